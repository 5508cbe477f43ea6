"""POST /debug/simulate: what the command line says, in a process that is bounded and ends with its client."""

import http.client
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.config import Config
from penstock.lab.commands.simulate import main
from penstock.parts.recording.options import RecordingOptions
from penstock.parts.watching.frontend.simulate import _why
from tests.frontend.http_client import error_of, get, post
from tests.frontend.live_server import LiveServer

SHAPE = Path(__file__).parents[3] / "bench" / "shapes" / "llama-3.1-8b"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step trace, as a server writes one."""
    path = tmp_path_factory.mktemp("traces") / "steps.jsonl"
    command = [
        sys.executable,
        "-m",
        "penstock.cli",
        "simulate",
        str(SHAPE),
        "--gpu",
        "h100",
        "--num-requests",
        "30",
    ]
    command += ["--request-rate", "20", "--input-len", "50:400", "--output-len", "5:40", "--step-trace", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def simulate(live: LiveServer, **fields: Any) -> Any:
    return post(live, "/debug/simulate", {"configs": {"now": ""}} | fields)


def children(live: LiveServer) -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "simulate" in child.cmdline()]


def test_two_configurations_side_by_side(live: LiveServer, trace: Path) -> None:
    configs = {"now": "", "few rows": "--max-num-seqs 2 --scheduling-policy sjf"}
    answer = simulate(live, configs=configs, recording=trace.read_text(), ttft_ms=500)
    assert answer.status == 200, answer.text
    told = answer.json()
    assert list(told["configs"]) == list(told["curves"]) == ["now", "few rows"]
    assert told["load"]["num_requests"] == 30
    assert told["targets"]["ttft_ms"] == 500
    for name in configs:
        figures, curves = told["configs"][name], told["curves"][name]
        assert figures["num_requests"] == 30
        for kind in ("ttft_ms", "tpot_ms", "e2e_ms"):
            assert len(curves["quantiles"][kind]) == 51
            assert curves["quantiles"][kind] == sorted(curves["quantiles"][kind])
            assert curves["quantiles"][kind][25] == pytest.approx(figures[kind]["p50"], abs=1e-3)
        assert 1 < len(curves["timeline"]) <= 256
    assert max(sample[3] for sample in told["curves"]["few rows"]["timeline"]) <= 2
    assert told["configs"]["few rows"]["ttft_ms"]["p99"] > told["configs"]["now"]["ttft_ms"]["p99"]


def test_a_recording_of_the_server_is_picked(live: LiveServer, trace: Path) -> None:
    assert get(live, "/debug/recordings").json() == {"data": [], "object": "list"}
    assert "there is: none" in error_of(simulate(live, picked="steps.jsonl"), 400)["message"]
    service = live.server.service
    before: Config = service.config
    service.config = before.with_options(RecordingOptions(step_trace=str(trace)))
    try:
        [known] = get(live, "/debug/recordings").json()["data"]
        assert known == {"name": "steps.jsonl", "bytes": trace.stat().st_size}
        assert simulate(live, picked="steps.jsonl").json()["load"]["num_requests"] == 30
        assert "there is no recording" in error_of(simulate(live, picked="../steps.jsonl"), 400)["message"]
    finally:
        service.config = before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--max-num-seqs -1", "--max-num-seqs"),
        ("--no-such-thing 3", "--no-such-thing"),
        ("--step-trace /tmp/not-here", "--step-trace writes a file"),
        ("--step-tr /tmp/not-here", "--step-trac"),
        ("--scheduling-policy os:system", "--scheduling-policy must be fcfs"),
        ("--scheduling-policy nobody", "--scheduling-policy must be fcfs"),
        ("'", "No closing quotation"),
    ],
)
def test_what_a_served_simulation_refuses(
    trace: Path, options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--served", "--measured", str(trace), f"--config=mine: {options}"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("/tmp/not-here").exists()


def test_bad_options_are_refused_with_the_simulators_sentence(live: LiveServer, trace: Path) -> None:
    error = error_of(simulate(live, configs={"mine": "--max-num-seqs -1"}, recording=trace.read_text()), 400)
    assert error["code"] == "simulation_failed"
    assert "--max-num-seqs" in error["message"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "either `recording` or `picked`"),
        ({"recording": "x", "picked": "y"}, "either `recording` or `picked`"),
        ({"configs": {}, "recording": "x"}, "configs"),
        ({"configs": {"a:b": ""}, "recording": "x"}, "is no name"),
        ({"configs": {"--served": ""}, "recording": "x"}, "is no name"),
        ({"recording": "x", "speed": 0}, "speed"),
        ({"recording": "x", "more": 0}, "more"),
    ],
)
def test_requests_that_are_none(live: LiveServer, fields: dict[str, Any], said: str) -> None:
    assert said in error_of(simulate(live, **fields), 400)["message"]


def test_a_file_that_is_not_named() -> None:
    said = "penstock simulate: /tmp/x/recording, line 1 is no step"
    assert _why(said, Path("/tmp/x/recording")) == "the recording, line 1 is no step"


def test_a_simulation_may_not_take_too_long(live: LiveServer, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.parts.watching.frontend.simulate.MAX_SECONDS", 0.05)
    assert "takes longer than 0.05 s" in error_of(simulate(live, recording=trace.read_text()), 400)["message"]
    assert not children(live)


def test_a_simulation_may_not_take_too_much_memory(
    live: LiveServer, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.parts.watching.frontend.simulate.MAX_MEMORY", 48 << 20)
    error = error_of(simulate(live, recording=trace.read_text()), 400)
    assert "may have needed more than" in error["message"]


def test_it_ends_when_its_client_leaves_and_there_is_one_at_a_time(live: LiveServer, trace: Path) -> None:
    body = json.dumps({"configs": {str(n): "" for n in range(8)}, "recording": trace.read_text()})
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    connection.request("POST", "/debug/simulate", body, {"Content-Type": "application/json"})
    deadline = time.monotonic() + 120
    while not (found := children(live)):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    found[0].suspend()  # so that it does not end by itself
    assert "there is one at a time" in error_of(simulate(live, recording="x"), 429)["message"]
    connection.close()
    # Not psutil's way to wait, which would take the exit status that the server's event loop is waiting for.
    while psutil.pid_exists(found[0].pid):
        assert time.monotonic() < deadline
        time.sleep(0.005)
