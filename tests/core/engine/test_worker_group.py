"""Two fake ranks behind real sockets: one plan for both, one answer, one death."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from random import Random

import pytest
import zmq
from msgspec.structs import replace

from penstock.config import Config, IpcOptions
from penstock.config.parts import with_parts
from penstock.core.engine import worker_group
from penstock.core.engine.loop import Engine
from penstock.core.scheduling.answers import FromAll
from penstock.ipc.channel import Dealer
from penstock.ipc.codec import Codec, deltas_of, pack_int32, unpack_int32
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    AddRequest,
    EngineReady,
    EngineStats,
    FrontendHello,
    Heartbeat,
    Refused,
    SayHello,
    StepPlan,
    ToFrontend,
    TokenBatch,
    ToWorker,
    Welcome,
    WorkerFailed,
    WorkerHello,
)
from penstock.parts.experts.messages import ExpertTokens, LayerTokens
from penstock.parts.experts.scheduler import Experts
from penstock.parts.grammars.messages import GrammarPrepared, PrepareGrammar
from tests.core.driver import PAGE_BYTES, hello, make_limits, make_request
from tests.core.fake_worker import FakeWorker, solo_run

PROMPT, NUM_TOKENS = list(range(10)), 40
LIMITS = make_limits()


class RecordingCodec(Codec[ToWorker]):
    """Keeps the bytes of plans."""

    def __init__(self) -> None:
        super().__init__(with_parts(ToWorker, "TO_WORKER"))
        self.plans: list[bytes] = []

    def decode(self, frame: bytes | memoryview) -> ToWorker:
        message = super().decode(frame)
        if isinstance(message, StepPlan):
            self.plans.append(bytes(frame))
        return message


class Rank:
    """A fake worker at its own socket. Ranks other than 0 answer, too, with tokens that nobody drew."""

    def __init__(self, group: "Group", rank: int, pid: int, /, **changes: object) -> None:
        self.codec = RecordingCodec()
        own = {"name": f"w{rank}", "rank": rank, "pid": pid, "num_ranks": 2, "answers": rank == 0}
        self.hello = replace(hello(LIMITS), **(own | changes))
        self.num_welcomes = 0
        self.refusal = ""
        self.is_broken = False  # it was told to start again
        self.is_stuck = False
        self.waits_for_another = False  # in the middle of a step
        self.grammars: list[PrepareGrammar] = []
        self.on_plan: Callable[[Rank, StepPlan], None] | None = None
        self._limits = group.limits
        self.channel: Dealer[ToWorker] = Dealer(
            group.context, group.engine.workers.channel.address, f"w{rank}", self.codec, self._on_message
        )
        self.channel.send(self.hello)
        group.ranks.append(self)

    def _on_message(self, message: ToWorker) -> None:
        match message:
            case Welcome():
                self.num_welcomes += 1
                self.waits_for_another = False
                self._worker = FakeWorker(self._limits)
            case StepPlan() if self.on_plan is not None:
                self.on_plan(self, message)
            case StepPlan() if not self.is_stuck and not self.waits_for_another:
                result = self._worker.execute(message)
                if self.hello.rank:
                    tokens = [(token + 1) % LIMITS.vocab_size for token in unpack_int32(result.token_ids)]
                    result = replace(result, token_ids=pack_int32(tokens))
                self.channel.send(result)
            case PrepareGrammar():
                self._worker.take_orders([message])
                self._worker.prepare()
                self.grammars.append(message)
            case SayHello():
                self.is_broken = message.is_broken
                if not self.hello.was_welcomed:
                    self.channel.send(self.hello)
            case Refused():
                self.refusal = message.reason


class Group:
    """An engine, a frontend, and whatever ranks the test starts."""

    def __init__(self, folder: Path) -> None:
        options = IpcOptions(
            frontend_address=f"ipc://{folder}/f", worker_address=f"ipc://{folder}/w", max_heartbeat_interval=0.05
        )
        self.hung: list[int] = []
        self.engine = Engine(Config(ipc=options), self.hung.append)
        self._watch = asyncio.create_task(self.engine.watch())
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.ranks: list[Rank] = []
        self.limits = LIMITS
        self.news: list[ToFrontend] = []
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, str | None] = {}
        self.frontend: Dealer[ToFrontend] = Dealer(
            self.context, options.frontend_address, "f", Codec(ToFrontend), self._on_message
        )
        self.frontend.send(FrontendHello(PROTOCOL_VERSION, "f", "m"))

    def _on_message(self, message: ToFrontend) -> None:
        self.news.append(message)
        if isinstance(message, TokenBatch):
            for delta in deltas_of(message):
                self.outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
                if delta.finish_reason is not None:
                    self.ended[delta.request_id] = delta.finish_reason

    def start(self, *, pid: int = 100, **changes: object) -> tuple[Rank, Rank]:
        return Rank(self, 0, pid), Rank(self, 1, pid + 1, **changes)

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(12000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it does not come")

    @property
    def suspects(self) -> Collection[object]:
        """Requests over which a worker may have died."""
        scheduler = self.engine.scheduler
        return scheduler.suspects.requests if scheduler is not None else ()

    async def send(self, request: AddRequest) -> None:
        await self.until(lambda: any(isinstance(message, EngineReady) for message in self.news))
        self.frontend.send(request)

    async def check(self, *names: str) -> None:
        """The requests end, with the tokens that they would have alone."""
        await self.until(lambda: all(name in self.ended for name in names))
        for name in names:
            expected = solo_run(PROMPT, make_request(name, PROMPT, NUM_TOKENS).sampling, 0, LIMITS)
            assert (self.ended[name], self.outputs[name]) == ("length", expected)

    async def close(self) -> None:
        self._watch.cancel()
        self.frontend.close()
        for rank in self.ranks:
            rank.channel.close()
        self.context.term()
        self.engine.close()


@pytest.fixture
async def group(tmp_path: Path) -> AsyncIterator[Group]:
    group = Group(tmp_path)
    yield group
    await group.close()


async def test_all_ranks_get_the_same_bytes_and_the_first_one_answers(group: Group) -> None:
    first, second = group.start()
    await group.send(make_request("a", PROMPT, NUM_TOKENS))
    await group.check("a")
    await group.until(lambda: len(second.codec.plans) == len(first.codec.plans))
    assert len(first.codec.plans) >= NUM_TOKENS
    assert first.codec.plans == second.codec.plans
    assert (first.num_welcomes, second.num_welcomes) == (1, 1)


async def test_nothing_starts_before_all_are_there_and_sizes_are_the_least_of_all(group: Group) -> None:
    group.limits = make_limits(20, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=60)
    Rank(group, 1, 7, num_pages=20, max_num_batched_tokens=16)
    await asyncio.sleep(0.2)
    assert not any(isinstance(message, EngineReady) for message in group.news)
    Rank(group, 0, 8, max_num_seqs=3, max_model_len=60)
    await group.send(make_request("a", PROMPT, NUM_TOKENS))
    await group.check("a")
    told = next(message for message in group.news if isinstance(message, EngineReady))
    assert (told.num_pages, told.max_num_seqs, told.max_model_len) == (20, 3, 60)
    assert group.engine.workers.hello is not None
    assert group.engine.workers.hello.page_bytes == 2 * PAGE_BYTES, "each has its part of a page"


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("how", ["fails", "leaves"])
async def test_the_death_of_one_ends_the_group_and_streams_go_on_with_the_next(
    group: Group, dies: int, how: str
) -> None:
    """The one that is left says hello again, and waits for a new neighbour."""
    ranks = group.start()

    def die(rank: Rank, plan: StepPlan) -> None:
        if plan.step_id < 5:
            rank.on_plan = None
            rank._on_message(plan)
            rank.on_plan = die
            return
        ranks[1 - dies].waits_for_another = True
        if how == "fails":
            rank.channel.send(WorkerFailed(plan.step_id, "device lost"))
            rank.on_plan = lambda rank, plan: None
        else:
            rank.channel.close()

    ranks[dies].on_plan = die
    for name in "ab":
        await group.send(make_request(name, PROMPT, NUM_TOKENS))
    await group.until(lambda: not group.engine.workers.is_ready and group.outputs)
    await asyncio.sleep(0.2)
    assert not group.engine.workers.is_ready
    assert group.ended == {}
    ranks[dies].channel.close()
    left, new = ranks[1 - dies], Rank(group, dies, 200)
    await group.check("a", "b")
    assert (left.num_welcomes, new.num_welcomes, left.refusal, new.refusal) == (2, 1, "", "")
    num_plans = len(new.codec.plans)
    assert left.codec.plans[-num_plans:] == new.codec.plans


async def test_a_rank_that_says_hello_again_takes_the_others_along(group: Group) -> None:
    """As after a connection that was lost: what it had in its rows is gone."""
    first, second = group.start()
    await group.send(make_request("a", PROMPT, NUM_TOKENS))
    await group.until(lambda: "a" in group.outputs)
    second.channel.send(second.hello)
    await group.check("a")
    assert (first.num_welcomes, second.num_welcomes) == (2, 2)


@pytest.mark.parametrize("was_welcomed", [True, False])
async def test_ranks_do_not_wait_for_others_that_are_left_in_a_step(
    group: Group, monkeypatch: pytest.MonkeyPatch, was_welcomed: bool
) -> None:
    """A scheduler has died while it sent a plan. Ranks of a group that begins may take any time."""
    monkeypatch.setattr(worker_group, "_GATHER_SECONDS", 0.1)
    first = Rank(group, 0, 100, was_welcomed=was_welcomed)
    await asyncio.sleep(0.4)
    assert first.is_broken == was_welcomed
    if was_welcomed:  # it has ended
        first.channel.close()
        Rank(group, 0, 200)
    Rank(group, 1, 201)
    await group.send(make_request("a", PROMPT, NUM_TOKENS))
    await group.check("a")


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_to_the_ranks_streams_say_the_same(group: Group, seed: int) -> None:
    rng = Random(seed)
    ranks, names = list(group.start()), [f"r{i}" for i in range(8)]
    for name in names[:4]:
        await group.send(make_request(name, PROMPT, NUM_TOKENS))
    for i in range(4):
        await asyncio.sleep(rng.random() / 20)
        # Whoever is in flight at one death after the other is held guilty, as he should be: each must prove innocent.
        await group.until(lambda: not group.suspects)
        number = rng.randrange(2)
        rank = ranks[number]
        match rng.choice(["fails", "leaves", "says hello", "both leave"]):
            case "fails":
                rank.channel.send(WorkerFailed(-1, "device lost"))
            case "leaves":
                rank.channel.close()
                await group.until(lambda: not group.engine.workers.is_ready)
                ranks[number] = Rank(group, number, 200 + i)
            case "says hello":
                rank.channel.send(rank.hello)
            case _:
                for each in ranks:
                    each.channel.close()
                await group.until(lambda: not group.engine.workers.is_ready)
                ranks = list(group.start(pid=1000 + 10 * i))
        group.frontend.send(make_request(names[4 + i], PROMPT, NUM_TOKENS))
        if ranks[number].channel.send(Heartbeat()):  # one that has failed is told to say hello
            await group.until(lambda: group.engine.workers.is_ready)
    await group.check(*names)
    assert group.engine.workers.hello is not None


async def test_a_stuck_step_is_judged_for_the_group(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.core.engine.worker_group.STEP_SECONDS", 0.3)
    monkeypatch.setattr("penstock.core.engine.worker_group.STEP_SECONDS_PER_TOKEN", 0.0)
    first, second = group.start()
    first.is_stuck = True  # the other one answers, which does not count
    await group.send(make_request("a", PROMPT, NUM_TOKENS))
    await group.until(lambda: len(group.hung) == 2)
    assert group.hung == [100, 101]
    first.channel.close()
    second.channel.close()
    group.start(pid=300)
    await group.check("a")


OTHERS: list[tuple[dict[str, object], str]] = [
    ({"model_fingerprint": "n"}, "model_fingerprint is n on rank 1, but m on rank 0"),
    ({"vocab_size": 999}, "vocab_size is 999 on rank 1, but 1000 on rank 0"),
    ({"page_size": 8}, "page_size is 8 on rank 1, but 4 on rank 0"),
    ({"num_ranks": 3}, "num_ranks is 3 on rank 1, but 2 on rank 0"),
    ({"rank": 2}, "there is no rank 2 in a group of 2"),
    ({"rank": 0}, "another worker is already serving"),
    ({"protocol_version": 1}, "protocol version 1 does not match the scheduler"),
]


@pytest.mark.parametrize(("changes", "reason"), OTHERS, ids=[next(iter(changes)) for changes, _ in OTHERS])
async def test_one_that_does_not_belong_is_refused_with_a_sentence(
    group: Group, changes: dict[str, object], reason: str
) -> None:
    first = Rank(group, 0, 100)
    await group.until(lambda: group.engine.workers._ranks)
    other = Rank(group, 1, 102, **changes)
    await group.until(lambda: other.refusal)
    assert reason in other.refusal
    other.channel.close()
    Rank(group, 1, 103)
    await group.send(make_request("a", PROMPT, NUM_TOKENS))
    await group.check("a")
    assert first.refusal == ""


async def test_a_grammar_is_ready_when_all_have_it(group: Group) -> None:
    first, second = group.start()
    await group.send(make_request("a", PROMPT, NUM_TOKENS, grammar="g"))
    await group.until(lambda: first.grammars and second.grammars)
    prepared = GrammarPrepared(first.grammars[0].grammar_id)
    first.channel.send(prepared)
    await asyncio.sleep(0.2)
    assert not first.codec.plans
    second.channel.send(prepared)
    await group.check("a")


async def test_a_grammar_that_one_rank_refuses_leaves_nothing_behind(group: Group) -> None:
    first, second = group.start()
    await group.send(make_request("a", PROMPT, NUM_TOKENS, grammar="g"))
    await group.until(lambda: first.grammars and second.grammars)
    grammar_id = first.grammars[0].grammar_id
    first.channel.send(GrammarPrepared(grammar_id, "it cannot be used"))
    answers = group.engine.workers._answers[GrammarPrepared]
    assert isinstance(answers, FromAll)
    await group.until(lambda: answers._failed)
    second.channel.send(GrammarPrepared(grammar_id))
    await group.until(lambda: not answers._failed)
    assert not answers._answers


async def test_what_ranks_say_of_themselves_is_added_up(group: Group) -> None:
    first, second = group.start()
    await group.send(make_request("a", PROMPT, NUM_TOKENS))
    first.channel.send(Heartbeat(1, 2, 30, 40))
    second.channel.send(Heartbeat(5, 6, 70, 80))

    def last() -> EngineStats | None:
        return next((message for message in reversed(group.news) if isinstance(message, EngineStats)), None)

    await group.until(lambda: (stats := last()) is not None and stats.device_memory_total == 120)
    stats = last()
    assert stats is not None
    assert (stats.num_dropped_by_worker, stats.num_log_lines_dropped_by_worker, stats.device_memory_used) == (6, 8, 100)


def test_a_hello_says_of_how_many() -> None:
    assert WorkerHello(PROTOCOL_VERSION, "w", 0, "m", "cpu", "float32", 100, 64, 4, 64, 8, 32).num_ranks == 1


async def test_a_rank_may_tell_of_its_experts_before_the_others_are_there(group: Group) -> None:
    """After a scheduler's restart, an idle rank tells what it computed last, while another one is left in a step."""
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    first = Rank(group, 0, 100)
    first.channel.send(ExpertTokens((LayerTokens(0, 2, {1: 5}),)))
    experts = group.engine.parts.get(Experts)
    assert experts is not None
    await group.until(lambda: errors or experts.stats())
    assert not errors
    assert experts.stats()["expert_tokens"] == {"0": 5}
