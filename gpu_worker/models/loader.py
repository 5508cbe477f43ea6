"""A checkpoint into a model: checks first, then its tensors, converted on the way."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
import torch
from torch import Tensor
from tqdm import tqdm

from penstock.core.checkpoint.check import model_tensors
from penstock.core.checkpoint.model_config import CLOCKWORK, ModelConfig, parse_model_config
from penstock.core.checkpoint.registry import open_checkpoint
from penstock.core.checkpoint.source import Checkpoint, StoredTensor
from penstock.core.checkpoint.tensors import expected_tensors
from penstock.gpu_worker.devices.device import multiplies_bf16_matrices
from penstock.gpu_worker.models import Model
from penstock.gpu_worker.models.clockwork import ClockworkModel
from penstock.gpu_worker.models.dense import DenseModel
from penstock.gpu_worker.models.native_dense import NativeDenseModel
from penstock.gpu_worker.models.weights import Read, build_weights
from penstock.kernels.native.library import Library

log = structlog.get_logger()

_DUMMY_STD = 0.02
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_PROGRESS_INTERVAL = 5.0  # seconds between log lines while loading


def load_model_config(path: Path) -> ModelConfig:
    """Read and check the configuration of the checkpoint that lies there.

    Raises:
        ConfigError: for what this engine does not support.
    """
    return parse_model_config(open_checkpoint(path).config)


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    library: Library | None = None,
) -> Model:
    """Load the weights.

    Args:
        checkpoint: where they are.
        config: of the model.
        dtype: of activations and KV, and of weights, but for what `library` allows.
        device: where they go.
        library: the CPU's own kernels, to make a model for them. They read bf16 weights as they are, whatever the
            dtype: that halves what a step reads, and loses nothing.

    Raises:
        LoadError: if files or tensors are missing, unexpected or of other shapes.
    """
    if config.architecture == CLOCKWORK:
        return ClockworkModel(checkpoint, config, dtype, device)
    expected = expected_tensors(config)
    found = model_tensors(checkpoint, config)
    with _progress(len(expected)) as advance:

        def read(name: str) -> Tensor:
            advance()
            return _tensor(found[name])

        is_bf16 = all(found[name].dtype == "BF16" for name in expected)
        return _make(config, dtype, device, read, library, is_bf16)


def dummy_model(config: ModelConfig, dtype: torch.dtype, device: torch.device, library: Library | None = None) -> Model:
    """Random weights of the right shapes, the same ones each time."""
    expected = expected_tensors(config)
    generator = torch.Generator(device=device).manual_seed(0)

    def read(name: str) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(expected[name], dtype=dtype, device=device)
        return torch.empty(expected[name], dtype=dtype, device=device).normal_(0.0, _DUMMY_STD, generator=generator)

    return _make(config, dtype, device, read, library, config.checkpoint_dtype == "bfloat16")


def _make(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    read: Read,
    library: Library | None,
    is_bf16: bool,
) -> Model:
    if library is None:
        return DenseModel(config, build_weights(config, dtype, device, read).in_memory())
    rounds_inputs = dtype == torch.bfloat16 and library.multiplies_bf16
    if dtype == torch.bfloat16 and multiplies_bf16_matrices():
        # Many times faster for long inputs than any other way, and torch alone knows it: the weights are there twice.
        dense = DenseModel(config, build_weights(config, dtype, device, read).in_memory())
        return NativeDenseModel(config, dense.weights, library, for_long_inputs=dense)
    stored = build_weights(config, torch.bfloat16 if is_bf16 else dtype, device, read, are_packed=True)
    return NativeDenseModel(config, stored, library, rounds_inputs=rounds_inputs)


def _tensor(stored: StoredTensor) -> Tensor:
    """The same, in the file's own memory where that can be."""
    dtype = _DTYPES[stored.dtype]
    data = torch.frombuffer(stored.read(), dtype=torch.uint8)
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(stored.shape)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, otherwise a log line every few seconds."""
    if sys.stderr.isatty():
        with tqdm(total=total, desc="Loading weights", unit="tensor", leave=False) as bar:
            yield lambda: bar.update() and None
        return
    done, last = 0, time.monotonic()

    def advance() -> None:
        nonlocal done, last
        done += 1
        now = time.monotonic()
        if now - last >= _PROGRESS_INTERVAL:
            last = now
            log.info("loading weights", tensors=done, of=total)

    yield advance
