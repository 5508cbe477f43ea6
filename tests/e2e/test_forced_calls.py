"""A model that knows nothing makes good tool calls when it must; cached prompts go when they are told to."""

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import openai

from tests.e2e.checkpoints import CHAT_TEMPLATE
from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import serving

TEMPLATE = "{% if tools %}{{ tools | tojson }} answer with <tool_call></tool_call>{% endif %}" + CHAT_TEMPLATE
MESSAGES: Any = [{"role": "user", "content": "What is the weather in these places? " * 8}]
PLACE = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Tromsø"]}, "near": {"$ref": "#/$defs/Place"}}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"$ref": "#/$defs/Place"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["place", "days", "note"],
    "additionalProperties": False,
    "$defs": {"Place": {**PLACE, "required": ["city"], "additionalProperties": False}},
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
BOUNDED: dict[str, Any] = {**SCHEMA, "properties": {**SCHEMA["properties"], "place": {"enum": ["Oslo", "Tromsø"]}}}
"""What follows it always comes to an end, whatever is drawn."""

FORMS = (
    ({"syntax": "regex", "definition": r'"[^"\\\n]{1,5}"[ab]{2}'}, r'"[^"\\\n]{1,5}"[ab]{2}'),
    (
        {"syntax": "lark", "definition": 'start: line ~ 2..3\nline: "+" /[^\\n]{0,4}/ LF\n%import common.LF'},
        r"(\+[^\n]{0,4}\n){2,3}",
    ),
)
"""Formats of a custom tool's input, and what an input must then match."""

NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}


def ask_for_calls(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for choice in ("required", NAMED):
            fields: dict[str, Any] = {"model": "m", "messages": MESSAGES, "tools": [WEATHER, NOW]}
            fields |= {"tool_choice": choice, "n": 4, "seed": 3, "max_tokens": 600, "parallel_tool_calls": False}
            answer = client.chat.completions.create(**fields)
            for choice_made in answer.choices:
                assert choice_made.finish_reason == "tool_calls", choice_made
                assert not choice_made.message.content
                [call] = choice_made.message.tool_calls
                arguments = json.loads(call.function.arguments)
                if call.function.name == "get_weather":
                    jsonschema.validate(arguments, SCHEMA)
                else:
                    assert (call.function.name, arguments) == ("get_time", {})
                    assert choice == "required"
            streamed = ["", "", "", ""]
            for chunk in client.chat.completions.create(stream=True, **fields):
                for part in chunk.choices:
                    for call in part.delta.tool_calls or []:
                        streamed[part.index] += call.function.arguments or ""
            assert streamed == [part.message.tool_calls[0].function.arguments for part in answer.choices]
        flat: Any = {"type": "function", **WEATHER["function"], "parameters": BOUNDED, "strict": True}
        response = client.responses.create(
            model="m", input="Weather?", tools=[flat], tool_choice="required", max_output_tokens=600, temperature=0.5
        )
        [item] = [item for item in response.output if item.type == "function_call"][:1]
        jsonschema.validate(json.loads(item.arguments), BOUNDED)
        for form, pattern in FORMS:
            custom: Any = {"type": "custom", "name": "edit", "format": {"type": "grammar", **form}}
            named: Any = {"type": "custom", "name": "edit"}
            response = client.responses.create(
                model="m", input="Edit!", tools=[custom], tool_choice=named, max_output_tokens=600, temperature=0.5
            )
            [edit] = response.output
            assert edit.type == "custom_tool_call"
            assert re.fullmatch(pattern, edit.input), edit.input


def cached_tokens(client: openai.OpenAI) -> int:
    usage = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=4).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


def reset(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        cached_tokens(client)
        assert cached_tokens(client) > 0
        client.with_options().post(f"{url}/reset_prefix_cache", cast_to=object)
        assert cached_tokens(client) == 0


async def test_forced_calls_and_a_reset(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint.folder, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    async with serving(folder, "--served-model-name", "m") as server:
        await asyncio.to_thread(ask_for_calls, server.url)
        await asyncio.to_thread(reset, server.url)
