"""Why requests wait: the figures are those of the scheduler's state, and the estimates come true."""

import re

import pytest
from msgspec.structs import replace

from penstock.core.scheduling.reasons import late_reasons, list_requests
from penstock.core.scheduling.step_record import GRAMMAR, PREFILL
from penstock.ipc.messages import KVSource, ListRequests, RequestList
from tests.core.driver import Driver, make_limits, make_request


def reasons(driver: Driver) -> dict[str, str]:
    """Why the first waiting sequence of each request waits."""
    found: dict[str, str] = {}
    for seq, reason in driver.scheduler.reasons().waiting(100):
        found.setdefault(seq.request_id, reason)
    return found


def learn(driver: Driver) -> None:
    """Every step is taken to last 10 milliseconds."""
    time = driver.scheduler.pace.step_time
    time._num_learned = 10
    time.weights[:] = [10_000.0, 0.0, 0.0, 0.0, 0.0]


def test_pages() -> None:
    driver = Driver(
        make_limits(num_pages=16, page_size=4, max_num_seqs=8), pipeline_depth=0, enable_prefix_caching=False
    )
    learn(driver)
    driver.add(make_request("a", range(15), 10))
    driver.add(make_request("b", range(15), 10))
    driver.add(make_request("c", range(15), 5))
    driver.add(make_request("large", range(39), 10))
    driver.step()
    told = reasons(driver)["large"]
    kind, _, figures = told.partition(": ")
    assert kind == "no free pages"
    found = re.fullmatch(r"needs (\d+), (\d+) available, 2 rows end in at most about (\d+) ms", figures)
    assert found, told
    needed, available, ms = map(int, found.groups())
    assert needed == 10
    assert available == max(0, driver.scheduler.kv.num_available - 2)
    num_steps = 0
    while "large" in reasons(driver):
        driver.step()
        num_steps += 1
    assert num_steps * 10 == pytest.approx(ms, abs=20)


def test_rows_and_turns() -> None:
    driver = Driver(make_limits(max_num_seqs=2), pipeline_depth=0)
    for i in range(5):
        driver.add(make_request(f"{i}", [i, 2, 3], 6 + i))
    driver.step()
    driver.step()
    told = reasons(driver)
    assert told == {
        "2": "no free row: 2 of 2 in use, the next one ends in at most about 4 steps",
        "3": "behind the first: its turn comes after 1 other",
        "4": "behind the first: its turn comes after 2 others",
    }
    learn(driver)
    assert reasons(driver)["2"].endswith("the next one ends in at most about 40 ms")


def test_a_prediction_is_used_where_there_is_one() -> None:
    driver = Driver(make_limits(max_num_seqs=1), pipeline_depth=0, scheduling_policy="sjf")
    for i in range(30):
        driver.add(make_request(f"{i}", [i, 2, 3], 90, stop=tuple(range(1000))))
    driver.run()
    driver.add(make_request("long", [1, 2], 90))
    driver.add(make_request("next", [1, 2], 90))
    driver.step()
    driver.step()
    found = re.search(r"the next one ends in about (\d+) step", " ".join(reasons(driver).values()))
    assert found
    assert int(found[1]) < 60, "all that came before ended with their first token"


def test_the_budget() -> None:
    driver = Driver(make_limits(max_num_batched_tokens=16), pipeline_depth=1)
    driver.add(make_request("long", range(60), 2))
    driver.add(make_request("next", range(5), 2))
    driver.schedule()
    assert reasons(driver) == {"next": "token budget: 16 of 16 used by 0 decodes and 1 prompt"}


def test_those_aside() -> None:
    driver = Driver(make_limits(max_num_batched_tokens=8), pipeline_depth=0)
    driver.add(make_request("family", range(30), 4, n=2))
    driver.add(make_request("grammar", range(5), 4, grammar="g"))
    driver.add(make_request("paused", range(5), 4))
    driver.scheduler.pause("paused")
    for _ in range(5):
        driver.schedule()
        driver.execute()
        driver.process()
    told = reasons(driver)
    assert told["grammar"] == "its grammar is being prepared"
    request = driver.scheduler.requests["paused"]
    assert driver.scheduler.reasons().of_requests([request]) == {request: "paused: its client does not read"}
    driver = Driver(make_limits(max_num_batched_tokens=16), pipeline_depth=0)
    driver.add(make_request("family", range(30), 4, n=2))
    driver.step()
    driver.schedule()
    driver.schedule()
    assert reasons(driver)["family"] in (
        "token budget: 14 of 16 used by 0 decodes and 1 prompt, with --max-prefill-ms 250",
        "sibling's prompt: 16 of 30 tokens computed",
    )


def test_each_is_counted_by_what_it_is_held_for() -> None:
    """Not by what it may wait for later: its prompt may go to another engine, and it has a grammar."""
    peers = {"here": (KVSource("nowhere", (), (), {}),)}
    driver = Driver(make_limits(hands_over=True), peers=peers, min_prefill_tokens=4)
    driver.add(replace(make_request("first", range(30), 4, grammar="g"), prefill_at=("here",)))
    driver.schedule()
    assert reasons(driver) == {"first": GRAMMAR}
    assert driver.scheduler.reasons().counts() == {GRAMMAR: 1}
    driver.prepare()
    driver.schedule()
    assert reasons(driver) == {"first": f"{PREFILL}: 28 tokens that a prefill engine computes"}
    assert driver.scheduler.reasons().counts() == driver.scheduler.stats().waiting_reasons == {PREFILL: 1}


def test_suspects_tell_how_many_they_are() -> None:
    driver = Driver(pipeline_depth=0)
    for name in "abcd":
        driver.add(make_request(name, [1, 2, 3], 9))
    driver.schedule()
    driver.reset_worker()
    driver.schedule()
    assert set(reasons(driver).values()) == {"a worker died: others are tried first: 4 requests"}


def test_a_queue_timeout_tells_the_last_reason() -> None:
    driver = Driver(make_limits(max_num_seqs=1), queue_timeout=5.0)
    driver.now = 10.0
    driver.add(make_request("a", [1, 2, 3], 20))
    driver.add(make_request("b", [1, 2, 3], 20))
    driver.step()
    [delta] = driver.scheduler.expire_queued(16.0)[b"frontend"]
    assert delta.error.startswith("the request waited in the queue for more than 5 s; no free row: 1 of 1 in use, ")
    assert delta.bill is not None
    assert delta.bill.queued_us == 6_000_000


def test_long_waits_are_noted_once() -> None:
    driver = Driver(make_limits(max_num_seqs=1), pipeline_depth=0)
    driver.now = 10.0
    for name in "abc":
        driver.add(make_request(name, [1, 2, 3], 4))
    driver.step()
    assert late_reasons(driver.scheduler, 14.0, 5.0, 10) == {}
    assert len(late_reasons(driver.scheduler, 16.0, 5.0, 1)) == 1
    assert [r.request_id for r in late_reasons(driver.scheduler, 16.0, 5.0, 10)] == ["c"]
    assert late_reasons(driver.scheduler, 20.0, 5.0, 10) == {}
    driver.run()
    assert driver.bills["a", 0].waited_for == ""
    assert driver.bills["b", 0].waited_for.startswith("no free row: 1 of 1")


def test_the_list_is_bounded_and_filtered() -> None:
    driver = Driver(make_limits(max_num_seqs=2), pipeline_depth=0)
    driver.now = 5.0
    for i in range(20):
        driver.add(make_request(f"f:{i}:client-{i}", [i, 2, 3], 6, tenant="t"))
    driver.add(make_request("f:20:slow", [1, 2], 6))
    driver.scheduler.pause("f:20:slow")
    driver.step()

    def ask(**fields: object) -> RequestList:
        return list_requests(driver.scheduler, ListRequests(7, **fields), 8.0)  # type: ignore[arg-type]

    answer = ask()
    assert (answer.number, answer.has_more, len(answer.sequences)) == (7, False, 21)
    assert (answer.num_running, answer.num_waiting, answer.num_paused) == (2, 18, 1)
    first = answer.sequences[0]
    assert (first.state, first.row, first.num_pages, first.num_output_tokens, first.age) == ("running", 0, 1, 1, 3.0)
    assert ask(most=5).has_more
    assert len(ask(most=5).sequences) == 5
    assert [each.state for each in ask(state="paused").sequences] == ["paused"]
    assert [each.request_id for each in ask(request_id="client-7").sequences] == ["f:7:client-7"]
    assert all(each.reason for each in ask(state="waiting").sequences)
