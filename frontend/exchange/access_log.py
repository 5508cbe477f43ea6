"""An access log like those of web servers, one line per request, for the programs that read such files.

The process's own log has each request too, with what the engine did for it. This file has what the client sent and got.
"""

import os
import time
from datetime import datetime
from pathlib import Path

import msgspec
import structlog

from penstock.config import ConfigError
from penstock.frontend.exchange.exchange import Request, Route
from penstock.frontend.exchange.replies import RequestRecord
from penstock.ipc.logs import LogSink

log = structlog.get_logger()

FLUSH_SECONDS = 1.0


class AccessLog:
    """One file, to which several frontends may append. A thread writes, and requests never wait for it."""

    def __init__(self, path: str, *, is_json: bool) -> None:
        """Open, or make, the file.

        Raises:
            ConfigError: if it cannot be opened.
        """
        self._path = Path(path)
        self._write = _as_json if is_json else _combined
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise ConfigError(f"--access-log {path!r} cannot be opened: {error.strerror}") from None
        self._sink = LogSink(self._descriptor, lambda count: log.warning("access log lines dropped", count=count))

    def note(self, record: RequestRecord, route: Route, request: Request, now: float) -> None:
        """Write the line of a request that has ended at this time (`time.monotonic`)."""
        if not record.is_background:  # background requests come from no client
            self._sink.put(self._write(record, route, request, now - record.arrived))

    def reopen(self) -> None:
        """Open the path again: log rotation may have moved the file away."""
        try:
            opened = self._open()
        except OSError as error:
            log.error("access log not reopened", file=str(self._path), reason=error.strerror)
            return
        self._sink.flush(FLUSH_SECONDS)
        os.dup2(opened, self._descriptor, inheritable=False)  # the sink and its thread go on
        os.close(opened)

    async def close(self) -> None:
        """Write what is left."""
        self._sink.flush(FLUSH_SECONDS)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)


def _combined(record: RequestRecord, route: Route, request: Request, seconds: float) -> str:
    """The combined format of Apache and nginx."""
    now = datetime.now().astimezone().strftime("%d/%b/%Y:%H:%M:%S %z")
    referer, agent = _header(request, "referer"), _header(request, "user-agent")
    who = f"{request.remote or '-'} - {_plain(record.key_id)} [{now}]"
    answered = f'"{_plain(request.line())}" {record.status} {request.num_sent}'
    return f'{who} {answered} "{_plain(referer)}" "{_plain(agent)}"\n'


def _as_json(record: RequestRecord, route: Route, request: Request, seconds: float) -> str:
    method, _, rest = _valid(request.line()).partition(" ")
    path, _, protocol = rest.rpartition(" ")
    line = {
        "time": datetime.fromtimestamp(time.time()).astimezone().isoformat(timespec="milliseconds"),
        "client": request.remote,
        "key": record.key_id,
        "method": method,
        "path": path,
        "protocol": protocol,
        "route": route.path,
        "status": record.status,
        "bytes": request.num_sent,
        "seconds": round(seconds, 6),
        "referer": _valid(_header(request, "referer")),
        "user_agent": _valid(_header(request, "user-agent")),
        "request_id": record.request_id,
        "model": "" if record.asked is None else record.asked.model,
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": record.num_output_tokens,
        "error": "" if record.error is None else record.error.code,
    }
    return msgspec.json.encode(line).decode() + "\n"


def _header(request: Request, name: str) -> str:
    return request.headers.get(name, ("",))[0]


def _valid(text: str) -> str:
    """A text that can be encoded: bytes that were not UTF-8 are question marks."""
    return text.encode(errors="replace").decode()


def _plain(text: str) -> str:
    """A field with backslashes, quotation marks and line breaks escaped; "-" if it is empty."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').encode("ascii", "backslashreplace").decode()
    return "".join(char if " " <= char <= "~" else f"\\x{ord(char):02x}" for char in escaped) or "-"
