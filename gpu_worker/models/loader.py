"""From a checkpoint to a model: checks first, then its tensors, converted on the way."""

import importlib
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
from penstock.core.checkpoint.families.registry import expected_tensors, family_of, parse_model_config
from penstock.core.checkpoint.model_config import ModelConfig
from penstock.core.checkpoint.registry import open_checkpoint
from penstock.core.checkpoint.source import Checkpoint, StoredTensor
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.models.weights import WeightReader

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
    """Read and check the configuration of the checkpoint at this path.

    Raises:
        ConfigError: for what this engine does not support.
    """
    return parse_model_config(open_checkpoint(path).config)


def load_model(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: Device) -> Model:
    """Load the weights.

    Args:
        checkpoint: the source of the weights.
        config: of the model.
        dtype: as in `WeightReader`.
        device: where the model runs.

    Raises:
        LoadError: if files or tensors are missing, unexpected or of the wrong shape.
    """
    expected = expected_tensors(config)
    shapes = expected or {}
    found = {} if expected == {} else model_tensors(checkpoint, config)
    is_bf16 = all(found[name].dtype == "BF16" for name in shapes)
    with _progress(len(shapes)) as advance:

        def read(name: str) -> Tensor:
            advance()
            return _tensor(found[name])

        reader = WeightReader(read, shapes, is_bf16, dtype, device.torch_device, device.library, checkpoint)
        return _build(config, reader)


def dummy_model(config: ModelConfig, dtype: torch.dtype, device: Device) -> Model:
    """Random weights of the right shapes, the same ones each time; arguments as in `load_model`."""
    on = device.torch_device
    shapes = expected_tensors(config) or {}
    generator = torch.Generator(device=on).manual_seed(0)

    def read(name: str) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shapes[name], dtype=dtype, device=on)
        return torch.empty(shapes[name], dtype=dtype, device=on).normal_(0.0, _DUMMY_STD, generator=generator)

    is_bf16 = config.checkpoint_dtype == "bfloat16"
    return _build(config, WeightReader(read, shapes, is_bf16, dtype, device.torch_device, device.library))


def _build(config: ModelConfig, reader: WeightReader) -> Model:
    module, _, function = family_of(config).build.partition(":")
    build: Callable[[ModelConfig, WeightReader], Model] = getattr(importlib.import_module(module), function)
    return build(config, reader)


def _tensor(stored: StoredTensor) -> Tensor:
    """The same as a torch tensor, in the file's own memory if possible."""
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
