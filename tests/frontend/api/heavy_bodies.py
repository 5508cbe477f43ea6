"""Request bodies that are as much work as their size allows: every route, every type of field, every kind of value."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from penstock.frontend.http.routes import ROUTES
from penstock.frontend.json_size import MAX_ESCAPES


@dataclass(frozen=True)
class HeavyBody:
    """One body; its content is made when it is sent."""

    name: str
    route: str
    make: Callable[[int], bytes]  # for so many bytes at most
    content_type: str = "application/json"

    def __str__(self) -> str:
        return f"{self.route} {self.name}"


def _repeated(opening: str, unit: str, closing: str) -> Callable[[int], bytes]:
    """As many units, with commas between, as the size allows."""

    def make(size: int) -> bytes:
        num = max((size - len(opening) - len(closing)) // (len(unit.encode()) + 1), 1)
        return f"{opening}{','.join([unit] * num)}{closing}".encode()

    return make


def _text(unit: str) -> Callable[[int], bytes]:
    """A string of this, as JSON writes it."""

    def make(size: int) -> bytes:
        return b'"' + unit.encode() * ((size - 2) // len(unit.encode())) + b'"'

    return make


def _escaped(unit: str, times: int = 1) -> Callable[[int], bytes]:
    """A string that begins with as many of these as a body may have, if each takes so many times its backslashes."""

    def make(size: int) -> bytes:
        num = min((size - 2) // len(unit), MAX_ESCAPES // (times * unit.count("\\")))
        return b'"' + unit.encode() * num + b"a" * (size - 2 - num * len(unit)) + b'"'

    return make


def _members(size: int) -> bytes:
    return b"{" + b",".join(b'"%d":[]' % i for i in range(size // 13)) + b"}"


VALUES: dict[str, Callable[[int], bytes]] = {
    "empty lists": _repeated("[", "[]", "]"),
    "empty objects": _repeated("[", "{}", "]"),
    "members": _members,
    "nested lists": _repeated("[", "[" * 40 + "]" * 40, "]"),
    "nested objects": _repeated("[", '{"a":' * 20 + "{}" + "}" * 20, "]"),
    "one deep list": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "empty strings": _repeated("[", '""', "]"),
    "short strings": _repeated("[", '"ab"', "]"),
    "equal strings": _repeated("[", '"tool"', "]"),
    "ids": _repeated("[", "7", "]"),
    "lists of ids": _repeated("[", "[7]", "]"),
    "nulls": _repeated("[", "null", "]"),
    "fractions": _repeated("[", "0.12345678901234568", "]"),
    "floats": _repeated("[", "1.7976931348623157e308", "]"),
    "large integers": _repeated("[", "9" * 4000, "]"),
    "long floats": _repeated("[", "1." + "9" * 700, "]"),
    "one number": lambda size: b"9" * size,
    "one fraction": lambda size: b"0." + b"9" * (size - 2),
    "letters": _text("a"),
    "words": _text("water runs down the pipe "),
    "escaped letters": _escaped("\\u0041"),
    "line breaks": _escaped("\\n"),
    "quotes": _escaped('\\"'),
    "backslashes": _escaped("\\\\"),
    "few quotes": _escaped('\\"', times=3),
    "more escapes": _text("\\n"),
    "wide characters": _text("\U0001f6b0"),
    "marks": _text("[{,:}]"),
    "special tokens": _text("<|im_start|>"),
    "beginnings of special tokens": _text("<"),
    "unfinished special tokens": _text("<unused"),
    "blanks": lambda size: b"[" + b" " * (size - 2) + b"]",
    "tools": _repeated(
        "[", '{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}}', "]"
    ),
    "messages": _repeated("[", '{"role":"user","content":"a"}', "]"),
    "parts": _repeated('[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]"),
}
"""Values by what they are full of."""

_MESSAGE = '[{"role":"user","content":"Hello"}]'

ENOUGH = {
    "/v1/chat/completions": {"messages": _MESSAGE},
    "/v1/completions": {"prompt": '"Hello"'},
    "/v1/responses": {"input": '"Hello"'},
    "/tokenize": {"prompt": '"Hello"'},
    "/v1/responses/input_tokens": {"input": '"Hello"'},
    "/detokenize": {"tokens": "[7]"},
    "/v1/messages": {"max_tokens": "9", "messages": _MESSAGE},
    "/v1/messages/count_tokens": {"messages": _MESSAGE},
}
"""The least that a request must say. A route that is missing here is tried with its heavy fields alone."""

_TOOL = '"tools":[{"type":"function","function":{"name":"f","strict":true,"parameters":{"type":"object","x":@}}}]'
_FLAT_TOOL = '"tools":[{"type":"function","name":"f","strict":true,"parameters":{"type":"object","x":@}}]'
_CALL = '{"id":"c","type":"function","function":{"name":"f","arguments":@}}'

PLACES = {
    "/v1/chat/completions": {
        "unknown field of a message": '{"messages":[{"role":"user","content":"a","x":@}]}',
        "content": '{"messages":[{"role":"user","content":@}]}',
        "text of a part": '{"messages":[{"role":"user","content":[{"type":"text","text":@}]}]}',
        "arguments of a call": '{"messages":[{"role":"user","content":"a"},{"role":"assistant","tool_calls":['
        + _CALL
        + "]}]}",
        "strict tool": '{"messages":' + _MESSAGE + "," + _TOOL + "}",
        "forced tool": '{"messages":' + _MESSAGE + ',"tool_choice":"required",' + _TOOL + "}",
        "schema": '{"messages":'
        + _MESSAGE
        + ',"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":{"type":"object","x":@}}}}',
        "grammar": '{"messages":' + _MESSAGE + ',"structured_outputs":{"grammar":@}}',
    },
    "/v1/completions": {
        "many prompts, many answers": '{"n":64,"max_tokens":1,"echo":true,"prompt":[' + ",".join(["@"] * 64) + "]}",
        "ids of many answers": '{"n":64,"max_tokens":1,"return_token_ids":true,"prompt":['
        + ",".join(["@"] * 64)
        + "]}",
        "regex": '{"prompt":"a","structured_outputs":{"regex":@}}',
    },
    "/v1/responses": {
        "unknown field of an item": '{"input":[{"role":"user","content":"a","x":@}]}',
        "content": '{"input":[{"role":"user","content":@}]}',
        "text of a part": '{"input":[{"role":"user","content":[{"type":"input_text","text":@}]}]}',
        "arguments of a call": '{"input":[{"type":"function_call","call_id":"c","name":"f","arguments":@},'
        '{"type":"function_call_output","call_id":"c","output":"a"}]}',
        "strict tool": '{"input":"a",' + _FLAT_TOOL + "}",
        "schema": '{"input":"a","text":{"format":{"type":"json_schema","name":"s","schema":{"type":"object","x":@}}}}',
    },
    "/v1/messages": {
        "content": '{"max_tokens":9,"messages":[{"role":"user","content":@}]}',
        "text of a block": '{"max_tokens":9,"messages":[{"role":"user","content":[{"type":"text","text":@}]}]}',
        "input of a call": '{"max_tokens":9,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a",'
        '"name":"f","input":{"x":@}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"a"}]}]}',
        "tool": '{"max_tokens":9,"messages":'
        + _MESSAGE
        + ',"tools":[{"name":"f","strict":true,"input_schema":{"type":"object","x":@}}]}',
        "schema": '{"max_tokens":9,"messages":'
        + _MESSAGE
        + ',"output_config":{"format":{"type":"json_schema","schema":{"type":"object","x":@}}}}',
    },
    "/tokenize": {
        "content": '{"messages":[{"role":"user","content":@}]}',
        "text": '{"return_token_strs":true,"prompt":@}',
    },
}
"""Deeper places than a request's own fields: `@` stands for the heavy value."""


def _in_place(template: str, value: Callable[[int], bytes], is_quoted: bool = False) -> Callable[[int], bytes]:
    pieces = template.encode().split(b"@")

    def make(size: int) -> bytes:
        room = (size - sum(map(len, pieces))) // (len(pieces) - 1)
        if is_quoted:
            return json.dumps(value(room * 3 // 4).decode()).encode().join(pieces)[:size]
        return value(room).join(pieces)

    return make


def _in_field(route: str, field: str, value: Callable[[int], bytes]) -> Callable[[int], bytes]:
    fields = ENOUGH.get(route, {}) | {field: "@"}
    return _in_place("{" + ",".join(f'"{name}":{content}' for name, content in fields.items()) + "}", value)


_BOUNDARY = "x" * 70
_FORM = f"multipart/form-data; boundary={_BOUNDARY}"
_HEAD = 'Content-Disposition: form-data; name="{}"'


def _form(head: str, content: str = "a") -> Callable[[int], bytes]:
    """As many parts with this head as the size allows."""

    def make(size: int) -> bytes:
        part = f"--{_BOUNDARY}\r\n{head}\r\n\r\n{content}\r\n".encode()
        return part * (size // len(part)) + f"--{_BOUNDARY}--\r\n".encode()

    return make


def _file(content: bytes) -> Callable[[int], bytes]:
    """A form with one file, full of this."""
    head = _HEAD.format('file"; filename="f.jsonl')

    def make(size: int) -> bytes:
        opening = f"--{_BOUNDARY}\r\n{_HEAD.format('purpose')}\r\n\r\nbatch\r\n--{_BOUNDARY}\r\n{head}\r\n\r\n"
        closing = f"\r\n--{_BOUNDARY}--\r\n"
        num = (size - len(opening) - len(closing)) // len(content)
        return opening.encode() + content * num + closing.encode()

    return make


FORMS: dict[str, Callable[[int], bytes]] = {
    "parts": _form(_HEAD.format("purpose"), "batch"),
    "long heads": _form("\r\n".join([_HEAD.format("x"), *[f"X-{i}: {'y' * 60}" for i in range(90)]])),
    "heads of parameters": _form(_HEAD.format("x") + "; a=b" * 1500),
    "heads of quotes": _form(_HEAD.format("x") + '; a="\\"' * 1000),
    "heads of blanks": _form(_HEAD.format("x") + ";" + " " * 8000),
    "one endless head": lambda size: f"--{_BOUNDARY}\r\n".encode() + b"X: " + b"y" * (size - 80),
    "a head of semicolons": lambda size: f"--{_BOUNDARY}\r\n".encode() + b";" * (size - 80),
    "line breaks": _file(b"\r\n"),
    "almost boundaries": _file(b"\r\n--" + _BOUNDARY[:-1].encode()),
    "boundaries of dashes": _file(b"-"),
}
"""Forms by what they are full of."""


def heavy_bodies() -> Iterator[HeavyBody]:
    """All of them: routes times their fields and deeper places, times kinds of values; and forms."""
    yield from (HeavyBody(f"form: {kind}", "/v1/files", make, _FORM) for kind, make in FORMS.items())
    for route, body_type in ((route.path, route.body) for route in ROUTES):
        if body_type is None:
            continue
        # Of fields of one type the first stands for all: they are read by the same code.
        fields = {str(field.type): field.encode_name for field in reversed(msgspec.structs.fields(body_type))}
        for kind, value in VALUES.items():
            yield HeavyBody(f"body: {kind}", route, value)
            for field in [*fields.values(), "an_unknown_field"]:
                yield HeavyBody(f"{field}: {kind}", route, _in_field(route, field, value))
            for place, template in PLACES.get(route, {}).items():
                yield HeavyBody(f"{place}: {kind}", route, _in_place(template, value))
                if place.startswith("arguments"):
                    yield HeavyBody(f"{place}, as text: {kind}", route, _in_place(template, value, is_quoted=True))
