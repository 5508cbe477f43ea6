"""The engine in process as the worker's tests use it: small, and looked at after every run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.in_process import InProcessEngine
from penstock.ipc.messages import SamplingParams, SequenceDelta
from penstock.options import config_of

_SMALL = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "page_size": 16, "pipeline_depth": 0}
_ON_CPU = {"device": "cpu", "dtype": "float32", "num_pages": 400, "num_threads": 1}


def make_config(folder: Path, **options: Any) -> Config:
    """A small configuration."""
    return config_of({"model": str(folder)} | _SMALL | _ON_CPU | options, {})


def schedule(budget: int, page_size: int, depth: int, *, num_tokens: int, cached: bool = False) -> dict[str, Any]:
    """Options that shape the schedule; `num_tokens` is the pool's size."""
    return {
        "max_num_batched_tokens": budget,
        "page_size": page_size,
        "pipeline_depth": depth,
        "enable_prefix_caching": cached,
        "num_pages": -(-num_tokens // page_size),
    }


class Engine(InProcessEngine):
    """Runs requests to their end; `run` may be called again, with what the prefix cache then holds."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(make_config(folder, **options))
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.last_delta: dict[tuple[str, int], SequenceDelta] = {}

    def run(
        self, prompts: Sequence[list[int]], sampling: SamplingParams | Sequence[SamplingParams], n: int = 1
    ) -> list[list[list[int]]]:
        """All at once; the output tokens by prompt and sequence."""
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        ids = [self.add(prompt, params, n) for prompt, params in zip(prompts, each, strict=True)]
        self.drain()
        return [[self.outputs[request_id, i] for i in range(n)] for request_id in ids]

    def add(self, prompt: Sequence[int], sampling: SamplingParams, n: int = 1, adapter: str = "") -> str:
        """Queue one request; its id."""
        request_id = super().add(prompt, sampling, n, adapter)
        for i in range(n):
            self.outputs[request_id, i] = []
        return request_id

    def make_ready(self) -> None:
        """Let the worker make what waiting requests need beside steps."""
        while self.scheduler.parts.num_in_making:
            self._order(before_plan=True)
            self._exchange([], seconds=1.0)

    def drain(self) -> None:
        """Plan and answer until every request is finished; then nothing may be held."""
        while self.has_work:
            for delta in self.step().deltas:
                self._take(delta)
        stats = self.scheduler.stats()
        assert stats.num_used_pages == 0
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages

    def _take(self, delta: SequenceDelta) -> None:
        key = (delta.request_id, delta.sequence_idx)
        assert delta.finish_reason != "error", delta.error
        self.outputs[key].extend(delta.token_ids)
        self.last_delta[key] = delta
