"""A case's texts through an engine in this process."""

from pathlib import Path
from typing import Any

import numpy as np

from penstock.ipc.messages import SamplingParams, SequenceDelta, WindowGroup
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.families.case import Case
from tests.gpu_worker.families.checkpoints import Answer, Reference
from tests.gpu_worker.families.schedules import Schedule

NUM_NEW = 16
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, num_logprobs=0)
_ROOMY = 800  # tokens in the pool, for each page group


class Scored(Engine):
    """Keeps the log-probabilities of what it generates."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.logprobs: dict[str, list[float]] = {}

    def answers(self, texts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[Answer]:
        """All at once; what follows each."""
        ids = [self.add(text, sampling) for text in texts]
        self.drain()
        return [self.answer(request_id) for request_id in ids]

    def answer(self, request_id: str) -> Answer:
        """What followed one text."""
        return Answer(self.outputs[request_id, 0], self.logprobs.get(request_id, []))

    def _take(self, delta: SequenceDelta) -> None:
        super()._take(delta)
        if delta.logprobs is not None:
            found = np.frombuffer(delta.logprobs.logprobs, np.float32)
            self.logprobs.setdefault(delta.request_id, []).extend(found.tolist())


def texts_of(case: Case) -> list[list[int]]:
    """The case's prompts."""
    return prompts(case.lens, seed=1)


def check(reference: Reference, run: Schedule, **options: Any) -> None:
    """Run a case's texts through a schedule, and compare with the reference; `options` are the engine's.

    `kind` among them is another class of engine.
    """
    texts = texts_of(reference.case)
    engine = engine_of(reference, run, options)
    groups = engine.hello.window_groups
    batches = [texts] if run.together else [[text] for text in texts]
    for _ in range(1 + run.cached):
        for batch in batches:
            for text, answer in zip(batch, engine.answers(batch), strict=True):
                assert len(answer.tokens) == NUM_NEW
                if difference := reference.errors(text, answer):
                    raise AssertionError(f"{run}: {difference}")
    stats = engine.scheduler.stats()
    if engine.hello.state_bytes and not engine.hello.num_snapshots:
        assert stats.num_cached_tokens == 0
    elif run.cached and not run.tight:
        page_size = max(run.page_size, *(group.page_size for group in groups), 1)  # where all groups can start
        assert stats.num_cached_tokens >= sum((len(text) - 1) // page_size * page_size for text in texts)
    if run.tight and not groups:  # what lies behind a window is free again: then there is no need
        assert stats.num_preemptions > 0


def engine_of(reference: Reference, run: Schedule, options: dict[str, Any]) -> Scored:
    """An engine with the pool that a schedule asks for."""
    roomy = _engine(reference, run._replace(tight=False), (), options)  # a tight pool may be too small for windows
    groups = roomy.hello.window_groups
    return _engine(reference, run, groups, options) if run.tight or groups else roomy


def _engine(reference: Reference, run: Schedule, groups: tuple[WindowGroup, ...], options: dict[str, Any]) -> Scored:
    """Its pool has room for all, or hardly more than the longest text needs, so that the others have to yield to it."""
    longest = max(reference.case.lens) + NUM_NEW
    shape = schedule(
        run.budget, run.page_size, run.depth, num_tokens=longest if run.tight else _ROOMY, cached=run.cached
    )
    # As many as the scheduler counts with for each window.
    for_windows = [2 + -(-(group.window + run.page_size) // group.page_size) for group in groups]
    shape["num_pages"] += sum(for_windows) if run.tight else len(groups) * shape["num_pages"]
    kind: type[Scored] = options.get("kind", Scored)
    return kind(reference.folder, **shape, **{name: its for name, its in options.items() if name != "kind"})
