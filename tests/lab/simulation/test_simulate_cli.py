"""`penstock simulate`, as people type it."""

import json
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.shapes_folder import SHAPES, shape_folder
from penstock.lab.commands import plan
from penstock.lab.commands.simulate import main
from penstock.lab.simulation.arrivals import Bursts, Shape, draw, write
from penstock.lab.simulation.device import Timing
from penstock.parts.recording.scheduler.step_trace import StepTrace
from tests.lab.simulation.loads import machine, simulator

MODEL = [str(shape_folder("llama-3.1-8b")), "--gpu", "h100"]
SMALL = [*MODEL, "--num-requests", "60", "--request-rate", "20", "--input-len", "100:900", "--output-len", "5:60"]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_same_seed_gives_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    one, again, other = (told(capsys, *SMALL, "--seed", seed) for seed in ("1", "1", "2"))
    assert one == again
    assert one["configs"] != other["configs"]


def test_configurations_are_compared_on_the_same_load(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(
        capsys, *SMALL, "--page-size", "32", "--config", "all:", "--config", "one: --max-num-seqs 1 --queue-patience 0",
        "--config", "--batching static", "--ttft", "300",
    )  # fmt: skip
    assert list(found["configs"]) == ["all", "one", "--batching static"]
    everyone, one, batched = found["configs"].values()
    assert everyone["ttft_ms"]["p99"] < one["ttft_ms"]["p99"]
    assert everyone["goodput"] > one["goodput"]
    assert everyone["ttft_ms"]["p99"] < batched["ttft_ms"]["p99"]
    assert everyone["num_output_tokens"] == one["num_output_tokens"] == batched["num_output_tokens"]


def test_prefixes_keys_and_bursts(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--shared-prefix-len", "96", "--num-prefixes", "2", "--num-keys", "3", "--burstiness", "0.3"]
    found = told(capsys, *words, "--config", "on:", "--config", "off: --no-enable-prefix-caching")
    on, off = found["configs"].values()
    assert on["hit_rate"] > 0.1
    assert off["hit_rate"] == 0
    assert on["ttft_ms"]["mean"] < off["ttft_ms"]["mean"]
    assert set(on["ttft_ms_by_key"]) == {"key-0", "key-1", "key-2"}


def test_a_table_a_plot_and_the_load_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plots = [tmp_path / name for name in ("one.svg", "two.svg", "three.png")]
    load = tmp_path / "load.jsonl"
    assert main([*SMALL, "--config", "quiet:", "--plot", str(plots[0]), "--save-load", str(load)]) == 0
    table = capsys.readouterr().out
    assert all(word in table for word in ("quiet", "TTFT p99", "goodput", "Jain", "preemptions", "prefix hits"))
    for plot in plots[1:]:
        assert main([*MODEL, "--load", str(load), "--config", "quiet:", "--plot", str(plot)]) == 0
    assert plots[0].read_bytes() == plots[1].read_bytes()
    assert "time to first token" in plots[0].read_text()
    assert plots[2].read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("command", [main, plan.main])
def test_without_matplotlib_a_plot_names_the_extra_that_brings_it(
    command: Callable[[Sequence[str]], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    extras = tomllib.loads((SHAPES.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(requirement.startswith("matplotlib") for requirement in extras["plan"])
    assert command([*MODEL, "--plot", "plot.svg"]) == 2
    assert "--plot needs matplotlib: pip install 'penstock-llm[plan]'" in capsys.readouterr().err


def test_a_step_trace_is_a_machine_and_a_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, again = tmp_path / "steps.jsonl", tmp_path / "again.jsonl"
    trace = StepTrace(str(recorded))
    arrivals = draw(80, Bursts(rate=10.0), Shape(input_len=(20, 200), output_len=(5, 40)), seed=1)
    simulator(arrivals, machine(timing=Timing(scheduler=1e-4, transport=3e-4)), trace=trace).run()
    trace.close()
    usual = told(capsys, "--measured", str(recorded), "--step-trace", str(again))
    assert usual["load"]["num_requests"] == 80
    assert usual["load"]["num_output_tokens"] == sum(each.output_len for each in arrivals)
    assert usual["machine"]["num_slots"] == 1 << 16
    assert again.read_bytes().count(b"\n") == usual["configs"]["server"]["num_steps"]
    fast = told(capsys, "--measured", str(recorded), "--speed", "3")
    assert fast["load"]["seconds"] == pytest.approx(usual["load"]["seconds"] / 3)
    assert fast["configs"]["server"]["tpot_ms"]["p50"] > usual["configs"]["server"]["tpot_ms"]["p50"]
    drawn = told(capsys, "--measured", str(recorded), "--request-rate", "3", "--num-requests", "7")
    assert drawn["load"]["num_requests"] == 7


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "MODEL"),
        ([*MODEL, "--measured", "x"], "x"),
        (["--measured", "/nowhere/x"], "/nowhere/x"),
        ([*MODEL[:1], "--gpu", "tpu"], "tpu"),
        (["/nowhere"], "/nowhere"),
        ([*SMALL, "--scheduling-policy", "nix"], "nix"),
        ([*SMALL, "--config", "a: --max-num-seqs -1"], "--max-num-seqs"),
        ([*SMALL, "--config", "a: --max-seqs 4"], "did you mean --max-num-seqs"),
        ([*SMALL, "--config", "a: --port 80"], "--port"),
        ([*SMALL, "--config", "a:", "--config", "a: --max-num-seqs 3"], "'a'"),
        ([*SMALL, "--config", "a:", "--config", "b:", "--step-trace", "/tmp/never"], "--step-trace"),
        ([*SMALL, "--page-size", "24"], "power of two"),
        ([*SMALL, "--plot", "x.pdf"], ".svg"),
        ([*SMALL, "--load", "/nowhere/y"], "/nowhere/y"),
        (
            [
                "bench/shapes/llama-3.1-8b",
                "--gpu",
                "rtx-4090",
                "--weights",
                "fp16",
                "--max-model-len",
                "0",
                "--tp",
                "0",
            ],
            "",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words)
    except SystemExit as error:  # argparse's own
        code = int(str(error.code))
    said = capsys.readouterr().err
    assert code == 2
    assert what in said
    assert "Traceback" not in said


def test_a_load_too_long_for_the_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = tmp_path / "load.jsonl"
    write(load, draw(3, Bursts(rate=1.0), Shape(input_len=(500, 500)), seed=0))
    found = told(capsys, *MODEL, "--load", str(load), "--max-model-len", "100")
    assert found["configs"]["server"]["errors"] == {"too_long": 3}
    assert found["configs"]["server"]["num_failed"] == 3
