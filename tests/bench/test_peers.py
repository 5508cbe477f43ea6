"""The comparison with other engines: its checkpoint, its clock, its tables, and a run whose peers are small scripts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.peers import __main__ as peers
from bench.peers import report as peers_report
from bench.peers.envs import Environment, PeerError
from bench.peers.formats import weight_bits
from bench.peers.model import harmless_ids, make_checkpoint
from bench.peers.plot import curve, draw
from bench.peers.systems import System, outcome_of, started
from bench.peers.workloads import Sizes, WorkloadFailed, step_seconds
from penstock.bench.load.job import Outcome, PlannedRequest

SMALL = Sizes(
    batches=(1, 3),
    decode_prompt=8,
    decode_output=9,
    prefill=32,
    num_prefills=1,
    mixed_requests=4,
    mixed_prompt=(4, 8),
    mixed_output=(2, 6),
    concurrencies=(1, 2),
    sweep_prompt=4,
    sweep_output=4,
    chat_requests=3,
    chat_concurrency=2,
    chat_prefix=6,
    chat_prompt=(8, 9),
    chat_output=(2, 3),
)

PEER = """
import json, sys
step = float(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if len(asked["requests"]) == int(sys.argv[2]):
        sys.exit("no more memory")
    answers = [[0.0, [[step * (1 + i), 1] for i in range(n)]] for _, _, n in asked["requests"]]
    print(json.dumps(answers), flush=True)
"""
"""An in-process peer with a known step time, which dies of a workload of so many requests."""


def peer(name: str, step: float, dies_of: int = 0) -> System:
    return System(
        name, "in process", {name: "1.0"}, lambda _, __: [sys.executable, "-c", PEER, str(step), str(dies_of)], {}
    )


def test_the_checkpoint_loads_and_never_says_what_has_no_text(tmp_path: Path) -> None:
    told: list[str] = []
    folder = make_checkpoint("tiny", tmp_path, told.append)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    assert not embedding[:256].any()
    assert embedding[256:].any(dim=1).all()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = harmless_ids(folder)
    assert ids == range(256, 512)
    said = model.generate(torch.tensor([[ids[5], ids[77]]]), max_new_tokens=20, do_sample=False)[0, 2:]
    assert len(said) == 20
    assert all(tokenizer.decode([token]).strip() for token in said.tolist())
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert make_checkpoint("tiny", tmp_path, told.append) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert "uses" in told[-1]


def test_a_step_is_timed_while_all_requests_stream() -> None:
    early = Outcome(start=0.0, ttft=0.1, gaps=[0.3, 0.02, 0.02, 0.02], num_output_tokens=5)
    late = Outcome(start=0.0, ttft=0.4, gaps=[0.02, 0.02, 0.02, 0.5], num_output_tokens=5)
    assert step_seconds([early, late]) == pytest.approx(0.02)
    in_pairs = Outcome(start=0.0, ttft=0.1, gaps=[0.06] * 4, num_output_tokens=9)
    assert step_seconds([in_pairs]) == pytest.approx(0.03)
    with pytest.raises(WorkloadFailed):
        step_seconds([Outcome(0.0, 0.1, gaps=[0.1], num_output_tokens=2), Outcome(1.0, 0.1, gaps=[0.1])])


def test_what_ran_in_process_is_told_as_http_tells_it() -> None:
    told = outcome_of(1.0, [(1.5, 1), (1.75, 2)], PlannedRequest(0.0, [7, 8], 3))
    assert (told.ttft, told.e2e, told.gaps) == (0.5, 0.75, [0.25])
    assert (told.num_prompt_tokens, told.num_output_tokens) == (2, 3)


def record(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    systems = {
        "penstock": {"versions": {}, "how": "HTTP", "flags": ""},
        "vllm": {"versions": {"vllm": "9.9"}, "how": "HTTP", "flags": "--eager"},
        "llamacpp": {"versions": {}, "how": "", "flags": ""},
    }
    return {
        "shape": "qwen2.5-0.5b",
        "is_quick": False,
        "date": "today",
        "commit": "abc",
        "command": "python -m bench.peers",
        "machine": {
            "processor": "a processor",
            "features": ["avx2"],
            "has_amx": False,
            "memory_gb": 8.0,
            "huge_pages": "madvise",
            "load_before": 0.0,
        },
        "threads": 2,
        "prefill_tokens": 1024,
        "decode_bytes": {"decode 1": 1e9, "decode 4": 1e9},
        "read_gb_per_s": [20.0],
        "systems": systems,
        "failures": {"llamacpp": "compiling failed:\n    much\n    no disk space"},
        "rounds": rounds,
    }


def both(own: float, its: float, own_rate: float = 100.0, its_rate: float = 90.0) -> dict[str, Any]:
    def part(step: float, rate: float) -> dict[str, Any]:
        figures = {"tokens_per_s": rate, "itl_mean_ms": 5.0, "itl_p50_ms": 4.0, "itl_p99_ms": 10.0}
        return {"raw": {"decode 1": {"step_ms": step}, "mixed": figures, "concurrency 1": figures}}

    return {"penstock": part(own, own_rate), "vllm": part(its, its_rate)}


def test_ratios_are_of_one_round_each_and_over_one_where_penstock_is_better() -> None:
    page = record([both(50, 70), both(100, 160), both(62.5, 62.5)])
    step, _, _, rate, *_ = peers_report.rows_of(page)
    assert peers_report.ratios(page, "vllm", step) == [1.4, 1.6, 1.0]
    assert peers_report.ratios(page, "vllm", rate) == [100 / 90] * 3
    assert peers_report.ratios(page, "llamacpp", step) == []
    shown = peers_report.markdown(page)
    assert "| decode, B=1, ms/step | **1.40** (1.00 to 1.60); target 1.3: met |" in shown
    assert "| mixed, output tok/s | **1.11** (1.11 to 1.11); target 1.3: missed |" in shown
    assert "| decode, B=1, ms/step | 62.5 (80% of memory) | 70 (71% of memory) |" in shown
    assert "| decode, B=4, ms/step | - | - |" in shown
    assert "- llamacpp: **FAILED**: compiling failed: no disk space" in shown
    assert "flags --eager" in shown


@pytest.mark.parametrize(
    ("ratio", "target", "told"),
    [
        (1.3, 1.3, "target 1.3: met"),
        (1.2, 1.3, "target 1.3: unresolved"),
        (1.1, 1.3, "target 1.3: missed"),
        (1.1, None, "no difference resolved"),
        (0.8, None, ""),
        (1.2, None, ""),
    ],
)
def test_verdicts(ratio: float, target: float | None, told: str) -> None:
    assert peers_report.verdict(ratio, target) == told


def test_the_plot_has_a_curve_for_each_system_that_has_figures(tmp_path: Path) -> None:
    page = record([both(50, 70), both(50, 70, own_rate=200.0)])
    assert curve(page, "penstock", "tokens_per_s") == ([1], [150.0])
    draw(page, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert "penstock" in drawn
    assert "vllm, p99" in drawn
    assert "llamacpp" not in drawn


def test_a_run_goes_on_without_the_peers_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Penstock, too, is a small script here: the run is what is tested."""

    def prepare(name: str, *_: object) -> System:
        if name == "vllm":
            raise PeerError("pip install failed:\n    no matching distribution")
        return peer(name, 0.002 if name == "penstock" else 0.004, dies_of=4 if name == "llamacpp" else 0)

    monkeypatch.setattr(peers, "prepare", prepare)
    monkeypatch.setattr(peers, "Sizes", lambda: SMALL)
    monkeypatch.setattr(peers, "read_rate", lambda _: 1e9)
    out, models = tmp_path / "out", tmp_path / "models"
    arguments = [
        "--shape",
        "tiny",
        "--models",
        str(models),
        "--envs",
        str(tmp_path / "envs"),
        "--out",
        str(out),
        "--rounds",
        "2",
    ]
    assert peers.main(arguments) == 1
    found = json.loads((out / "peers.json").read_text())
    assert sorted(found["failures"]) == ["llamacpp", "vllm"]
    assert "no more memory" in found["failures"]["llamacpp"]
    first, second = found["rounds"]
    assert sorted(second["llamacpp"]["raw"]) == [
        "decode 1",
        "decode 3",
        "prefill",
        "start",
    ]  # it died of what came next
    for system, step in (("penstock", 2.0), ("openvino", 4.0)):
        for round_ in (first, second):
            assert round_[system]["raw"]["decode 1"]["step_ms"] == pytest.approx(step)
            assert round_[system]["raw"]["decode 3"]["step_ms"] == pytest.approx(step)
            assert round_[system]["raw"]["prefill"]["tokens_per_s"] == pytest.approx(32e3 / step)
            assert round_[system]["chat"]["chat"]["ttft_ms"] == pytest.approx(step)
        assert "concurrency 2" in first[system]["raw"]
        assert "concurrency 2" not in second[system]["raw"]
    page = (out / "peers.md").read_text()
    assert "| decode, B=3, ms/step | **2.00** (2.00 to 2.00) |" in page
    assert "no matching distribution" in page
    assert page in capsys.readouterr().out
    before = page, (out / "peers.svg").read_bytes()
    assert peers.main(["--draw", str(out / "peers.json")]) == 0
    assert ((out / "peers.md").read_text(), (out / "peers.svg").read_bytes()) == before


def test_the_bits_of_a_weight(tmp_path: Path) -> None:
    """Of a file those that it has, whatever it calls itself."""
    (tmp_path / "model-Q8_0.gguf").write_bytes(bytes(1700))
    assert weight_bits("q8_0", tmp_path, 1600) == 8.5
    assert weight_bits("int8", tmp_path, 1600) == 8
    assert weight_bits("bf16", tmp_path, 1600) == 16


def test_a_server_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    system = System("vllm", "HTTP", {}, lambda _, __: list(command), {}, "/health")
    with (
        pytest.raises(RuntimeError, match=r"(?s)code 1.*no such model"),
        started(system, "m", False, tmp_path / "log"),
    ):
        pass


def test_a_step_of_an_installation_that_fails_is_told_with_its_last_lines(tmp_path: Path) -> None:
    told: list[str] = []
    env = Environment(tmp_path, told.append)
    assert env.run("greets", [sys.executable, "-c", "print('hello')"]) == "hello\n"
    with pytest.raises(PeerError, match=r"(?s)compiles failed \(exit code 1.*no space left"):
        env.run("compiles", [sys.executable, "-c", "import sys; sys.exit('no space left')"])
    assert told == [f"{tmp_path.name}: greets", f"{tmp_path.name}: compiles"]


@pytest.mark.parametrize("arguments", [["--peers", "vllm,tgi"], ["--shape", "gpt-5"], ["--flags", "tgi=--fast"]])
def test_what_is_not_there_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        peers.main(arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err
