"""Random traces: whatever happens around it, every sequence has the output of its solo run."""

from collections import deque
from collections.abc import Callable
from math import inf
from random import Random

import pytest

from penstock.core.sequences.limits import WorkerLimits
from penstock.ipc.codec import unpack_int32
from penstock.ipc.messages import AddRequest
from penstock.parts.grammars.scheduler import MAX_BYTES
from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_worker import Guess, score_of, shown_prompt, solo_run
from tests.faults.soak import sized

NUM_SEEDS = 240
OWNERS = (b"frontend-0", b"frontend-1")


def random_limits(rng: Random) -> WorkerLimits:
    page_size = rng.choice([1, 4, 16])
    max_model_len = rng.choice([24, 48, 80])
    fewest = -(-max_model_len // page_size)
    return make_limits(
        num_pages=rng.choice([fewest, fewest + 1, fewest + 3, 2 * fewest, 4 * fewest]),
        page_size=page_size,
        max_num_seqs=rng.choice([1, 2, 3, 5, 8, 16]),
        max_num_batched_tokens=rng.choice([1, 2, 5, 7, 16, 33, 200]),
        max_model_len=max_model_len,
    )


def random_requests(rng: Random, limits: WorkerLimits) -> deque[AddRequest]:
    max_prompt = limits.max_sequence_len - 1
    stems = [[rng.randrange(limits.vocab_size) for _ in range(max_prompt)] for _ in range(2)]
    requests: deque[AddRequest] = deque()
    grammars = rng.choice([[""], ["", "a"], ["a", "b", "c", ""]])
    for i in range(rng.randint(3, 14)):
        length = rng.randint(1, rng.choice([max_prompt, max_prompt // 3]))
        stem = rng.choice(stems)
        shared = rng.choice([0, length, length // 2])
        prompt = stem[:shared] + [rng.randrange(limits.vocab_size) for _ in range(length - shared)]
        requests.append(
            make_request(
                f"r{i}",
                prompt,
                rng.choice([1, 2, 10, 100, 100]),
                n=rng.choice([1, 1, 1, 2, 3, 6]),
                seed=rng.choice([7, i, 2**63 - 1]),
                min_tokens=rng.choice([0, 0, 3]),
                stop=tuple(rng.sample(range(limits.vocab_size), rng.choice([0, 0, 20, 200]))),
                priority=rng.randint(-2, 2),
                salt=rng.choice(["", "", "salt"]),
                num_logprobs=rng.choice([-1, -1, -1, 0, 2]),
                prompt_logprobs=rng.choice([-1, -1, -1, 0, 3]),
                grammar=rng.choice(grammars),
                grammar_bytes=rng.choice([0, 0, MAX_BYTES]),
                tenant=rng.choice(["", "", "a", "b"]),
                group=rng.choice(["", "g0", "g1"]),
            )
        )
    return requests


def random_trace(
    seed: int,
    make_limits: Callable[[Random], WorkerLimits] = random_limits,
    *,
    guess: Guess | None = None,
    num_stages: int = 1,
    make_requests: Callable[[Random, WorkerLimits], deque[AddRequest]] = random_requests,
    make_driver: type[Driver] = Driver,
    seconds_per_call: float = 0.0,
    **options: object,
) -> Driver:
    """Requests, aborts, deaths and lags as the seed has them, until all is done; what came out is checked."""
    rng = Random(seed)
    limits = make_limits(rng)
    driver = make_driver(
        limits,
        guess=guess,
        num_stages=num_stages,
        pipeline_depth=rng.choice([0, 1, 1, 2]),
        enable_prefix_caching=rng.random() < 0.75,
        **{"scheduling_policy": rng.choice(["fcfs", "priority"])} | options,  # type: ignore[arg-type]
    )
    to_add = make_requests(rng, limits)
    requests = list(to_add)
    abort_rate, reset_rate = rng.choice([(0.0, 0.0), (0.02, 0.0), (0.0, 0.01), (0.02, 0.01)])
    restart_rate = rng.choice([0.0, 0.0, 0.01, 0.02])
    while to_add or driver.scheduler.has_work:
        action = rng.random()
        if to_add and action < 0.15:
            assert driver.add(to_add.popleft(), rng.choice(OWNERS)) is None
        elif action < 0.15 + abort_rate:
            driver.abort(rng.choice(requests).request_id, rng.choice([-1, 0, 1]))
        elif action < 0.15 + abort_rate + reset_rate:
            driver.reset_worker(rng.choice([None, driver.limits]))
        elif action < 0.15 + abort_rate + reset_rate + restart_rate:
            driver.restart_scheduler()
        else:
            may: list[Callable[[], object]] = [driver.schedule] * 2
            may += [driver.execute] * bool(driver.plans)
            may += [driver.process] * bool(driver.results)
            may += [driver.prepare] * bool(driver.worker.asked or driver.worker.to_encode)
            may += [driver.move] * driver.can_move
            rng.choice(may)()
            driver.now += seconds_per_call
            if driver.scheduler.wakes_at < inf:
                driver.now = driver.scheduler.wakes_at if rng.random() < 0.5 else driver.now + 0.004
            is_idle = not to_add and not driver.plans and not driver.results and not driver.worker.asked
            is_idle = is_idle and not driver.can_move and not driver.worker.to_encode
            is_left = is_idle and driver.scheduler.has_work and driver.schedule() is None
            if is_left and not driver.worker.asked and not driver.worker.to_encode:
                if driver.scheduler.wakes_at < inf:
                    driver.now = driver.scheduler.wakes_at
                is_asked = driver.schedule() is not None or driver.worker.asked or driver.worker.to_encode
                assert is_asked, "work is left, but nothing is scheduled or in flight"
    while driver.plans or driver.results or driver.can_move:  # sequences aborted while their last steps were in flight
        driver.step()
    driver.check_idle()
    check_outputs(driver, requests)
    return driver


def check_outputs(driver: Driver, requests: list[AddRequest]) -> None:
    for request in requests:
        prompt = list(unpack_int32(request.prompt_token_ids))
        for idx in range(request.n):
            name = (request.request_id, idx)
            check_logprobs(driver, request, idx)
            expected = solo_run(shown_prompt(prompt, request.images), request.sampling, idx, driver.limits)
            output = driver.outputs.get(name, [])
            if name in driver.aborted:
                assert name not in driver.finished
                assert output == expected[: len(output)]
                continue
            last = driver.finished[name]
            if last.error_code == "late":  # its policy has refused it
                assert not output
                continue
            if any(image.key.startswith(b"bad") for image in request.images):
                assert (output, last.error) == ([], "the image cannot be used")
                continue
            if last.error_code == "ends_workers":  # workers that die so often make suspects of anybody
                assert driver.num_deaths >= 2
                assert output == expected[: len(output)]
                continue
            assert output == expected
            is_stop = expected[-1] in request.sampling.stop_token_ids and len(expected) > request.sampling.min_tokens
            assert last.finish_reason == ("stop" if is_stop else "length")
            assert last.stop_token_id == (expected[-1] if is_stop else None)
            assert 0 <= driver.num_cached[name] < len(prompt)


def check_logprobs(driver: Driver, request: AddRequest, sequence_idx: int) -> None:
    """Every token's once and in order, of as many best tokens as asked; the prompt's with sequence 0 only."""
    name, sampling = (request.request_id, sequence_idx), request.sampling
    prompt = list(unpack_int32(request.prompt_token_ids))
    output = driver.outputs.get(name, [])
    tokens, n = prompt + output, sampling.num_logprobs
    expected = [score_of(tokens[:i], tokens[i], n) for i in range(len(prompt), len(tokens))] if n >= 0 else []
    assert driver.logprobs.get(name, []) == expected
    n = sampling.prompt_logprobs if sequence_idx == 0 else -1
    expected = [score_of(prompt[:i], prompt[i], n) for i in range(1, len(prompt))] if n >= 0 else []
    told = driver.prompt_logprobs.get(name, [])
    assert told == (expected if output else expected[: len(told)])


@pytest.mark.parametrize("first_seed", range(0, sized(120, NUM_SEEDS), 40))
def test_every_sequence_has_its_solo_output(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 40):
        try:
            random_trace(seed)
        except BaseException as error:
            error.add_note(f"trace of seed {seed}")
            raise


def test_the_traces_reach_what_they_are_for() -> None:
    """Preemptions, forks with page copies, dropped tokens, prefix hits, evictions and resumptions all occur in them."""
    preemptions = copies = dropped = cached = stalls = resumed = 0
    for seed in range(NUM_SEEDS, NUM_SEEDS + 30):
        driver = random_trace(seed)
        preemptions += sum(totals.num_preemptions for totals in driver.totals)
        dropped += sum(totals.num_dropped_tokens for totals in driver.totals)
        cached += sum(totals.num_cached_tokens for totals in driver.totals)
        copies += sum(len(step.plan.copy_src) // 4 for step in driver.steps)
        stalls += sum(bool(step.record and "no free pages" in step.record.waiting_reasons) for step in driver.steps)
        resumed += driver.num_resumed
    reached = (preemptions, copies, dropped, cached, stalls, resumed)
    assert min(reached) > 15, reached


def test_a_request_on_trial_finds_room_for_its_grammar() -> None:
    """A sibling of the first one on trial waits with a live grammar that leaves no room for another one."""
    random_trace(5007)
