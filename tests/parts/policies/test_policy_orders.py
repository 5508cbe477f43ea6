"""What each policy is for: who comes first, in the real scheduler."""

from importlib.metadata import EntryPoint, EntryPoints
from random import Random

import pytest

from penstock.config import ConfigError
from penstock.core.sequences.output_lengths import LengthPredictor
from penstock.core.sequences.sequence import Request
from penstock.parts.policies.scheduler import registry
from penstock.parts.policies.scheduler.fair import Fair
from penstock.parts.policies.scheduler.registry import make_policy
from penstock.parts.policies.scheduler.sjf import ShortestJobFirst
from tests.core.driver import Driver, make_limits, make_request
from tests.parts.policies.test_policies import admitted


def one_row(policy: str) -> Driver:
    """A driver with one row, which a first request has for a while."""
    driver = Driver(make_limits(max_num_seqs=1, num_pages=256), scheduling_policy=policy, pipeline_depth=0)
    driver.add(make_request("runs", range(5), 20))
    driver.step()
    return driver


def request_of(tenant: str, num_prompt: int, max_tokens: int = 10_000) -> Request:
    return Request(make_request("r", range(num_prompt), max_tokens, tenant=tenant), b"", 1 << 20)


# --- how long outputs will be


def test_lengths_before_anything_is_known() -> None:
    lengths = LengthPredictor()
    assert lengths.predict(request_of("a", 10)) == 256
    assert lengths.predict(request_of("a", 10, 7)) == 7, "as much as it allows"


def test_lengths_are_learned_by_tenant_and_prompt() -> None:
    rng, lengths = Random(0), LengthPredictor()
    means = {("brief", 8): 10, ("brief", 500): 40, ("wordy", 8): 300, ("wordy", 500): 900}
    for _ in range(200):
        for (tenant, num_prompt), mean in means.items():
            lengths.learn(request_of(tenant, num_prompt), round(rng.uniform(0.5, 1.5) * mean))
    for (tenant, num_prompt), mean in means.items():
        assert lengths.predict(request_of(tenant, num_prompt)) == pytest.approx(mean, rel=0.25)
    short, long = (lengths.predict(request_of("new", num_prompt)) for num_prompt in (8, 500))
    assert 100 < short < long < 500, "as the others' on average"
    for _ in range(200):
        lengths.learn(request_of("brief", 8), 100)
    assert lengths.predict(request_of("brief", 8)) == pytest.approx(100, rel=0.1), "what was long ago is forgotten"


def test_tenants_that_finish_nothing_are_forgotten() -> None:
    lengths = LengthPredictor()
    for i in range(10_000):
        lengths.learn(request_of(f"{i}", 8), 10)
    assert len(lengths._by_tenant) <= 4096


# --- orders


def test_the_shortest_job_comes_first_and_equals_take_turns() -> None:
    driver = one_row("sjf")
    for i, (max_tokens, tenant) in enumerate([(40, "a"), (9, "a"), (40, "b"), (10, "a"), (9, "b"), (2, "b")]):
        driver.add(make_request(f"{i}", [i] * 5, max_tokens, tenant=tenant))
    driver.run()
    assert admitted(driver) == ["runs", "5", "1", "4", "3", "0", "2"]


def test_what_is_learned_changes_the_order() -> None:
    """Both tenants ask for as much; one always gets short answers."""
    driver = one_row("sjf")
    policy = driver.scheduler.policy
    assert isinstance(policy, ShortestJobFirst)
    for _ in range(30):
        policy.on_finished(request_of("brief", 5), 3)
        policy.on_finished(request_of("wordy", 5), 90)
    for i in range(4):
        driver.add(make_request(f"wordy{i}", range(5), 100, tenant="wordy"))
        driver.add(make_request(f"brief{i}", range(5), 100, stop=(1, 2), tenant="brief"))
    driver.run()
    assert [name[:5] for name in admitted(driver)] == ["runs", *["brief"] * 4, *["wordy"] * 4]


def test_short_jobs_have_the_lower_mean_latency() -> None:
    def mean_latency(policy: str) -> float:
        rng = Random(3)
        driver = Driver(make_limits(max_num_seqs=2, num_pages=256), scheduling_policy=policy, max_policy_delay=1e6)
        for i in range(20):
            driver.add(make_request(f"{i}", [i] * rng.randint(1, 30), rng.choice([2, 4, 60])))
        ended: dict[str, float] = {}
        while driver.scheduler.has_work:
            driver.now += 1.0
            driver.step()
            ended.update((name, driver.now) for name, _ in driver.finished if name not in ended)
        return sum(ended.values()) / len(ended)

    fcfs = mean_latency("fcfs")
    assert mean_latency("sjf") < 0.7 * fcfs
    assert mean_latency("hrrn") < 0.9 * fcfs


def test_waiting_makes_up_for_length() -> None:
    driver = one_row("hrrn")
    driver.add(make_request("long", [1] * 5, 100))  # about a second of work
    driver.now = 9.0
    driver.add(make_request("short", [2] * 5, 10))  # a tenth of that
    driver.now = 9.2
    driver.add(make_request("late", [3] * 5, 10))
    driver.now = 9.3
    driver.run()
    assert admitted(driver) == ["runs", "long", "short", "late"], "ratios of about 10, 4 and 2"


def test_cached_prefixes_come_together() -> None:
    """Questions to eight documents come in turns, and the pool holds two documents."""

    def num_cached(policy: str) -> int:
        limits = make_limits(max_num_seqs=1, num_pages=24, page_size=4, max_num_batched_tokens=64)
        driver = Driver(limits, scheduling_policy=policy, max_policy_delay=1e6)
        for question in range(6):
            for document in range(8):
                driver.add(make_request(f"{document}-{question}", [7, document] * 16 + [100 + question], 2))
                driver.step()
        driver.run()
        return driver.scheduler.totals.num_cached_tokens

    assert num_cached("cache-aware") > 3 * num_cached("fcfs")


def test_what_is_not_cached_any_more_does_not_come_first() -> None:
    driver = one_row("cache-aware")
    driver.run()
    assert driver.scheduler.totals.num_cached_tokens == 0
    driver.add(make_request("holds the row", [9], 30))
    driver.step()
    driver.add(make_request("new", [3] * 9, 2))
    driver.add(make_request("known", range(5), 2))
    driver.scheduler.reset_prefix_cache()
    driver.run()
    assert admitted(driver)[-2:] == ["new", "known"]


def test_the_light_tenant_comes_first_and_weights_count() -> None:
    driver = one_row("fair")
    policy = driver.scheduler.policy
    assert isinstance(policy, Fair)
    for i in range(30):
        for tenant, weight in (("one", 1.0), ("three", 3.0)):
            driver.add(make_request(f"{tenant}{i}", [i, int(weight)] * 3, 10, tenant=tenant, weight=weight))
    while len(driver.finished) < 24:
        driver.step()
    names = [name.rstrip("0123456789") for name in admitted(driver)]
    assert names.count("three") == pytest.approx(3 * names.count("one"), abs=3)
    driver.add(make_request("light", [1] * 5, 2, tenant="light"))
    assert policy.service("light") <= min(policy.service("one"), policy.service("three"))
    num_before = len(admitted(driver))
    driver.run()
    assert "light" in admitted(driver)[num_before:][:2]


def test_what_a_tenant_did_not_use_is_not_saved_up() -> None:
    driver = one_row("fair")
    for i in range(40):
        driver.add(make_request(f"busy{i}", [i] * 5, 10, tenant="busy"))
    while len(driver.finished) < 20:
        driver.step()
    num_before = len(admitted(driver))
    for i in range(10):
        driver.add(make_request(f"comes{i}", [i] * 5, 10, tenant="comes"))
    driver.run()
    names = [name.rstrip("0123456789") for name in admitted(driver)][num_before:][:8]
    assert names.count("comes") == pytest.approx(4, abs=1)


def test_fair_forgets_tenants() -> None:
    driver = Driver(make_limits(max_num_seqs=4, num_pages=64), scheduling_policy="fair")
    policy = driver.scheduler.policy
    assert isinstance(policy, Fair)
    for i in range(6000):
        policy.tenant_waits(f"{i}", [])
        policy.first_tenant([f"{i}"])
    assert len(policy._accounts) <= 4200


# --- names


def test_an_installed_package_gives_its_policy_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("edf", "tests.parts.policies.test_policies:EarliestDeadline", registry.ENTRY_POINTS)
    wrong = EntryPoint("gone", "no_such_module:Policy", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda **which: EntryPoints([entry, wrong]).select(**which))
    assert type(make_policy("edf")).__name__ == "EarliestDeadline"
    for name in ("gone", "other"):
        with pytest.raises(ConfigError, match="--scheduling-policy"):
            make_policy(name)
