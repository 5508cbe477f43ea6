"""Policies that are defined here order admissions and choose victims in the real scheduler, by their names alone."""

import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

from penstock.config import ConfigError
from penstock.core.sequences.sequence import Key, Request, Sequence
from penstock.ipc.messages import AddRequest, SamplingParams
from penstock.parts.policies.scheduler import Policy, View
from penstock.parts.policies.scheduler.registry import POLICIES, make_policy
from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_worker import solo_run
from tests.core.scheduling.test_preemption import preempted
from tests.faults.soak import sized

EDF, FAIR = f"{__name__}:EarliestDeadline", f"{__name__}:FairShare"


class EarliestDeadline(Policy):
    """The one whose time is up first; who has most time left gives way. Keys stay as they are."""

    preempts = True

    def key(self, request: Request, now: float) -> Key:
        return request.deadline, request.arrived


class FairShare(Policy):
    """The tenant with fewest computed tokens, in steps of 32; the sequence with least to lose gives way."""

    changes = True

    def __init__(self) -> None:
        self.num_tokens = Counter[str]()

    def key(self, request: Request, now: float) -> Key:
        return (self.num_tokens[request.tenant] // 32,)

    def on_tokens(self, request: Request, num_tokens: int) -> None:
        self.num_tokens[request.tenant] += num_tokens

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return min(running, key=lambda seq: (seq.num_tokens, -seq.turn))


class Aging(Policy):
    """By priority, of which waiting takes away one every ten seconds."""

    changes = True

    def key(self, request: Request, now: float) -> Key:
        return (request.priority - (now - request.arrived) // 10,)


class Looking(Policy):
    """Notes what it sees first."""

    def attach(self, view: View) -> None:
        super().attach(view)
        self.seen = view.max_num_seqs, view.max_num_batched_tokens, view.kv.page_size, len(view.running), view.now


def admitted(driver: Driver) -> list[str]:
    return [each.request_id for step in driver.steps if step.record for each in step.record.admitted]


def check_outputs(driver: Driver) -> None:
    for (name, idx), output in driver.outputs.items():
        request, _ = driver.added[name]
        prompt = list(memoryview(request.prompt_token_ids).cast("i"))
        assert output == solo_run(prompt, request.sampling, idx, driver.limits), name


def test_a_policy_sees_its_scheduler_from_the_beginning() -> None:
    driver = Driver(make_limits(page_size=4, max_num_seqs=3), scheduling_policy=f"{__name__}:Looking")
    policy = driver.scheduler.policy
    assert type(policy).__name__ == "Looking"
    assert policy.seen == (3, 64, 4, 0, 0.0)  # type: ignore[attr-defined]


def test_the_earliest_deadline_is_admitted_first_and_takes_a_row() -> None:
    driver = Driver(make_limits(max_num_seqs=1), scheduling_policy=EDF, pipeline_depth=0)
    driver.add(make_request("runs", range(5), 40, seconds_left=50))
    driver.step()
    driver.now = 10.0
    for name, seconds in (("none", 0), ("late", 90), ("early", 20), ("earlier", 5)):
        driver.add(make_request(name, range(5), 3, seconds_left=seconds))
    driver.run()
    assert admitted(driver) == ["runs", "earlier", "early", "runs", "late", "none"]
    assert preempted(driver) == [("runs", 0)]
    check_outputs(driver)


def test_out_of_pages_the_latest_deadline_gives_way() -> None:
    driver = Driver(make_limits(num_pages=7, page_size=4, max_model_len=24), scheduling_policy=EDF)
    for name, seconds in (("late", 9), ("early", 1), ("middle", 3)):
        driver.add(make_request(name, [int(seconds)] * 8, 14, seconds_left=seconds))
    driver.run()
    assert preempted(driver)[0] == ("late", 0)
    assert ("early", 0) not in preempted(driver)
    check_outputs(driver)


def test_tenants_get_equal_shares_of_the_tokens() -> None:
    """One tenant's answers are ten times as long: by turns alone it would get ten times as much."""
    driver = Driver(make_limits(max_num_seqs=1, num_pages=256), scheduling_policy=FAIR)
    for i in range(20):
        driver.add(make_request(f"long{i}", range(5), 60, tenant="long"))
        driver.add(make_request(f"short{i}", range(5), 6, tenant="short"))
    policy = driver.scheduler.policy
    assert isinstance(policy, FairShare)
    while "short19" not in admitted(driver):
        driver.step()
    assert abs(policy.num_tokens["long"] - policy.num_tokens["short"]) <= 32 + 64, "a step of the policy and a request"
    driver.run()
    check_outputs(driver)


def test_a_policy_chooses_its_victim() -> None:
    driver = Driver(make_limits(num_pages=7, page_size=4, max_model_len=24), scheduling_policy=FAIR)
    driver.add(make_request("short", [1], 18))
    driver.add(make_request("long", range(2, 12), 10))
    driver.run()
    assert preempted(driver) == [("short", 0)], "which came first"
    check_outputs(driver)


def test_keys_that_time_changes_are_looked_at_again() -> None:
    driver = Driver(make_limits(max_num_seqs=1), scheduling_policy=f"{__name__}:Aging", pipeline_depth=0)
    driver.add(make_request("runs", range(5), 10))
    driver.step()
    driver.add(make_request("old", range(5), 2, priority=3))
    driver.now = 45.0
    driver.add(make_request("new", range(5), 2))
    driver.run()
    assert admitted(driver) == ["runs", "old", "new"]


@pytest.mark.parametrize("policy", [EDF, FAIR])
@pytest.mark.parametrize("seed", range(sized(4, 16)))
def test_random_loads_end_and_change_no_token(policy: str, seed: int) -> None:
    rng = Random(seed)
    driver = Driver(
        make_limits(num_pages=rng.choice([40, 200]), max_num_seqs=rng.choice([2, 4]), max_num_batched_tokens=32),
        scheduling_policy=policy,
        pipeline_depth=rng.choice([0, 1, 2]),
    )
    for i in range(40):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 40))]
        tenant, group, n = rng.choice("abc"), rng.choice(["", "g"]), rng.choice([1, 1, 3])
        seconds = rng.choice([0.0, rng.random() * 100])
        driver.add(
            make_request(
                f"{i}", prompt, rng.randint(1, 60), n=n, seed=i, tenant=tenant, group=group, seconds_left=seconds
            )
        )
        if i % 13 == 5:
            driver.scheduler.pause(f"{i}")
        for _ in range(rng.randrange(6)):
            driver.now += rng.random()
            if driver.scheduler.can_schedule and len(driver.scheduler.requests) > 1:
                driver.step()
        if i % 13 == 9:
            driver.scheduler.resume(f"{i - 4}")
        if i == 20:
            driver.reset_worker(has_died=False)
    for name in list(driver.scheduler.requests):
        driver.scheduler.resume(name)
    driver.run()
    check_outputs(driver)


def test_what_names_no_policy_is_said() -> None:
    for name in (
        "lifo",
        "tests.parts.policies.test_policies:Nothing",
        "no_such_module:Policy",
        "os:path",
        f"{__name__}:Random",
        ":",
        "",
    ):
        with pytest.raises(ConfigError, match="--scheduling-policy"):
            make_policy(name)


def test_a_policy_can_join_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "edf", EarliestDeadline)
    assert isinstance(Driver(scheduling_policy="edf").scheduler.policy, EarliestDeadline)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_a_time_that_is_no_number_is_refused(seconds: float) -> None:
    """A key that equals nothing, itself included, would be lost in the queue."""
    request = AddRequest("a", b"\x01\0\0\0", SamplingParams(max_tokens=1), seconds_left=seconds)
    assert Driver().add(request) is not None


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the installed command does not look for modules there."""
    (tmp_path / "in_this_folder.py").write_text(
        "from penstock.parts.policies.scheduler import Policy\n\n\nclass Mine(Policy):\n    pass\n"
    )
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    with pytest.raises(ConfigError, match="No module named 'in_this_folder'"):
        make_policy("in_this_folder:Mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert type(make_policy("in_this_folder:Mine")).__name__ == "Mine"


def test_an_installed_module_is_found_from_a_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert isinstance(make_policy(EDF), EarliestDeadline)
