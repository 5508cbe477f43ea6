"""Chat templates render as transformers renders them."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config import ConfigError
from penstock.frontend.errors import TemplateFailed
from penstock.frontend.text.chat_template import ChatTemplate, load_chat_template
from penstock.frontend.text.tokenizer import load_tokenizer
from penstock.models.finding.registry import open_checkpoint
from tests.frontend.checkpoint_folder import CHATML, write_checkpoint

CONTROL = """
{%- set ns = namespace(n=0, first=true) %}
{%- for message in messages %}
    {%- if message.name == 'skip' %}
        {%- continue %}
    {%- endif %}
    {%- if message.name == 'end' %}{% break %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
    {% if loop.first %}
{{ bos_token }}
    {% endif %}
[{{ message.role | upper }} {{ ns.n }}] {{ message['content'] | trim | tojson }}
    {% generation %}{{ message.get('name', 'nobody') }}{% endgeneration %}
{%- endfor %}
{{ {'b': '<\u00e9>', 'a': [1, 2.5, none, true]} | tojson }}
{{ {'b': 1, 'a': 2} | tojson(indent=2) }}
{{ messages | map(attribute='role') | join(',') }} {{ dict(a=1) }} {{ dict.fromkeys(['x']) }}
{%- if add_generation_prompt %}>>{% endif %}{% if reasoning is defined %}{{ reasoning }}{% endif %}
"""

TOOLS_AND_REASONING = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% if m.content is defined %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}|"
    "{% endfor %}{{ tools is none }}{{ eos_token }}"
)

MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": " <b>\u00e9 \u4e2d \U0001f600</b> \n"},
        {"role": "user", "content": 'a "quote"\n\ttab'},
    ],
    [
        {"role": "user", "content": "x", "name": "skip"},
        {"role": "user", "content": "", "name": "Ann"},
        {"role": "user", "content": "y", "name": "end"},
    ],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "  Water runs  ", "reasoning": "hm", "tool_calls": None},
        {"role": "user", "content": "More"},
        {"role": "assistant", "content": "And the gate "},
    ],
]


@pytest.mark.parametrize("source", [CHATML, CONTROL, TOOLS_AND_REASONING], ids=["chatml", "control", "tools"])
@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("prompt", [True, False])
def test_equal_to_transformers(tmp_path: Path, source: str, messages: list[dict[str, Any]], prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_checkpoint(tmp_path, chat_template=source)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    tokenizer = load_tokenizer(open_checkpoint(folder))
    template = load_chat_template(open_checkpoint(folder), "", tokenizer.special_tokens)
    assert template is not None
    assert template.render(messages, add_generation_prompt=prompt) == text
    expected_ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
    assert tokenizer.encode(text, add_special_tokens=False) == expected_ids
    if messages[-1]["role"] == "assistant" and source != TOOLS_AND_REASONING:
        continued = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        rendered = template.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert rendered == continued
        assert not rendered.endswith("<|im_end|>\n")


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named {{ x }}"}]
    folder = write_checkpoint(tmp_path / "a", chat_template=named)
    assert rendered(folder) == "named "
    (folder / "chat_template.jinja").write_text("from a file")
    assert rendered(folder) == "from a file"
    own = tmp_path / "own.jinja"
    own.write_text("mine")
    assert rendered(folder, str(own)) == "mine"
    assert load_chat_template(open_checkpoint(write_checkpoint(tmp_path / "b", chat_template=None)), "", {}) is None


def rendered(folder: Path, override: str = "") -> str:
    template = load_chat_template(open_checkpoint(folder), override, {})
    assert template is not None
    return template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("chat_template", "reason"),
    [
        ("{% for %}", "does not compile"),
        ([{"name": "other", "template": "x"}], "none is called 'default'"),
        (5, "neither a text nor a list"),
    ],
)
def test_unusable_templates_are_refused_at_start(tmp_path: Path, chat_template: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_chat_template(open_checkpoint(write_checkpoint(tmp_path, chat_template=chat_template)), "", {})
    with pytest.raises(ConfigError, match="cannot read"):
        load_chat_template(open_checkpoint(tmp_path), str(tmp_path / "absent.jinja"), {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(__x=1) }}",
        "{{ range(10 ** 10) | list }}",
        "{{ dict.__class__ }}{{ raise_exception('x') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ],
)
def test_failing_templates_end_the_request(source: str) -> None:
    with pytest.raises(TemplateFailed):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_strftime_now_and_variables() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%Y')|length }}{{ bos_token }}{{ mood }}{{ messages|length }}", {"bos_token": "B"}
    )
    assert template.extra_variables == {"mood"}
    assert template.render([{"role": "user", "content": "x"}], variables={"mood": "!"}) == "4B!1"


def test_special_tokens_of_either_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    first = load_tokenizer(open_checkpoint(folder)).vocab_size
    config["added_tokens_decoder"] = {
        str(first + 1): {"content": "<|x|>", "special": True},
        str(first): {"content": "<tool>", "special": False},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    tokenizer = load_tokenizer(open_checkpoint(folder))
    assert tokenizer.special_tokens["eos_token"] == "<|endoftext|>"
    assert tokenizer.eos_token_id == 0
    assert tokenizer.encode("a<tool><|x|>", add_special_tokens=False)[1:] == [first, first + 1]
    assert tokenizer.decode([first, first + 1], skip_special_tokens=True) == "<tool>"
    config["added_tokens_decoder"] = {"777": {"content": "<far>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="777"):
        load_tokenizer(open_checkpoint(folder))


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_tokenizer(open_checkpoint(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        load_tokenizer(open_checkpoint(tmp_path))


def test_tools_under_another_name() -> None:
    """SmolLM3's template reads `xml_tools`."""
    template = ChatTemplate("{% if xml_tools %}{{ xml_tools | tojson }}{% endif %}{{ messages[0].content }}", {})
    assert template.shape.tools == "shown"
    assert "xml_tools" not in template.extra_variables
    chat: Any = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert template.render(chat, tools=tools) == '[{"type": "function", "function": {"name": "f"}}]Hi'
    assert template.render(chat) == "Hi"
    assert ChatTemplate("{{ messages[0].content }}", {}).shape.tools == "prompted"
