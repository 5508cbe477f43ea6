"""The script for a GPU machine, in its dry form: every part runs, and the table is there."""

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.engine.offline import uniform
from bench.gpu import run as gpu_run
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
    assert done.stdout.splitlines()[-2].startswith("  tiny B=3 context 8: step")  # the table is whole
    kinds = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert sum("limits" in record for record in kinds) == 1
    assert {record.get("kind") for record in kinds} == {"decode_step", "mixed_step", "profile", "offline", None}
    assert sum("summary" in record for record in kinds) == 1
    assert "test_fp32_equals_transformers" in (tmp_path / "tests-engine.log").read_text()
    assert "test_decode_over_page_sizes" in (tmp_path / "tests-kernels.log").read_text()


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([ROOT / "bench/gpu.sh", tmp_path], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--dry" in done.stdout


def shell(group: str, name: str, command: str, seconds: int = 60, needs: Sequence[str] = ()) -> gpu_run.Part:
    return gpu_run.Part(group, name, seconds, ["/sh", "-c", command], needs)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[list[gpu_run.Part]]:
    """Parts that are shell commands; the second one fails."""
    made = [
        [shell("smoke", "first", "echo first; echo x >> {out}/first.count")],
        [shell("tests", "broken", "echo what is wrong; exit 3"), shell("tests", "beside", "echo beside")],
        [shell("steps", "last", "echo last")],
    ]
    monkeypatch.setattr(gpu_run, "STAGES", made)
    return made


def test_a_failure_is_told_and_the_others_results_are_there(
    stages: list[list[gpu_run.Part]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert gpu_run.main([str(out)]) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "FAILED: broken"
    assert "what is wrong" in said
    assert said.count("not measured") == len(gpu_table.rows([]))
    with tarfile.open(out / "results.tar.gz") as archive:
        assert set(archive.getnames()) >= {
            "table.txt",
            "commit.txt",
            "first.log",
            "broken.log",
            "beside.log",
            "last.log",
        }
    # A second call does again what failed, and nothing else.
    stages[1][0] = shell("tests", "broken", "echo mended")
    assert gpu_run.main([str(out)]) == 0
    assert "first: done before" in capsys.readouterr().out
    assert (out / "first.count").read_text() == "x\n"


def test_groups_can_be_chosen(
    stages: list[list[gpu_run.Part]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_run.main(["--only", "steps", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/last.log").read_text() == "last\n"
    assert not (tmp_path / "out/first.log").exists()


@pytest.mark.usefixtures("stages")
def test_the_time_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LIMIT", "10")  # fewer seconds than any part gets
    assert gpu_run.main([str(tmp_path / "out")]) == 1
    assert "== first: left out, the time is over" in capsys.readouterr().out
    assert not (tmp_path / "out/first.log").exists()


def test_a_part_that_takes_too_long_is_ended_with_its_children(
    stages: list[list[gpu_run.Part]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages[:] = [[shell("steps", "slow", "(sleep 60; echo late) & echo begun; wait", seconds=1)]]
    assert gpu_run.main([str(tmp_path / "out")]) == 1
    assert "== slow: exit code 124" in capsys.readouterr().out
    assert (tmp_path / "out/slow.log").read_text() == "begun\n"


def test_what_is_missing_is_said(
    stages: list[list[gpu_run.Part]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages[:] = [
        [shell("steps", "lacking", "true", needs=("json", "no_such_module"))],
        [gpu_run.Part("steps", "tool", 9, ["/no-such-tool"])],
    ]
    assert gpu_run.main([str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "== lacking: left out, this Python lacks: no_such_module" in said
    assert "== tool: left out, there is no no-such-tool" in said


def test_what_is_wrong_at_once_ends_the_run(
    stages: list[list[gpu_run.Part]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages[0][0] = shell("smoke", "smoke", "exit 1")
    assert gpu_run.main([str(tmp_path / "out")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: smoke"
    assert not (tmp_path / "out/last.log").exists()


def test_what_it_does_not_know_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_run.main(["--only", "kernel"])
    assert "no group kernel" in capsys.readouterr().err


def test_every_part_can_be_run() -> None:
    """Modules, test files and tests that the parts name are there."""
    for part in (part for stage in gpu_run.STAGES for part in stage):
        if not part.command[0].startswith("/"):
            assert importlib.util.find_spec(part.command[0]), part.name
        for word in (gpu_run.filled(word, Path("results")) for word in part.command):
            assert "{out}" not in word
            if word.startswith("tests/"):
                path, _, test = word.partition("::")
                assert (ROOT / path).exists(), word
                assert f"def {test}" in (ROOT / path).read_text() if test else True, word


def test_the_kernels_tests_need_no_more_than_torch_and_pytest() -> None:
    """On a bare GPU machine, here played by an interpreter that cannot find the other packages."""
    lines = (ROOT / "bench/gpu/requirements.in").read_text().splitlines()
    modules = {"pyzmq": "zmq", "pytest-xdist": "xdist", "rpds-py": "rpds"}
    names = [line for line in lines if line and not line.startswith("#")]
    absent = [modules.get(name, name.replace("-", "_")) for name in names]
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
    limits = {"memory_bytes_per_s": 4e12, "matrix_flop_per_s": 8e14}
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
