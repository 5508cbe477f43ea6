"""The lines of an input file: all are checked before the first one runs, and each is read again when it runs."""

from collections.abc import Callable, Collection, Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.frontend.json_size import JsonSize, TooManyValuesError
from penstock.parts.batches.frontend.shapes import BatchError, Line

MAX_LINES = 50_000
MAX_ERRORS = 50
"""How many errors of a file are reported; more would not help."""

_MAX_CUSTOM_ID = 512  # characters
_line = msgspec.json.Decoder(Line)


class _Body(msgspec.Struct):
    """The fields of a body that are checked before the request runs."""

    model: str | None = None
    stream: bool | None = None


_body = msgspec.json.Decoder(_Body)


class NumberedLine(NamedTuple):
    """A line of a valid file."""

    number: int  # from 1, including empty lines
    custom_id: str
    url: str
    body: bytes


def read_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the text of each non-empty line; only a part of lines that are too long."""
    with path.open("rb") as file:
        number, is_rest = 0, False
        while text := file.readline(max_bytes + 1):
            if not is_rest:
                number += 1
                if text.strip():
                    yield number, text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text
            is_rest = not text.endswith(b"\n")


def valid_lines(path: Path) -> Iterator[NumberedLine]:
    """Yield the lines of a file that was found to be valid."""
    for number, text in read_lines(path, 1 << 62):
        line = _line.decode(text)
        yield NumberedLine(number, line.custom_id, line.url, bytes(line.body))


def check_lines(
    path: Path, endpoints: Collection[str], max_bytes: int, is_model: Callable[[str], bool], most: int = MAX_LINES
) -> tuple[int, list[BatchError]]:
    """Check a whole file, which takes long.

    Args:
        path: of the file.
        endpoints: those that requests may be for.
        max_bytes: limit for a line.
        is_model: returns whether a model is served.
        most: limit for the number of lines.

    Returns:
        The number of requests, and what is wrong with the file. If anything is, none of the requests may run.
    """
    errors: list[BatchError] = []
    num_lines, seen = 0, set[bytes]()
    for number, text in read_lines(path, max_bytes):
        num_lines += 1
        if num_lines > most:
            errors.append(BatchError("too_many_requests", f"a batch may have at most {most} requests", number))
            break
        error = _check(number, text, endpoints, max_bytes, is_model, seen)
        if error is not None:
            errors.append(error)
            if len(errors) == MAX_ERRORS:
                break
    if not num_lines:
        errors.append(BatchError("empty_file", "the input file has no requests"))
    return num_lines, errors


def _check(
    number: int,
    text: bytes,
    endpoints: Collection[str],
    max_bytes: int,
    is_model: Callable[[str], bool],
    seen: set[bytes],
) -> BatchError | None:
    def wrong(code: str, message: str, param: str | None = None) -> BatchError:
        return BatchError(code, message, number, param)

    if len(text) > max_bytes:
        return wrong("line_too_long", f"a line may have at most {max_bytes} bytes")
    try:
        size = JsonSize()
        size.feed(text)
        text.decode()  # decoders skip what they do not look for, such as most of a body
        line = _line.decode(text)
    except TooManyValuesError as error:
        return wrong("too_many_values", f"the request is too large: {error}")
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        found = place.rstrip("`") or None
        if "missing required field" in what:
            found = what.rpartition("field `")[2].rstrip("`")
            return wrong("missing_required_parameter", f"{found} is missing", found)
        return wrong("invalid_type", f"{what[:1].lower()}{what[1:]}", found)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return wrong("invalid_json_line", "the line is not valid JSON in UTF-8")
    if not 0 < len(line.custom_id) <= _MAX_CUSTOM_ID:
        return wrong("invalid_custom_id", f"custom_id must have 1 to {_MAX_CUSTOM_ID} characters", "custom_id")
    name = sha256(line.custom_id.encode(errors="replace")).digest()[:16]
    if name in seen:
        return wrong("duplicate_custom_id", f"the custom_id {line.custom_id[:64]!r} is used twice", "custom_id")
    seen.add(name)
    if line.method != "POST":
        return wrong("invalid_method", f"method must be 'POST', got {line.method[:16]!r}", "method")
    if line.url not in endpoints:
        supported = " or ".join(map(repr, endpoints))
        return wrong("invalid_url", f"url must be {supported}, got {line.url[:64]!r}", "url")
    try:
        body = _body.decode(line.body)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        param = f"body.{place.rstrip('`')}" if place else "body"
        return wrong("invalid_type", f"{what[:1].lower()}{what[1:]}", param)
    if body.stream:
        return wrong("unsupported_parameter", "requests of batches cannot be streams", "body.stream")
    if body.model and not is_model(body.model):
        return wrong("model_not_found", f"the model {body.model[:128]!r} is not served here", "body.model")
    return None
