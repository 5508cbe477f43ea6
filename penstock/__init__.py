"""Penstock, an LLM inference engine: `from penstock import LLM, SamplingParams`.

Names are imported on first use, so the processes of a server and `penstock --help` load none of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.async_llm import AsyncLLM
    from penstock.config import ConfigError
    from penstock.frontend.errors import ApiError
    from penstock.llm import LLM
    from penstock.lora_request import LoRARequest
    from penstock.outputs import (
        BatchError,
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from penstock.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "ApiError",
    "AsyncLLM",
    "BatchError",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "Logprob",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "ApiError": "frontend.errors",
    "ConfigError": "config",
    "LoRARequest": "lora_request",
    **dict.fromkeys(
        (
            "BatchError",
            "BeamSearchOutput",
            "BeamSearchSequence",
            "ClassificationRequestOutput",
            "CompletionOutput",
            "EmbeddingRequestOutput",
            "Logprob",
            "PoolingRequestOutput",
            "RequestOutput",
            "ScoringRequestOutput",
        ),
        "outputs",
    ),
    **dict.fromkeys(
        ("BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"), "sampling_params"
    ),
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
