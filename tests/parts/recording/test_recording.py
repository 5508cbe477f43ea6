"""Recordings: their lines, and what a reader makes of them."""

from pathlib import Path

import msgspec
import pytest

from penstock.config import ConfigError, SchedulerOptions
from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.ipc.messages import SamplingParams, StepPlan, WindowGroup, WorkerHello
from penstock.parts.recording.lines import Arrival, End, Header, Plan, Result, Worker, encoded, read_back, told
from penstock.parts.recording.reader import Recording
from tests.core.driver import hello, make_limits

ENCODER = msgspec.json.Encoder()
SAMPLING = SamplingParams(
    max_tokens=7, temperature=0.5, seed=2**62, stop_token_ids=(3, 4), logit_bias=((5, -1.5),), bad_words=((1, 2), (3,))
)


def header(run: str = "a", part: int = 0, version: int = 1) -> Header:
    options = {"scheduler": msgspec.to_builtins(SchedulerOptions(max_num_seqs=3))}
    return Header(version=version, run=run, part=part, unix_time=1.0, program="0", options=options, has_tokens=True)


def write(path: Path, *lines: object) -> None:
    path.write_bytes(b"".join(encoded(line, ENCODER) for line in lines))  # type: ignore[arg-type]


def test_messages_are_told_by_name_and_read_back() -> None:
    fields = told(SAMPLING)
    assert set(fields) == {"max_tokens", "temperature", "seed", "stop_token_ids", "logit_bias", "bad_words"}
    there = msgspec.json.decode(ENCODER.encode(fields))
    assert read_back(there, SamplingParams) == SAMPLING
    assert read_back(there | {"of a later version": 1}, SamplingParams) == SAMPLING
    with pytest.raises(msgspec.ValidationError, match="max_tokens"):
        read_back({"seed": 1}, SamplingParams)
    a_hello = msgspec.structs.replace(hello(make_limits()), window_groups=(WindowGroup(16, 32),))
    assert read_back(msgspec.json.decode(ENCODER.encode(told(a_hello))), WorkerHello) == a_hello


def test_parts_runs_and_ends_belong_together(tmp_path: Path) -> None:
    path = tmp_path / "rec"
    request = Arrival(at=0.5, id="r", num_tokens=2, digest="d", pages=b"12345678abcdefgh", token_ids=pack_int32([8, 9]))
    worker = Worker(at=0.1, hello=told(hello(make_limits())))
    write(path.with_name("rec.1"), header(), worker, request)
    write(path, header(part=1), End(at=0.9, id="r", reason="stop", num_tokens=1), header("b"), worker)
    recording = Recording.read(path)
    assert [run.header.run for run in recording.runs] == ["a", "b"]
    [told_request] = recording.requests()
    assert list(told_request.prompt()) == [8, 9]
    assert told_request.page_digests() == [b"12345678", b"abcdefgh"]
    assert told_request.ends[0].reason == "stop"
    assert recording.runs[0].hello() == hello(make_limits())
    assert recording.runs[0].scheduler_options().max_num_seqs == 3


def test_a_line_that_was_cut_is_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "rec"
    write(path, header(), Result(at=1, step=0), Result(at=2, step=1))
    path.write_bytes(path.read_bytes()[:-9] + b'\n{"kind":"of a later version"}\n' + encoded(header("b"), ENCODER))
    recording = Recording.read(path)
    assert len(recording.runs[0].events) == 1
    assert recording.num_damaged == 1
    assert len(recording.runs) == 2


def test_plans_that_say_same_are_told_in_full(tmp_path: Path) -> None:
    path = tmp_path / "rec"
    batch = {"rows": pack_int32([0, 2]), "start": pack_int32([5, 9]), "num_new": pack_int32([1, 1]), "samples": b"\1\1"}
    pages = {"page_rows": pack_int32([2]), "page_counts": pack_int32([1]), "page_ids": pack_int32([7])}
    write(
        path,
        header(),
        Plan(at=1, step=4, num_rows=2, columns=batch),
        Plan(at=2, step=5, num_rows=2, is_same=True, columns=pages),
        Plan(at=3, step=6, num_rows=2, is_same=True),
    )
    plans = [plan for _, plan in Recording.read(path).runs[0].plans()]
    assert plans[0] == msgspec.structs.replace(StepPlan(4, b"", b"", b"", b""), **batch)
    assert plans[1] == msgspec.structs.replace(plans[0], step_id=5, start=pack_int32([6, 10]), **pages)
    assert list(unpack_int32(plans[2].start)) == [7, 11]


@pytest.mark.parametrize(
    ("text", "said"),
    [(b"", "no line"), (b"a text\n", "no line"), (ENCODER.encode(header(version=9)) + b"\n", "format 9")],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "rec"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=said):
        Recording.read(path)
    with pytest.raises(ConfigError, match="cannot read"):
        Recording.read(tmp_path / "none")
