"""The real scheduler and the real runner in one process, joined by a deque of unanswered plans."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.config import Config, ModelOptions, SchedulerOptions, WorkerOptions
from penstock.core.scheduling.scheduler import Scheduler
from penstock.gpu_worker.startup.start import start
from penstock.gpu_worker.steps.model_runner import PendingStep
from penstock.ipc.deltas import deltas_of
from penstock.ipc.messages import AddRequest, PrepareGrammar, SamplingParams, SequenceDelta


def make_config(folder: Path, **options: Any) -> Config:
    """A small configuration; options go to the group that has them."""
    groups: dict[str, dict[str, Any]] = {
        "model": {"model": str(folder)},
        "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 512, "page_size": 16, "pipeline_depth": 0},
        "worker": {"device": "cpu", "dtype": "float32", "num_pages": 400, "num_threads": 1},
    }
    structs: dict[str, Any] = {"model": ModelOptions, "scheduler": SchedulerOptions, "worker": WorkerOptions}
    for key, value in options.items():
        group = next(name for name, struct in structs.items() if key in struct.__struct_fields__)
        groups[group][key] = value
    return Config(**{name: struct(**groups[name]) for name, struct in structs.items()})


def schedule(budget: int, page_size: int, depth: int, *, num_tokens: int, cached: bool = False) -> dict[str, Any]:
    """Options that shape the schedule; `num_tokens` is the pool's size."""
    return {
        "max_num_batched_tokens": budget,
        "page_size": page_size,
        "pipeline_depth": depth,
        "enable_prefix_caching": cached,
        "num_pages": -(-num_tokens // page_size),
    }


class Engine:
    """Runs requests to their end; `run` may be called again, with what the prefix cache then holds."""

    def __init__(self, folder: Path, **options: Any) -> None:
        config = make_config(folder, **options)
        self.runner, self.hello = start(config, "test-worker")
        self.scheduler = Scheduler.for_worker(config.scheduler, self.hello)
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.last_delta: dict[tuple[str, int], SequenceDelta] = {}
        self._num_requests = 0

    def run(
        self, prompts: Sequence[list[int]], sampling: SamplingParams | Sequence[SamplingParams], n: int = 1
    ) -> list[list[list[int]]]:
        """All at once; the output tokens by prompt and sequence."""
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        ids = [self.add(prompt, params, n) for prompt, params in zip(prompts, each, strict=True)]
        self.drain()
        return [[self.outputs[request_id, i] for i in range(n)] for request_id in ids]

    def add(self, prompt: list[int], sampling: SamplingParams, n: int = 1) -> str:
        """Queue one request; its id."""
        request_id = f"r{self._num_requests}"
        self._num_requests += 1
        buffer = np.array(prompt, dtype=np.int32).tobytes()
        refusal = self.scheduler.add_request(AddRequest(request_id, buffer, sampling, n), owner=b"test")
        assert refusal is None, refusal
        for i in range(n):
            self.outputs[request_id, i] = []
        return request_id

    def drain(self) -> None:
        """Plan and answer until every request is finished; then nothing may be held."""
        pending: deque[PendingStep] = deque()
        while self.scheduler.has_work or pending:
            while self.scheduler.can_schedule:
                step = self.scheduler.schedule()
                self.exchange_grammars()
                if step is None:
                    break
                pending.append(self.runner.launch(step.plan))
            if not pending:
                continue  # a grammar has become ready
            for batch in self.scheduler.process(pending.popleft().result()).values():
                for delta in deltas_of(batch):
                    self._take(delta)
        stats = self.scheduler.stats()
        assert stats.num_used_pages == 0
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages

    def exchange_grammars(self) -> None:
        """Have the grammars ready that the scheduler asks for."""
        for message in self.scheduler.grammars.take_messages():
            if isinstance(message, PrepareGrammar):
                self.runner.grammar_store.prepare(message)
            else:
                self.runner.grammar_store.drop(message.grammar_id)
        for prepared in self.runner.grammar_store.take_prepared(wait=True):
            for deltas in self.scheduler.grammar_prepared(prepared).values():
                for delta in deltas:
                    self._take(delta)

    def _take(self, delta: SequenceDelta) -> None:
        key = (delta.request_id, delta.sequence_idx)
        assert delta.finish_reason != "error", delta.error
        self.outputs[key].extend(delta.token_ids)
        self.last_delta[key] = delta
