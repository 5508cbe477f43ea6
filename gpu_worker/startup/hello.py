"""The third part of a start: what the worker tells the scheduler of itself."""

import os
from typing import Any

from penstock.config import Config
from penstock.config.ranks import Rank
from penstock.gpu_worker.startup.identity import arithmetic
from penstock.gpu_worker.startup.loaded import Loaded
from penstock.gpu_worker.startup.pool import PoolPlan
from penstock.gpu_worker.state.host_pages import HostPages
from penstock.gpu_worker.state.kv_pool import kv_name, page_bytes, window_groups
from penstock.ipc.messages import PROTOCOL_VERSION, WorkerHello
from penstock.models.files.source import fingerprint
from penstock.models.shards.experts import placement_digest


def hello_of(config: Config, rank: Rank, loaded: Loaded, plan: PoolPlan, host_pages: HostPages | None) -> WorkerHello:
    """The worker's hello, but for what its parts add."""
    scheduler, model, part, place = config.scheduler, loaded.model, loaded.part, loaded.ranks.place
    classes = model.config.prompt_classes
    hello = WorkerHello(
        protocol_version=PROTOCOL_VERSION,
        name=rank.name,
        rank=rank.number,
        model_fingerprint=fingerprint(loaded.checkpoint),
        device=loaded.device.name,
        dtype=_types(loaded),
        vocab_size=part.vocab_size,
        max_model_len=plan.size.max_model_len,
        page_size=scheduler.page_size,
        num_pages=plan.size.num_pages,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        pid=os.getpid(),
        kernels=model.kernels,
        page_bytes=page_bytes(plan.groups, loaded.kv_type),
        num_ranks=rank.num_ranks,
        num_stages=place.num_stages,
        answers=place.answers,
        longest_usual_prompt=0 if classes is None else classes.up_to,
        is_each_length_special=classes is not None and classes.each_length,
        window_groups=window_groups(plan.groups),
        weights=loaded.weights,
        arithmetic=arithmetic(loaded.device, model),
        is_batch_invariant=model.is_batch_invariant,
        placement=placement_digest(part),
        num_snapshots=plan.num_snapshots,
        state_bytes=part.state_bytes,
        **_of_host_pages(host_pages),
    )
    return loaded.ahead.hello(hello)


def _of_host_pages(host_pages: HostPages | None) -> dict[str, Any]:
    if host_pages is not None:
        return {"num_host_pages": host_pages.num_pages, "host_copy_speed": host_pages.copy_speed()}
    return {}


def _types(loaded: Loaded) -> str:
    dtype, kv_type = loaded.dtype, loaded.kv_type
    return kv_name(dtype) if kv_type == dtype else f"{kv_name(dtype)}, KV {kv_name(kv_type)}"
