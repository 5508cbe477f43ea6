"""Tools of Anthropic's own servers: offered beside the client's, and what they leave in a conversation."""

from typing import Any

import anthropic
import pytest

from tests.frontend.http_client import post
from tests.frontend.live_server import LiveServer
from tests.frontend.messages.conftest import body, prompt_text

OWN = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
SERVERS: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "mcp_toolset", "mcp_server_name": "m"},
]


def use(name: str, call_id: str = "srvtoolu_1", kind: str = "server_tool_use", **given: Any) -> dict[str, Any]:
    return {"type": kind, "id": call_id, "name": name, "input": given}


def result(kind: str, content: Any, call_id: str = "srvtoolu_1", **more: Any) -> dict[str, Any]:
    return {"type": kind, "tool_use_id": call_id, "content": content, **more}


FOUND = {
    "type": "web_search_result",
    "url": "https://a.example",
    "title": "Rain",
    "encrypted_content": "Eo",
    "page_age": None,
}
PAGE = {
    "type": "web_fetch_result",
    "url": "https://a.example",
    "content": {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "It rains."}},
}
RAN = {"type": "bash_code_execution_result", "stdout": "a.py\n", "stderr": "", "return_code": 1, "content": []}

SHOWN: list[tuple[list[dict[str, Any]], str]] = [
    (
        [use("web_search", query="rain"), result("web_search_tool_result", [FOUND, FOUND])],
        "Rain\nhttps://a.example\nRain",
    ),
    (
        [
            use("web_search", query="rain"),
            result("web_search_tool_result", {"type": "web_search_tool_result_error", "error_code": "unavailable"}),
        ],
        "Error: unavailable",
    ),
    ([use("web_fetch", url="u"), result("web_fetch_tool_result", PAGE)], "https://a.example\nIt rains."),
    ([use("bash_code_execution"), result("bash_code_execution_tool_result", RAN)], "a.py\nexit code: 1"),
    (
        [
            use("find", kind="mcp_tool_use", server_name="m"),
            result("mcp_tool_result", [{"type": "text", "text": "broken"}], is_error=True),
        ],
        "Error: broken",
    ),
    (
        [
            use("tool_search_tool_regex"),
            result(
                "tool_search_tool_result",
                {
                    "type": "tool_search_tool_search_result",
                    "tool_references": [{"type": "tool_reference", "tool_name": "map"}],
                },
            ),
        ],
        "The tool map is available.",
    ),
]


def conversation(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Go on"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look."}, *blocks, {"type": "text", "text": "So."}],
        },
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize("tool", SERVERS, ids=lambda tool: tool["type"])
def test_server_tools_are_left_out(live: LiveServer, tool: dict[str, Any]) -> None:
    live.says("Good.")
    post(live, "/v1/messages", body(tools=[OWN]))
    plain = prompt_text(live)
    choice = {"type": "tool", "name": tool.get("name", "look")}
    for more in ({}, {"tool_choice": choice} if "name" in tool else {}):
        answer = post(live, "/v1/messages", body(tools=[tool, OWN], **more))
        assert answer.status == 200, answer.text
        assert f"tools[0]: tools of type '{tool['type']}'" in answer.headers["x-penstock-warning"]
        assert ("tool_choice" in answer.headers["x-penstock-warning"]) == bool(more)
        assert prompt_text(live) == plain
        counted = post(
            live, "/v1/messages/count_tokens", {"messages": body()["messages"], "tools": [tool, OWN], **more}
        )
        assert counted.json()["input_tokens"] == len(live.tokenizer.encode(plain, add_special_tokens=False))
        assert counted.headers["x-penstock-warning"] == answer.headers["x-penstock-warning"]


def test_only_server_tools(client: anthropic.Anthropic, live: LiveServer) -> None:
    live.says("Good.")
    tools: Any = SERVERS[:1]
    said = client.messages.create(
        model="test/model", max_tokens=9, messages=[{"role": "user", "content": "x"}], tools=tools
    )
    assert said.stop_reason == "end_turn"
    assert post(live, "/v1/messages", body(tools=tools, tool_choice={"type": "any"})).status == 400


@pytest.mark.parametrize(("blocks", "shown"), SHOWN, ids=lambda value: str(value)[:50])
def test_their_results_are_shown(live: LiveServer, blocks: list[dict[str, Any]], shown: str) -> None:
    live.says("Good.")
    answer = post(live, "/v1/messages", body(messages=conversation(blocks)))
    assert answer.status == 200, answer.text
    assert "x-penstock-warning" not in answer.headers
    prompt, name = prompt_text(live), blocks[0]["name"]
    places = ["assistant\nI look.", f"<tool_call>{name} ", f"tool\n{shown}", "assistant\nSo.", "user\nAnd?"]
    assert [prompt.count(place) for place in places] == [1] * 5
    assert sorted(places, key=prompt.index) == places


@pytest.mark.parametrize(
    "blocks",
    [
        [use("web_search", query="rain")],
        [
            use("web_search"),
            result("web_search_tool_result", [{"type": "web_search_result", "encrypted_content": "Eo"}]),
        ],
        [result("code_execution_tool_result", {"type": "encrypted_code_execution_result", "encrypted_stdout": "Eo"})],
        [{"type": "container_upload", "file_id": "f"}],
        [{"type": "compaction", "content": None, "encrypted_content": "Eo"}],
        [{"type": "fallback"}],
    ],
    ids=lambda blocks: blocks[0]["type"],
)
def test_what_has_no_text_is_left_out(live: LiveServer, blocks: list[dict[str, Any]]) -> None:
    live.says("Good.")
    post(live, "/v1/messages", body(messages=conversation([])))
    plain = prompt_text(live)
    answer = post(live, "/v1/messages", body(messages=conversation(blocks)))
    assert answer.status == 200, answer.text
    for block in blocks:
        assert f"messages: a block of type '{block['type']}'" in answer.headers["x-penstock-warning"]
    assert prompt_text(live) == plain
    alone = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": blocks}]
    answer = post(live, "/v1/messages", body(messages=alone))
    assert answer.status == 200, answer.text
    assert prompt_text(live).endswith("user\nGo on<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_calls_beside_each_other_have_one_message(live: LiveServer) -> None:
    live.says("Good.")
    calls = [use("web_search", "srvtoolu_1"), use("web_search", "srvtoolu_2")]
    results = [result("web_search_tool_result", [FOUND], call["id"]) for call in calls]
    answer = post(live, "/v1/messages", body(messages=conversation([*calls, *results])))
    assert answer.status == 200, answer.text
    prompt = prompt_text(live)
    assert prompt.count("<tool_call>web_search") == prompt.count("tool\nRain") == 2
    assert prompt.count("<|im_start|>assistant\n") == 3  # the calls, the answer, the one to come


def test_a_turn_that_was_paused_goes_on(live: LiveServer) -> None:
    """The call ends a message, and its result begins the next one."""
    live.says("Good.")
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Go on"},
        {"role": "assistant", "content": [use("web_search", query="rain")]},
        {"role": "assistant", "content": [result("web_search_tool_result", [FOUND])]},
    ]
    answer = post(live, "/v1/messages", body(messages=messages))
    assert answer.status == 200, answer.text
    prompt = prompt_text(live)
    assert prompt.index("<tool_call>web_search") < prompt.index("tool\nRain") < prompt.rindex("assistant\n")


def test_a_summary_of_theirs_is_shown(live: LiveServer) -> None:
    live.says("Good.")
    post(live, "/v1/messages", body(messages=conversation([{"type": "compaction", "content": "What was said."}])))
    assert "What was said." in prompt_text(live)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
CALLED = [
    {"role": "user", "content": "Go on"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
]


def test_what_cannot_be_read_in_a_result_becomes_a_note(live: LiveServer) -> None:
    live.says("Good.")
    seen = [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "So:"}, IMAGE, PDF]}]
    messages = [*CALLED, {"role": "user", "content": seen}]
    answer = post(live, "/v1/messages", body(messages=messages))
    assert answer.status == 200, answer.text
    assert "So:\n[an image that this model cannot read]\n[a file that this model cannot read]" in prompt_text(live)
    warning = answer.headers["x-penstock-warning"]
    assert "messages: an image in a tool's result" in warning
    assert "messages: a file in a tool's result" in warning
    assert post(live, "/v1/messages", body(messages=[*CALLED[:1], {"role": "user", "content": [IMAGE]}])).status == 400
