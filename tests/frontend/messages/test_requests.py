"""What becomes of a request: the prompt that the model sees, what is refused, and what is told of."""

from typing import Any

import pytest

from penstock.parts.anthropic.frontend.conversation import Conversation, conversation_of
from penstock.parts.anthropic.frontend.schema import CountTokensRequest
from tests.frontend.http_client import get, post
from tests.frontend.live_server import LiveServer
from tests.frontend.messages.conftest import body, prompt_text

OFF = "<think>\n\n</think>\n\n"
END = "<|im_end|>\n"
CALLED = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {"x": 1}}]},
]


def said(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}{END}"


def rendered(live: LiveServer, **fields: Any) -> str:
    """The prompt of a request, but for how it asks for the answer."""
    answer = post(live, "/v1/messages", body(**fields))
    assert answer.status == 200, answer.text
    return prompt_text(live).removesuffix(f"<|im_start|>assistant\n{OFF}")


def of(*messages: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": content, **more}


def test_system_blocks_and_cache_control(live: LiveServer) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    attribution = text("x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;")
    prompt = rendered(
        live,
        system=[attribution, text("Be kind.", **cached), text("Be brief.")],
        messages=of(("user", [text("One.", **cached), text("Two.")])),
        **cached,
    )
    assert prompt == said("system", "Be kind.\nBe brief.") + said("user", "One.\nTwo.")


def test_turns_of_a_role_become_one(live: LiveServer) -> None:
    prompt = rendered(
        live, messages=of(("user", "A"), ("user", "B"), ("assistant", "C"), ("assistant", "D"), ("user", "E"))
    )
    assert prompt == said("user", "A\nB") + said("assistant", "C\nD") + said("user", "E")


def test_a_turn_of_many_messages(live: LiveServer) -> None:
    """Texts are joined in order, whatever comes between them; empty ones leave no trace."""
    messages = of(
        ("user", "A"), ("user", ""), ("system", "S"), ("user", [text("B"), text("C")]),
        ("assistant", [{"type": "thinking", "thinking": "T", "signature": ""}]),
        ("assistant", "D"), ("assistant", [{"type": "thinking", "thinking": "U", "signature": ""}, text("E")]),
        ("assistant", [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]),
        ("assistant", [{"type": "tool_use", "id": "b", "name": "look", "input": {}}]),
        ("user", [result("R")]), ("system", "V"),
    )  # fmt: skip
    asked = CountTokensRequest(messages=messages)
    found = conversation_of(asked, takes_images=False).messages
    [calls] = [message.pop("tool_calls") for message in found if "tool_calls" in message]
    assert [call["id"] for call in calls] == ["a", "b"]
    assert found == [
        {"role": "user", "content": "A\n\nS\nB\nC"},
        {"role": "assistant", "content": "D\nE", "reasoning_content": "T\nU"},
        {"role": "tool", "content": "R\n\nV", "tool_call_id": "a"},
    ]


def test_a_growing_turn_is_joined_once() -> None:
    found = Conversation(takes_images=False)
    found.add("messages[0]", "user", "A")
    for word in ("B", "C"):
        found.append_text(word)
        assert found.messages == [{"role": "user", "content": "A"}], "joining it each time would take quadratic time"
    found.join()
    assert found.messages == [{"role": "user", "content": "A\nB\nC"}]


def test_the_answer_goes_on_with_the_last_message(live: LiveServer) -> None:
    assert post(live, "/v1/messages", body(messages=of(("user", "A"), ("assistant", "The best is (")))).status == 200
    assert prompt_text(live) == said("user", "A") + "<|im_start|>assistant\nThe best is ("


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (result("rain"), "rain (a)"),
        (result(), " (a)"),
        (result([text("rain"), text("wind")]), "rain\nwind (a)"),
        (result("no such city", is_error=True), "Error: no such city (a)"),
        (result("Error: none", is_error=True), "Error: none (a)"),
        (result("fine", is_error=False), "fine (a)"),
        (result([{"type": "tool_reference", "tool_name": "dig"}]), "The tool dig is available. (a)"),
        (
            result([{"type": "search_result", "source": "s", "title": "t", "content": [text("c")]}]),
            "t\ns\nc (a)",
        ),
    ],
)
def test_tool_results(live: LiveServer, given: dict[str, Any], shown: str) -> None:
    prompt = rendered(live, messages=[*CALLED, {"role": "user", "content": [given]}])
    called = '<tool_call>look {"x": 1}</tool_call>'
    assert prompt == said("user", "Hello") + said("assistant", called) + said("tool", shown)


def test_documents(live: LiveServer) -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "Words."}
    parts = {"type": "content", "content": [text("One."), text("Two.")]}
    blocks = [
        {"type": "document", "source": plain, "title": "Title", "context": "Context"},
        {"type": "document", "source": parts},
        text("Which?"),
    ]
    assert rendered(live, messages=of(("user", blocks))) == said("user", "Title\nContext\nWords.\nOne.\nTwo.\nWhich?")


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        (of(("system", "S"), ("user", "A")), said("system", "S") + said("user", "A")),
        (of(("user", "A"), ("system", "S")), said("user", "A\n\nS")),
        (
            of(("user", "A"), ("assistant", "B"), ("system", "S"), ("user", "C")),
            said("user", "A") + said("assistant", "B") + said("user", "S\n\nC"),
        ),
        (
            of(("user", "A"), ("assistant", "B"), ("system", "S")),
            said("user", "A") + said("assistant", "B") + said("user", "S"),
        ),
        (
            [*CALLED, *of(("system", "S"), ("user", [result("rain")]))],
            said("user", "Hello")
            + said("assistant", '<tool_call>look {"x": 1}</tool_call>')
            + said("tool", "rain\n\nS (a)"),
        ),
    ],
)
def test_system_messages_in_the_midst(live: LiveServer, messages: list[dict[str, Any]], shown: str) -> None:
    assert rendered(live, messages=messages) == shown


def test_reminders_behind_results_start_no_turn(live: LiveServer) -> None:
    """For many templates a user's message ends the loop of calls: they leave out what was thought in it."""
    reminder = text("<system-reminder>Q</system-reminder>")
    before = said("user", "Hello") + said("assistant", '<tool_call>look {"x": 1}</tool_call>')
    content = [result("rain"), reminder]
    reminded = said("tool", "rain\n\n<system-reminder>Q</system-reminder> (a)")
    assert rendered(live, messages=[*CALLED, {"role": "user", "content": content}]) == before + reminded
    content.append(text("And now?"))
    asked = rendered(live, messages=[*CALLED, {"role": "user", "content": content}])
    assert asked == before + reminded + said("user", "And now?")
    content = [result("rain"), text("Stop."), reminder]
    stopped = said("tool", "rain (a)") + said("user", "Stop.\n<system-reminder>Q</system-reminder>")
    assert rendered(live, messages=[*CALLED, {"role": "user", "content": content}]) == before + stopped


def test_a_growing_conversation_keeps_its_prefix(live: LiveServer) -> None:
    """As an agent sends it: a reminder in each turn, and an attribution that is never the same."""
    messages: list[dict[str, Any]] = []
    before = ""
    for turn in range(3):
        messages += of(("user", f"Q{turn}"), ("system", f"reminder {turn}"))
        system = [text(f"x-anthropic-billing-header: cch={turn};"), text("Be kind.")]
        prompt = rendered(live, system=system, messages=messages)
        assert prompt.startswith(before)
        before = prompt
        messages += of(("assistant", [{"type": "redacted_thinking", "data": "x"}, text(f"A{turn}")]))


@pytest.mark.parametrize(
    ("thinking", "is_on"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "between_tools"}, False),
        ({"type": "enabled", "budget_tokens": 2000}, True),
        ({"type": "adaptive", "display": "summarized"}, True),
    ],
)
def test_thinking_is_switched(live: LiveServer, thinking: Any, is_on: bool) -> None:
    answer = post(live, "/v1/messages", body(thinking=thinking))
    assert prompt_text(live).endswith(OFF) == (not is_on)
    told = answer.headers.get("x-penstock-warning", "")
    assert ("budget_tokens: no effect" in told) == bool(is_on and "budget_tokens" in thinking)


def test_what_has_no_effect_is_told(live: LiveServer) -> None:
    answer = post(
        live,
        "/v1/messages",
        body(
            context_management={"edits": []},
            speed="fast",
            inference_geo="eu",
            diagnostics={"previous_message_id": None},
            output_config={"effort": "max"},
            metadata={"user_id": "u"},
            service_tier="auto",
            mcp_servers=[],
            new_thing=1,
        ),
    )
    assert answer.status == 200
    told = [note.split(":")[0] for note in answer.headers["x-penstock-warning"].split("; ")]
    assert told == [
        "new_thing", "context_management", "speed", "diagnostics", "inference_geo", "output_config.effort",
    ]  # fmt: skip
    counted = post(live, "/v1/messages/count_tokens", {"messages": of(("user", "A")), "speed": "fast"})
    assert counted.headers["x-penstock-warning"].startswith("speed: no effect")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
TOOL = {"name": "look", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": -1}, "max_tokens must be at least 0"),
        ({"messages": []}, "messages is required"),
        ({"messages": None}, "messages is required"),
        ({"messages": of(("robot", "Hi"))}, "messages[0].role must be"),
        ({"messages": of(("user", []))}, "messages[0].content is empty"),
        ({"messages": of(("user", 5))}, "messages[0].content: expected a string or a list"),
        ({"messages": of(("user", ["Hi"]))}, "messages[0].content[0]: expected an object"),
        ({"messages": of(("user", [{"type": "text"}]))}, "messages[0].content[0].text: expected a string"),
        ({"messages": of(("user", [IMAGE]))}, "messages[0].content[0]: this model takes no images"),
        ({"messages": of(("user", [PDF]))}, "messages[0].content[0].source: documents of type 'base64'"),
        ({"messages": of(("user", [{"type": "server_tool_use"}]))}, "blocks of type 'server_tool_use'"),
        ({"messages": of(("assistant", [{"type": "magic"}]))}, "blocks of type 'magic'"),
        ({"messages": of(("assistant", [{"type": "server_tool_use"}]))}, "messages[0].content[0].id"),
        (
            {"messages": of(("system", [IMAGE]), ("user", "A"))},
            "messages[0].content[0]: images are read in messages of users",
        ),
        ({"messages": CALLED}, "messages[1]: a tool_result must follow"),
        (
            {"messages": of(("assistant", [{"type": "tool_use", "id": "a", "name": "b", "input": "c"}]))},
            "messages[0].content[0].input: expected an object",
        ),
        ({"system": [{"type": "document"}]}, "system[0]: blocks of type 'document'"),
        ({"system": "S", "messages": of(("user", "x" * 40000))}, "messages[0].content has 40000 characters"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema: expected an object"),
        ({"tools": [TOOL | {"name": "a\tb"}]}, "tools[0].name must have"),
        ({"tools": [TOOL, TOOL]}, "'look' is listed twice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice must have the type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "dig"}}, "tool_choice names 'dig'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice 'any' needs tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": "no"}},
            "tool_choice.disable_parallel_tool_use: expected a boolean",
        ),
        ({"thinking": {"type": "much"}}, "thinking.type must be one of enabled, adaptive"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display must be"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort must be one of"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type must be"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is required"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "word"}}}},
            "output_config.format.schema",
        ),
        ({"stop_sequences": ["x" * 17_000]}, "stop_sequences"),
        ({"service_tier": "gold"}, "service_tier must be"),
        ({"container": "c"}, "container is not supported"),
        ({"mcp_servers": [{"name": "m"}]}, "mcp_servers is not supported"),
        ({"temperature": "warm"}, "temperature: expected"),
    ],
)
def test_refusals(live: LiveServer, fields: dict[str, Any], message: str) -> None:
    answer = post(live, "/v1/messages", body(**fields))
    found = answer.json()
    assert (answer.status, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")
    assert message in found["error"]["message"]
    assert found["request_id"] == answer.headers["request-id"]
    assert not live.scheduler.added


def test_the_key_and_version_headers(live: LiveServer) -> None:
    versioned = {"anthropic-version": "2023-06-01"}
    assert post(live, "/v1/messages", body(), **versioned, **{"x-api-key": "any"}).status == 200
    assert "first_id" in get(live, "/v1/models", **versioned).json()
    assert get(live, "/v1/models").json()["object"] == "list"
    refused = get(live, "/v1/models?limit=0", **versioned)
    assert (refused.status, refused.json()["type"]) == (400, "error")
    assert get(live, "/v1/models/none").json()["error"]["code"] == "model_not_found"


def test_counting_refuses_what_a_message_would(live: LiveServer) -> None:
    answer = post(live, "/v1/messages/count_tokens", {"messages": of(("user", [IMAGE]))})
    assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert post(live, "/v1/messages/count_tokens", b"[1]").json()["error"]["type"] == "invalid_request_error"
