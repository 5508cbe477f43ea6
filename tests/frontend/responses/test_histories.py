"""What agents send back: items of every known type are shown or left out with a warning, and summaries of reasoning."""

import json
from typing import Any

import openai
import pytest

from tests.frontend.http_client import chat, error_of, get, post
from tests.frontend.live_server import LiveServer
from tests.frontend.parsing.test_tools import THOUGHT
from tests.frontend.responses.conftest import prompt_text

PIXEL = "data:image/png;base64,AA=="
ACTION: dict[str, Any] = {
    "type": "exec",
    "command": ["ls", "-l"],
    "env": {},
    "timeout_ms": None,
    "working_directory": "/tmp",
}
OUTCOME = {"stdout": "a.py\n", "stderr": "warning", "outcome": {"type": "exit", "exit_code": 1}}
LATE = {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}}

SHOWN: list[tuple[str, list[dict[str, Any]], list[str]]] = [
    (
        "custom",
        [
            {"type": "custom_tool_call", "call_id": "c1", "name": "edit", "input": 'a "b"\n'},
            {
                "type": "custom_tool_call_output",
                "call_id": "c1",
                "output": [{"type": "input_text", "text": "Done it."}],
            },
        ],
        [
            f"<tool_call>edit {json.dumps({'input': chr(97) + ' ' + chr(34) + 'b' + chr(34) + chr(10)})}",
            "Done it. (c1)",
        ],
    ),
    (
        "local shell",
        [
            {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "status": "completed", "action": ACTION},
            {"type": "local_shell_call_output", "id": "c1", "output": '{"output": "a.py"}'},
        ],
        ['<tool_call>local_shell {"command": ["ls", "-l"], "working_directory": "/tmp"}', '{"output": "a.py"} (c1)'],
    ),
    (
        "shell",
        [
            {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"], "timeout_ms": 5}},
            {"type": "shell_call_output", "call_id": "c1", "output": [OUTCOME, LATE]},
        ],
        [
            '<tool_call>shell {"commands": ["ls"], "timeout_ms": 5}',
            "tool\na.py\nwarning\nexit code: 1\nit took too long and was ended (c1)",
        ],
    ),
    (
        "patch",
        [
            {
                "type": "apply_patch_call",
                "call_id": "c1",
                "status": "completed",
                "operation": {"type": "create_file", "path": "a.py", "diff": "+x"},
            },
            {"type": "apply_patch_call_output", "call_id": "c1", "status": "failed"},
        ],
        ['<tool_call>apply_patch {"type": "create_file", "path": "a.py", "diff": "+x"}', "tool\nfailed (c1)"],
    ),
    (
        "computer",
        [
            {"type": "computer_call", "id": "cu_1", "call_id": "c1", "action": {"type": "click", "x": 1, "y": 2}},
            {
                "type": "computer_call_output",
                "call_id": "c1",
                "output": {"type": "computer_screenshot", "image_url": PIXEL},
            },
        ],
        ['<tool_call>computer {"action": {"type": "click", "x": 1, "y": 2}}', "[an image that this model cannot read]"],
    ),
    (
        "mcp",
        [
            {
                "type": "mcp_call",
                "id": "mcp_1",
                "server_label": "s",
                "name": "find",
                "arguments": "{}",
                "output": "found",
            },
            {
                "type": "mcp_call",
                "id": "mcp_2",
                "server_label": "s",
                "name": "find",
                "arguments": "{}",
                "error": "broken",
            },
        ],
        ["<tool_call>find {}", "tool\nfound (mcp_1)", "tool\nError: broken (mcp_2)"],
    ),
    (
        "code",
        [
            {
                "type": "code_interpreter_call",
                "id": "ci_1",
                "code": "print(1)",
                "container_id": "x",
                "status": "completed",
                "outputs": [{"type": "logs", "logs": "1"}, {"type": "image", "url": "u"}],
            }
        ],
        ['<tool_call>code_interpreter {"code": "print(1)"}', "tool\n1\n[an image] (ci_1)"],
    ),
    (
        "files",
        [
            {
                "type": "file_search_call",
                "id": "fs_1",
                "queries": ["q"],
                "status": "completed",
                "results": [{"filename": "a.md", "text": "It rains."}],
            }
        ],
        ['<tool_call>file_search {"queries": ["q"]}', "tool\na.md\nIt rains. (fs_1)"],
    ),
    (
        "tools",
        [
            {"type": "tool_search_call", "id": "ts_1", "call_id": None, "arguments": {"query": "maps"}},
            {"type": "tool_search_output", "call_id": "ts_1", "tools": [{"name": "map"}]},
            {"type": "program", "id": "p", "call_id": "c2", "code": "1 + 1", "fingerprint": "f"},
            {"type": "program_output", "id": "p", "call_id": "c2", "result": "2", "status": "completed"},
        ],
        ['<tool_call>tool_search {"query": "maps"}', '[{"name":"map"}] (ts_1)', '{"code": "1 + 1"}', "tool\n2 (c2)"],
    ),
    (
        "no ids",
        [
            {"type": "local_shell_call", "action": ACTION, "status": "completed"},
            {"type": "mcp_call", "server_label": "s", "name": "find", "arguments": "{}", "output": "found"},
        ],
        ["<tool_call>local_shell", "tool\nfound (call_"],
    ),
    ("reasoning", [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}], ["<think>Hm."]),
]

LEFT_OUT: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "rain"}},
    {"type": "file_search_call", "id": "fs_1", "queries": ["rain"], "status": "completed", "results": None},
    {"type": "image_generation_call", "id": "ig_1", "result": "AA==", "status": "completed"},
    {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
    {"type": "mcp_approval_request", "id": "m", "server_label": "s", "name": "f", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True},
    {"type": "additional_tools", "role": "developer", "tools": []},
    {"type": "ghost_snapshot", "ghost_commit": {"id": "abc"}},
    {"type": "compaction_trigger"},
    {"type": "compaction", "encrypted_content": "gAAAAB"},
    {"type": "compaction_summary", "encrypted_content": "penstock:%"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAB"},
]


def history(items: list[dict[str, Any]]) -> dict[str, Any]:
    user = {"role": "user", "content": "Go on"}
    return {"input": [user, *items, {**user, "content": "And?"}]}


@pytest.mark.parametrize(("items", "shown"), [case[1:] for case in SHOWN], ids=[case[0] for case in SHOWN])
def test_items_with_a_text_are_shown(agent: LiveServer, items: list[dict[str, Any]], shown: list[str]) -> None:
    agent.says("Good.")
    answer = post(agent, "/v1/responses", history(items))
    assert answer.status == 200, answer.text
    prompt = prompt_text(agent)
    for text in shown:
        assert text in prompt
    note = answer.headers.get("x-penstock-warning", "")
    assert note == (
        "input: an image in a tool's result became a note: this model cannot read it"
        if "computer" in items[0]["type"]
        else ""
    )
    later = post(agent, "/v1/responses", {"input": "More?", "previous_response_id": answer.json()["id"]})
    assert later.status == 200, later.text
    assert prompt_text(agent).startswith(prompt.removesuffix("<|im_start|>assistant\n"))  # as it was stored
    listed = get(agent, f"/v1/responses/{answer.json()['id']}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in listed[1:-1]] == [item["type"] for item in items]
    assert all(item["id"] for item in listed)


@pytest.mark.parametrize("item", LEFT_OUT, ids=lambda item: item["type"])
def test_items_without_a_text_are_left_out_and_told(agent: LiveServer, item: dict[str, Any]) -> None:
    agent.says("Good.")
    post(agent, "/v1/responses", history([]))
    plain = prompt_text(agent)
    answer = post(agent, "/v1/responses", history([item]))
    assert answer.status == 200, answer.text
    assert answer.headers["x-penstock-warning"].startswith("input: ")
    assert prompt_text(agent) == plain
    made = post(agent, "/v1/conversations", {"items": [item]})
    assert made.status == 200
    assert "x-penstock-warning" in made.headers


def test_unknown_items_are_refused_with_the_known_ones(agent: LiveServer) -> None:
    error = error_of(post(agent, "/v1/responses", history([{"type": "magic"}])), 400)
    assert error["param"] == "input[1].type"
    for name in ("'magic'", "custom_tool_call", "shell_call_output", "compaction", "ghost_snapshot"):
        assert name in error["message"]


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"type": "custom_tool_call", "name": "f", "input": "x"}, "call_id"),
        ({"type": "custom_tool_call", "name": "f", "call_id": "c"}, "input"),
        ({"type": "custom_tool_call_output", "id": "c", "output": "x"}, "call_id"),
        ({"type": "custom_tool_call_output", "call_id": "c"}, "output"),
        ({"type": "shell_call", "call_id": "c", "action": []}, "action"),
        ({"type": "local_shell_call_output", "output": "x"}, "call_id"),
        ({"type": "mcp_call", "id": "m", "name": "f"}, "arguments"),
        ({"type": "program_output", "call_id": "c"}, "output"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_broken_items(agent: LiveServer, item: dict[str, Any], field: str) -> None:
    assert error_of(post(agent, "/v1/responses", history([item])), 400)["param"] == f"input[1].{field}"


IN_RESULT = [
    {"type": "input_text", "text": "It looks so:"},
    {"type": "input_image", "image_url": PIXEL},
    {"type": "input_file", "file_data": "AA=="},
]


def test_what_a_text_model_cannot_read_in_a_result_becomes_a_note(agent: LiveServer) -> None:
    agent.says("Good.")
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    answer = post(
        agent, "/v1/responses", history([call, {"type": "function_call_output", "call_id": "c", "output": IN_RESULT}])
    )
    assert answer.status == 200, answer.text
    shown = "It looks so:\n[an image that this model cannot read]\n[a file that this model cannot read]"
    assert shown in prompt_text(agent)
    assert [note.split(" became")[0] for note in answer.headers["x-penstock-warning"].split("; ")] == [
        "input: an image in a tool's result",
        "input: a file in a tool's result",
    ]
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    result = [{"type": "text", "text": "It looks so:"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "c", "content": result}]
    answer = chat(agent, messages=messages)
    assert answer.status == 200, answer.text
    assert answer.headers["x-penstock-warning"].startswith("messages: an image in a tool's result")
    sent = {"role": "user", "content": result}
    assert error_of(chat(agent, messages=[sent]), 400)["param"] == "messages[0].content[1].type"


@pytest.mark.parametrize("per_step", [1, 1000])
def test_reasoning_is_told_as_a_summary_too(agent_client: openai.OpenAI, agent: LiveServer, per_step: int) -> None:
    agent.says(THOUGHT + "Good.", per_step=per_step)
    fields: dict[str, Any] = {"model": "test/model", "input": "Think", "reasoning": {"summary": "auto"}}
    whole = agent_client.responses.create(**fields)
    item = whole.output[0]
    assert item.type == "reasoning"
    assert [part.to_dict() for part in item.summary] == [{"text": "Let me see.", "type": "summary_text"}]
    assert item.content is not None
    assert item.content[0].text == "Let me see."
    events = list(agent_client.responses.create(**fields, stream=True))
    mine = [event for event in events if getattr(event, "item_id", "") == events[2].item.id]
    kinds = [
        event.type
        for event in events[2:]
        if event.type.startswith("response.reasoning_summary") or "item" in event.type
    ]
    deltas = [event for event in mine if event.type == "response.reasoning_summary_text.delta"]
    assert [kind for kind in kinds if not kind.endswith("delta")][:5] == [
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
    ]
    assert kinds[2] == "response.reasoning_summary_text.delta"
    assert events[2].item.summary == []
    assert "".join(event.delta for event in deltas) == "Let me see."
    assert {event.summary_index for event in deltas} == {0}
    done = next(event for event in events if event.type == "response.output_item.done")
    assert done.item.summary[0].text == "Let me see."
    [*_, last] = events
    told = list(agent_client.responses.retrieve(last.response.id, stream=True))
    assert [event.type for event in told if "summary" in event.type] == [
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
    ]
    post(
        agent,
        "/v1/responses",
        {"input": [{"role": "user", "content": "Think"}, done.item.to_dict(), {"role": "user", "content": "x"}]},
    )
    assert prompt_text(agent).count("Let me see.") == 1


def test_a_short_summary_is_not_what_was_asked_for(agent: LiveServer) -> None:
    agent.says(THOUGHT + "Good.")
    for summary, told in (("detailed", False), ("concise", True), (None, False)):
        answer = post(agent, "/v1/responses", {"input": "Think", "reasoning": {"summary": summary}})
        assert ("reasoning.summary" in answer.headers.get("x-penstock-warning", "")) == told
        assert len(answer.json()["output"][0]["summary"]) == (summary is not None)
