"""Chats with every family: the formats are found from its template, and streams say what whole answers say."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from penstock.config.options import FrontendOptions
from penstock.frontend.parsing.detection import find_formats
from penstock.frontend.parsing.parser import OutputFormat, ValidTools
from penstock.frontend.parsing.reasoning import REASONING_FORMATS, reasoning_format_of
from penstock.frontend.parsing.tool_formats.registry import TOOL_FORMATS, tool_format_of
from penstock.frontend.text.call_style import Chat
from penstock.frontend.text.chat_template import ChatTemplate
from penstock.frontend.text.template_facts import facts_of
from penstock.ipc.messages import AddRequest
from tests.faults.soak import IS_SOAK
from tests.frontend.checkpoint_folder import byte_level_tokenizer, write_checkpoint
from tests.frontend.fake_scheduler import prompt_ids
from tests.frontend.families import ANSWER, FAMILIES, SEARCH, WEATHER, Output
from tests.frontend.http_client import chat, events
from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.pieces import assert_same_at_every_cut

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in arguments.items()}},
        },
    }
    for name, arguments in (("get_weather", {"city": "string"}), ("search", {"query": "string", "days": "integer"}))
]
USER = {"role": "user", "content": "How is the weather?"}
USUAL = ["gpt_oss", "deepseek_v31", "glm_4_5", "gemma4", "phi4_mini", "mistral_v13", "command", "llama_4"]
SERVED = list(FAMILIES) if IS_SOAK else USUAL  # each with a server of its own


@pytest.mark.parametrize("name", FAMILIES)
def test_the_formats_are_found_from_the_template_alone(name: str) -> None:
    family = FAMILIES[name]
    template = ChatTemplate(family.source(name), {})
    facts = facts_of(template)
    assert facts.shows_tools == (family.tools is not None)
    for tools, reasoning in (
        find_formats(template.source, facts),
        (tool_format_of(template.source), reasoning_format_of(template.source)),  # by its words alone
    ):
        assert tools.name == (family.tools or "generic")
        assert (reasoning and reasoning.name) == family.reasoning
    assert (FrontendOptions().tool_call_parser, FrontendOptions().reasoning_parser) == ("auto", "auto")


def test_every_reasoning_format_has_a_family() -> None:
    assert {family.reasoning for family in FAMILIES.values()} >= REASONING_FORMATS.keys() - {"apertus"}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_cut_of_an_output_says_the_same(name: str) -> None:
    family = FAMILIES[name]
    template = ChatTemplate(family.source(name), {})
    for output in family.outputs:
        tools = TOOLS if family.tools is not None else None
        prompt = template.render([USER], tools=tools, variables=output.variables)
        if not output.variables:
            assert prompt.endswith(family.prompt_end)
        reasoning = REASONING_FORMATS.get(family.reasoning or "")
        tool_format = TOOL_FORMATS.get(family.tools or "")
        names = frozenset(tool["function"]["name"] for tool in TOOLS)
        form = OutputFormat(
            reasoning=reasoning,
            is_reasoning_open=reasoning is not None and reasoning.is_opened_by(prompt),
            is_answer_open=reasoning is not None and reasoning.is_answered_by(prompt),
            tools=ValidTools(TOOLS, names, True, tool_format) if tool_format is not None else None,
            tool_format=tool_format,
        )
        thought, content, calls = assert_same_at_every_cut(form, output.text)
        assert (thought, content) == (output.reasoning, output.content), output.text
        assert [(called, json.loads(arguments)) for called, arguments in calls] == list(output.calls), output.text


@pytest.mark.parametrize("name", SERVED)
def test_a_conversation_over_http(name: str, tmp_path: Path) -> None:
    """With marks that are special tokens: the decoder must show them to the parser, and nobody else may see them."""
    family = FAMILIES[name]
    source = family.source(name)
    tool_format, reasoning = TOOL_FORMATS.get(family.tools or ""), REASONING_FORMATS.get(family.reasoning or "")
    marks = (*(tool_format.marks if tool_format else ()), *(reasoning.marks if reasoning else ()))
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([mark for mark in marks if mark.startswith(("<", "[")) and mark in source])
    folder = write_checkpoint(tmp_path / "model", tokenizer=tokenizer, chat_template=source)
    with (
        tempfile.TemporaryDirectory(prefix="pst-") as sockets,
        live_server(folder, Path(sockets), max_model_len=4096) as live,
    ):
        for output in family.outputs:
            live.says(output.text)
            fields: dict[str, Any] = {"messages": [USER], "chat_template_kwargs": output.variables}
            if tool_format is not None:
                fields["tools"] = TOOLS
            whole = chat(live, **fields).json()["choices"][0]
            check_message(whole["message"], output)
            assert whole["finish_reason"] == ("tool_calls" if output.calls else "stop")
            check_message(added_up(events(chat(live, **fields, stream=True))), output)
            if output.calls:
                check_second_turn(live, name, whole["message"], output)


def check_message(message: dict[str, Any], output: Output) -> None:
    assert (message.get("reasoning") or "") == output.reasoning
    assert (message["content"] or "") == output.content
    calls = [call["function"] for call in message.get("tool_calls") or []]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == list(output.calls)


def added_up(found: list[Any]) -> dict[str, Any]:
    """The message that a stream's deltas make."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for choice in (choice for event in found if event != "[DONE]" for choice in event["choices"]):
        delta = choice["delta"]
        for field in ("content", "reasoning"):
            message[field] += delta.get(field) or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"].get("arguments", "")
    return message


def check_second_turn(live: LiveServer, name: str, message: dict[str, Any], output: Output) -> None:
    """The client sends back what it got, with the tools' results."""
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "Rain until noon."}
        for call in message["tool_calls"]
    ]
    live.says(ANSWER)
    live.do(live.scheduler.received.clear)
    fields = {"messages": [USER, message, *answers], "tools": TOOLS, "chat_template_kwargs": output.variables}
    second = chat(live, **fields)
    assert second.status == 200, second.text
    [request] = [got for got in live.scheduler.received if isinstance(got, AddRequest)]
    prompt = live.tokenizer.decode(prompt_ids(request))
    assert "Rain until noon." in prompt
    for called, arguments in output.calls:
        assert called in prompt
        assert all(str(value) in prompt for value in arguments.values())
    assert "None" not in prompt


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.tools and not family.hides_calls])
def test_past_calls_are_shown_as_the_model_writes_them(name: str) -> None:
    """What the template writes of a past turn is read back as the same calls."""
    family = FAMILIES[name]
    calls = (WEATHER,) if name == "gpt_oss" else (WEATHER, SEARCH)
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"functions.{called}:{index}" if family.tools == "kimi_k2" else f"abcdefgh{index}",
                "type": "function",
                "function": {"name": called, "arguments": arguments},
            }
            for index, (called, arguments) in enumerate(calls)
        ],
    }
    template = ChatTemplate(family.source(name), {})

    def rendered(chat: Chat) -> str:
        return template.render(chat, tools=TOOLS, add_generation_prompt=False)

    turn = rendered([USER, message]).removeprefix(rendered([USER]))
    tool_format = TOOL_FORMATS[str(family.tools)]
    reasoning = REASONING_FORMATS[str(family.reasoning)] if name in ("gpt_oss", "kimi_k3", "minimax_m3") else None
    names = frozenset(tool["function"]["name"] for tool in TOOLS)
    form = OutputFormat(reasoning=reasoning, tools=ValidTools(TOOLS, names, True, tool_format), tool_format=tool_format)
    _, _, found = assert_same_at_every_cut(form, turn)
    assert [(called, json.loads(arguments)) for called, arguments in found] == list(calls), turn


def test_the_effort_and_the_roles_of_gpt_oss() -> None:
    template = ChatTemplate(FAMILIES["gpt_oss"].source("gpt_oss"), {})
    assert "reasoning_effort" in template.extra_variables
    chat: Chat = [{"role": "developer", "content": "Be brief."}, USER]
    assert "Reasoning: medium\n" in template.render(chat)
    prompt = template.render(chat, variables={"reasoning_effort": "high"}, tools=TOOLS)
    assert "Reasoning: high\n" in prompt
    assert "<|start|>developer<|message|># Instructions\n\nBe brief." in prompt
    assert prompt.endswith("<|start|>assistant")
