"""Conversations of all kinds on templates that show only some: whatever a client says is in the prompt, once."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.errors import TemplateFailed
from penstock.frontend.text.chat_template import ChatTemplate, ValidConversation
from penstock.frontend.text.tool_prompt import ToolFields
from penstock.ipc.messages import AddRequest
from tests.frontend.checkpoint_folder import write_checkpoint
from tests.frontend.fake_scheduler import prompt_ids
from tests.frontend.http_client import chat, error_of, post
from tests.frontend.live_server import LiveServer, live_server
from tests.real.conversations import CONVERSATIONS, call, result, says

_CALLS = (
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}"
)
_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}{% endif %}"
_TURN = "<{{ m.role }}>{{ m.content }}" + _CALLS

PLAIN = _TOOLS + "{% for m in messages %}" + _TURN + "{% endfor %}"
ONE_SYSTEM = (  # as Qwen3.5: a system message anywhere else is refused
    _TOOLS + "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}" + _TURN + "{% endfor %}"
)
FIRST_SYSTEM = (  # as MiniMax M2: any other is left out without a word
    _TOOLS + "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + _TURN + "{% endif %}{% endfor %}"
)
DEVELOPERS = (  # as gpt-oss: an instruction is the developer's; the template names the role
    _TOOLS + "{% for m in messages %}{% if loop.first and m.role in ('system', 'developer') %}<rules>{{ m.content }}"
    "{% elif m.role in ('user', 'assistant', 'tool') %}" + _TURN + "{% endif %}{% endfor %}"
)
IGNORES_DEVELOPERS = (  # as Command R7B: it contains the word, and drops the message
    _TOOLS + "{% for m in messages %}{% if m.role == 'developer' %}{% else %}" + _TURN + "{% endif %}{% endfor %}"
)
ALTERNATES = (  # as Mistral Nemo
    "{% set ns = namespace(i=0) %}{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not "
    "m.tool_calls) %}{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% elif m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "{% if m.tool_calls %}{% for call in m.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('nine characters') }}{% endif %}{% endfor %}{% endif %}" + _TURN + "{% endfor %}" + _TOOLS
)
NO_SYSTEM = (  # as Gemma 2, which knows no tools either
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('a role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
ONE_CALL = (  # as Llama 3
    _TOOLS + "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call') }}{% endif %}" + _TURN + "{% endfor %}"
)
FIRST_CALL = PLAIN.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")  # as gpt-oss: others are left out
CALLS_OR_TEXT = (  # as Llama 3: no text beside calls
    _TOOLS + "{% for m in messages %}{% if m.tool_calls %}" + _CALLS + "{% else %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)
ONE_TEXT_A_TURN = (  # as Mistral Small 3.2: roles must alternate, and text beside calls is not shown
    ALTERNATES.replace(_TURN, "{% if m.tool_calls %}" + _CALLS + "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}")
)
FORGETS_PAST_THOUGHTS = (  # as gpt-oss: what is said beside calls is a thought, and those of past turns are left out
    _TOOLS + "{% for m in messages %}{% if m.tool_calls %}{% set ns = namespace(answered=false) %}"
    "{% for later in messages[loop.index:] %}{% if later.role == 'assistant' and not later.tool_calls %}"
    "{% set ns.answered = true %}{% endif %}{% endfor %}{% if not ns.answered %}<thinks>{{ m.content }}{% endif %}"
    + _CALLS
    + "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
SYSTEM_WITH_THE_LAST = (  # as Mistral Nemo: only a question that comes last has the system message before it
    _TOOLS + "{% for m in messages %}{% if m.role == 'user' and loop.last and messages[0].role == 'system' %}<user>"
    "{{ messages[0].content }} {{ m.content }}{% elif not (m.role == 'system' and loop.first) %}"
    + _TURN
    + "{% endif %}{% endfor %}"
)
AFTER_A_CALL = (  # as gpt-oss: a result needs a call before it, of which it takes the name
    _TOOLS + "{% set ns = namespace(name='') %}{% for m in messages %}{% if m.role == 'tool' %}{% if not ns.name %}"
    "{{ raise_exception('no call') }}{% endif %}{% elif m.tool_calls %}"
    "{% set ns.name = m.tool_calls[0].function.name %}{% endif %}" + _TURN + "{% endfor %}"
)
USER_FIRST = (  # as Qwen3.5: there must be a question
    _TOOLS + "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no user') }}"
    "{% endif %}{% for m in messages %}" + _TURN + "{% endfor %}"
)
NEEDS_ALL = (  # as Hermes: writes signatures, and goes through the types
    "{% macro kind(part) %}{% if part.type == 'array' %}list of {{ kind(part['items']) }}"
    "{% elif part.type is string %}{{ part.type }}{% else %}{{ kind(part) }}{% endif %}{% endmacro %}"
    "{% if tools is defined %}{% for tool in tools %}{{ '# ' + tool.function.description }} {{ tool.function.name }}("
    "{% for name, part in tool.function.parameters.properties.items() %}{{ name + ': ' + kind(part) + ', '"
    " + part.description }}{% endfor %}){% endfor %}{% endif %}{% for m in messages %}" + _TURN + "{% endfor %}"
)
APPENDS = (  # as Kimi K2: lists are filled by calling a method
    "{% set past = [] %}{% for m in messages %}{% set _ = past.append(m) %}{% endfor %}"
    + _TOOLS
    + "{% for m in past %}"
    + _TURN
    + "{% endfor %}"
)
WITHOUT_EMPTY = (  # as Ministral 3: an answer must say something
    _TOOLS + "{% for m in messages %}{% if m.role == 'assistant' and not m.content and not m.tool_calls %}"
    "{{ raise_exception('empty') }}{% endif %}" + _TURN + "{% endfor %}"
)
QUESTION_LAST = (
    _TOOLS + "{% if messages[-1].role == 'assistant' %}{{ raise_exception('a question must be last') }}{% endif %}"
    "{% for m in messages %}" + _TURN + "{% endfor %}"
)
AS_TEXT = (  # as FireFunction: tools are a text, and there is a date
    "{{ 'Functions: ' + functions + ' on ' + datetime }}{% for m in messages %}" + _TURN + "{% endfor %}"
)
HIDES_CALLS = _TOOLS + "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"  # as Granite 3.3

TEMPLATES = {
    name: source
    for name, source in globals().items()
    if name[0].isalpha() and name.isupper() and isinstance(source, str)
}


@pytest.mark.parametrize("kind", [kind for kind in CONVERSATIONS if kind != "an image"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_all_that_is_said_is_in_the_prompt_once(name: str, kind: str) -> None:
    template, given = ChatTemplate(TEMPLATES[name], {}), CONVERSATIONS[kind]
    messages = [message | {"content": message["content"] or ""} for message in given.messages]
    before = copy.deepcopy(messages)
    conversation = ValidConversation(messages, True, False, {}, list(given.tools) or None)
    if kind == "another role" and name in ("DEVELOPERS", "NO_SYSTEM"):
        reason = "does not show messages of role 'critic'" if name == "DEVELOPERS" else "a role"
        with pytest.raises(TemplateFailed, match=reason):
            template.render_conversation(conversation)
        return
    rendered = template.render_conversation(conversation)
    said = [word for word in given.shows if any(word in str(message["content"]) for message in given.messages)]
    assert [word for word in said if rendered.text.count(word) != 1] == [], rendered.text
    assert [word for word in given.shows if word not in rendered.text] == [], rendered.text
    assert rendered.warnings == ()
    assert messages == before


def text_of(source: str, *messages: dict[str, Any], **fields: Any) -> str:
    return ChatTemplate(source, {}).render(list(messages), **fields)


def test_what_a_template_shows_stays_as_it_is() -> None:
    chat = [says("system", "A"), says("system", "B"), says("user", "C"), says("user", "D"), says("assistant", "E")]
    assert text_of(PLAIN, *chat) == "<system>A<system>B<user>C<user>D<assistant>E"
    assert text_of(PLAIN, says("developer", "A"), says("user", "B")) == "<system>A<user>B"  # no role of this template


def test_a_role_of_the_template_stays() -> None:
    assert text_of(DEVELOPERS, says("developer", "A"), says("user", "B")) == "<rules>A<user>B"
    named = DEVELOPERS.replace("<rules>", "<{{ m.role }}!>").replace("loop.first and ", "")
    assert text_of(named, says("system", "A"), says("developer", "B"), says("user", "C")) == (
        "<system!>A<developer!>B<user>C"
    )


def test_instructions_go_where_the_template_has_a_place() -> None:
    system, later, user, answer = says("system", "A"), says("system", "B"), says("user", "C"), says("assistant", "D")
    for source in (ONE_SYSTEM, FIRST_SYSTEM):
        assert text_of(source, system, later, user) == "<system>A\n\nB<user>C"
        assert text_of(source, system, user, later) == "<system>A<user>C\n\nB"
        assert text_of(source, system, user, answer, later, user) == "<system>A<user>C<assistant>D<user>B\n\nC"
    assert text_of(NO_SYSTEM, system, user) == "<user>A\n\nC"
    assert text_of(NO_SYSTEM, says("developer", "A"), user, later) == "<user>A\n\nC\n\nB"


def test_neighbours_are_joined_where_roles_must_alternate() -> None:
    user, answer = says("user", "A"), says("assistant", "B")
    assert (
        text_of(ALTERNATES, user, says("user", "C"), answer, says("assistant", "D")) == "<user>A\n\nC<assistant>B\n\nD"
    )
    assert text_of(ALTERNATES, answer, user) == "<user><assistant>B<user>A"
    assert text_of(PLAIN, answer, user) == "<assistant>B<user>A"
    parts = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "A"}]}
    joined = [*parts["content"], {"type": "text", "text": "\n\n"}, {"type": "text", "text": "C"}]
    assert text_of(ALTERNATES, parts, says("user", "C")) == f"<user>{joined}"


def test_a_loop_of_calls_begins_with_the_prompt_of_its_question() -> None:
    given = CONVERSATIONS["one call under a system"]
    asked = text_of(SYSTEM_WITH_THE_LAST.replace("}} {{", "}}\n\n{{"), *given.messages[:2], tools=[*given.tools])
    loop = text_of(SYSTEM_WITH_THE_LAST.replace("}} {{", "}}\n\n{{"), *given.messages, tools=[*given.tools])
    assert loop.startswith(asked)


def test_tools_are_written_once_where_each_system_message_has_them() -> None:
    source = "{% for m in messages %}{% if m.role == 'system' %}" + _TOOLS + "{% endif %}" + _TURN + "{% endfor %}"
    for kind in ("two systems with tools", "system in the middle", "system after a result"):
        given = CONVERSATIONS[kind]
        chat = [says("system", "Anise"), *given.messages]
        text = text_of(source, *chat, tools=[*CONVERSATIONS["tools"].tools])
        assert text.count("Looks into the notes.") == 1, text
        assert [word for word in ("Anise", *given.shows) if word not in text] == [], text


def test_an_effort_that_the_template_refuses_is_left_out_and_told() -> None:
    source = (
        "{% if reasoning_effort is defined and reasoning_effort not in ('low', 'high') %}"
        "{{ raise_exception('no such effort') }}{% endif %}{{ reasoning_effort }}" + NEEDS_ALL
    )
    template = ChatTemplate(source, {})
    bare = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"items": {}}}}}}
    for effort, told in (("low", ()), ("medium", ("'medium' has no effect",))):
        given = ValidConversation([says("user", "Quince")], True, False, {"reasoning_effort": effort}, [bare])
        rendered = template.render_conversation(given)
        assert "Quince" in rendered.text
        assert rendered.text.startswith("low") == (effort == "low")
        assert len(rendered.warnings) == len(told)
        assert all(word in warning for word, warning in zip(told, rendered.warnings, strict=True))
    refused = ValidConversation([says("critic", "Quince")], True, False, {"reasoning_effort": "low"})
    with pytest.raises(TemplateFailed, match="no such role"):
        ChatTemplate("{{ reasoning_effort }}{{ raise_exception('no such role') }}", {}).render_conversation(refused)


def test_two_calls_become_two_turns_where_one_is_shown() -> None:
    calls = says("assistant", None, tool_calls=[call(1, "f"), call(2, "g")])
    turns = [says("user", "A"), calls, result(2, "second"), result(1, "first")]
    for source in (ONE_CALL, FIRST_CALL):
        text = text_of(source, *turns)
        assert text.index("<call>g") < text.index("second") < text.index("<call>f") < text.index("first")
        text = text_of(source, *turns[:3])
        assert text.index("<call>g") < text.index("second") < text.index("<call>f")
    text = text_of(CALLS_OR_TEXT, says("user", "A"), calls | {"content": "I look."}, result(1, "B"), result(2, "C"))
    assert text.startswith("<user>A<assistant>I look.<call>f")


def test_ids_and_names_are_filled_in() -> None:
    shows_both = PLAIN.replace("{{ m.content }}", "{{ m.content }}[{{ m.name }} {{ m.tool_call_id }}]").replace(
        "<call>", "<call {{ call.id }}>"
    )
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("f", "g")]
    results = [says("tool", "one"), says("tool", "two")]
    text = text_of(shows_both, says("user", "A"), says("assistant", None, tool_calls=calls), *results)
    assert "<call call00000>f" in text
    assert "<tool>one[f call00000]<tool>two[g call00001]" in text
    short = ChatTemplate(ALTERNATES, {}).shape.apply(
        [says("user", "A"), says("assistant", "", tool_calls=[call(1)]), result(1, "B")], None
    )[0]
    assert len(short[1]["tool_calls"][0]["id"]) == 9
    assert short[1]["tool_calls"][0]["id"] == short[2]["tool_call_id"]


def test_absent_tools_are_none_unless_the_template_fails_on_it() -> None:
    assert text_of("{{ tools is none }}{{ messages[0].content }}", says("user", "A")) == "TrueA"
    looks = "{% if tools is defined %}Tools: {{ tools | length }}. {% endif %}{{ messages[0].content }}"
    assert text_of(looks, says("user", "A")) == "A"
    shows = "{% if tools is defined %}Tools: {{ tools }}. {% endif %}{{ messages[0].content }}"
    assert text_of(shows, says("user", "A")) == "A"


def test_lists_that_filters_make_are_written_as_json() -> None:
    source = "{{ messages | map(attribute='content') | tojson }}{{ dict(a=1).keys() | tojson }}"
    assert text_of(source, says("user", "A")) == '["A"]["a"]'
    with pytest.raises(TemplateFailed, match="not JSON serializable"):
        text_of("{{ namespace(a=1) | tojson }}", says("user", "A"))


def test_a_template_may_change_its_copy_alone() -> None:
    messages = [says("user", "A")]
    source = "{% for m in messages %}{% set _ = m.update({'content': 'B'}) %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source + "{% set _ = messages.clear() %}", {})
    assert template.render(messages) == template.render(messages) == "B"
    assert messages == [says("user", "A")]
    with pytest.raises(TemplateFailed, match="unsafe"):
        text_of("{{ messages.__class__.__init__(messages) }}", says("user", "A"))


def test_only_what_a_template_needs_is_filled_in() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert ChatTemplate(PLAIN, {}).shape.tool_fields == ToolFields()
    assert str(tool).replace("'", '"') in text_of(PLAIN, says("user", "A"), tools=[tool])
    fields = ChatTemplate(NEEDS_ALL, {}).shape.tool_fields
    assert fields == ToolFields(descriptions=True, parameters=True, types=True)
    kinds = {
        "type": "object",
        "properties": {
            "a": {"type": ["null", "integer"]},
            "b": {"anyOf": [{"type": "null"}, {"type": "number"}]},
            "c": {"type": "array", "items": {"type": ["string", "null"]}},
            "d": {"enum": [1]},
        },
    }
    text = text_of(
        NEEDS_ALL, says("user", "A"), tools=[{"type": "function", "function": {"name": "f", "parameters": kinds}}]
    )
    assert text.startswith("#  f(a: integer, b: number, c: list of string, d: string, )")


def test_what_is_lost_all_the_same_is_told() -> None:
    source = "{% for m in messages %}{{ m.content.replace('/think', '') }}{% endfor %}"
    given = ValidConversation([says("user", "A /think B"), says("user", "C")], True, False, {})
    rendered = ChatTemplate(source, {}).render_conversation(given)
    assert rendered.text == "A  BC"
    assert rendered.warnings == ("messages[0]: the chat template does not show this text as it was sent",)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    source = ALTERNATES + "<{{ 'assistant' }}>"
    folder = write_checkpoint(tmp_path_factory.mktemp("strict"), chat_template=source)
    with live_server(folder, tmp_path_factory.mktemp("s"), max_model_len=4096) as live:
        yield live


SYSTEM_TURNS = [
    says("system", "Juniper"),
    says("developer", "Lovage"),
    says("user", "Quince"),
    says("user", "Tarragon"),
]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": SYSTEM_TURNS}),
    ("/v1/responses", {"instructions": "Juniper", "input": SYSTEM_TURNS[1:]}),
    ("/v1/messages", {"system": "Juniper", "max_tokens": 5, "messages": [
        says("system", "Lovage"), says("user", "Quince"), says("user", "Tarragon")]}),
    ("/api/chat", {"stream": False, "messages": SYSTEM_TURNS}),
    ("/tokenize", {"messages": SYSTEM_TURNS}),
]  # fmt: skip


@pytest.mark.parametrize(("route", "fields"), ROUTES, ids=[route for route, _ in ROUTES])
def test_every_api_brings_its_messages_into_shape(strict: LiveServer, route: str, fields: dict[str, Any]) -> None:
    strict.reset()
    answer = post(strict, route, {"model": "test/model", **fields})
    assert answer.status == 200, answer.text
    if route == "/tokenize":
        tokens = answer.json()["tokens"]
    else:
        received = strict.do(lambda: list(strict.scheduler.received))
        [request] = [got for got in received if isinstance(got, AddRequest)]
        tokens = prompt_ids(request)
    prompt = strict.tokenizer.decode(tokens)
    assert [prompt.count(word) for word in ("Juniper", "Lovage", "Quince", "Tarragon")] == [1, 1, 1, 1], prompt


def test_what_is_lost_is_told_over_http(tmp_path: Path, sockets: Path) -> None:
    source = "{% for m in messages %}{{ m.content.replace('/think', '') }}{% endfor %}"
    with live_server(write_checkpoint(tmp_path, chat_template=source), sockets) as live:
        answer = chat(live, messages=[says("user", "A /think B")])
        assert "does not show this text" in answer.headers["x-penstock-warning"]


def test_a_role_that_cannot_be_shown_is_refused(tmp_path: Path, sockets: Path) -> None:
    with live_server(write_checkpoint(tmp_path, chat_template=DEVELOPERS), sockets) as live:
        error = error_of(chat(live, messages=[says("user", "A"), says("critic", "B")]), 400)
        assert error["message"] == "messages[1]: the chat template does not show messages of role 'critic'"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x", "tool_call_id": [1]}, "messages[1].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": 7}, "messages[1].tool_call_id"),
        ({"role": "assistant", "content": "x", "reasoning_content": ["y"]}, "messages[1].reasoning_content"),
        ({"role": "user", "content": "x", "tool_calls": [call(0)]}, "messages[1].tool_calls"),
    ],
)
def test_fields_of_another_type_are_refused(strict: LiveServer, message: dict[str, Any], param: str) -> None:
    assert error_of(chat(strict, messages=[says("user", "A"), message]), 400)["param"] == param
    assert chat(strict, messages=[says("user", "A")]).status == 200


def test_an_empty_answer_is_continued_where_empty_ones_are_left_out() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and not m.content %}{{ raise_exception('empty') }}"
        "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    assert template.shape.empty_answer == "left out"
    begun = [says("user", "q"), says("assistant", "")]
    assert template.render(begun, continue_final_message=True, add_generation_prompt=False) == "<user>q<assistant>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ kept.append(messages[0].content) }}{{ kept | join(',') }}",
        "{{ kept['append'](messages[0].content) }}{{ kept | join(',') }}",
        "{{ (kept | attr('append'))(messages[0].content) }}{{ kept | join(',') }}",
    ],
)
def test_nothing_of_one_conversation_is_in_the_next(source: str) -> None:
    template = ChatTemplate(source, {"kept": ["k"]})
    for text in ("Juniper", "Lovage"):
        try:
            shown = template.render([says("user", text)])
        except TemplateFailed:  # only templates that name a method that changes something may call it
            continue
        assert "Juniper" not in shown or text == "Juniper"


def test_templates_that_fail_on_a_probe_fail_on_it_alone() -> None:
    source = "{% if messages|length > 2 %}{{ 1 // 0 }}{% endif %}{{ messages[-1].content }}"
    template = ChatTemplate(source, {})
    assert template.render([says("user", "A")]) == "A"
    with pytest.raises(TemplateFailed, match="ZeroDivisionError"):
        template.render([says("user", "A"), says("assistant", "B"), says("user", "C"), says("assistant", "D")])
