"""A model's logits at every position of a text, as the engine computes them: with its kernels, pages and formats."""

from typing import Any

import torch
from torch import Tensor

from penstock.in_process import InProcessEngine
from penstock.ipc.messages import SamplingParams
from penstock.options import config_of

_SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
_USUAL = {"max_num_seqs": 1, "enable_prefix_caching": False, "pipeline_depth": 0}


class ScoringEngine:
    """One text at a time, computed as a prompt whose log-probabilities are asked for."""

    def __init__(self, model: str, context: int, **options: Any) -> None:
        """Load a model.

        Raises:
            ConfigError: the options cannot work.
        """
        # A text is computed in several chunks: later ones read the keys and values of earlier ones from their pages,
        # as decoding does.
        sizes = {"max_model_len": context + 1, "max_num_batched_tokens": 128, "page_size": 16}
        sizes["num_pages"] = -(-(context + 1) // 16) + 1
        self._engine = InProcessEngine(config_of({"model": model} | _USUAL | sizes | options, {}))
        self._heard: list[Tensor] = []
        self._listen()

    @property
    def kernels(self) -> str:
        """What computes the model."""
        return self._engine.hello.kernels

    @property
    def dtype(self) -> str:
        """Of activations, and of what is not quantized."""
        return self._engine.hello.dtype

    def logits(self, token_ids: list[int]) -> Tensor:
        """fp32[T - 1, V], on the host: what follows each token but the last."""
        self._heard.clear()
        self._engine.add(token_ids, _SCORED)
        while self._engine.has_work:
            self._engine.step()
        heard = torch.cat(self._heard)
        return heard[: len(token_ids) - 1]

    def close(self) -> None:
        """Release what the engine holds."""
        self._engine.close()

    def _listen(self) -> None:
        """Keep the logits that the runner scores prompts by: they leave it as log-probabilities of single tokens."""
        model = self._engine.runner._model
        compute = model.logits

        def logits(hidden: Tensor) -> Tensor:
            found = compute(hidden)
            self._heard.append(found.detach().float().cpu().clone())
            return found

        model.logits = logits  # type: ignore[method-assign]
