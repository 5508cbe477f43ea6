"""The ranks of a group as real processes, and an engine in this process whose plans they compute."""

import multiprocessing
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from penstock.config import Config
from penstock.core.scheduling.scheduler import Scheduler
from penstock.ipc.messages import StepPlan, StepResult, WorkerHello
from tests.gpu_worker.engine_in_process import make_config
from tests.gpu_worker.families.run import Scored
from tests.gpu_worker.parallel.rank_process import RankReport, serve_rank

_PATIENCE = 120  # seconds for an answer


class Group:
    """Processes, kept for many models."""

    def __init__(self, num_ranks: int) -> None:
        context = multiprocessing.get_context("forkserver")
        pairs = [context.Pipe() for _ in range(num_ranks)]
        self._channels = [own for own, _ in pairs]
        self._processes = [
            context.Process(target=serve_rank, args=(its, number, num_ranks), daemon=True)
            for number, (_, its) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        for _, its in pairs:
            its.close()
        self._folder = tempfile.TemporaryDirectory()
        self._num_starts = 0
        self.reports: list[RankReport] = []

    def start(self, config: Config) -> WorkerHello:
        """Load a model; the group's hello."""
        self._num_starts += 1
        meeting = f"file://{self._folder.name}/{self._num_starts}"
        self.reports = self.ask(replace(config, ipc=replace(config.ipc, rendezvous_address=meeting)))
        return next(report.hello for report in self.reports if report.hello.answers)

    def ask(self, message: object) -> list[Any]:
        """Tell all ranks; what each of them answers."""
        for channel in self._channels:
            channel.send(message)
        answers = []
        for channel in self._channels:
            assert channel.poll(_PATIENCE), "a rank does not answer"
            answers.append(channel.recv())
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def close(self) -> None:
        """End the processes."""
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            process.join(5)
            process.kill()
        self._folder.cleanup()


@contextmanager
def groups() -> Iterator["Groups"]:
    """Groups of any size, started when they are first needed."""
    found = Groups()
    try:
        yield found
    finally:
        for group in found.by_size.values():
            group.close()


class Groups:
    """See `groups`."""

    def __init__(self) -> None:
        self.by_size: dict[int, Group] = {}

    def of(self, num_ranks: int) -> Group:
        """The group of so many ranks."""
        if num_ranks not in self.by_size:
            self.by_size[num_ranks] = Group(num_ranks)
        return self.by_size[num_ranks]


class _Launched(NamedTuple):
    answer: StepResult

    def result(self) -> StepResult:
        return self.answer


class _Runner:
    """Sends a plan to all ranks, and has the answer of the one that answers."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def launch(self, plan: StepPlan) -> _Launched:
        answers = self._group.ask(plan)
        (its,) = (answer for answer, report in zip(answers, self._group.reports, strict=True) if report.hello.answers)
        return _Launched(its)


class GroupEngine(Scored):
    """An engine whose model is spread over a group."""

    def __init__(self, folder: Path, *, group: Group, **options: Any) -> None:
        config = make_config(folder, **options)
        self.hello = group.start(config)
        self.runner: Any = _Runner(group)
        self.use([])
        self.scheduler = Scheduler.for_worker(config, self.hello)
        self._pending = deque()
        self._num_added = 0
        self.outputs, self.last_delta, self.logprobs = {}, {}, {}
