"""The two-deque driver: plans not yet executed, results not yet processed; invariants after every call."""

import dataclasses
from array import array
from collections import deque
from collections.abc import Iterable
from functools import partial
from math import inf

from msgspec.structs import replace

from penstock.config import Config
from penstock.config.options import SchedulerOptions
from penstock.core.scheduling.invariants import check_invariants
from penstock.core.scheduling.scheduler import Deltas, Refusal, ScheduledStep, Scheduler
from penstock.core.sequences.limits import WorkerLimits
from penstock.ipc.codec import deltas_of, pack_int32, unpack_int32
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    AddRequest,
    KVSource,
    SamplingParams,
    SequenceBill,
    SequenceDelta,
    SequenceProgress,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WindowGroup,
    WorkerHello,
)
from penstock.parts.batching.options import BatchingOptions
from penstock.parts.disk.messages import DropStoredKV, LoadKV, StoreKV
from penstock.parts.disk.scheduler.moves import DiskMoves
from penstock.parts.drafts.scheduler.lengths import FixedLengths
from penstock.parts.grammars.scheduler import GrammarGate
from penstock.parts.handover.messages import OfferKV
from penstock.parts.handover.scheduler.handovers import Handovers, Peers
from penstock.parts.host.options import HostOptions
from penstock.parts.images.scheduler import ImageGate
from penstock.parts.policies.options import PolicyOptions
from tests.core.fake_worker import FakeWorker, Guess, Scores
from tests.parts.disk.fake_disk import FakeDisk
from tests.parts.drafts.lengths import drafting_of

OWNER = b"frontend"
SequenceName = tuple[str, int]
PAGE_BYTES = 1000
EMBEDDING_BYTES = 10


def make_limits(
    num_pages: int = 64,
    page_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    vocab_size: int = 1000,
    windows: Iterable[tuple[int, int]] = (),
    num_host_pages: int = 0,
    num_disk_places: int = 0,
    hands_over: bool = False,
    max_embedding_bytes: int = 0,
    images_are_whole: bool = False,
    num_snapshots: int = -1,
) -> WorkerLimits:
    """`windows`: tokens of a page and of the window, of each page group beside the first.

    `num_snapshots`: of the states that rows have; -1: they have none.
    """
    groups = tuple(WindowGroup(page_size, window) for page_size, window in windows)
    return WorkerLimits(
        num_pages,
        page_size,
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        vocab_size,
        groups,
        num_host_pages=num_host_pages,
        page_bytes=PAGE_BYTES,
        num_disk_places=num_disk_places,
        hands_over=hands_over,
        max_embedding_bytes=max_embedding_bytes,
        embedding_bytes=EMBEDDING_BYTES,
        images_are_whole=images_are_whole,
        has_states=num_snapshots >= 0,
        num_snapshots=max(0, num_snapshots),
    )


def hello(limits: WorkerLimits) -> WorkerHello:
    return WorkerHello(
        protocol_version=PROTOCOL_VERSION,
        name="w",
        rank=0,
        model_fingerprint="m",
        device="cpu",
        dtype="float32",
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        page_size=limits.page_size,
        num_pages=limits.num_pages,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        window_groups=limits.window_groups,
        num_host_pages=limits.num_host_pages,
        page_bytes=limits.page_bytes,
        host_copy_speed=limits.host_copy_speed,
        num_disk_places=limits.num_disk_places,
        num_stages=limits.num_stages,
        max_drafts=limits.max_drafts,
        drafter="oracle" if limits.max_drafts else "",
        max_embedding_bytes=limits.max_embedding_bytes,
        embedding_bytes=limits.embedding_bytes,
        images_are_whole=limits.images_are_whole,
        num_snapshots=limits.num_snapshots,
        state_bytes=int(limits.has_states),
        kv_sources=(KVSource("nowhere", (), (), {}),) if limits.hands_over else (),
    )


def make_request(
    request_id: str,
    prompt: Iterable[int],
    max_tokens: int = 8,
    *,
    n: int = 1,
    seed: int = 0,
    min_tokens: int = 0,
    stop: tuple[int, ...] = (),
    priority: int = 0,
    salt: str = "",
    num_logprobs: int = -1,
    prompt_logprobs: int = -1,
    grammar: str = "",
    grammar_bytes: int = 0,
    tenant: str = "",
    group: str = "",
    seconds_left: float = 0.0,
    weight: float = 1.0,
    ttft_left: float = 0.0,
    tpot: float = 0.0,
    max_drafts: int = -1,
    is_background: bool = False,
) -> AddRequest:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        min_tokens=min_tokens,
        stop_token_ids=stop,
        num_logprobs=num_logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        grammar_bytes=grammar_bytes,
        max_drafts=max_drafts,
    )
    return AddRequest(
        request_id,
        pack_int32(prompt),
        sampling,
        n,
        priority,
        salt,
        tenant=tenant,
        group=group,
        seconds_left=seconds_left,
        weight=weight,
        ttft_left=ttft_left,
        tpot=tpot,
        is_background=is_background,
    )


def scores_in(table: TokenLogprobs) -> list[Scores]:
    """One entry per token of a delta's log-probabilities."""
    ranks = unpack_int32(table.ranks)
    ids, values = unpack_int32(table.token_ids), array("f", table.logprobs)
    width = len(ids) // len(ranks)
    assert len(values) == len(ids) == width * len(ranks) > 0
    return [
        Scores(list(ids[i * width : (i + 1) * width]), list(values[i * width : (i + 1) * width]), rank)
        for i, rank in enumerate(ranks)
    ]


def make_config(**options: object) -> Config:
    """Options of the scheduler, of its host tier, and of the parts that order its requests."""
    of_host, of_policy, of_batching = (
        {name: options.pop(name) for name in kind.__struct_fields__ if name in options}
        for kind in (HostOptions, PolicyOptions, BatchingOptions)
    )
    config = Config(scheduler=SchedulerOptions(**options))  # type: ignore[arg-type]
    config = config.with_options(HostOptions(**of_host))  # type: ignore[arg-type]
    return config.with_options(PolicyOptions(**of_policy), BatchingOptions(**of_batching))  # type: ignore[arg-type]


def make_scheduler(config: Config, limits: WorkerLimits, *, peers: Peers | None = None) -> Scheduler:
    """`peers`: prefill engines, as `Arrivals` knows them."""
    scheduler = Scheduler(config, limits)
    if limits.max_drafts:
        drafting_of(scheduler).lengths = FixedLengths(limits.max_drafts)
    handovers = scheduler.parts.get(Handovers)
    if peers is not None and handovers is not None:
        handovers.arrivals.peers = peers
    return scheduler


class Driver:
    """A scheduler and a fake worker, with as much lag between them as the caller lets there be."""

    def __init__(
        self,
        limits: WorkerLimits | None = None,
        *,
        guess: Guess | None = None,
        max_drafts: int = 3,
        num_stages: int = 1,
        peers: Peers | None = None,
        **options: object,
    ) -> None:
        """`guess`: of the worker's drafter, if it has one."""
        max_drafts = 0 if guess is None else max_drafts
        self.limits = dataclasses.replace(limits or make_limits(), num_stages=num_stages, max_drafts=max_drafts)
        options = {"max_num_seqs": 4096, "max_num_batched_tokens": 1 << 20} | options
        config = make_config(**options)
        self.options = config.scheduler
        self.make_scheduler = partial(make_scheduler, config, peers=peers)
        self.scheduler = self.make_scheduler(WorkerLimits.of(self.options, hello(self.limits)))
        self.guess = guess
        self.worker = FakeWorker(self.limits, guess)
        self.disk = FakeDisk(self.limits.num_disk_places, seed=self.limits.num_pages + self.limits.num_host_pages)
        self.disk.begin()
        self.num_sent = self.num_executed = 0  # plans
        self.num_accepted = 0  # drafts
        self.plans: deque[StepPlan] = deque()
        self.results: deque[StepResult] = deque()
        self.offers: list[OfferKV] = []  # of pages to other engines, until somebody takes them
        self.steps: list[ScheduledStep] = []
        self.outputs: dict[SequenceName, list[int]] = {}
        self.finished: dict[SequenceName, SequenceDelta] = {}
        self.num_cached: dict[SequenceName, int] = {}
        self.late: dict[str, str] = {}  # why a request was served behind others
        self.aborted: set[SequenceName] = set()
        self.logprobs: dict[SequenceName, list[Scores]] = {}  # of output tokens
        self.prompt_logprobs: dict[SequenceName, list[Scores]] = {}
        self.added: dict[str, tuple[AddRequest, bytes]] = {}
        self.num_resumed = 0  # sequences that had outputs
        self.totals = [self.scheduler.totals]  # of each scheduler
        self.num_deaths = 0  # of workers
        self.bills: dict[SequenceName, SequenceBill] = {}
        self.now = 0.0  # seconds; the test lets time pass

    def add(self, request: AddRequest, owner: bytes = OWNER) -> Refusal | None:
        refusal = self.scheduler.add_request(request, owner, self.now)
        check_invariants(self.scheduler)
        if refusal is None:
            self.added[request.request_id] = (request, owner)
        return refusal

    def abort(self, request_id: str, sequence_idx: int = -1) -> None:
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            for seq in [*request.running, *request.waiting]:
                if sequence_idx in (-1, seq.sequence_idx):
                    self.aborted.add((request_id, seq.sequence_idx))
        self.scheduler.abort(request_id, sequence_idx, self.now)
        self.take_bills()
        check_invariants(self.scheduler)

    def take_bills(self) -> None:
        """The last deltas of aborted sequences."""
        for deltas in self.scheduler.accounts.take_bills().values():
            for delta in deltas:
                name = (delta.request_id, delta.sequence_idx)
                assert (name in self.aborted, delta.finish_reason, delta.token_ids) == (True, "abort", ())
                self._note_bill(name, delta)

    def _note_bill(self, name: SequenceName, delta: SequenceDelta) -> None:
        assert delta.bill is not None
        assert name not in self.bills, "one bill each"
        self.bills[name] = delta.bill

    def schedule(self) -> ScheduledStep | None:
        step = self.scheduler.schedule(self.now, with_record=True)
        self.take(self.scheduler.take_ended())
        check_invariants(self.scheduler)
        if step is not None:
            self.plans.append(step.plan)
            self.num_sent += 1
            self.steps.append(step)
        if (disk := self.scheduler.parts.get(DiskMoves)) is not None:
            messages = disk.take_behind_plan()
            moves = [message for message in messages if isinstance(message, StoreKV | LoadKV | DropStoredKV)]
            self.disk.take(moves, self.num_sent)
        self.take_orders()
        return step

    def take_orders(self) -> None:
        messages = self.scheduler.take_messages(before_plan=True)
        self.offers += [message for message in messages if isinstance(message, OfferKV)]
        self.worker.take_orders(messages)

    def prepare(self) -> bool:
        """Let the worker make one grammar ready, or fail to; False if it is asked for none."""
        if self.worker.to_encode:
            self.take(self.scheduler.answered(self.worker.encode()))
            check_invariants(self.scheduler)
            return True
        if not self.worker.asked:
            return False
        self.take(self.scheduler.answered(self.worker.prepare()))
        check_invariants(self.scheduler)
        return True

    @property
    def can_move(self) -> bool:
        """Whether the disk has something to do, or to tell."""
        return self.scheduler.parts.get(DiskMoves) is not None and self.disk.can_answer(self.num_executed)

    def move(self) -> None:
        """Let the disk do or tell one thing."""
        answer = self.disk.answer(self.worker, self.num_executed)
        if answer is not None:
            self.scheduler.answered(answer)
        check_invariants(self.scheduler)

    def execute(self) -> None:
        self.num_executed += 1
        num_before = self.worker.num_accepted
        self.results.append(self.worker.execute(self.plans.popleft()))
        self.num_accepted += self.worker.num_accepted - num_before

    def process(self) -> Deltas:
        told = self.scheduler.process(self.results.popleft(), self.now)
        self.take_bills()
        deltas = {owner: list(deltas_of(batch)) for owner, batch in told.items()}
        self.take(deltas)
        check_invariants(self.scheduler)
        return deltas

    def take(self, deltas: Deltas) -> None:
        for owner_deltas in deltas.values():
            for delta in owner_deltas:
                name = (delta.request_id, delta.sequence_idx)
                assert name not in self.finished, "a delta after the last one"
                assert name not in self.aborted, "a delta after the abort"
                if delta.logprobs is not None:
                    scores = scores_in(delta.logprobs)
                    assert [score.token_ids[0] for score in scores] == list(delta.token_ids)
                    self.logprobs.setdefault(name, []).extend(scores)
                if delta.prompt_logprobs is not None:
                    assert name not in self.outputs, "the prompt's come with the first token at the latest"
                    self.prompt_logprobs.setdefault(name, []).extend(scores_in(delta.prompt_logprobs))
                    if not delta.token_ids:
                        continue
                if name not in self.outputs:
                    self.num_cached[name] = delta.num_cached_tokens
                    if delta.late:
                        self.late[name[0]] = delta.late
                self.outputs.setdefault(name, []).extend(delta.token_ids)
                if delta.finish_reason is not None:
                    self.finished[name] = delta
                    self._note_bill(name, delta)

    def step(self) -> bool:
        """Fill the pipeline, then let one step return; False if nothing is left to do."""
        while self.schedule() is not None:
            pass
        if not self.plans and not self.results and self.prepare():
            return True
        if not self.plans and not self.results and self.can_move:
            self.move()
            return True
        if not self.plans and not self.results and self.scheduler.wakes_at < inf:
            assert self.now < self.scheduler.wakes_at
            self.now = self.scheduler.wakes_at
            return True
        if not self.plans and not self.results:
            assert not self.scheduler.has_work, "work is left, but nothing is scheduled or in flight"
            return False
        if self.plans:
            self.execute()
        self.process()
        return True

    def run(self, max_steps: int = 100_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                self.check_idle()
                return
        raise AssertionError("no end")

    def reset_worker(self, limits: WorkerLimits | None = None, *, has_died: bool = True) -> None:
        self.num_deaths += 1
        self.plans.clear()
        self.results.clear()
        if limits is None:
            self.take(self.scheduler.reset_worker(has_died=has_died, now=self.now))
        else:
            self.limits = limits = dataclasses.replace(limits, max_drafts=self.limits.max_drafts)
            self.take(self.scheduler.reset_worker(hello(limits), has_died=has_died, now=self.now))
        self.take_bills()
        self.worker = FakeWorker(self.limits, self.guess)
        self._begin_disk()
        check_invariants(self.scheduler)

    def _begin_disk(self) -> None:
        self.num_sent = self.num_executed = 0
        self.disk.begin()

    def restart_scheduler(self) -> None:
        """Scheduler and worker die; the frontends give another one all that is not finished, with what they have."""
        self.plans.clear()
        self.results.clear()
        self.worker = FakeWorker(self.limits, self.guess)
        self._begin_disk()
        self.scheduler = self.make_scheduler(WorkerLimits.of(self.options, hello(self.limits)))
        self.totals.append(self.scheduler.totals)
        for request_id, (request, owner) in self.added.items():
            names = [(request_id, idx) for idx in range(request.n)]
            live = [name for name in names if name not in self.finished and name not in self.aborted]
            if live:
                progress = tuple(
                    SequenceProgress(
                        name[1], pack_int32(self.outputs.get(name, ())), len(self.prompt_logprobs.get(name, ()))
                    )
                    for name in live
                )
                refusal = self.scheduler.add_request(replace(request, progress=progress), owner, self.now)
                assert refusal is None, refusal
                self.num_resumed += sum(name in self.outputs for name in live)
        check_invariants(self.scheduler)

    def check_idle(self) -> None:
        stats = self.scheduler.stats()
        assert stats.num_running == stats.num_waiting == stats.num_used_pages == 0
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        if self.scheduler.kv.tiers is not None:
            assert self.scheduler.kv.tiers.host.num_held == 0
        if (disk := self.scheduler.parts.get(DiskMoves)) is not None:
            assert not disk.fetches()
            assert disk.disk.num_moving == 0
        assert self.scheduler.running.num_free_rows == self.limits.max_num_seqs
        assert not self.scheduler.requests
        grammars = self.scheduler.parts.get(GrammarGate)
        assert grammars is not None
        assert not len(grammars)
        self.take_orders()
        assert not self.worker.grammars
        if (images := self.scheduler.parts.get(ImageGate)) is not None:
            assert not images.asking()
            images.drop_unused()
            assert not len(images), "nobody needs an embedding any more"
            self.take_orders()
            assert not self.worker.embeddings
