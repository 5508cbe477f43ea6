"""`penstock run-batch`: answer the requests of a file, with an engine that runs only for this file.

    in.jsonl ──▶ checked ──▶ engine ──▶ out.jsonl: a line as each request is answered; in the end in the input's order

Answers that are in the output already are not computed again: after a crash or Ctrl-C, the same command goes on. Ids,
and the seeds of requests without one, follow from the input, so the result does not depend on interruptions.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import file_digest
from pathlib import Path
from typing import Any

import msgspec

from penstock.async_llm import AsyncLLM
from penstock.config import ConfigError
from penstock.config.flags import config_from
from penstock.config.foreign_flags import without_foreign_flags
from penstock.config.parser import Parser
from penstock.frontend.api.text_model import load_text_model
from penstock.frontend.http.routes import ROUTES
from penstock.ipc import process
from penstock.parts.batches.frontend.lines import MAX_ERRORS, NumberedLine, check_lines, valid_lines
from penstock.parts.batches.frontend.sender import Sender, has_room
from penstock.parts.batches.frontend.shapes import endpoints_of

GROUPS = ("model", "scheduler", "worker", "parallel", "log")
MAX_LINE_BYTES = 64 << 20
INTERRUPTED = 130
_MOST = 8192  # requests in flight
_ROOM_SECONDS = 0.005
_TELL_SECONDS = 10.0
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 0 if every request has an answer, even if that is an error."""
    try:
        parser = _parser()
        options = parser.parse_args(without_foreign_flags(sys.argv[1:] if argv is None else list(argv)))
        given = vars(options)
        source, target = Path(given.pop("input_file")), Path(given.pop("output_file"))
        config_from(options, os.environ)
        return asyncio.run(_run(source, target, given))
    except (ConfigError, OSError) as error:
        _say(str(error))
        return process.EXIT_CONFIG
    except KeyboardInterrupt:
        _say("stopped; the same command goes on with what is left")
        return INTERRUPTED


def _say(sentence: str) -> None:
    with suppress(OSError):
        print(f"penstock run-batch: {sentence}", file=sys.stderr, flush=True)


async def _run(source: Path, target: Path, options: dict[str, Any]) -> int:
    llm = AsyncLLM(options.pop("model", ""), engine="process", **options)
    model = await asyncio.to_thread(load_text_model, llm.config)
    names = (*model.names, *(name for options in llm.config.of_parts() for name in options.model_names))
    model.tokenizer.close()
    most = sys.maxsize
    num_lines, errors = await asyncio.to_thread(
        check_lines, source, endpoints_of(ROUTES), MAX_LINE_BYTES, lambda name: name in names, most
    )
    for error in errors:
        _say(f"{source}{'' if error.line is None else f', line {error.line}'}: {error.message}")
    if errors:
        more = " (there may be more)" if len(errors) == MAX_ERRORS else ""
        raise ConfigError(f"{source} has {len(errors)} errors{more}; nothing was run")
    with source.open("rb") as file:
        batch_id = f"batch_{file_digest(file, 'sha256').hexdigest()[:24]}"
    output = _Output(target, batch_id)
    try:
        if left := num_lines - len(output.numbers):
            _say(f"{left} of {num_lines} requests are to be answered")
            async with llm:
                await _answer(llm, source, output, num_lines)
    finally:
        output.close()
    await asyncio.to_thread(output.sort)
    _say(f"{num_lines} requests, {output.num_errors} of them with errors: {target}")
    return 0


async def _answer(llm: AsyncLLM, source: Path, output: "_Output", num_lines: int) -> None:
    service = await llm.service()
    sender, under_way = Sender(service, endpoints_of(ROUTES), lambda: None), set[asyncio.Task[None]]()
    told_at = time.monotonic()

    async def answer(line: NumberedLine) -> None:
        content, is_error = await sender.answer(output.batch_id, output.created, line, "", "")
        output.add(line.number, content, is_error=is_error)

    async with asyncio.TaskGroup() as tasks:
        for line in valid_lines(source):
            if line.number in output.numbers:
                continue
            while not has_room(service, len(under_way), _MOST):  # noqa: ASYNC110  (the engine tells it now and then)
                await asyncio.sleep(_ROOM_SECONDS)
            task = tasks.create_task(answer(line))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            if time.monotonic() - told_at > _TELL_SECONDS:
                told_at = time.monotonic()
                _say(f"{len(output.numbers)} of {num_lines}")


class _Output:
    """The output file. A complete line is an answer; an incomplete last line is cut off."""

    def __init__(self, path: Path, batch_id: str) -> None:
        """
        Raises:
            ConfigError: the file contains anything but answers to this input.
        """
        self._path = path
        self.batch_id = batch_id
        self.created = int(time.time())
        self.numbers: dict[int, tuple[int, int]] = {}  # number of an answered line -> where its answer is
        self.num_errors = 0
        self._file = open(path, "a+b")  # noqa: SIM115
        try:
            self._end = self._read_all()
        except ConfigError:
            self._file.close()
            raise
        self._file.truncate(self._end)

    def _read_all(self) -> int:
        """Read the answers; return where the last complete one ends."""
        end, begin = 0, f'{{"id":"batch_req_{self.batch_id.removeprefix("batch_")}_'.encode()
        self._file.seek(0)
        for text in self._file:
            if not text.endswith(b"\n"):
                if text[: len(begin)] != begin[: len(text)]:  # no answer that a crash has cut: it is somebody's text
                    raise self._foreign()
                break
            self._read(text, end)
            end += len(text)
        return end

    def _foreign(self) -> ConfigError:
        return ConfigError(f"{self._path} has other lines than answers to this input: name another file, or remove it")

    def _read(self, text: bytes, at: int) -> None:
        try:
            answer = _decode(text)
            name, _, number = answer["response"]["request_id"].rpartition("-")
            line, body = int(number), answer["response"]["body"]
            is_error = answer["response"]["status_code"] >= 400
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
            name = ""
        if name != self.batch_id:
            raise self._foreign()
        self.created = next((body[key] for key in ("created", "created_at") if key in body), self.created)
        self.numbers[line] = at, len(text)
        self.num_errors += is_error

    def add(self, number: int, content: bytes, *, is_error: bool) -> None:
        """Append an answer."""
        self._file.write(content)
        self._file.flush()
        self.numbers[number] = self._end, len(content)
        self._end += len(content)
        self.num_errors += is_error

    def sort(self) -> None:
        """Sort the answers by the order of their requests."""
        sorted_path = self._path.with_name(f".{self._path.name}.sorted")
        with self._path.open("rb") as file, sorted_path.open("wb") as target:
            for number in sorted(self.numbers):
                at, num_bytes = self.numbers[number]
                file.seek(at)
                target.write(file.read(num_bytes))
        sorted_path.replace(self._path)

    def close(self) -> None:
        """Close the file; no more answers are added."""
        self._file.close()


def _parser() -> Parser:
    parser = Parser(
        "penstock run-batch",
        "Answer the requests of a file in OpenAI's batch format, without a server. If it is interrupted, "
        "the same command goes on.",
    )
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests, a JSON object a line")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="answers, a JSON object a line")
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="as of `penstock serve`")
    parser.add_flags(GROUPS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
