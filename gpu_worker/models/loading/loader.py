"""From a checkpoint to a model: check it first, then read its tensors and convert them."""

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import structlog
import torch
from tqdm import tqdm

from penstock.config.options import ConfigError
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.adapters import Adapters
from penstock.gpu_worker.models.loading.making import Maker
from penstock.gpu_worker.models.loading.random_weights import RandomWeights
from penstock.gpu_worker.models.loading.stored import BytesRead, StoredWeights, as_tensor
from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.parallel.alone import ALONE
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.kernels.attention.kv_quantization import KVScales
from penstock.kernels.quantized.weight import QuantizedWeight
from penstock.models.check import ModelTensors, model_tensors
from penstock.models.described import model_config_of
from penstock.models.description.decoder import Decoder
from penstock.models.description.model_config import ModelConfig
from penstock.models.families.registry import expected_matrices, expected_tensors, family_of
from penstock.models.files.source import Checkpoint, LoadError, StoredTensor
from penstock.models.finding.registry import open_checkpoint
from penstock.models.formats.kv_scales import scale_names
from penstock.models.kv_formats import KVFormatName
from penstock.models.quantization import recipes_of
from penstock.models.shards.shard import whole_of
from penstock.models.shards.sources import own_tensors
from penstock.models.weights.sources import Cut

log = structlog.get_logger()

_PROGRESS_INTERVAL = 5.0  # seconds between log lines while loading


def load_model_config(path: Path) -> ModelConfig:
    """Read and check the configuration of the checkpoint at this path.

    Raises:
        ConfigError: the checkpoint has something that this engine does not support.
    """
    return model_config_of(open_checkpoint(path))


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    kv_format: KVFormatName | None = None,
    ranks: Ranks = ALONE,
    bytes_read: BytesRead | None = None,
    adapters: Adapters | None = None,
) -> Model:
    """Load the weights.

    Args:
        checkpoint: the source of the weights.
        config: of the model, or of a rank's part of it.
        dtype: as in `WeightReader`.
        device: where the model runs.
        kv_format: the format of KV; the checkpoint's scales are used if they are for this format.
        ranks: the ranks that load the model's parts at the same time.
        bytes_read: counts the bytes that are read.
        adapters: gets the sites of the model's products.

    Raises:
        LoadError: if files or tensors are missing, unexpected or of the wrong shape.
    """
    whole = whole_of(config)
    expected = expected_tensors(whole)
    tensors = ModelTensors({}, {}, {}) if expected == {} else model_tensors(checkpoint, whole)
    stored, formats, _ = tensors
    own = own_tensors(config) if isinstance(config, Decoder) else expected or {}
    is_bf16 = all(_is_bf16(stored[name], is_quantized=bool(formats)) for name in own if name not in formats)
    with _progress(len(own)) as advance:
        weights = StoredWeights(tensors, expected_matrices(whole), advance, bytes_read)
        make = Maker(whole, weights.read, ranks, device.torch_device)

        def read_quantized(name: str, cut: Cut) -> QuantizedWeight | None:
            return weights.read_quantized(name, cut) if name in formats else make(name, cut)

        def kv_scales(attention: str) -> KVScales | None:
            if kv_format is None or kv_format != config.kv_scales:
                return None
            k, v = _kv_scale(stored, attention, "k"), _kv_scale(stored, attention, "v")
            return None if k is None or v is None else KVScales(k, v)

        reader = WeightReader(
            weights.read,
            is_bf16,
            dtype,
            device.torch_device,
            device.library,
            checkpoint,
            read_quantized,
            kv_scales,
            adapters=adapters,
            ranks=ranks,
        )
        return _build(config, reader)


def dummy_model(
    config: ModelConfig, dtype: torch.dtype, device: Device, ranks: Ranks = ALONE, adapters: Adapters | None = None
) -> Model:
    """Random weights of the right shapes, the same ones each time; arguments as in `load_model`."""
    if config.quantization is not None and not recipes_of(config):
        raise ConfigError(
            f"--load-format dummy makes weights of floats, but config.json asks for {config.quantization.name}"
        )
    on, whole = device.torch_device, whole_of(config)
    weights = RandomWeights(expected_tensors(whole) or {}, dtype, on)
    is_bf16 = config.checkpoint_dtype == "bfloat16"
    make = Maker(whole, weights.read, ranks, on)
    reader = WeightReader(
        weights.read, is_bf16, dtype, on, device.library, read_quantized=make, adapters=adapters, ranks=ranks
    )
    return _build(config, reader)


def _build(config: ModelConfig, reader: WeightReader) -> Model:
    module, _, function = family_of(config).build.partition(":")
    build: Callable[[ModelConfig, WeightReader], Model] = getattr(importlib.import_module(module), function)
    return build(config, reader)


def _kv_scale(stored: Mapping[str, StoredTensor], attention: str, which: Literal["k", "v"]) -> float | None:
    """The scale of an attention's keys or values; None if there is no single scale for all of them."""
    name = next((its for its in scale_names(attention, which) if its in stored), None)
    if name is None or stored[name].num_elements != 1:
        return None
    scale = float(as_tensor(stored[name]))
    if not 0 < scale < float("inf"):
        raise LoadError(f"the weights are damaged: {name} is {scale:g}")
    return scale


def _is_bf16(stored: StoredTensor, *, is_quantized: bool) -> bool:
    """Whether a tensor counts as bf16. Without quantized weights, this includes fp32 vectors that bf16 holds exactly.

    GGUF files have all vectors in fp32.
    """
    if stored.dtype == "F32" and len(stored.shape) == 1 and not is_quantized:
        return not int(as_tensor(stored).view(torch.int32).bitwise_and(0xFFFF).max())
    return stored.dtype == "BF16"


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on a terminal, otherwise a log line every few seconds."""
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
