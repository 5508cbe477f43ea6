"""Too little memory is one sentence that names what to change, wherever it shows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.config import ConfigError
from penstock.gpu_worker.devices.out_of_memory import failure_reason, is_out_of_memory
from penstock.gpu_worker.startup import pool
from penstock.gpu_worker.startup.start import start
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import make_config


def raise_out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def raise_in_turn(*_: Any, **__: Any) -> None:
    """A failed capture: what ends it fails too."""
    try:
        raise_out_of_memory()
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize("failure", [raise_out_of_memory, raise_in_turn])
@pytest.mark.parametrize(
    ("step", "flag"),
    [("loaded.load_model", "--dtype"), ("pool.KVPool", "--num-pages"), ("start.ModelRunner", "--max-model-len")],
)
def test_each_step_of_the_start(
    checkpoint: Callable[..., Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    flag: str,
    failure: Callable[..., None],
) -> None:
    monkeypatch.setattr(f"penstock.gpu_worker.startup.{step}", failure)
    with pytest.raises(ConfigError, match=f"^out of memory: .*{flag}"):
        start(make_config(checkpoint("llama")[0]))


def test_other_errors_are_not_taken_for_it(
    checkpoint: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(pool, "KVPool", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        start(make_config(checkpoint("llama")[0]))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_in_a_step(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert "--max-num-batched-tokens" in failure_reason(error)
