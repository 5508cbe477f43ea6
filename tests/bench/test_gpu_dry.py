"""The script for a GPU machine, in its dry form: every part runs, and the table is there."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench.engine.offline import uniform
from bench.gpu import table as gpu_table
from tests.faults.soak import only_in_soak

ROOT = Path(__file__).parents[2]


@only_in_soak  # the parts alone have tests of their own, and their order that with a stand-in
@pytest.mark.timeout(900)
def test_the_dry_form(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [ROOT / "bench/gpu.sh", "--dry", tmp_path], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out" not in done.stdout
    assert "No figure below means anything" in done.stdout
    assert "  tiny B=3 context 8: step" in done.stdout.splitlines()[-2]  # the table is whole
    kinds = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert sum("limits" in record for record in kinds) == 1
    assert {record.get("kind") for record in kinds} == {"decode_step", "offline", None}
    assert sum("summary" in record for record in kinds) == 1
    assert "test_fp32_equals_transformers" in (tmp_path / "tests.log").read_text()


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([ROOT / "bench/gpu.sh", tmp_path], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--dry" in done.stdout


_STAND_IN = """#!/bin/bash
case "$*" in
*is_available*) exit 0 ;;
-c*|*gpu.table*) exec PYTHON "$@" ;;
*offline*uniform-qwen3-0.6b*) exit 3 ;;
esac
echo "ran: $*"
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    """An environment with a stand-in for Python that finds a GPU and does nothing."""
    script = tmp_path / "python"
    script.write_text(_STAND_IN.replace("PYTHON", sys.executable))
    script.chmod(0o755)
    return {**os.environ, "PYTHON": str(script)}


def test_on_a_gpu_machine_every_part_is_run_and_a_failure_is_told(stand_in: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "bench/gpu.sh", tmp_path / "out"], env=stand_in, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "FAILED: offline-uniform-qwen3-0.6b"
    ran = [line for line in done.stdout.splitlines() if line.startswith("ran: ")]
    for part in ("bench.kernels", "decode_step", "1024x1024", "gpu.serve"):
        assert any(part in line for line in ran), part
    assert done.stdout.count("not measured") == len(gpu_table.rows([]))
    assert done.stdout.count("what is wanted on an H200") == 1
    with tarfile.open(tmp_path / "out/results.tar.gz") as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert names >= {"table.txt", "commit.txt", "kernels.log", "offline-uniform-qwen3-0.6b.log"}


@pytest.mark.parametrize(("only", "has_tests", "has_benchmarks"), [("tests", True, False), ("bench", False, True)])
def test_one_half_alone(
    stand_in: dict[str, str], tmp_path: Path, only: str, has_tests: bool, has_benchmarks: bool
) -> None:
    command: list[str | Path] = [ROOT / "bench/gpu.sh", "--only", only, tmp_path / "out"]
    done = subprocess.run(command, env=stand_in, capture_output=True, text=True, check=False)
    assert ("tests-test_attention" in done.stdout) is has_tests
    assert (tmp_path / "out/tests-test_attention.log").exists() is has_tests
    assert ("bench.kernels" in done.stdout) is has_benchmarks
    assert not list((tmp_path / "out").glob("precompile*"))


def test_the_time_ends(stand_in: dict[str, str], tmp_path: Path) -> None:
    env = stand_in | {"LIMIT": "20"}
    command: list[str | Path] = [ROOT / "bench/gpu.sh", "--only", "bench", tmp_path / "out"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "== kernels: left out, the 20 seconds are over" in done.stdout
    assert "ran: " not in done.stdout


@pytest.mark.parametrize("arguments", [["--only", "kernels"], ["--quick"], ["--only"]])
def test_what_it_does_not_know_it_refuses(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "bench/gpu.sh", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout.startswith("usage: ")


def test_the_kernels_tests_need_no_more_than_torch_and_pytest() -> None:
    """On a bare GPU machine, here played by an interpreter that cannot find the other packages."""
    lines = (ROOT / "bench/gpu/requirements.in").read_text().splitlines()
    modules = {"pyzmq": "zmq"}
    absent = [modules.get(line, line) for line in lines if line and not line.startswith("#") and line != "pytest"]
    assert len(absent) > 10
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r})); import pytest; "
        "sys.exit(pytest.main(['-c', 'bench/gpu/pytest.ini', '--rootdir', '.', '--collect-only', "
        "'tests/kernels/launched']))"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "test_rows_without_a_token_are_told" in done.stdout


def test_the_workload_is_the_published_one() -> None:
    prompts, output_lens = uniform()
    assert (sum(map(len, prompts)), sum(output_lens)) == (142_827, 133_966)


def result(part: str, case: str, rate: float, seconds: float, share: float) -> dict[str, object]:
    return {"part": part, "case": case, "rate": rate, "seconds": seconds, "share": share, "peers": {}}


def test_the_table_names_the_worst_case_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        result("decode", "B=1 context=1024 (4 MiB)", 1000, 4e-6, 0.2),  # too small a call to count
        result("decode", "B=64 context=1024 (256 MiB)", 3500, 8e-5, 0.81),
        result("decode", "B=256 context=1024 (1024 MiB)", 3900, 2.7e-4, 0.93),
        result("prefill", "B=1 new=8192 context=8192", 410, 1e-3, 0.5),
        result("prefill", "B=1 new=2048 context=16384", 100, 1e-3, 0.1),
    ]
    limits = {"copy_bytes_per_s": 4e12, "matrix_flop_per_s": 8e14}
    (tmp_path / "kernels.json").write_text(json.dumps({"device": "card", "limits": limits, "results": results}))
    row = {"batch": 1, "context": 9, "step_ms": 4.0, "queued_ms": 3.9, "exposed_ms": 0.1, "launch_ms": 1.0}
    record = {"kind": "decode_step", "shape": "llama-3.1-8b", "rows": [row | {"bytes_read": 8e9}]}
    (tmp_path / "step.json").write_text(json.dumps(record))
    assert gpu_table.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = {line[:52].strip(): line[52:].split() for line in lines if len(line) > 52}
    assert said["decode attention, KV >= 0.25 GB, worst case"][0] == "81"
    assert "missed" in said["decode attention, KV >= 0.25 GB, worst case"]
    assert {"410", "good"} <= set(said["prefill attention, fresh prompts >= 8k, worst case"])
    assert {"4", "top", "50"} <= set(said["llama-3.1-8b bf16, B=1, one decode step"])
    assert said["offline qwen3-0.6b, 256 sequences"][-2:] == ["not", "measured"]
    assert {"0.1", "good"} <= set(said["exposed host time per step, worst batch"])


def test_a_summary_without_figures_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing served, or answers of one token: there is no time between tokens."""
    nothing = {"p50": None, "p99": None}
    summary = {"output_tokens_per_s": 0.0, "ttft_ms": nothing, "itl_ms": nothing, "num_failed": 3}
    (tmp_path / "served.json").write_text(json.dumps({"summary": summary}))
    assert gpu_table.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].strip() == (
        "served: 0 tok/s, TTFT p50 - ms, ITL p50 - ms, p99 - ms, failed 3"
    )
