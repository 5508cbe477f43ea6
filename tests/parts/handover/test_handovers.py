"""Two schedulers over fake workers, one computing prompts for the other: under aborts, pauses, deaths of each process
and any lag every sequence has its solo output, and every page is free or cached afterwards, on both sides.

The fake workers' memories hold tokens, so a page that is read too early or too late, filled while somebody else has it,
or put at a wrong place, changes every token after it.
"""

import os
from collections import deque
from dataclasses import replace
from importlib.util import find_spec, module_from_spec
from random import Random

import msgspec
import pytest

import tests.core.driver
from penstock.core.scheduling.invariants import check_invariants
from penstock.core.sequences.limits import WorkerLimits
from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.ipc.messages import AbortRequest, AddRequest, HandoverReleased, HandoverTaken, KVSource, SequenceDelta
from penstock.parts.handover.messages import KVReceived, OfferKV, ReceiveKV, StopReceivingKV
from penstock.parts.handover.scheduler import arrivals
from penstock.parts.handover.scheduler.arrivals import Arrivals
from penstock.parts.handover.scheduler.handovers import Handovers
from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_worker import solo_run
from tests.core.kv.test_window_pages import window_limits
from tests.core.scheduling.test_scheduler_traces import check_outputs, random_limits
from tests.parts.host.test_host_moves import returning_requests, with_host

NUM_SEEDS = 900 if "PENSTOCK_SOAK" in os.environ else 18
AT = "prefill"  # the address
US = b"decode engine"
SOURCES = (KVSource("nowhere", (), (), {}),)
Page = tuple[int, int]  # page group, index


def of(driver: Driver) -> Handovers:
    """Both sides of one of the engines."""
    handovers = driver.scheduler.parts.get(Handovers)
    assert handovers is not None
    return handovers


class Transfer:
    """What the decode engine's worker has to fill, and knows of the other side."""

    def __init__(self, message: ReceiveKV, num_sent: int) -> None:
        numbers = list(unpack_int32(message.pages))
        self.missing: dict[Page, int] = {
            (numbers[i], numbers[i + 1]): numbers[i + 2] for i in range(0, len(numbers), 3)
        }
        self.num_sent = num_sent  # plans before it
        self.offered: dict[Page, int] = {}
        self.num_pages = len(self.missing)


class Pair:
    """A decode engine and a prefill engine, and all that is on its way between them."""

    def __init__(self, of_decode: WorkerLimits, of_prefill: WorkerLimits, rng: Random) -> None:
        self.rng = rng
        self.peers: dict[str, tuple[KVSource, ...] | None] = {}
        self.decode = Driver(of_decode, peers=self.peers, min_prefill_tokens=of_decode.page_size)
        self.prefill = Driver(of_prefill)
        self.to_prefill: deque[AddRequest | AbortRequest | HandoverTaken] = deque()
        self.to_decode: deque[SequenceDelta | HandoverReleased] = deque()
        self.offers: list[tuple[OfferKV, int]] = []  # with the plans before it
        self.transfers: dict[str, Transfer] = {}
        self.num_taken = 0
        self.num_deaths = 0

    def connect(self) -> None:
        self.peers[AT] = SOURCES
        self._arrivals.peers_changed()

    @property
    def _arrivals(self) -> Arrivals:
        return of(self.decode).arrivals

    # --- what the engines' loops do ---------------------------------------------------------

    def collect(self) -> None:
        """Take what the schedulers want to be sent."""
        ours = of(self.decode)
        self.to_prefill += [order.message for order in ours.take_orders()]
        for message in ours.arrivals.take_messages():
            if isinstance(message, ReceiveKV):
                self.transfers[message.handover_id] = Transfer(message, self.decode.num_sent)
            else:
                self.answer(message.handover_id, "not wanted")
        self.prefill.take_orders()
        self.offers += [(offer, self.prefill.num_sent) for offer in self.prefill.offers]
        self.prefill.offers.clear()

    def plan(self, driver: Driver) -> bool:
        has_planned = driver.schedule() is not None
        self.collect()
        return has_planned

    def work(self, driver: Driver) -> None:
        """Let a worker compute, or a result return."""
        if driver.plans and (not driver.results or self.rng.random() < 0.5):
            driver.execute()
        elif driver.results:
            for owner, deltas in driver.process().items():
                self.tell(owner, deltas)

    def tell(self, owner: bytes, deltas: list[SequenceDelta]) -> None:
        self.to_decode += [delta for delta in deltas if owner == US and delta.finish_reason]

    def look(self) -> None:
        """The decode engine's worker hears of offers, at any time after they are computed."""
        for offer, num_before in self.offers:
            transfer = self.transfers.get(offer.handover_id)
            if transfer is not None and self.prefill.num_executed >= num_before:
                numbers = list(unpack_int32(offer.pages))
                for i in range(0, len(numbers), 3):
                    transfer.offered[numbers[i], numbers[i + 1]] = numbers[i + 2]

    def read(self) -> None:
        """It reads some page, as it is now."""
        for handover_id, transfer in list(self.transfers.items()):
            readable = [page for page in transfer.missing if page in transfer.offered]
            if not readable or self.decode.num_executed < transfer.num_sent:
                continue
            page = self.rng.choice(readable)
            theirs, ours = transfer.offered[page], transfer.missing.pop(page)
            source, to = self.prefill.worker, self.decode.worker
            size = source.page_size
            to.memory[ours * size : (ours + 1) * size] = source.memory[theirs * size : (theirs + 1) * size]
            for offset in range(source.max_page_size):
                to.window_memory.pop((ours, offset), None)
                if (theirs, offset) in source.window_memory:
                    to.window_memory[ours, offset] = source.window_memory[theirs, offset]
            if not transfer.missing:
                self.answer(handover_id)
            return

    def answer(self, handover_id: str, error: str = "") -> None:
        transfer = self.transfers.pop(handover_id, None)
        if transfer is not None:
            self._arrivals.received(KVReceived(handover_id, 0 if error else transfer.num_pages, error))
            check_invariants(self.decode.scheduler)

    def deliver(self) -> None:
        """One message between the schedulers arrives."""
        departures = of(self.prefill).departures
        if self.to_prefill and self.rng.random() < 0.5:
            message = self.to_prefill.popleft()
            match message:
                case AddRequest():
                    refusal = self.prefill.scheduler.add_request(message, US, self.prefill.now)
                    if refusal is not None:
                        self.to_decode.append(SequenceDelta(message.request_id, 0, (), "error", error=refusal.reason))
                    else:
                        self.prefill.added[message.request_id] = (message, US)
                case AbortRequest():
                    if message.request_id in self.prefill.scheduler.requests:
                        self.prefill.abort(message.request_id)
                    else:
                        departures.leave(message.request_id, US)
                case HandoverTaken():
                    self.to_decode.append(
                        HandoverReleased(message.request_id, departures.taken(message.request_id, US))
                    )
            check_invariants(self.prefill.scheduler)
        elif self.to_decode:
            told = self.to_decode.popleft()
            if isinstance(told, HandoverReleased):
                self.num_taken += told.is_right
                self._arrivals.released(told)
            else:
                self._arrivals.computed(told.request_id, told.error, told.num_cached_tokens)
            check_invariants(self.decode.scheduler)

    # --- deaths -------------------------------------------------------------------------------

    def lose_prefill_worker(self) -> None:
        """Its scheduler computes anew what was in flight; handovers have failed."""
        self.num_deaths += 1
        driver = self.prefill
        driver.plans.clear()
        driver.results.clear()
        told = driver.scheduler.reset_worker(now=driver.now)
        driver.take_bills()
        for owner, deltas in told.items():
            self.tell(owner, deltas)
        driver.take(told)
        driver.worker = type(driver.worker)(driver.limits)
        driver.num_sent = driver.num_executed = 0
        self.offers.clear()
        self.collect()

    def lose_prefill_engine(self) -> None:
        """Scheduler and worker: its connection breaks, and an empty one comes back."""
        self.num_deaths += 1
        self.to_prefill.clear()
        self.to_decode.clear()
        self.offers.clear()
        self.prefill = Driver(self.prefill.limits)
        self.peers[AT] = ()
        self._arrivals.peers_changed()
        check_invariants(self.decode.scheduler)
        self.collect()
        self.to_prefill.clear()
        if self.rng.random() < 0.8:
            self.connect()

    def lose_decode_worker(self) -> None:
        self.num_deaths += 1
        self.transfers.clear()
        self.decode.reset_worker()
        self.collect()

    def lose_decode_engine(self) -> None:
        """The prefill engine aborts what it had for it; the frontend submits all again."""
        self.num_deaths += 1
        self.to_prefill.clear()
        self.to_decode.clear()
        self.transfers.clear()
        self.prefill.scheduler.abort_owner(US, self.prefill.now)
        self.prefill.aborted.update((name, 0) for name in self.prefill.added)
        self.prefill.take_bills()
        check_invariants(self.prefill.scheduler)
        self.decode.restart_scheduler()
        self.collect()

    @property
    def is_done(self) -> bool:
        busy = self.decode.scheduler.has_work or self.prefill.scheduler.has_work
        under_way = (
            *self.to_prefill, *self.to_decode, *self.transfers, *self.decode.plans, *self.decode.results,
            *self.prefill.plans, *self.prefill.results,
        )  # fmt: skip
        return not busy and not under_way

    def turn(self) -> None:
        """Something happens."""
        match self.rng.randrange(7):
            case 0 | 1:
                driver = self.rng.choice([self.decode, self.prefill])
                self.plan(driver)
                self.work(driver)
            case 2:
                self.look()
            case 3:
                self.read()
            case 4:
                self.collect()
            case _:
                self.deliver()
        self.decode.now += 0.001
        self.prefill.now += 0.001

    def finish(self) -> None:
        for _ in range(200_000):
            self.collect()
            if self.is_done:
                return
            self.turn()
            for driver in (self.decode, self.prefill):
                while self.rng.random() < 0.5 and driver.prepare():
                    pass
        raise AssertionError("no end")


def trace(seed: int, *, with_deaths: bool = True) -> Pair:
    rng = Random(seed)
    kind = (random_limits, with_host(random_limits), window_limits, with_host(window_limits))[seed % 4]
    of_decode = replace(kind(rng), hands_over=True)
    of_prefill = replace(
        of_decode,
        max_num_seqs=rng.choice([1, 2, 8]),
        max_num_batched_tokens=rng.choice([1, 3, 16, 100]),
        num_pages=of_decode.num_pages + rng.choice([0, 3, 100]),
    )
    pair = Pair(of_decode, of_prefill, rng)
    requests = returning_requests(rng, of_decode)
    waiting = deque(msgspec.structs.replace(request, prefill_at=(AT,)) for request in requests)
    paused: list[str] = []
    pair.peers[AT] = None
    connects_at = rng.choice([0, 20])
    for number in range(100_000):
        if number == connects_at:
            pair.connect()
        if waiting and rng.random() < 0.1:
            assert pair.decode.add(waiting.popleft()) is None
        live = list(pair.decode.scheduler.requests)
        if live and rng.random() < 0.01:
            pair.decode.abort(rng.choice(live))
        if live and rng.random() < 0.01:
            paused.append(rng.choice(live))
            pair.decode.scheduler.pause(paused[-1], pair.decode.now)
        if paused and rng.random() < 0.1:
            pair.decode.scheduler.resume(paused.pop())
        if with_deaths and pair.num_deaths < 3 and rng.random() < 0.004:
            rng.choice([
                pair.lose_prefill_worker, pair.lose_prefill_engine, pair.lose_decode_worker, pair.lose_decode_engine,
            ])()  # fmt: skip
        pair.turn()
        for driver in (pair.decode, pair.prefill):
            if rng.random() < 0.3:
                driver.prepare()
        if not waiting and pair.is_done:
            break
    for name in paused:
        pair.decode.scheduler.resume(name)
    pair.finish()
    check_outputs(pair.decode, list(requests))
    for driver in (pair.decode, pair.prefill):
        driver.check_idle()
    assert not of(pair.decode).arrivals.holders()
    return pair


@pytest.mark.parametrize("first_seed", range(0, NUM_SEEDS, 6))
def test_every_sequence_has_its_solo_output(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 6):
        try:
            trace(seed)
        except BaseException as error:
            error.add_note(f"trace of seed {seed}")
            raise


def test_the_traces_reach_what_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.core.driver, "check_invariants", lambda scheduler: None)  # they take most of the time
    pairs = [trace(seed) for seed in range(12)]
    assert sum(pair.num_taken for pair in pairs) > 30
    assert sum(pair.num_deaths for pair in pairs) > 5
    stats = [of(pair.decode).stats() for pair in pairs]
    assert sum(each.num_failed for each in stats) > 2


def pair_of(num_pages: int) -> Pair:
    made = make_limits(num_pages, 4, hands_over=True)
    pair = Pair(made, made, Random(1))
    pair.connect()
    return pair


def test_pages_move_once_and_prefixes_on_both_sides_are_used() -> None:
    pair = pair_of(num_pages=64)
    prompt = list(range(30))
    request = make_request("a", prompt, 5)
    assert pair.decode.add(msgspec.structs.replace(request, prefill_at=(AT,))) is None
    pair.finish()
    assert pair.decode.outputs["a", 0] == solo_run(prompt, request.sampling, 0, pair.decode.limits)
    ours, theirs = (of(driver).stats() for driver in (pair.decode, pair.prefill))
    assert (ours.num_received, ours.num_received_pages, ours.num_received_bytes) == (1, 7, 7)
    assert (theirs.num_sent, theirs.num_sent_pages, theirs.num_kept_pages) == (1, 7, 0)
    assert pair.prefill.worker.num_computed == 28
    assert pair.decode.worker.num_computed == 2 + 4, "the last tokens of the prompt, and the outputs but the last"
    assert pair.decode.num_cached["a", 0] == 0, "nothing of it was cached anywhere"
    # What this side has is not sent again; what that side has is not computed again.
    longer = [*prompt[:28], *range(100, 120)]
    request = make_request("b", longer, 1)
    assert pair.decode.add(msgspec.structs.replace(request, prefill_at=(AT,))) is None
    pair.finish()
    ours, theirs = (of(driver).stats() for driver in (pair.decode, pair.prefill))
    assert (ours.num_received_pages, theirs.num_sent_pages) == (7 + 4, 7 + 4)
    assert pair.prefill.worker.num_computed == 28 + 16
    assert pair.decode.num_cached["b", 0] == 28
    pair.decode.scheduler.reset_prefix_cache()
    request = make_request("c", [*longer, 7], 1)
    assert pair.decode.add(msgspec.structs.replace(request, prefill_at=(AT,))) is None
    pair.finish()
    ours = of(pair.decode).stats()
    assert ours.num_received_pages == 11 + 12
    assert pair.prefill.worker.num_computed == 28 + 16 + 4, "all but the last page was cached there"


def test_a_prompt_that_lacks_little_is_computed_here() -> None:
    pair = pair_of(num_pages=64)
    for number, request in enumerate(
        (make_request("a", [1, 2, 3, 4], 2), make_request("b", list(range(40)), 2, prompt_logprobs=0))
    ):
        assert pair.decode.add(msgspec.structs.replace(request, prefill_at=(AT,))) is None
        pair.finish()
        assert pair.prefill.num_sent == 0, f"request {number}"


def test_a_request_for_pages_is_refused_without_a_role() -> None:
    driver = Driver(make_limits())
    refusal = driver.add(msgspec.structs.replace(make_request("a", [1, 2, 3]), handover_from=0))
    assert refusal is not None
    assert "--role" in refusal.reason


def test_a_wrong_answer_is_not_believed() -> None:
    """Nobody can take pages of a handover that is another one's, or take them before they are there."""
    pair = pair_of(num_pages=64)
    message = AddRequest("x", pack_int32(range(30)), make_request("x", [1]).sampling, handover_from=0)
    assert pair.prefill.scheduler.add_request(message, US) is None
    departures = of(pair.prefill).departures
    assert not departures.taken("x", US)
    assert not departures.taken("x", b"other")
    assert not departures.taken("y", US)
    pair.prefill.abort("x")
    check_invariants(pair.prefill.scheduler)


def test_an_engine_that_has_answered_is_not_waited_for() -> None:
    """It was refused, or is lost: only for the first answer of an engine requests wait, and once."""
    pair = pair_of(num_pages=64)
    pair.peers[AT] = ()
    assert pair.decode.add(msgspec.structs.replace(make_request("a", list(range(30)), 2), prefill_at=(AT,))) is None
    assert pair.decode.schedule() is not None
    pair.finish()
    pair.peers[AT] = None
    assert pair.decode.add(msgspec.structs.replace(make_request("b", list(range(50, 80)), 2), prefill_at=(AT,))) is None
    pair.decode.schedule()
    request = pair.decode.scheduler.requests["b"]
    assert not request.running
    pair.decode.now += arrivals.CONNECT_SECONDS + 0.01
    pair.decode.schedule()
    assert not request.prefill_at
    pair.finish()


def test_pages_that_never_come_are_not_waited_for_without_an_end() -> None:
    pair = pair_of(num_pages=64)
    prompt = list(range(30))
    request = make_request("a", prompt, 5)
    assert pair.decode.add(msgspec.structs.replace(request, prefill_at=(AT,))) is None
    pair.decode.schedule()
    (message,) = of(pair.decode).arrivals.take_messages()
    assert isinstance(message, ReceiveKV)
    ours = of(pair.decode).arrivals
    assert ours.computed(message.handover_id, "")
    assert ours.wakes_at == pair.decode.now + arrivals.READ_SECONDS
    pair.decode.schedule()
    assert ours.num_waiting == 1
    pair.decode.now += arrivals.READ_SECONDS + 0.01
    pair.decode.schedule()
    check_invariants(pair.decode.scheduler)
    assert ours.num_waiting == 0
    (stop,) = ours.take_messages()
    assert isinstance(stop, StopReceivingKV)
    assert "did not come" in ours.received(KVReceived(message.handover_id, error="it is not wanted any more"))
    pair.to_prefill.clear()
    of(pair.decode).take_orders()
    pair.finish()
    assert pair.decode.outputs["a", 0] == solo_run(prompt, request.sampling, 0, pair.decode.limits)


def test_decode_engines_do_not_use_the_same_names() -> None:
    spec = find_spec(arrivals.__name__)
    assert spec is not None
    assert spec.loader is not None
    other = module_from_spec(spec)  # as in another process
    spec.loader.exec_module(other)
    assert next(arrivals._names).rpartition("-")[0] != next(other._names).rpartition("-")[0]


def test_room_is_made_for_pages_from_the_host_too() -> None:
    """Pages of a window are copied from there before it is found that the new prompt leaves them behind."""
    made = make_limits(20, 4, windows=[(4, 8)], num_host_pages=40, hands_over=True)
    pair = Pair(made, made, Random(1))
    pair.connect()
    prompt = list(range(20))
    assert pair.decode.add(make_request("a", prompt, 1)) is None
    pair.finish()
    kv = pair.decode.scheduler.kv
    assert kv.reserve(kv.num_available), "all that is cached goes to the host"
    assert pair.decode.add(make_request("b", list(range(50, 74)), 1)) is None
    pair.finish()
    longer = make_request("c", [*prompt, *range(100, 132)], 1)
    assert pair.decode.add(msgspec.structs.replace(longer, prefill_at=(AT,))) is None
    pair.finish()
    assert of(pair.decode).stats().num_received == 1
    assert pair.decode.outputs["c", 0] == solo_run([*prompt, *range(100, 132)], longer.sampling, 0, made)


def test_a_prompt_that_came_is_billed_even_if_its_pages_were_given_up() -> None:
    made = make_limits(64, 4, max_num_seqs=1, hands_over=True)
    pair = Pair(made, made, Random(1))
    pair.connect()
    ours = of(pair.decode).arrivals
    assert pair.decode.add(msgspec.structs.replace(make_request("a", list(range(30)), 5), prefill_at=(AT,))) is None
    pair.decode.schedule()
    assert pair.decode.add(make_request("other", [1, 2, 3], 100)) is None
    while not any(each.is_there for each in ours.holders()):
        pair.turn()
    [arrival] = ours.holders()
    arrival.device_us = 5e6
    ours.unpin()
    check_invariants(pair.decode.scheduler)
    assert not ours.holders()
    pair.finish()
    assert pair.decode.num_cached["a", 0] == 0, "its pages were still here, but the other engine had computed them"
    assert pair.decode.bills["a", 0].device_us >= 5e6


def test_pages_that_come_while_the_next_one_lacks_pages_are_not_kept_from_it() -> None:
    """If nothing runs, nothing else would end its wait."""
    pair = pair_of(num_pages=17)
    prompt, large = list(range(33)), make_request("large", list(range(500, 530)), 20)
    assert pair.decode.add(msgspec.structs.replace(make_request("a", prompt, 5), prefill_at=(AT,))) is None
    pair.decode.schedule()
    assert pair.decode.add(large) is None
    for _ in range(20):
        pair.decode.schedule()
        if pair.decode.plans:
            pair.decode.execute()
            pair.decode.process()
    [seq] = pair.decode.scheduler.requests["large"].waiting
    assert not seq.is_new, "it has lost its row"
    pair.finish()
    for request in (large, make_request("a", prompt, 5)):
        expected = solo_run(unpack_int32(request.prompt_token_ids).tolist(), request.sampling, 0, pair.decode.limits)
        assert pair.decode.outputs[request.request_id, 0] == expected


def test_an_engine_that_computes_for_others_does_not_wait_for_them_without_an_end() -> None:
    """It has got another role while others compute for it: two engines could wait for each other's pages."""
    driver = Driver(make_limits(17, 4, hands_over=True), peers={AT: SOURCES}, min_prefill_tokens=4)
    for number in range(2):
        prompt = range(100 * number, 100 * number + 33)
        assert driver.add(msgspec.structs.replace(make_request(f"{number}", prompt, 2), prefill_at=(AT,))) is None
    driver.schedule()
    ours = of(driver).arrivals
    assert [type(each) for each in ours.take_messages()] == [ReceiveKV, ReceiveKV]
    assert driver.scheduler.kv.num_available == 1
    assert driver.add(msgspec.structs.replace(make_request("theirs", range(500, 540), 1), handover_from=0)) is None
    stopped: list[str] = []
    for _ in range(4):
        driver.schedule()
        for message in ours.take_messages():
            assert isinstance(message, StopReceivingKV)
            stopped.append(message.handover_id)
            ours.received(KVReceived(message.handover_id, error="it is not wanted any more"))
            check_invariants(driver.scheduler)
    assert len(stopped) == 1, "no more than necessary"
    assert driver.plans, "something is computed"
