"""The first part of a start: a device, and the weights on it."""

import time
from typing import NamedTuple

import structlog
import torch
from msgspec.structs import replace

from penstock.config import Config
from penstock.config.ranks import Rank
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.devices.open import choose_dtype, open_device
from penstock.gpu_worker.devices.out_of_memory import no_memory_for
from penstock.gpu_worker.models.adapters import Adapters
from penstock.gpu_worker.models.loading.loader import dummy_model, load_model
from penstock.gpu_worker.models.loading.stored import BytesRead
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.parallel.open import open_ranks
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.gpu_worker.startup.identity import reading_weights
from penstock.gpu_worker.startup.memory_ledger import MemoryLedger
from penstock.gpu_worker.startup.step_limits import with_limits
from penstock.gpu_worker.state.kv_pool import KVType, kv_name
from penstock.gpu_worker.steps.ahead import AheadPart, Target, load_ahead
from penstock.kernels.attention.kv_quantization import KV_FORMATS
from penstock.models.described import model_config_of
from penstock.models.description.decoder import Decoder
from penstock.models.description.model_config import ModelConfig
from penstock.models.files.source import Checkpoint
from penstock.models.finding.registry import open_model
from penstock.models.kv_formats import kv_format_of
from penstock.models.shards.rank_part import rank_part
from penstock.models.state_limits import check_states
from penstock.models.vision.foreign import ForeignVision

log = structlog.get_logger()


class Loaded(NamedTuple):
    """A model on its device, and what serves it."""

    config: Config  # with the sizes that the options left to the device
    checkpoint: Checkpoint
    part: ModelConfig  # of the model: that of this rank
    model: Model
    device: Device
    ranks: Ranks
    dtype: torch.dtype
    kv_type: KVType
    weights: str  # digest of what was read
    ahead: AheadPart
    bytes_read: int  # of the checkpoint's tensors
    seconds: float
    ledger: MemoryLedger
    adapters: Adapters


def load(config: Config, rank: Rank) -> Loaded:
    """Open the device, and read this rank's part of the weights.

    Raises:
        ConfigError: if the configuration or the checkpoint cannot work.
    """
    began = time.monotonic()
    worker, checkpoint = config.worker, open_model(config)
    has_weights, adapters = worker.load_format != "dummy", Adapters()
    whole = model_config_of(checkpoint, config.model.model_impl, worker.quantization, with_weights=has_weights)
    sees_nothing = any(options.reads_no_images for options in config.of_parts())
    if sees_nothing and isinstance(whole, Decoder) and isinstance(whole.vision, ForeignVision):
        whole = replace(whole, vision=None)  # so transformers, too, need not be there, nor be imported
    check_states(whole, config)
    part = rank_part(whole, config.parallel, rank.number)
    device = open_device(worker.device, worker.num_threads, worker.cpu_kernels, rank.cores)
    ledger = MemoryLedger(device)
    ranks = open_ranks(config, rank.number, device.torch_device, device.library)
    device.adapt_to(4 * part.num_step_weights)
    is_quantized = device.library is not None and part.quantization is not None
    dtype = choose_dtype(worker.dtype, part.checkpoint_dtype, device.torch_device, is_quantized=is_quantized)
    kv_format = kv_format_of(worker.kv_cache_dtype, part)
    log.info(
        "loading",
        model=str(checkpoint.path),
        architecture=part.architecture,
        device=str(device.torch_device),
        dtype=kv_name(dtype),
        **({} if part.quantization is None else {"quantization": part.quantization.name}),
    )
    bytes_read = BytesRead(with_digest=not ranks.place.is_alone)
    with (
        reading_weights(checkpoint, part, worker.load_format, bytes_read) as weights_digest,
        no_memory_for("the weights", "choose a smaller --dtype, a smaller model or another --device"),
    ):
        if has_weights:
            model = load_model(checkpoint, part, dtype, device, kv_format, ranks, bytes_read, adapters)
        else:
            model = dummy_model(part, dtype, device, ranks, adapters)
        weights = weights_digest()
    kv_type = dtype if kv_format is None else KV_FORMATS[kv_format]
    config = with_limits(config, part, kv_type, device, ranks)
    ahead = load_ahead(Target(config, part, model, dtype, device))
    device.give_back()
    ledger.note("weights")
    return Loaded(
        config, checkpoint, part, model, device, ranks, dtype, kv_type, weights, ahead, bytes_read.total,
        time.monotonic() - began, ledger, adapters,
    )  # fmt: skip
