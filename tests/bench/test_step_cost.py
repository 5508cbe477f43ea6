"""The cost of a step over rows, context and history: the line through it, and a run at tiny sizes."""

import json
from pathlib import Path

import pytest

from bench.engine.step_cost import fit, main


def test_the_line_through_a_series() -> None:
    assert fit({1: 3.0, 2: 5.0, 4: 9.0}) == pytest.approx((1.0, 2.0, 1.0))
    assert fit({1: 1.0, 2: 3.0, 3: 1.0})[2] == pytest.approx(0.0, abs=1e-9)
    assert fit({0: 2.0, 10: 2.0})[1] == pytest.approx(0.0)


def test_a_run_leaves_record_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "1,2", "--contexts", "128,300", "--finished", "0,70", "--steps", "6"]
    assert main(["--shape", "tiny", "--out", str(tmp_path), *sizes]) == 0
    record = json.loads((tmp_path / "step_cost.json").read_text())
    assert {name: list(series) for name, series in record["series"].items()} == {
        "rows": ["1", "2"],
        "context": ["128", "300"],
        "finished requests": ["0", "70"],
    }
    assert all(ms > 0 for series in record["series"].values() for ms in series.values())
    assert "finished requests" in (tmp_path / "step_cost.svg").read_text()
    assert "rows: 1: " in capsys.readouterr().out
