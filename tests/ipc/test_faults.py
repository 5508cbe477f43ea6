"""The fault points of the test kit: read once, from the environment alone; nothing where nothing is armed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.ipc import faults
from penstock.ipc.faults import Fault, InjectedFault, parse, point, point_about


def test_what_the_variable_says() -> None:
    assert parse("worker.step:kill@17, worker.result:delay=0.5,worker.step:raise@token=777") == (
        Fault("worker.step", "kill", call=17),
        Fault("worker.result", "delay", seconds=0.5),
        Fault("worker.step", "raise", about="token", number=777),
    )
    assert parse("worker.encode:kill@embeddings=8") == (Fault("worker.encode", "kill", about="embeddings", number=8),)
    assert parse("") == ()


@pytest.mark.parametrize(
    "text",
    [
        "worker.stop:kill",
        "worker.step:explode",
        "worker.step",
        "worker.step:kill@x",
        ":@=",
        "worker.step:kill@embeddings=8",
        "worker.encode:kill@token=8",
        "worker.step:kill@tokens=8",
        "worker.step:kill@token=",
    ],
)
def test_what_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse(text)


def test_unarmed_points_do_nothing() -> None:
    assert not faults.ARMED
    assert {point(name) for name in faults.POINTS} == {point("worker.step")}
    assert point_about("worker.step") is None


def test_calls_are_counted() -> None:
    armed = parse("worker.step:raise@3")
    reached, other = point("worker.step", armed), point("worker.result", armed)
    reached()
    other()
    reached()
    with pytest.raises(InjectedFault):
        reached()
    reached()


def test_tokens_are_looked_at() -> None:
    reached = point_about("worker.step", parse("worker.step:memory@token=7"))
    assert reached is not None
    reached({6, 8})
    with pytest.raises(MemoryError):
        reached({6, 7})


def test_once_is_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.ONCE, str(tmp_path))
    reached = point("worker.step", parse("worker.step:raise"))
    with pytest.raises(InjectedFault):
        reached()
    reached()
    point("worker.step", parse("worker.step:raise"))()


def test_a_process_started_with_a_fault_has_it() -> None:
    code = "from penstock.ipc.faults import point; point('scheduler.plan')(); print('on')"
    environment = os.environ | {faults.FAULTS: "scheduler.plan:kill@1"}
    dead = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True)
    assert (dead.returncode, dead.stdout) == (-9, b"")
