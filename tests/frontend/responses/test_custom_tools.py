"""Custom tools, whose input is a text: in responses and chats, whole, streamed, stored, forced, in the background."""

import json
import time
from typing import Any

import openai
import pytest

from penstock.frontend.validation.custom_tools import as_function
from penstock.frontend.validation.grammar import MAX_GRAMMAR_BYTES
from penstock.parts.grammars.frontend.custom_patterns import MAX_LARK, patterns_of
from tests.frontend.http_client import chat, error_of, post
from tests.frontend.live_server import LiveServer
from tests.frontend.responses.conftest import prompt_text

TEXT = '*** Begin\n+"x"\\n = ø\n*** End'
CALL = f"<tool_call>\n{json.dumps({'name': 'edit', 'arguments': {'input': TEXT}}, ensure_ascii=False)}\n</tool_call>"
OTHER_CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "here"}}\n</tool_call>'
GRAMMAR = 'start: "*** Begin" LF line+ "*** End"\nline: "+" /.*/ LF\nLF: /\\n/\n'
FORMAT = {"type": "grammar", "syntax": "lark", "definition": GRAMMAR}
EDIT: dict[str, Any] = {"type": "custom", "name": "edit", "description": "Edits files.", "format": FORMAT}
LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
RECURSIVE = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")"'}

_RULES_NOT_ENFORCED = "tools: the grammar of 'edit' is shown to the model, but not enforced: 'start' refers to itself"


def nested(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of responses in the shape of chats."""
    kind = tool["type"]
    fields = {name: value for name, value in tool.items() if name != "type"}
    if "format" in fields and fields["format"]["type"] == "grammar":
        grammar = {name: fields["format"][name] for name in ("syntax", "definition")}
        fields["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: fields}


def respond(client: openai.OpenAI, given: Any = "Edit it", **fields: Any) -> Any:
    return client.responses.create(model="test/model", input=given, **{"tools": [EDIT, LOOK], **fields})


@pytest.mark.parametrize("per_step", [1, 7, 1000])
def test_a_response_with_calls(agent_client: openai.OpenAI, agent: LiveServer, per_step: int) -> None:
    agent.says(f"I edit.\n{CALL}\n{OTHER_CALL}\n{CALL}", per_step=per_step, delay=0.002 if per_step == 1 else 0.0)
    whole = respond(agent_client)
    message, first, look, second = whole.output
    assert (message.type, first.type, look.type, second.type) == (
        "message",
        "custom_tool_call",
        "function_call",
        "custom_tool_call",
    )
    assert (first.name, first.input, first.status) == ("edit", TEXT, "completed")
    assert first.id.startswith("ctc_")
    assert first.call_id != second.call_id
    assert (second.input, look.arguments) == (TEXT, '{"at": "here"}')
    assert whole.tools[0].to_dict() == EDIT
    events = list(respond(agent_client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    done = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert [event.input for event in done] == [TEXT, TEXT]
    for event in done:
        mine = [delta for delta in deltas if delta.item_id == event.item_id]
        assert "".join(delta.delta for delta in mine) == TEXT
        assert len(mine) > 5 or per_step > 1
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.input for item in added if item.type == "custom_tool_call"] == ["", ""]
    final = events[-1].response
    assert [item.input for item in final.output if item.type == "custom_tool_call"] == [TEXT, TEXT]
    again = list(agent_client.responses.retrieve(final.id, stream=True))
    told = [event.input for event in again if event.type == "response.custom_tool_call_input.done"]
    assert told == [TEXT, TEXT]


def test_the_model_sees_a_function_with_the_grammar(agent_client: openai.OpenAI, agent: LiveServer) -> None:
    agent.says("No.")
    respond(agent_client, tools=[EDIT])
    seen = prompt_text(agent)
    as_responses = seen[: seen.index("user\n")]
    assert '"name": "edit"' in seen
    assert "Edits files." in seen
    assert "It must match this Lark grammar" in seen
    assert "pattern" not in seen
    answer = chat(agent, tools=[nested(EDIT)])
    assert answer.status == 200
    assert prompt_text(agent).startswith(as_responses)  # the same tool, whatever route it comes by


def test_a_conversation_goes_on(agent_client: openai.OpenAI, agent: LiveServer) -> None:
    """From a stored response and from items that are sent back, the prompt is the same."""
    agent.says(CALL)
    first = respond(agent_client)
    [call] = first.output
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done it."}
    agent.says("Good.")
    respond(agent_client, [result], previous_response_id=first.id)
    stored = prompt_text(agent)
    history = [{"role": "user", "content": "Edit it"}, call.to_dict(), result]
    respond(agent_client, history)
    assert prompt_text(agent) == stored
    assert f"edit {json.dumps({'input': TEXT}, ensure_ascii=False)}" in stored
    assert f"tool\nDone it. ({call.call_id})" in stored
    items = agent_client.responses.input_items.list(respond(agent_client, history).id, order="asc").data
    assert [item.type for item in items] == ["message", "custom_tool_call", "custom_tool_call_output"]
    messages = [
        {"role": "user", "content": "Edit it"},
        {
            "role": "assistant",
            "tool_calls": [{"id": call.call_id, "type": "custom", "custom": {"name": "edit", "input": TEXT}}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "Done it."},
    ]
    chat(agent, messages=messages, tools=[nested(EDIT), nested(LOOK)])
    assert prompt_text(agent)[: len(stored)].split("user\n")[1] == stored.split("user\n")[1]


@pytest.mark.parametrize("per_step", [1, 7, 1000])
def test_a_chat_with_calls(agent_client: openai.OpenAI, agent: LiveServer, per_step: int) -> None:
    agent.says(f"{CALL}\n{OTHER_CALL}", per_step=per_step)
    fields: dict[str, Any] = {
        "model": "test/model",
        "messages": [{"role": "user", "content": "Edit it"}],
        "tools": [nested(EDIT), nested(LOOK)],
    }
    [choice] = agent_client.chat.completions.create(**fields).choices
    assert choice.finish_reason == "tool_calls"
    edit, look = choice.message.tool_calls or []
    assert edit.type == "custom"
    assert (edit.custom.name, edit.custom.input) == ("edit", TEXT)
    assert (look.type, look.function.name) == ("function", "look")
    text, names = "", []
    for chunk in agent_client.chat.completions.create(**fields, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            told = part.to_dict()
            if part.id is not None:
                names.append((part.index, told["type"], told[told["type"]]["name"]))
            text += told.get("custom", {}).get("input", "")
    assert names == [(0, "custom", "edit"), (1, "function", "look")]
    assert text == TEXT


@pytest.mark.parametrize(
    "choice",
    [
        "auto",
        "required",
        {"type": "custom", "name": "edit"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "edit"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "edit"}]},
    ],
    ids=lambda value: str(value)[:60],
)
def test_choices(agent: LiveServer, choice: Any) -> None:
    agent.says(CALL)
    answer = post(agent, "/v1/responses", {"input": "Edit it", "tools": [EDIT, LOOK], "tool_choice": choice})
    assert answer.status == 200, answer.text
    assert answer.json()["tool_choice"] == choice
    assert "x-penstock-warning" not in answer.headers
    grammar = agent.scheduler.added[-1].sampling.grammar
    assert "Begin" in grammar  # it is held to its format whenever it is called
    assert ("look" in grammar) == (choice in ("auto", "required"))
    as_chat = choice if isinstance(choice, str) else _nested_choice(choice)
    answer = chat(agent, tools=[nested(EDIT), nested(LOOK)], tool_choice=as_chat)
    assert answer.status == 200, answer.text
    assert agent.scheduler.added[-1].sampling.grammar == grammar


def _nested_choice(choice: dict[str, Any]) -> dict[str, Any]:
    if choice["type"] == "custom":
        return {"type": "custom", "custom": {"name": choice["name"]}}
    tools = [{"type": "custom", "custom": {"name": tool["name"]}} for tool in choice["tools"]]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": tools}}


def test_free_text_is_not_constrained_unless_it_is_forced(agent: LiveServer) -> None:
    free = {"type": "custom", "name": "edit"}
    agent.says(CALL)
    answer = post(agent, "/v1/responses", {"input": "Edit it", "tools": [free]})
    assert answer.json()["tools"] == [{**free, "description": None, "format": {"type": "text"}}]
    assert not agent.scheduler.added[-1].sampling.grammar
    post(
        agent, "/v1/responses", {"input": "Edit it", "tools": [free], "tool_choice": {"type": "custom", "name": "edit"}}
    )
    assert '"input"' in agent.scheduler.added[-1].sampling.grammar


@pytest.mark.parametrize("form", [RECURSIVE, {**FORMAT, "definition": "start: /(?=a)/"}], ids=["rules", "regex"])
def test_what_is_not_enforced_is_told(agent: LiveServer, form: dict[str, Any]) -> None:
    agent.says(CALL)
    answer = post(agent, "/v1/responses", {"input": "Edit it", "tools": [{**EDIT, "format": form}]})
    assert answer.status == 200, answer.text
    assert "not enforced" in answer.headers["x-penstock-warning"]
    assert (_RULES_NOT_ENFORCED in answer.headers["x-penstock-warning"]) == (form is RECURSIVE)
    offered = [nested({**EDIT, "format": form})]
    assert chat(agent, tools=offered).headers["x-penstock-warning"]
    told = post(agent, "/tokenize", {"messages": [{"role": "user", "content": "Edit it"}], "tools": offered})
    assert "x-penstock-warning" not in told.headers  # nothing is written there


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [("lark", f"// {'x' * (MAX_LARK * 2 // 3)}\n{GRAMMAR}"), ("regex", "[a]" * (MAX_GRAMMAR_BYTES * 2 // 9))],
    ids=["lark", "regex"],
)
def test_grammars_are_enforced_up_to_a_limit(syntax: str, definition: str) -> None:
    """All are shown, but to rewrite large ones would keep other requests waiting."""
    large = {"type": "grammar", "syntax": syntax, "definition": definition}
    found = {name: as_function("t", {"name": name, "format": large}) for name in ("one", "two")}
    wanted = [tool["function"]["parameters"]["properties"]["input"]["description"] for tool, _ in found.values()]
    assert all(definition in each for each in wanted)
    patterns, warnings = patterns_of({name: grammar for name, (_, grammar) in found.items()})
    assert (bool(patterns["one"]), patterns["two"]) == (True, "")
    assert ["'two'" in warning for warning in warnings] == [True]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "name"),
        ({**EDIT, "name": "a<b"}, "name"),
        ({**EDIT, "description": 5}, "description"),
        ({**EDIT, "format": "text"}, "format.type"),
        ({**EDIT, "format": {"type": "json"}}, "format.type"),
        ({**EDIT, "format": {**FORMAT, "syntax": "peg"}}, "format.syntax"),
        ({**EDIT, "format": {**FORMAT, "definition": " "}}, "format.definition"),
        ({**EDIT, "format": {**FORMAT, "definition": "x" * 70_000}}, "format.definition"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_tools(agent: LiveServer, tool: dict[str, Any], param: str) -> None:
    assert error_of(post(agent, "/v1/responses", {"input": "x", "tools": [tool]}), 400)["param"] == (
        f"tools[0].custom.{param}"
    )


def test_bad_choices_and_calls(agent: LiveServer) -> None:
    for wrong in ({"type": "custom", "name": "look"}, {"type": "function", "name": "edit"}):
        body = {"input": "x", "tools": [EDIT, LOOK], "tool_choice": wrong}
        assert error_of(post(agent, "/v1/responses", body), 400)["param"] == "tool_choice"
    calling = {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "edit"}}]}
    assert error_of(chat(agent, messages=[calling]), 400)["param"] == "messages[0].tool_calls[0].custom"
    for tool in (nested(EDIT), {"function": {"name": "edit"}}):  # Ollama's API has functions only
        answer = post(agent, "/api/chat", {"messages": [{"role": "user", "content": "x"}], "tools": [tool]})
        assert (answer.status, answer.json()["error"]) == (400, "tools[0].type must be 'function'")


def test_tools_of_a_choice_that_were_left_out(agent: LiveServer) -> None:
    agent.says(CALL)
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "web_search"}, {"type": "custom", "name": "edit"}],
    }
    body = {"input": "x", "tools": [EDIT, LOOK, {"type": "web_search"}], "tool_choice": allowed}
    answer = post(agent, "/v1/responses", body)
    assert answer.json()["tool_choice"]["tools"] == [{"type": "custom", "name": "edit"}]
    assert "tool_choice" in answer.headers["x-penstock-warning"]
    assert "look" not in prompt_text(agent)
    answer = post(agent, "/v1/responses", {**body, "tool_choice": {**allowed, "tools": [{"type": "web_search"}]}})
    assert answer.json()["tool_choice"] == "none"


def test_an_input_that_is_cut_off(agent_client: openai.OpenAI, agent: LiveServer) -> None:
    agent.says(CALL)
    whole = respond(agent_client, max_output_tokens=60)
    [call] = whole.output
    assert (whole.status, call.status) == ("incomplete", "incomplete")
    assert call.input
    assert TEXT.startswith(call.input)
    early = respond(agent_client, max_output_tokens=12, tool_choice={"type": "custom", "name": "edit"})
    [begun] = early.output  # nobody is to run a tool whose input has not begun
    assert (early.status, begun.status, begun.type) == ("incomplete", "incomplete", "message")
    assert CALL.startswith(begun.content[0].text)


def test_in_the_background(agent_client: openai.OpenAI, agent: LiveServer) -> None:
    agent.says(CALL, per_step=3, delay=0.002)
    response = respond(agent_client, background=True)
    until = time.monotonic() + 30
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < until
        response = agent_client.responses.retrieve(response.id)
    assert [item.input for item in response.output] == [TEXT]
    streamed = list(respond(agent_client, background=True, stream=True))
    at = next(i for i, event in enumerate(streamed) if event.type == "response.custom_tool_call_input.delta")
    rest = list(agent_client.responses.retrieve(streamed[0].response.id, stream=True, starting_after=at))
    assert [event.type for event in rest] == [event.type for event in streamed[at + 1 :]]


def test_the_client_s_stream_helper(agent_client: openai.OpenAI, agent: LiveServer) -> None:
    agent.says(f"<think>\nHm.\n</think>\n\n{CALL}", per_step=3)
    fields: dict[str, Any] = {"tools": [EDIT], "reasoning": {"summary": "auto"}}
    with agent_client.responses.stream(model="test/model", input="Edit it", **fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.reasoning_summary_text.delta" in kinds
    assert "response.custom_tool_call_input.delta" in kinds
    reasoning, call = final.output
    assert reasoning.type == "reasoning"
    assert reasoning.summary[0].text == "Hm."
    assert call.type == "custom_tool_call"
    assert call.input == TEXT
