"""The simulator: exact times of small loads, and what must hold of all."""

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import Config, ConfigError, SchedulerOptions, WorkerOptions
from penstock.config.step_limits import StepLimits
from penstock.core.scheduling.invariants import check_invariants
from penstock.lab.simulation.arrivals import Arrival, Targets
from penstock.lab.simulation.device import Timing
from penstock.lab.simulation.figures import figures
from penstock.lab.simulation.simulator import Simulator
from penstock.parts.batching.scheduler.registry import KINDS
from penstock.parts.policies.scheduler.registry import POLICIES
from tests.lab.simulation.loads import KnownDevice, machine, simulator

TIMING = Timing(
    request=1e-3, request_per_token=1e-5, reply=2e-3, admission=2e-4, scheduler=3e-4, transport=4e-4, wake=5e-4
)
FLAT = KnownDevice(step=10e-3, row=0, context=0, token=0, between=1e-3)


def test_a_single_request_takes_as_long_as_its_parts() -> None:
    run = simulator([Arrival(time=5.0, input_len=100, output_len=4)], machine(FLAT, TIMING), pipeline_depth=0).run()
    (outcome,) = run.outcomes
    assert outcome.ttft == pytest.approx(1e-3 + 100 * 1e-5 + 2e-4 + 5e-4 + 4e-4 + 10e-3 + 3e-4 + 2e-3)
    assert outcome.tpot == pytest.approx(10e-3 + 1e-3)  # the worker's gap is longer than the way
    assert (outcome.num_tokens, run.totals.num_steps) == (4, 4)


def test_steps_overlap_the_scheduler_and_the_way() -> None:
    """The worker has the next plan before a step ends: only its own gap is between two steps."""
    run = simulator([Arrival(time=0.0, input_len=100, output_len=11)], machine(FLAT, TIMING), pipeline_depth=1).run()
    (outcome,) = run.outcomes
    assert outcome.tpot == pytest.approx(11e-3)


def test_what_comes_during_a_step_waits_for_it() -> None:
    arrivals = [Arrival(time=0.0, input_len=10, output_len=2), Arrival(time=1e-3, input_len=10, output_len=1)]
    run = simulator(arrivals, machine(FLAT), pipeline_depth=0).run()
    assert [outcome.first_token for outcome in run.outcomes] == pytest.approx([10e-3, 21e-3])


def test_shared_prefixes_are_hits_and_nothing_else_is() -> None:
    shared = [Arrival(time=float(i), input_len=100, output_len=5, prefix_id="a", prefix_len=64) for i in range(4)]
    others = [Arrival(time=4.0 + i, input_len=100, output_len=5) for i in range(4)]
    run = simulator([*shared, *others]).run()
    assert [outcome.num_cached for outcome in run.outcomes] == [0, 64, 64, 64, 0, 0, 0, 0]


def test_states_take_memory_and_prefixes_need_snapshots_of_them() -> None:
    shared = [Arrival(time=float(i), input_len=100, output_len=5, prefix_id="a", prefix_len=64) for i in range(4)]
    run = simulator(shared, machine()._replace(state_bytes=64)).run()
    assert [outcome.num_cached for outcome in run.outcomes] == [0, 0, 64, 64], "the second finds out where they part"
    stateful = machine()._replace(state_bytes=4096)
    config = Config(worker=WorkerOptions(state_snapshots_gib=4096 * 100 / 2**30))
    plain, hello = machine().hello(config), stateful.hello(config)
    assert (hello.num_snapshots, plain.num_snapshots) == (100, 0)
    taken = (hello.max_num_seqs + 1 + 100) * 4096
    assert plain.num_pages - hello.num_pages == -(-taken // (64 * hello.page_size))
    with pytest.raises(ConfigError, match="less --max-num-seqs or --state-snapshots-gib"):
        stateful._replace(state_bytes=1 << 30).hello(config)


def test_a_machine_chooses_the_sizes_that_options_leave_open() -> None:
    found = machine()._replace(limits=StepLimits(8, 100, 32)).hello(Config(scheduler=SchedulerOptions(max_num_seqs=3)))
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.page_size) == (3, 100, 32)


def test_pages_that_hold_nothing_are_bounded() -> None:
    alone = machine()._replace(state_bytes=4096, kv_bytes_per_token=0.0, max_model_len=1 << 20)
    assert alone.hello(Config()).num_pages == 1 << 19
    short = alone._replace(max_model_len=1 << 10).hello(Config())
    assert short.num_pages == 2 * (1024 // short.page_size) * short.max_num_seqs


def test_pages_of_a_recording_are_shared_as_far_as_they_begin_alike() -> None:
    a, b, c = (bytes([i] * 8) for i in (1, 2, 3))
    pages = [a + b, a + b + c, a + c, b]
    arrivals = [Arrival(time=float(i), input_len=60, output_len=2, pages=each) for i, each in enumerate(pages)]
    run = simulator(arrivals).run()
    assert [outcome.num_cached for outcome in run.outcomes] == [0, 32, 16, 0]


def test_a_conversation_extends_its_prompt() -> None:
    arrivals = [Arrival(time=float(i), input_len=32 * (i + 1), output_len=3, prefix_id="talk") for i in range(3)]
    run = simulator(arrivals).run()
    assert [outcome.num_cached for outcome in run.outcomes] == [0, 32, 64]


def test_answers_that_stop_by_themselves_do_so_after_their_length() -> None:
    arrivals = [
        Arrival(time=0.0, input_len=20, output_len=7, max_tokens=50),
        Arrival(time=0.0, input_len=20, output_len=30),
        Arrival(time=0.0, input_len=20, output_len=1, max_tokens=9),
    ]
    run = simulator(arrivals).run()
    assert [outcome.num_tokens for outcome in run.outcomes] == [7, 30, 1]
    assert run.totals.num_output_tokens == 38
    assert run.totals.num_dropped_tokens > 0  # computed ahead of the stop


def test_requests_that_cannot_run_are_refused() -> None:
    run = simulator([Arrival(time=0.0, input_len=5000, output_len=1)]).run()
    assert [outcome.error for outcome in run.outcomes] == ["too_long"]


def test_a_queue_that_is_too_long_refuses_as_the_server_does() -> None:
    arrivals = [Arrival(time=0.0, input_len=10, output_len=50) for _ in range(30)]
    run = simulator(arrivals, max_num_seqs=2, max_num_queued_seqs=10, queue_patience=0.0).run()
    assert [outcome.error for outcome in run.outcomes].count("queue_full") == 20


def test_requests_that_wait_too_long_expire() -> None:
    arrivals = [Arrival(time=0.01 * i, input_len=10, output_len=1500) for i in range(6)]
    run = simulator(arrivals, max_num_seqs=1, queue_timeout=2.0, queue_patience=0.0).run()
    assert "queue_timeout" in [outcome.error for outcome in run.outcomes]
    assert all(outcome.num_ends == 1 for outcome in run.outcomes)


def test_a_key_that_waits_while_another_has_all_rows_is_not_treated_fairly() -> None:
    flood = [Arrival(time=0.0, input_len=10, output_len=300, key="flood") for _ in range(40)]
    light = [Arrival(time=0.1, input_len=10, output_len=300, key="light")]
    run = simulator([*flood, *light], max_num_seqs=4).run()
    assert set(run.shares) == {"flood", "light"}
    assert run.shares["light"] < run.shares["flood"] == 1.0


def test_weights_are_shares_under_the_fair_policy() -> None:
    load = [
        Arrival(time=0.0, input_len=10, output_len=60, key=key, weight=weight)
        for key, weight in [("heavy", 4.0), ("plain", 1.0)] * 30
    ]
    run = simulator(load, max_num_seqs=4, queue_patience=0.0, scheduling_policy="fair").run()
    heavy, plain = (
        sum(o.ttft for o, a in zip(run.outcomes, load, strict=True) if a.key == key) for key in ("heavy", "plain")
    )
    assert heavy < 0.8 * plain


REFUSALS = {"queue_full", "queue_timeout", "too_long", "late", "unattainable"}
LENGTHS = st.integers(1, 90)
ARRIVALS = st.builds(
    Arrival,
    time=st.floats(0, 0.3),
    input_len=LENGTHS,
    output_len=st.integers(1, 40),
    prefix_id=st.sampled_from(["", "a", "b"]),
    prefix_len=st.integers(0, 60),
    key=st.sampled_from(["", "x", "y"]),
    priority=st.integers(-1, 1),
    max_tokens=st.sampled_from([0, 60]),
    ttft_ms=st.sampled_from([0.0, 0.0, 30.0]),
    tpot_ms=st.sampled_from([0.0, 0.0, 4.0]),
)
OPTIONS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 9),
        "max_num_batched_tokens": st.integers(9, 120),
        "max_prefill_ms": st.sampled_from([0, 5, 250]),
        "page_size": st.sampled_from([1, 4, 16]),
        "pipeline_depth": st.integers(0, 3),
        "enable_prefix_caching": st.booleans(),
        "scheduling_policy": st.sampled_from(sorted(POLICIES)),
        "max_num_queued_seqs": st.sampled_from([3, 4096]),
        "queue_patience": st.sampled_from([0.0, 0.05, 4.0]),
        "queue_timeout": st.sampled_from([0.0, 0.1]),
        "batching": st.sampled_from(sorted(KINDS)),
        "batch_wait_ms": st.sampled_from([0, 20]),
        "host_kv_gib": st.sampled_from([0.0, 2e-5]),
        "preemption": st.sampled_from(["recompute", "swap", "auto"]),
    }
)


@settings(max_examples=40, deadline=None)
@given(st.lists(ARRIVALS, min_size=1, max_size=25), OPTIONS, st.integers(150, 400), st.integers(0, 3))
def test_every_request_ends_once_and_nothing_is_lost(
    arrivals: list[Arrival], options: dict[str, Any], num_tokens: int, seed: int
) -> None:
    device = KnownDevice(spread=0.3)
    num_pages = num_tokens // int(options["page_size"])
    one = simulator(arrivals, machine(device, TIMING), seed=seed, num_pages=num_pages, **options)
    now = -1.0
    while one.step():
        assert one.now >= now
        now = one.now
        check_invariants(one.scheduler)
    run = one.run()
    assert not one.scheduler.has_work
    limit = one.scheduler.limits.max_sequence_len
    for outcome, arrival in zip(run.outcomes, arrivals, strict=True):
        assert outcome.num_ends == 1
        if outcome.error:
            assert outcome.error in REFUSALS
            continue
        assert outcome.first_token is not None
        assert arrival.time < outcome.first_token <= outcome.ended
        assert outcome.num_tokens == min(arrival.output_len, limit - arrival.input_len)
        assert 0 <= outcome.num_cached < arrival.input_len
    answered = [o for o in run.outcomes if not o.error]
    assert run.totals.num_output_tokens == sum(outcome.num_tokens for outcome in answered)
    assert run.totals.num_cached_tokens == sum(outcome.num_cached for outcome in answered)
    assert run.totals.num_completed == len(answered)
    stats = one.scheduler.stats()
    assert stats.num_running == stats.num_waiting == stats.num_used_pages == 0
    assert run.busy <= one.now + 1e-9
    again = simulator(arrivals, machine(device, TIMING), seed=seed, num_pages=num_pages, **options)
    assert told(again, arrivals) == told(one, arrivals)


def told(one: Simulator, arrivals: list[Arrival]) -> tuple[object, ...]:
    run = one.run()
    return figures(run, arrivals, 1, Targets(50.0, 5.0)), asdict(run.totals), run.samples


def test_a_batch_that_waits_for_more_begins_when_its_time_is_over() -> None:
    arrivals = [Arrival(time=0.0, input_len=10, output_len=2), Arrival(time=5.0, input_len=10, output_len=2)]
    run = simulator(arrivals, machine(FLAT), batching="dynamic", batch_wait_ms=70).run()
    assert [outcome.ttft for outcome in run.outcomes] == pytest.approx([71e-3 + 10e-3] * 2, abs=1.1e-3)


def test_pages_that_come_back_from_the_host_take_the_time_of_their_copies() -> None:
    arrivals = [Arrival(time=float(i), input_len=480, output_len=2, prefix_id=prefix) for i, prefix in enumerate("aba")]
    slow = machine(FLAT)._replace(copy_speed=1e6)  # a page of 1 KiB in a millisecond
    dropped, kept = (simulator(arrivals, slow, num_pages=31, host_kv_gib=gib).run() for gib in (0.0, 1e-3))
    assert [outcome.num_cached for outcome in dropped.outcomes][2] == 0
    assert [outcome.num_cached for outcome in kept.outcomes][2] == 464
    delay = kept.outcomes[2].ttft - dropped.outcomes[2].ttft
    assert 20e-3 < delay < 60e-3


def test_fair_shares_and_batches_go_together() -> None:
    """A batch has levels of its own, so tenants may wait on two."""
    load = [Arrival(time=0.0, input_len=n, output_len=20, key=key) for n, key in ((17, "x"), (15, "x"), (84, "y"))]
    run = simulator(load, max_num_seqs=2, batching="static", scheduling_policy="fair").run()
    assert [outcome.num_tokens for outcome in run.outcomes] == [20, 20, 20]


def test_requests_that_cannot_meet_their_targets_are_refused_if_that_is_configured() -> None:
    load = [Arrival(time=0.02 * i, input_len=200, output_len=100, ttft_ms=60.0) for i in range(100)]
    options: dict[str, Any] = {"max_num_seqs": 4, "queue_patience": 0.0}
    demoted, refused = (
        simulator(load, scheduling_policy=name, **options).run() for name in ("deadline", "deadline-refuse")
    )
    errors = {outcome.error for outcome in refused.outcomes}
    assert len(errors) == 2
    assert {outcome.error for outcome in demoted.outcomes} == {""}
    targets = Targets(60.0, 0.0)
    good = [figures(run, load, 1, targets)["goodput_per_s"] for run in (demoted, refused)]
    fcfs = figures(simulator(load, **options | {"scheduling_policy": "fcfs"}).run(), load, 1, targets)
    assert min(good) > fcfs["goodput_per_s"]
