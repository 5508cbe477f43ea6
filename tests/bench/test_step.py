"""Host time per step, from a trace made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.step import main


def _line(step_id: int, sent: float, idle_us: int, **more: Any) -> str:
    fields = {"step_id": step_id, "t_schedule_us": 40.0, "t_process_us": 60.0, "t_sent": sent, "t_result": sent + 0.005}
    return json.dumps(fields | {"num_rows": 4, "num_tokens": 4, "forward_us": 5000, "idle_us": idle_us, **more})


def test_exposed_and_hidden_host_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "steps.jsonl"
    lines = [_line(i, i * 0.005, 30, rows=[["a", 0, 1]]) for i in range(10)]
    lines.append(_line(10, 99.0, 98_000_000))  # after a pause: the device waited for a request, not for the host
    trace.write_text("\n".join(lines) + "\n")
    assert main([str(trace), "--skip", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_steps"] == 9
    assert found["us"]["host"]["mean"] == pytest.approx(100)
    assert found["us"]["exposed"]["p99"] == pytest.approx(30)
    assert found["us"]["hidden"]["p50"] == pytest.approx(70)
    assert main([str(trace), "--skip", "0"]) == 0
    assert "exposed" in capsys.readouterr().out


def test_a_broken_trace_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "steps.jsonl"
    trace.write_text(_line(0, 0.0, 0) + "\nnonsense\n")
    assert main([str(trace)]) == 2
    assert "steps.jsonl:2" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 2
