"""Conversations that every chat template must show whole. Each text of a client is a word that occurs nowhere else."""

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A place."}},
            "required": ["city"],
        },
    },
}
SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search_notes",
        "description": "Looks into the notes.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "Words."},
                "days": {"type": "integer", "description": "How far back."},
            },
            "required": ["query"],
        },
    },
}
TOOLS = (WEATHER, SEARCH)


@dataclass(frozen=True)
class Conversation:
    """Messages and tools, and the words that must be in the prompt."""

    messages: tuple[Message, ...]
    shows: tuple[str, ...]
    tools: tuple[dict[str, Any], ...] = ()


def says(role: str, text: str | None, **fields: Any) -> Message:
    """A message."""
    return {"role": role, "content": text, **fields}


def call(number: int, name: str = "get_weather", arguments: str = '{"city": "Bergamot"}') -> Message:
    """A call, as clients send it back."""
    call_id = f"call_{number}f3a9c7e51"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(number: int, text: str | None) -> Message:
    """A tool's answer to the call with this number."""
    return {"role": "tool", "tool_call_id": f"call_{number}f3a9c7e51", "content": text}


def _tool(**changes: Any) -> dict[str, Any]:
    function = {**WEATHER["function"], **changes}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _with_properties(**properties: Any) -> dict[str, Any]:
    return _tool(parameters={"type": "object", "properties": properties, "required": list(properties)})


_FIND = call(2, "search_notes", '{"query": "Cardamom", "days": 3}')
_ONE = (says("user", "Quince"), says("assistant", None, tool_calls=[call(1)]), result(1, "Drizzle"))
_ONE_SHOWN = ("Quince", "get_weather", "Bergamot", "Drizzle")
_TWO = (
    says("user", "Quince"),
    says("assistant", None, tool_calls=[call(1), _FIND]),
    result(1, "Drizzle"),
    result(2, "Saffron"),
)
_TWO_SHOWN = (*_ONE_SHOWN, "search_notes", "Cardamom", "Saffron")
_OPTIONAL = {"type": ["string", "null"], "description": "A place."}

CONVERSATIONS: dict[str, Conversation] = {
    "one question": Conversation((says("user", "Quince"),), ("Quince",)),
    "turns": Conversation(
        (says("system", "Juniper"), says("user", "Quince"), says("assistant", "Marjoram"), says("user", "Tarragon")),
        ("Juniper", "Quince", "Marjoram", "Tarragon"),
    ),
    "system alone": Conversation((says("system", "Juniper"),), ("Juniper",)),
    "two systems": Conversation(
        (says("system", "Juniper"), says("system", "Lovage"), says("user", "Quince")), ("Juniper", "Lovage", "Quince")
    ),
    "developer": Conversation((says("developer", "Juniper"), says("user", "Quince")), ("Juniper", "Quince")),
    "system, then developer": Conversation(
        (says("system", "Juniper"), says("developer", "Lovage"), says("user", "Quince")),
        ("Juniper", "Lovage", "Quince"),
    ),
    "system in the middle": Conversation(
        (
            *(says("system", "Juniper"), says("user", "Quince"), says("assistant", "Marjoram")),
            *(says("system", "Lovage"), says("user", "Tarragon")),
        ),
        ("Juniper", "Quince", "Marjoram", "Lovage", "Tarragon"),
    ),
    "system at the end": Conversation((says("user", "Quince"), says("system", "Lovage")), ("Quince", "Lovage")),
    "developer in the middle": Conversation(
        (says("user", "Quince"), says("developer", "Lovage"), says("assistant", "Marjoram"), says("user", "Tarragon")),
        ("Quince", "Lovage", "Marjoram", "Tarragon"),
    ),
    "two users": Conversation((says("user", "Quince"), says("user", "Tarragon")), ("Quince", "Tarragon")),
    "two assistants": Conversation(
        (says("user", "Quince"), says("assistant", "Marjoram"), says("assistant", "Sorrel"), says("user", "Tarragon")),
        ("Quince", "Marjoram", "Sorrel", "Tarragon"),
    ),
    "assistant first": Conversation((says("assistant", "Marjoram"), says("user", "Quince")), ("Marjoram", "Quince")),
    "system, then assistant": Conversation(
        (says("system", "Juniper"), says("assistant", "Marjoram"), says("user", "Quince")),
        ("Juniper", "Marjoram", "Quince"),
    ),
    "assistant last": Conversation((says("user", "Quince"), says("assistant", "Marjoram")), ("Quince", "Marjoram")),
    "null contents": Conversation(
        (
            says("system", None),
            says("user", "Quince"),
            says("assistant", None),
            says("user", None),
            says("user", "Dill"),
        ),
        ("Quince", "Dill"),
    ),
    "another role": Conversation((says("user", "Quince"), says("critic", "Sumac")), ("Quince", "Sumac")),
    "an image": Conversation(
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Quince"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                ],
            },
        ),
        ("Quince",),
    ),
    "tools": Conversation(
        (says("system", "Juniper"), says("user", "Quince")), ("Juniper", "Quince", "get_weather"), TOOLS
    ),
    "two systems with tools": Conversation(
        (says("system", "Juniper"), says("system", "Lovage"), says("user", "Quince")),
        ("Juniper", "Lovage", "Quince", "get_weather"),
        TOOLS,
    ),
    "one call": Conversation(_ONE, _ONE_SHOWN, TOOLS),
    "one call under a system": Conversation((says("system", "Juniper"), *_ONE), ("Juniper", *_ONE_SHOWN), TOOLS),
    "one call, and on": Conversation(
        (says("system", "Juniper"), *_ONE, says("assistant", "Marjoram"), says("user", "Tarragon")),
        ("Juniper", *_ONE_SHOWN, "Marjoram", "Tarragon"),
        TOOLS,
    ),
    "text beside a call": Conversation(
        (says("user", "Quince"), says("assistant", "Sorrel", tool_calls=[call(1)]), result(1, "Drizzle")),
        (*_ONE_SHOWN, "Sorrel"),
        TOOLS,
    ),
    "text beside calls, and on": Conversation(
        (
            *(says("user", "Quince"), says("assistant", "Sorrel", tool_calls=[call(1)]), result(1, "Drizzle")),
            *(says("assistant", "Chervil", tool_calls=[_FIND]), result(2, "Saffron")),
            *(says("assistant", "Marjoram"), says("user", "Tarragon")),
        ),
        (*_TWO_SHOWN, "Sorrel", "Chervil", "Marjoram", "Tarragon"),
        TOOLS,
    ),
    "two calls": Conversation(_TWO, _TWO_SHOWN, TOOLS),
    "two calls, and on": Conversation(
        (*_TWO, says("assistant", "Marjoram"), says("user", "Tarragon")), (*_TWO_SHOWN, "Marjoram", "Tarragon"), TOOLS
    ),
    "text after a result": Conversation((*_ONE, says("user", "Tarragon")), (*_ONE_SHOWN, "Tarragon"), TOOLS),
    "system after a result": Conversation((*_ONE, says("system", "Lovage")), (*_ONE_SHOWN, "Lovage"), TOOLS),
    "calls in two turns": Conversation(
        (
            *_ONE,
            says("assistant", None, tool_calls=[_FIND]),
            result(2, "Saffron"),
            says("assistant", "Marjoram"),
            says("user", "Tarragon"),
        ),
        (*_TWO_SHOWN, "Marjoram", "Tarragon"),
        TOOLS,
    ),
    "calls without tools": Conversation(_ONE, _ONE_SHOWN),
    "a call without arguments": Conversation(
        (says("user", "Quince"), says("assistant", None, tool_calls=[call(1, arguments="{}")]), result(1, "Drizzle")),
        ("Quince", "get_weather", "Drizzle"),
        TOOLS,
    ),
    "an empty result": Conversation(
        (*_ONE[:2], result(1, None), says("user", "Tarragon")), ("Quince", "get_weather", "Bergamot", "Tarragon"), TOOLS
    ),
    "a result without a call": Conversation(
        (says("user", "Quince"), result(1, "Drizzle"), says("user", "Tarragon")),
        ("Quince", "Drizzle", "Tarragon"),
        TOOLS,
    ),
    "no description": Conversation((says("user", "Quince"),), ("Quince", "get_weather"), (_tool(description=None),)),
    "no parameters": Conversation((says("user", "Quince"),), ("Quince", "get_weather"), (_tool(parameters=None),)),
    "a name alone": Conversation(
        (says("user", "Quince"),), ("Quince", "get_weather"), (_tool(description=None, parameters=None),)
    ),
    "empty parameters": Conversation((says("user", "Quince"),), ("Quince", "get_weather"), (_tool(parameters={}),)),
    "a bare property": Conversation(
        (says("user", "Quince"),), ("Quince", "get_weather", "city"), (_with_properties(city={"type": "string"}),)
    ),
    "an empty property": Conversation(
        (says("user", "Quince"),), ("Quince", "get_weather", "city"), (_with_properties(city={}),)
    ),
    "a list of types": Conversation(
        (says("user", "Quince"),), ("Quince", "get_weather", "city"), (_with_properties(city=_OPTIONAL),)
    ),
    "alternatives": Conversation(
        (says("user", "Quince"),),
        ("Quince", "get_weather", "city"),
        (_with_properties(city={"anyOf": [{"type": "string"}, {"type": "null"}]}, mode={"enum": ["a", "b", 3]}),),
    ),
    "nested types": Conversation(
        (says("user", "Quince"),),
        ("Quince", "get_weather", "city"),
        (
            _with_properties(
                city={"type": ["array", "null"], "items": {"type": ["string", "integer"]}},
                more={"type": "object", "properties": {"inner": {"type": ["object", "null"]}}, "required": ["inner"]},
                list={"type": "array"},
            ),
        ),
    ),
}
