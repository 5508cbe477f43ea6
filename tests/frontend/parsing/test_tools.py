"""Tools and reasoning over HTTP: what the template sees, what the client gets, streamed and whole."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client.parser import text_string_to_metric_families

from penstock.config import ConfigError
from penstock.config.flags import config_from
from penstock.frontend.validation.tools import check_tool_choice
from penstock.ipc.messages import AddRequest
from tests.frontend.checkpoint_folder import write_checkpoint
from tests.frontend.fake_scheduler import prompt_ids
from tests.frontend.http_client import HELLO, chat, error_of, events, get
from tests.frontend.live_server import LiveServer, live_server, made_server

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> answer with <tool_call></tool_call>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "</tool_call>{% endfor %}"
    "{% if m.tool_call_id %} ({{ m.tool_call_id }}){% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if open_thinking %}<think>\n{% endif %}{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tromsø"}}\n</tool_call>'
SPECIAL = ("<think>", "</think>", "<tool_call>")
"""Tokens that must not vanish from the text."""
THOUGHT = "<think>\nLet me see.\n</think>\n\n"


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("tools")
    with made_server(folder, chat_template=TEMPLATE, special_tokens=SPECIAL) as live:
        yield live


@pytest.fixture
def live(tool_server: LiveServer) -> LiveServer:
    tool_server.reset()
    return tool_server


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    messages: Any = fields.pop("messages", HELLO)
    answer: ChatCompletion = client.chat.completions.create(model="test/model", messages=messages, **fields)
    return answer


def stream(client: openai.OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    messages: Any = fields.pop("messages", HELLO)
    return list(client.chat.completions.create(model="test/model", messages=messages, stream=True, **fields))


def streamed_message(chunks: list[ChatCompletionChunk]) -> dict[str, Any]:
    """What a client that adds up deltas ends with."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish_reason": None}
    for chunk in chunks:
        for choice in chunk.choices:
            extra = choice.delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            message["reasoning"] += extra.get("reasoning") or ""
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                if call.id is not None:
                    assert call.type == "function"
                    assert call.index == len(message["calls"])
                    message["calls"].append([call.function.name, ""])
                message["calls"][call.index][1] += call.function.arguments or ""
            message["finish_reason"] = choice.finish_reason or message["finish_reason"]
    return message


def whole_message(answer: ChatCompletion) -> dict[str, Any]:
    [choice] = answer.choices
    extra = choice.message.model_extra or {}
    assert extra.get("reasoning") == extra.get("reasoning_content")
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]  # type: ignore[union-attr]
    content = choice.message.content or ""
    return {
        "content": content,
        "reasoning": extra.get("reasoning") or "",
        "calls": calls,
        "finish_reason": choice.finish_reason,
    }


OUTPUTS = [
    (CALL, "", "", 1, "tool_calls"),
    (f"I look.\n{CALL}\n{CALL}", "", "I look.", 2, "tool_calls"),
    (THOUGHT + CALL, "Let me see.", "", 1, "tool_calls"),
    (THOUGHT + "Sunny.", "Let me see.", "Sunny.", 0, "stop"),
    ("Sunny. ", "", "Sunny. ", 0, "stop"),
    ("<think>on and on", "on and on", "", 0, "stop"),
]


@pytest.mark.parametrize(("output", "reasoning", "content", "num_calls", "reason"), OUTPUTS)
@pytest.mark.parametrize("per_step", [1, 7, 1000])
def test_streamed_and_whole_answers_are_equal(
    client: openai.OpenAI,
    live: LiveServer,
    output: str,
    reasoning: str,
    content: str,
    num_calls: int,
    reason: str,
    per_step: int,
) -> None:
    live.says(output, per_step=per_step)
    expected = {
        "content": content,
        "reasoning": reasoning,
        "calls": [["get_weather", '{"city": "Tromsø"}']] * num_calls,
        "finish_reason": reason,
    }
    assert whole_message(ask(client, tools=[WEATHER])) == expected
    assert streamed_message(stream(client, tools=[WEATHER])) == expected


def test_the_shape_of_a_call(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(CALL)
    message = chat(live, tools=[WEATHER]).json()["choices"][0]["message"]
    assert message["content"] is None
    assert message["reasoning"] is None
    [call] = message["tool_calls"]
    assert sorted(call) == ["function", "id", "type"]
    assert call["id"].startswith("call_")
    live.says(CALL, delay=0.005)
    found = events(chat(live, tools=[WEATHER], stream=True))
    deltas = [event["choices"][0]["delta"] for event in found[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    [first] = deltas[1]["tool_calls"]
    assert first | {"id": ""} == {
        "index": 0,
        "id": "",
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    assert len(deltas) > 5  # the arguments come in pieces
    assert deltas[-1] == {}


def test_the_template_sees_tools_calls_and_results(live: LiveServer) -> None:
    live.says("Cold.")
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "there?"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "-3"},
    ]
    assert chat(live, messages=messages, tools=[WEATHER]).status == 200
    text = live.tokenizer.decode(prompt_ids(live.scheduler.added[-1]))
    assert f"<tools>[{json.dumps(WEATHER)}]</tools>" in text
    assert "<|im_start|>system\nBe kind." in text
    assert "Weather\nthere?" in text
    assert '<think>hm</think><tool_call>get_weather {"city": "Oslo"}</tool_call>' in text
    assert "<|im_start|>tool\n-3 (c1)" in text


def test_tool_choice_none_offers_no_tools(live: LiveServer) -> None:
    live.says(CALL)
    answer = chat(live, tools=[WEATHER], tool_choice="none").json()
    assert "<tools>" not in live.tokenizer.decode(prompt_ids(live.scheduler.added[-1]))
    assert "tool_calls" not in answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_without_parallel_calls_there_is_one(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(CALL + CALL)
    assert len(whole_message(ask(client, tools=[WEATHER], parallel_tool_calls=False))["calls"]) == 1
    assert len(streamed_message(stream(client, tools=[WEATHER], parallel_tool_calls=False))["calls"]) == 1


def test_calls_are_counted_as_such(client: openai.OpenAI, live: LiveServer) -> None:
    def count() -> float:
        found = text_string_to_metric_families(get(live, "/metrics").text)
        return sum(
            sample.value
            for family in found
            for sample in family.samples
            if sample.name.endswith("_total") and sample.labels.get("finished_reason") == "tool_calls"
        )

    live.says(CALL)
    before = count()
    ask(client, tools=[WEATHER], n=2)
    stream(client, tools=[WEATHER])
    assert count() == before + 3


def test_a_call_cut_off_by_the_length_limit(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(CALL)
    num_tokens = len(live.tokenizer.encode(CALL, add_special_tokens=False)) - 12
    found = whole_message(ask(client, tools=[WEATHER], max_tokens=num_tokens))
    assert found["finish_reason"] == "length"
    assert streamed_message(stream(client, tools=[WEATHER], max_tokens=num_tokens)) == found


def test_reasoning_tokens_are_counted(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(THOUGHT + "Sunny.")
    num_reasoning = len(live.tokenizer.encode("<think>\nLet me see.\n</think>", add_special_tokens=False))
    usage = ask(client).usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == num_reasoning
    live.says(THOUGHT + "Sunny.", per_step=5)
    chunks = stream(client, stream_options={"include_usage": True}, n=2)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens_details is not None
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 2 * num_reasoning
    live.says("Sunny.")
    usage = ask(client).usage
    assert usage is not None
    assert usage.completion_tokens_details is None


def test_reasoning_that_nobody_wants(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(THOUGHT + CALL)
    extra: Any = {"include_reasoning": False}
    found = whole_message(ask(client, tools=[WEATHER], extra_body=extra))
    assert (found["reasoning"], len(found["calls"])) == ("", 1)
    assert streamed_message(stream(client, tools=[WEATHER], extra_body=extra)) == found


def test_a_template_that_opens_reasoning_itself(client: openai.OpenAI, live: LiveServer) -> None:
    live.says("Let me see.\n</think>\n\nSunny.")
    extra: Any = {"chat_template_kwargs": {"open_thinking": True}}
    found = whole_message(ask(client, extra_body=extra))
    assert (found["reasoning"], found["content"]) == ("Let me see.", "Sunny.")
    assert streamed_message(stream(client, extra_body=extra)) == found
    final: list[Any] = [*HELLO, {"role": "assistant", "content": "<think>So"}]
    found = whole_message(ask(client, messages=final, extra_body={"continue_final_message": True}))
    assert (found["reasoning"], found["content"]) == ("Let me see.", "Sunny.")


def test_stop_strings_in_reasoning_and_content(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(THOUGHT + "Sunny and warm.", hangs=True)
    for stop, reasoning, content in ((" and", "Let me see.", "Sunny"), (" see", "Let me", "")):
        found = whole_message(ask(client, stop=[stop]))
        assert (found["reasoning"], found["content"], found["finish_reason"]) == (reasoning, content, "stop")
        assert streamed_message(stream(client, stop=[stop])) == found


def test_token_ids_come_once_each(live: LiveServer) -> None:
    ids = live.tokenizer.encode(THOUGHT + CALL, add_special_tokens=False)
    live.gives(ids)
    answer = chat(live, tools=[WEATHER], return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == [*ids, 2]
    found = events(chat(live, tools=[WEATHER], return_token_ids=True, stream=True))[:-1]
    assert [i for event in found for i in event["choices"][0].get("token_ids", [])] == [*ids, 2]


def test_logprobs_come_once_each(live: LiveServer) -> None:
    """One entry per token in order, whatever part of the message the token is of."""
    live.says(THOUGHT + CALL)
    asked: dict[str, Any] = {"tools": [WEATHER], "logprobs": True, "top_logprobs": 1}
    whole = chat(live, **asked).json()["choices"][0]
    content = whole["logprobs"]["content"]
    assert whole["message"]["tool_calls"]
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == THOUGHT + CALL
    streamed = [
        entry
        for event in events(chat(live, **asked, stream=True))[:-1]
        for choice in event["choices"]
        if choice["logprobs"] is not None
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content


def test_forced_calls_bring_a_grammar(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(CALL)
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    other = {"type": "function", "function": {"name": "other"}}
    for tools, choice in (([WEATHER], "required"), ([STRICT, other], "required"), ([other, WEATHER], named)):
        found = whole_message(ask(client, tools=tools, tool_choice=choice))
        assert found["calls"] == [["get_weather", '{"city": "Tromsø"}']]
        assert found["finish_reason"] == "tool_calls"
        assert streamed_message(stream(client, tools=tools, tool_choice=choice)) == found
        grammar = live.scheduler.added[-1].sampling.grammar
        assert "get_weather" in grammar
        assert ("other" in grammar) == (tools[-1] is other)
        assert "<tools>" in live.tokenizer.decode(prompt_ids(live.scheduler.added[-1]))


def test_a_choice_among_some_of_the_tools(live: LiveServer) -> None:
    live.says(CALL)
    other = {"type": "function", "function": {"name": "other"}}
    named = {"type": "function", "function": {"name": "get_weather"}}
    for mode, has_grammar in (("auto", False), ("required", True)):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
        answer = chat(live, tools=[other, WEATHER], tool_choice=choice).json()
        assert answer["choices"][0]["message"]["tool_calls"]
        grammar = live.scheduler.added[-1].sampling.grammar
        assert bool(grammar) == has_grammar
        assert "other" not in grammar
        assert '"other"' not in live.tokenizer.decode(prompt_ids(live.scheduler.added[-1]))
    in_responses = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}
    assert check_tool_choice(in_responses) == ("allowed_auto", ("get_weather",))


def test_a_form_and_tools(client: openai.OpenAI, live: LiveServer) -> None:
    """The output is calls or the form; a forced choice wins over the form."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": {"answer": {}}}}}
    for tool in (WEATHER, STRICT):
        for output, calls in ((THOUGHT + CALL, 1), (THOUGHT + '{"answer": 1}', 0)):
            live.says(output)
            found = whole_message(ask(client, tools=[tool], response_format=form))
            assert found["reasoning"] == "Let me see."
            assert len(found["calls"]) == calls
            assert found["content"] == ("" if calls else '{"answer": 1}')
            assert streamed_message(stream(client, tools=[tool], response_format=form)) == found
            grammar = live.scheduler.added[-1].sampling.grammar
            assert "get_weather" in grammar
            assert "answer" in grammar
    live.says(CALL)
    assert whole_message(ask(client, tools=[WEATHER], tool_choice="required", response_format=form))["calls"]
    grammar = live.scheduler.added[-1].sampling.grammar
    assert "get_weather" in grammar
    assert "answer" not in grammar


def test_reasoning_before_a_form(client: openai.OpenAI, live: LiveServer) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": {"answer": {}}}}}
    live.says(THOUGHT + '{"answer": 1}')
    found = whole_message(ask(client, response_format=form))
    assert (found["reasoning"], found["content"]) == ("Let me see.", '{"answer": 1}')
    assert streamed_message(stream(client, response_format=form)) == found
    live.says('Let me see.\n</think>\n\n{"answer": 1}')
    extra: Any = {"chat_template_kwargs": {"open_thinking": True}}
    found = whole_message(ask(client, response_format=form, extra_body=extra))
    assert (found["reasoning"], found["content"]) == ("Let me see.", '{"answer": 1}')


def test_a_form_after_reasoning_that_is_continued(live: LiveServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": {"answer": {}}}}}
    live.says(' me see.\n</think>\n\n{"answer": 1}')
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>\nLet"}]
    answer = chat(live, messages=messages, response_format=form, continue_final_message=True).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("me see.", '{"answer": 1}')
    assert "think" in live.scheduler.added[-1].sampling.grammar, "the model may first end its reasoning"


def test_a_schema_that_cannot_be_enforced_is_told(live: LiveServer) -> None:
    for schema in (
        ENDLESS["function"]["parameters"],
        {"type": "object", "properties": {"a": {"$ref": "https://elsewhere.example/a.json"}}},
        {"type": "object", "properties": {"a": {"type": "wrong"}}},
    ):
        live.says(CALL)
        function = {**WEATHER["function"], "parameters": schema, "strict": True}
        tools = [{"type": "function", "function": function}]
        for fields in ({"tools": tools}, {"tools": tools, "tool_choice": "required"}):
            answer = chat(live, **fields)
            assert answer.status == 200, answer.text
            assert answer.json()["choices"][0]["message"]["tool_calls"]
            assert "is not enforced" in answer.headers["x-penstock-warning"]
            assert "get_weather" in live.scheduler.added[-1].sampling.grammar


def test_a_schema_nested_too_deeply(live: LiveServer) -> None:
    schema: dict[str, Any] = {}
    for _ in range(400):
        schema = {"properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    error = error_of(chat(live, tools=[tool], tool_choice="required"), 400)
    assert error["code"] == "too_many_values"
    assert "128 levels" in error["message"]


def test_strict_tools_bring_a_grammar(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(THOUGHT + "I look.\n" + CALL)
    found = whole_message(ask(client, tools=[STRICT]))
    assert found["reasoning"] == "Let me see."
    assert found["content"] == "I look."
    assert found["calls"] == [["get_weather", '{"city": "Tromsø"}']]
    assert "get_weather" in live.scheduler.added[-1].sampling.grammar
    parsed = client.chat.completions.parse(model="test/model", messages=HELLO, tools=[STRICT])  # type: ignore[list-item, arg-type]
    [call] = parsed.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == {"city": "Tromsø"}
    ask(client, tools=[STRICT], tool_choice="none")
    assert not live.scheduler.added[-1].sampling.grammar


STRICT: dict[str, Any] = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
ENDLESS: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    },
}
BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"tools": 5}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "magic"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a\tb"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a<b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 257}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": " "}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]}, "tools[0].function.description"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [WEATHER] * 129}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}}, "tool_choice"),
    (
        {
            "tools": [WEATHER],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]},
        },
        "tool_choice",
    ),
    ({"tools": [WEATHER], "tool_choice": {"type": "custom", "name": "get_weather"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "required", "ignore_eos": True}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "perhaps"}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_TOOLS, ids=lambda value: str(value)[:60])
def test_bad_tools(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    assert error_of(chat(live, **fields), 400)["param"] == param


def test_parsers_can_be_named_or_switched_off(checkpoint: Path, tmp_path: Path, sockets: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", chat_template=TEMPLATE)
    with live_server(folder, sockets, frontend={"tool_call_parser": "none", "reasoning_parser": "none"}) as live:
        live.says(THOUGHT)
        assert chat(live).json()["choices"][0]["message"]["content"] == THOUGHT
        assert error_of(chat(live, tools=[WEATHER]), 400)["param"] == "tools"
    other = sockets / "2"
    other.mkdir()
    with live_server(folder, other, frontend={"tool_call_parser": "mistral", "reasoning_parser": "mistral"}) as live:
        live.says('[THINK]hm[/THINK][TOOL_CALLS][{"name": "get_weather", "arguments": {}}]')
        message = chat(live, tools=[WEATHER]).json()["choices"][0]["message"]
        assert message["reasoning"] == "hm"
        assert len(message["tool_calls"][0]["id"]) == 9


def test_a_template_without_tools(checkpoint: Path, sockets: Path) -> None:
    """Tools are described in the system message, calls are read, and past ones are shown; or tools are refused."""
    with live_server(checkpoint, sockets, max_model_len=4096) as live:
        for choice in ("auto", "required"):
            live.says(f"I look.\n{CALL}" if choice == "auto" else CALL)
            live.do(live.scheduler.received.clear)
            answer = chat(live, tools=[WEATHER], tool_choice=choice)
            message = answer.json()["choices"][0]["message"]
            assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Tromsø"}'}
            [request] = [got for got in live.scheduler.received if isinstance(got, AddRequest)]
            assert json.dumps(WEATHER["function"]) in live.tokenizer.decode(prompt_ids(request))
            assert (request.sampling.grammar != "") == (choice == "required")
        live.do(live.scheduler.received.clear)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Rain."}
        assert chat(live, tools=[WEATHER], messages=[*HELLO, message, result]).status == 200
        [request] = [got for got in live.scheduler.received if isinstance(got, AddRequest)]
        prompt = live.tokenizer.decode(prompt_ids(request))
        assert CALL in prompt
        assert "Rain." in prompt


def test_an_unknown_parser_is_no_option() -> None:
    with pytest.raises(ConfigError, match="PENSTOCK_TOOL_CALL_PARSER"):
        config_from(argparse.Namespace(), {"PENSTOCK_TOOL_CALL_PARSER": "magic"})
