"""Checkpoint folders for the scripted model: chat templates of several families, and how these write calls.

The templates are reduced to what matters between turns: marks, where tools stand, how past calls and results are
shown, and what each family is known to choke on.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Call = tuple[str, dict[str, Any]]
MAX_LEN = 32768
_EVERYWHERE = ("<pad>", "<s>")


@dataclass(frozen=True)
class Family:
    """One way of writing conversations. `end` ends a turn; `specials` are single tokens."""

    name: str
    template: str
    end: str
    specials: tuple[str, ...]
    openers: tuple[str, ...]
    write_calls: Callable[[Iterable[Call]], str]
    thinks: bool = False

    def say(self, text: str = "", calls: Iterable[Call] = (), thought: str = "") -> str:
        """An answer as such a model writes it."""
        opening = f"<think>\n{thought}\n</think>\n\n" if thought and self.thinks else ""
        return opening + text + self.write_calls(calls)


def _tagged(calls: Iterable[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )


def _objects(calls: Iterable[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def _listed(calls: Iterable[Call]) -> str:
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"[TOOL_CALLS] {json.dumps(objects)}" if objects else ""


QWEN = Family(
    name="qwen",
    template="""
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Return each call as <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}
{{ content }}<|im_end|>
{% elif message.role == 'assistant' %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif -%}
<|im_start|>assistant
{{ content }}
{%- for call in message.tool_calls or [] %}
{%- if call.function %}{% set call = call.function %}{% endif %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}""",
    end="<|im_end|>",
    specials=("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    openers=("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    write_calls=_tagged,
    thinks=True,
)

LLAMA = Family(
    name="llama",
    template="""
{{- bos_token }}
{%- for message in messages %}
{%- if not (message.role in ('tool', 'ipython') or 'tool_calls' in message) -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if loop.first and tools %}Respond in the format {"name": function name, "parameters": dictionary of arguments}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{% endif %}{{ message.content | trim }}<|eot_id|>
{%- elif 'tool_calls' in message -%}
<|start_header_id|>assistant<|end_header_id|>

{% for call in message.tool_calls %}
{%- set name, parameters = call.function.name, call.function.arguments | tojson %}
{{- '{"name": "' + name + '", "parameters": ' + parameters + '}' }}
{%- if not loop.last %}; {% endif %}{% endfor %}<|eot_id|>
{%- else -%}
<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}""",
    end="<|eot_id|>",
    specials=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    openers=("<|start_header_id|>assistant<|end_header_id|>\n\n",),
    write_calls=_objects,
)

MISTRAL = Family(
    name="mistral",
    template="""
{{- bos_token }}
{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role in ('user', 'system') %}[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('IDs have nine letters and digits!') }}{% endif %}
{%- set text = call.function | tojson %}{{ text[:-1] }}, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {"content": {{ message.content | tojson }},
{{- ' "call_id": "' + message.tool_call_id + '"}' }}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}""",
    end="</s>",
    specials=(
        "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    ),
    openers=("[/INST]", "[/TOOL_RESULTS]"),
    write_calls=_listed,
)  # fmt: skip

FAMILIES = {family.name: family for family in (QWEN, LLAMA, MISTRAL)}


def write_folder(folder: Path, family: Family, rules: list[dict[str, Any]], max_len: int = MAX_LEN) -> Path:
    """A checkpoint of the scripted model; one token per byte, and those of the family."""
    folder.mkdir(parents=True, exist_ok=True)
    specials = [*_EVERYWHERE, *family.specials]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    is_text = {"<think>", "</think>", "<tool_call>", "</tool_call>"}  # tokens of their own, but shown as text
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials if t not in is_text])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in specials if t in is_text])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = vocabulary[family.end]
    config = {
        "architectures": ["ClockworkForCausalLM"],
        "model_type": "clockwork",
        "dtype": "float32",
        "vocab_size": len(vocabulary),
        "hidden_size": 2,
        "intermediate_size": 1,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": max_len,
        "eos_token_id": end,
        "bos_token_id": vocabulary["<s>"],
    }
    settings = {"eos_token": family.end, "bos_token": "<s>", "chat_template": family.template}
    files = {
        "config.json": config,
        "tokenizer_config.json": settings,
        "script.json": {"openers": family.openers, "rules": rules},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
