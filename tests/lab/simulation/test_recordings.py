"""A recording is a machine and a load."""

from pathlib import Path

import msgspec
import pytest

from penstock.config import Config
from penstock.ipc.codec import pack_int32
from penstock.lab.simulation.device import StepShape
from penstock.lab.simulation.study import measured
from penstock.parts.recording.lines import (
    AnyLine,
    Arrival,
    End,
    Header,
    NewSequence,
    Plan,
    Result,
    Worker,
    encoded,
    told,
)
from tests.lab.simulation.loads import machine


def plan(step: int, at: float, start: int, count: int) -> Plan:
    columns = {
        "rows": pack_int32([0]),
        "start": pack_int32([start]),
        "num_new": pack_int32([count]),
        "samples": b"\x01",
    }
    new = (NewSequence(row=0, id="r", num_tokens=count, pages=b""),) if not start else ()
    return Plan(at=at, step=step, num_rows=1, columns=columns, new=new)


def test_what_a_recording_says_of_steps_and_requests(tmp_path: Path) -> None:
    """A request of 40 tokens whose second page another one shares, 30 steps of 4 ms, none overlapped."""
    hello = machine(num_slots=3200).hello(Config())
    pages = bytes(range(16))
    lines: list[AnyLine] = [
        Header(version=1, run="a", part=0, unix_time=0.0, program="", options={"scheduler": {}}, has_tokens=False),
        Worker(at=0.0, hello=told(hello)),
        Arrival(at=1.0, id="r", num_tokens=40, digest="", pages=pages, tenant="k", priority=2,
                sampling={"max_tokens": 99}, more={"weight": 3.0, "ttft_left": 0.5}),
        Arrival(at=1.5, id="lost", num_tokens=40, digest=""),
        Arrival(at=2.0, id="s", num_tokens=36, digest="", pages=pages),
        plan(0, 1.0002, 0, 40),
        Result(at=1.0045, step=0, forward_us=4000),
    ]  # fmt: skip
    for step in range(1, 31):
        lines.append(plan(step, 1.0 + 0.005 * step, 39 + step, 1))
        lines.append(Result(at=1.0045 + 0.005 * step, step=step, forward_us=4000, idle_us=700))
    lines += [
        End(at=1.2, id="r", reason="stop", num_tokens=31, first_token_at=1.0045),
        End(at=2.2, id="s", reason="length", num_tokens=5, first_token_at=2.1),
        End(at=1.6, id="lost", reason="error", num_tokens=0, error="queue_full"),
    ]
    path = tmp_path / "run.jsonl"
    encoder = msgspec.json.Encoder()
    path.write_bytes(b"".join(encoded(line, encoder) for line in lines))
    found = measured(path)
    first, second = found.arrivals
    assert (first.time, first.input_len, first.output_len, first.max_tokens) == (0.0, 40, 31, 99)
    assert (first.key, first.weight, first.priority, first.ttft_ms) == ("k", 3.0, 2, 500.0)
    assert (second.time, second.input_len, second.output_len, second.max_tokens) == (1.0, 36, 5, 0)
    assert first.pages == second.pages == pages
    assert [delay for delays in found.delays for delay in delays] == pytest.approx([0.0045, 0.2, 0.1, 0.2])
    assert found.steps[0].shape == StepShape([], [(0, 40)])
    assert found.steps[5].shape == StepShape([44], [])
    assert (found.machine.num_slots, found.machine.max_model_len, found.machine.kv_bytes_per_token) == (
        3200,
        4096,
        64.0,
    )
    assert found.machine.timing.transport == pytest.approx(0.5e-3)
    assert found.machine.timing.admission == pytest.approx(0.2e-3)
    assert found.machine.device.walk(0).seconds(StepShape([50], [])) == pytest.approx(4e-3, rel=0.01)
