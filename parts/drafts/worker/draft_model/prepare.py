"""A draft model: from its checkpoint to a drafter. Every rank holds the whole draft model."""

import time
from pathlib import Path

import structlog

from penstock.config import ConfigError
from penstock.gpu_worker.devices.open import choose_dtype
from penstock.gpu_worker.models.loading.loader import dummy_model, load_model
from penstock.gpu_worker.state.kv_pool import KVType, kv_name, one_group
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.ahead import Computed, Target
from penstock.kernels.attention.kv_quantization import KV_FORMATS
from penstock.models.finding.registry import open_checkpoint
from penstock.models.kv_formats import kv_format_of
from penstock.parts.drafts.checkpoints.draft_model import draft_config
from penstock.parts.drafts.speculative import SpeculativeConfig
from penstock.parts.drafts.worker.draft_model.drafter import Bounds, DraftModel
from penstock.parts.drafts.worker.draft_model.passes import DraftPasses
from penstock.parts.drafts.worker.pages import DraftPages, draft_page_bytes
from penstock.parts.drafts.worker.prepared import Prepared

log = structlog.get_logger()


def prepare(speculative: SpeculativeConfig, target: Target) -> Prepared:
    """As `registry.Prepare`."""
    config, device = target.config, target.device
    began = time.monotonic()
    try:
        checkpoint = open_checkpoint(Path(speculative.model))
        parsed = draft_config(config, speculative, checkpoint)
        dtype = choose_dtype(
            config.worker.dtype,
            parsed.checkpoint_dtype,
            device.torch_device,
            is_quantized=device.library is not None and parsed.quantization is not None,
        )
        kv_format = kv_format_of(config.worker.kv_cache_dtype, parsed)
        if config.worker.load_format == "dummy":
            model = dummy_model(parsed, dtype, device)
        else:
            model = load_model(checkpoint, parsed, dtype, device, kv_format)
        group = one_group(parsed, config.scheduler.page_size)
    except ConfigError as error:
        raise ConfigError(f"--speculative-config, the draft model {speculative.model!r}: {error}") from None
    kv: KVType = dtype if kv_format is None else KV_FORMATS[kv_format]
    log.info(
        "draft model loaded",
        model=speculative.model,
        architecture=parsed.architecture,
        dtype=kv_name(dtype),
        kernels=model.kernels,
        bytes_per_token=group.bytes_per_token(kv),
        load_seconds=round(time.monotonic() - began, 2),
    )

    def make(num_pages: int, state: RowState) -> DraftModel:
        longest = min(state.token_ids.shape[1] - 1, parsed.max_model_len)
        bounds = Bounds(
            max_drafts=speculative.num_speculative_tokens,
            max_len=min(longest, speculative.max_model_len or longest),
            max_tokens=config.scheduler.max_num_batched_tokens,
            vocab_size=parsed.vocab_size,
            model_vocab_size=target.model_config.vocab_size,
        )
        pages = DraftPages(group, num_pages, kv, device, has_dummy_page=device.graphs is not None)
        passes = DraftPasses(model, pages.kv, state, device, dtype, bounds.max_len)
        return DraftModel(passes, pages, state, device, bounds, parsed.prompt_classes)

    return Prepared(make, draft_page_bytes(group, kv), Computed(model, (group,), kv))
