"""From a body's bytes to the request that its route takes."""

import re
from functools import cache
from typing import TypeVar, cast

import msgspec

from penstock.frontend.errors import InvalidParameter, MalformedBody
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.heavy_turns import heavy_turn
from penstock.frontend.validation.common import without_collecting
from penstock.frontend.validation.foreign_fields import take_foreign_fields

Q = TypeVar("Q", bound=msgspec.Struct)

_encode = msgspec.json.encode

_MAX_COMPLAINT = 200
"""The longest message about a field of the wrong type, in characters."""

_OBJECT_ERRORS = {"missing required": "is required", "contains unknown": "is an unknown field"}
"""What is wrong with a body's fields, by msgspec's words for it."""
_OF_AN_OBJECT = re.compile(rf"Object ({'|'.join(_OBJECT_ERRORS)}) field `(.*)`", re.DOTALL)

_WHOLE_NUMBER = re.compile(rb"(-?[0-9]{1,19})\.0{1,9}")


async def read(decoder: msgspec.json.Decoder[Q], record: RequestRecord, body: bytes) -> Q:
    """Decode a body, and note what is told about fields that its route does not have (see `foreign_fields.py`).

    A body that has only its route's own fields is decoded once. For a large body, each step has a turn of its own; then
    it yields to other tasks, because the next steps are large, too.

    Raises:
        ApiError: as `decode`; UnsupportedParameter: a field asks for what does not exist here.
    """
    await heavy_turn(len(body))
    try:
        with without_collecting():
            request: Q = _of_own_fields(decoder.type).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        await heavy_turn(len(body))
        request = decode(decoder, body)
        await heavy_turn(len(body))
        record.warnings += _take_others(request, body)
    await heavy_turn(len(body))
    return request


@cache
def _of_own_fields(kind: type[Q]) -> msgspec.json.Decoder[Q]:
    """A decoder that refuses every other field of the body's object."""
    strict = msgspec.defstruct(kind.__name__, (), bases=(kind,), kw_only=True, forbid_unknown_fields=True)
    return cast("msgspec.json.Decoder[Q]", msgspec.json.Decoder(strict))


def decode(decoder: msgspec.json.Decoder[Q], body: bytes) -> Q:
    """Decode a request.

    Raises:
        MalformedBody: if the body is not a JSON object.
        InvalidParameter: if a field has the wrong type; names the field.
    """
    try:
        with without_collecting():
            return decoder.decode(body)
    except msgspec.ValidationError as error:
        what, found, path = str(error).rpartition(" - at `")
        if what.endswith("got `float`") and (whole := _with_whole_numbers(body)):
            return decode(decoder, whole)
        if not found and (named := _OF_AN_OBJECT.fullmatch(path)):
            field = _cut(named[2])
            raise InvalidParameter(f"{field} {_OBJECT_ERRORS[named[1]]}", param=field) from None
        if not found:
            raise MalformedBody(f"the body must be a JSON object: {_cut(path)}") from None
        field = path.rstrip("`").removeprefix("$").lstrip(".")
        raise InvalidParameter(f"{field}: {what[:1].lower()}{_cut(what[1:])}", param=field) from None
    except RecursionError:
        raise MalformedBody("the body is not valid JSON: nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBody(f"the body is not valid JSON in UTF-8: {error}") from None


def _with_whole_numbers(body: bytes) -> bytes:
    """The body with 3 for a field's 3.0, which is how some languages write integers; empty if there is none."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return b""  # the error that has been found is told
    whole = {name: found[1] for name, raw in fields.items() if (found := _WHOLE_NUMBER.fullmatch(bytes(raw)))}
    return _encode(fields | {name: msgspec.Raw(number) for name, number in whole.items()}) if whole else b""


def _cut(complaint: str) -> str:
    """Shorten a message: it may quote a long name from the body."""
    return complaint if len(complaint) <= _MAX_COMPLAINT else f"{complaint[:_MAX_COMPLAINT]}…"


def _take_others(request: msgspec.Struct, body: bytes) -> list[str]:
    try:
        return take_foreign_fields(request, msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    except RecursionError:  # in a field that the request's decoder has passed over
        raise MalformedBody("the body is not valid JSON: nested too deeply") from None
