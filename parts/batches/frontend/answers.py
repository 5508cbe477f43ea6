"""Lines of output and error files, in OpenAI's format."""

import msgspec

from penstock.frontend.exchange.replies import Reply

_encode = msgspec.json.encode


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Answer(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None


def request_id(batch_id: str, number: int) -> str:
    """The id of the request in a batch's line: the same whenever, and however often, it runs."""
    return f"{batch_id}-{number}"


def answered(batch_id: str, number: int, custom_id: str, reply: Reply) -> bytes:
    """The line of a request that was answered, perhaps with an error."""
    response = _Response(reply.status, request_id(batch_id, number), msgspec.Raw(reply.body))
    return _line(batch_id, number, custom_id, response, None)


def not_run(batch_id: str, number: int, custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that never ran."""
    return _line(batch_id, number, custom_id, None, _Error(code, message))


def _line(batch_id: str, number: int, custom_id: str, response: _Response | None, error: _Error | None) -> bytes:
    answer_id = f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
    return _encode(_Answer(answer_id, custom_id, response, error)) + b"\n"
