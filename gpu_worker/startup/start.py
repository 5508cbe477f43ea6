"""From a configuration to a runner that can take plans: device, weights, KV pool."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import structlog
import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.core.checkpoint.described import model_config_of
from penstock.core.checkpoint.files.source import fingerprint
from penstock.core.checkpoint.finding.registry import open_model
from penstock.core.checkpoint.kv_formats import kv_format_of
from penstock.core.checkpoint.shards.experts import placement_digest
from penstock.core.checkpoint.shards.rank_part import rank_part
from penstock.core.checkpoint.state_limits import check_states, num_snapshots
from penstock.core.config import Config, channel_keys
from penstock.core.config.ranks import ONLY_RANK, Rank
from penstock.core.config.speculative import speculative_config
from penstock.gpu_worker.devices.device import Device, Graphs
from penstock.gpu_worker.devices.open import choose_dtype, open_device
from penstock.gpu_worker.devices.out_of_memory import NoMemoryError, is_out_of_memory
from penstock.gpu_worker.disk.mover import DiskMover
from penstock.gpu_worker.drafting.guarded import guarded
from penstock.gpu_worker.drafting.registry import prepare_drafter
from penstock.gpu_worker.drafting.target import Passes, Target
from penstock.gpu_worker.handover.handover import Handover
from penstock.gpu_worker.models.expert_counts import ExpertCounts
from penstock.gpu_worker.models.loading.loader import dummy_model, load_model
from penstock.gpu_worker.models.loading.stored import BytesRead
from penstock.gpu_worker.models.model import Model, SeesImages
from penstock.gpu_worker.parallel.open import open_ranks
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.gpu_worker.startup.disk_tier import open_disk, staging_bytes
from penstock.gpu_worker.startup.identity import arithmetic, reading_weights
from penstock.gpu_worker.startup.memory_profile import pool_budget
from penstock.gpu_worker.startup.replacement import start_again, wait_until_settled
from penstock.gpu_worker.startup.warm_up import Limits, warm_up
from penstock.gpu_worker.state.host_pages import HostPages, NoHostMemoryError
from penstock.gpu_worker.state.kv_pool import (
    KVPool,
    KVType,
    PageGroup,
    PoolSize,
    kv_name,
    page_bytes,
    page_groups,
    plan_pool,
)
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.state.state_slots import state_slots
from penstock.gpu_worker.state.transfers import slots_bytes
from penstock.gpu_worker.steps.model_runner import ModelRunner
from penstock.ipc.messages import PROTOCOL_VERSION, ExpertTokens, WindowGroup, WorkerHello
from penstock.kernels.attention.kv_quantization import KV_FORMATS

if TYPE_CHECKING:
    from penstock.gpu_worker.steps.stage_runner import StageRunner

log = structlog.get_logger()

_GIB = 1 << 30
_EMBEDDING_BYTES = 512 << 20
"""Bytes of all image embeddings that are kept at a time."""


class Started(NamedTuple):
    """A ready worker, and its hello."""

    runner: ModelRunner
    hello: WorkerHello
    ranks: Ranks
    disk: DiskMover | None = None
    bytes_read: int = 0  # of the checkpoint's tensors
    handover: Handover | None = None
    stage: "StageRunner | None" = None  # in a pipeline, it drives the runner
    take_expert_tokens: Callable[[], ExpertTokens | None] | None = None


def start_replacement(config: Config, rank: Rank) -> Started:
    """As `start`, while a worker that has just died may still hold memory.

    Raises:
        ConfigError: if the configuration or the checkpoint cannot work.
        StillNoMemoryError: if there is too little memory, and no more becomes free.
    """
    device = open_device(config.worker.device, 1)
    if device.frees_memory_late:
        wait_until_settled(device.free_memory)
    return start_again(lambda: start(config, rank), device.free_memory)


@torch.inference_mode()
def start(config: Config, rank: Rank = ONLY_RANK) -> Started:
    """Load everything.

    Raises:
        ConfigError: if the configuration or the checkpoint cannot work.
    """
    began = time.monotonic()
    checkpoint = open_model(config)
    has_weights = config.worker.load_format != "dummy"
    whole = model_config_of(checkpoint, config.model.model_impl, config.worker.quantization, with_weights=has_weights)
    check_states(whole, config)
    model_config = rank_part(whole, config.parallel, rank.number)
    device = open_device(config.worker.device, config.worker.num_threads, config.worker.cpu_kernels, rank.cores)
    ranks = open_ranks(config, rank.number, device.torch_device, device.library)
    device.adapt_to(4 * model_config.num_step_weights)
    dtype = choose_dtype(
        config.worker.dtype,
        model_config.checkpoint_dtype,
        device.torch_device,
        is_quantized=device.library is not None and model_config.quantization is not None,
    )
    kv_format = kv_format_of(config.worker.kv_cache_dtype, model_config)
    kv_type = dtype if kv_format is None else KV_FORMATS[kv_format]
    log.info(
        "loading",
        model=str(checkpoint.path),
        architecture=model_config.architecture,
        device=str(device.torch_device),
        dtype=kv_name(dtype),
        **({} if model_config.quantization is None else {"quantization": model_config.quantization.name}),
    )
    bytes_read = BytesRead(with_digest=not ranks.place.is_alone)
    with (
        reading_weights(checkpoint, model_config, config.worker.load_format, bytes_read) as weights_digest,
        _no_memory_for("the weights", "choose a smaller --dtype, a smaller model or another --device"),
    ):
        if has_weights:
            model = load_model(checkpoint, model_config, dtype, device, kv_format, ranks, bytes_read)
        else:
            model = dummy_model(model_config, dtype, device, ranks)
        weights = weights_digest()
    speculative, drafting = speculative_config(config.worker.speculative_config), None
    if speculative is not None:
        with _no_memory_for("the drafter's weights", "choose a smaller drafter, or none"):
            drafting = prepare_drafter(speculative, Target(config, model_config, model, dtype, device, _passes))
    draft_page_bytes = 0 if drafting is None else drafting.page_bytes
    device.give_back()
    loaded = time.monotonic()
    if not model.can_be_captured:
        config = replace(config, worker=replace(config.worker, enforce_eager=True))
    scheduler = config.scheduler
    largest = f"a batch of {scheduler.max_num_batched_tokens} tokens and {scheduler.max_num_seqs} rows"
    with _no_memory_for(f"{largest} beside the weights", "lower --max-num-batched-tokens or --max-num-seqs"):
        beside = None if drafting is None else drafting.computed
        budget = 0 if config.worker.num_pages else pool_budget(config, model, dtype, kv_type, device, beside)
        budget -= 0 if drafting is None else drafting.row_bytes * (scheduler.max_num_seqs + 1)
    tower = model.tower if isinstance(model, SeesImages) else None
    if tower is not None and device.torch_device.type == "cuda":
        budget -= _EMBEDDING_BYTES
    groups = page_groups(model.config, scheduler.page_size)
    takes_snapshots = model_config.state_bytes > 0 and len(groups) == 1 and scheduler.enable_prefix_caching
    if takes_snapshots and device.torch_device.type == "cuda":
        budget -= int(config.worker.state_snapshots_gib * _GIB)
    if (config.worker.host_kv_gib or config.worker.disk_kv) and device.lanes() is not None:
        budget -= slots_bytes(page_bytes(groups, kv_type))
    size = plan_pool(config, model_config, groups, kv_type, budget, draft_page_bytes=draft_page_bytes)
    snapshots = num_snapshots(config, model_config.state_bytes, size.num_pages) if takes_snapshots else 0
    graphs = None if config.worker.enforce_eager else device.graphs
    with _no_memory_for(
        f"{size.num_pages} KV pages and {scheduler.max_num_seqs} rows of {size.max_model_len} tokens",
        "lower --num-pages, --gpu-memory-utilization, --cpu-kv-cache-gib, --state-snapshots-gib, --max-num-seqs or "
        "--max-model-len",
    ):
        has_dummy_page = graphs is not None  # for padding rows
        is_shared = bool(config.parallel.role)
        kv = KVPool(
            groups,
            size.num_pages,
            kv_type,
            device.torch_device,
            has_dummy_page=has_dummy_page,
            is_shared=is_shared,
            states=state_slots(model_config, scheduler.max_num_seqs + 1, device.torch_device, snapshots),
        )
        runner = ModelRunner(model, kv, device, scheduler.max_num_seqs, size.max_model_len, checkpoint)
        runner.host_pages = _host_pages(config, kv, device, size.max_model_len)
        if config.parallel.check_ranks and ranks.place.num_tensor > 1 and ranks.place.is_last_stage:
            runner.check_drawn = rank_check(ranks)
        if drafting is not None:
            make = partial(drafting.make, size.num_pages)
            runner.draft_with(make if rank.num_ranks > 1 else partial(guarded, make))
    if tower is not None:
        from penstock.gpu_worker.images.store import EmbeddingStore  # most models take texts only

        runner.image_store = EmbeddingStore(tower)
    if graphs is not None:
        _capture(runner, graphs, dtype)
    if device.compiles_launches:
        _warm_up(config, runner, size, model_config.vocab_size)
    _log_ready(config, groups, device, dtype, kv_type, model.kernels, size, bytes_read.total, loaded - began)
    classes = model.config.prompt_classes
    hello = WorkerHello(
        protocol_version=PROTOCOL_VERSION,
        name=rank.name,
        rank=rank.number,
        model_fingerprint=fingerprint(checkpoint),
        device=device.name,
        dtype=_types(dtype, kv_type),
        vocab_size=model_config.vocab_size,
        max_model_len=size.max_model_len,
        page_size=scheduler.page_size,
        num_pages=size.num_pages,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        pid=os.getpid(),
        kernels=model.kernels,
        page_bytes=page_bytes(groups, kv_type),
        draft_page_bytes=draft_page_bytes,
        num_ranks=rank.num_ranks,
        num_stages=ranks.place.num_stages,
        drafter="" if speculative is None else speculative.method,
        max_drafts=0 if speculative is None else speculative.num_speculative_tokens,
        answers=ranks.place.answers,
        longest_usual_prompt=0 if classes is None else classes.up_to,
        is_each_length_special=classes is not None and classes.each_length,
        window_groups=tuple(WindowGroup(group.page_size, group.window or 0) for group in groups[1:]),
        weights=weights,
        arithmetic=arithmetic(device, model),
        is_batch_invariant=model.is_batch_invariant,
        placement=placement_digest(model_config),
        num_snapshots=snapshots,
        state_bytes=model_config.state_bytes,
    )
    if tower is not None:
        hello = replace(hello, max_embedding_bytes=_EMBEDDING_BYTES, embedding_bytes=tower.embedding_bytes)
        hello = replace(hello, images_are_whole=tower.vision.is_whole)
    if (host_pages := runner.host_pages) is not None:
        hello = replace(hello, num_host_pages=host_pages.num_pages, host_copy_speed=host_pages.copy_speed())
    elif config.worker.host_kv_gib:
        hello = replace(hello, failed_tiers=("host",))
    disk = None
    if config.worker.disk_kv:
        disk = None if host_pages is None else open_disk(config, hello, groups, host_pages)
        failed = ("disk",) if disk is None else ()
        num_places = 0 if disk is None else disk.num_places
        hello = replace(hello, num_disk_places=num_places, failed_tiers=hello.failed_tiers + failed)
    handover = None
    if config.parallel.role:
        handover = Handover(config, rank, hello, kv, model)
        hello = replace(hello, kv_sources=(handover.source,))
    stage = open_stage(config, runner, ranks, device)
    take_expert_tokens = ExpertCounts(model.held_experts).take if model.held_experts else None
    return Started(runner, hello, ranks, disk, bytes_read.total, handover, stage, take_expert_tokens)


def _passes(model: Model, kv: KVPool, state: RowState, device: Device, dtype: torch.dtype, max_len: int) -> Passes:
    """As `MakePasses`."""
    from penstock.gpu_worker.steps.draft_passes import DraftPasses  # for draft models only

    return DraftPasses(model, kv, state, device, dtype, max_len)


def rank_check(ranks: Ranks) -> Callable[[Tensor], None]:
    """Return a function that compares the tokens that ranks draw."""
    from penstock.gpu_worker.steps.rank_check import RankCheck  # for debugging only

    return RankCheck(ranks)


def open_stage(config: Config, runner: ModelRunner, ranks: Ranks, device: Device) -> "StageRunner | None":
    """Connect to the other stages of the pipeline, if there are any. All ranks do so once everything else is ready."""
    if ranks.place.num_stages == 1:
        return None
    from penstock.gpu_worker.parallel.pipeline import Pipeline
    from penstock.gpu_worker.steps.stage_runner import StageRunner

    pipeline = Pipeline(ranks, config.ipc.rendezvous_address, device.torch_device, channel_keys(config))
    return StageRunner(runner, pipeline, config.scheduler.max_num_seqs + 1)


def _host_pages(config: Config, kv: KVPool, device: Device, max_model_len: int) -> HostPages | None:
    """The host tier, if one is wanted, or else the host pages that stage a disk tier.

    If there is no memory for them, serving goes on without.
    """
    num_bytes = int(config.worker.host_kv_gib * _GIB)
    num_bytes = num_bytes or staging_bytes(config, kv.page_bytes, max_model_len)
    if not num_bytes:
        return None
    began = time.monotonic()
    try:
        host_pages = HostPages.within(num_bytes, kv, device)
    except NoHostMemoryError as error:
        log.error("no host tier for KV pages: streams go on without it", reason=str(error))
        return None
    log.info(
        "host tier",
        pages=host_pages.num_pages,
        tokens=host_pages.num_pages * kv.page_size,
        mib=round(host_pages.num_pages * host_pages.page_bytes / 2**20),
        seconds=round(time.monotonic() - began, 2),
    )
    return host_pages


def _capture(runner: ModelRunner, graphs: Graphs, dtype: torch.dtype) -> None:
    began = time.monotonic()
    with _no_memory_for(
        "CUDA graphs", "lower --gpu-memory-utilization, --num-pages or --max-num-seqs, or set --enforce-eager"
    ):
        runner.capture_graphs(graphs, dtype)
    log.info("captured CUDA graphs", seconds=round(time.monotonic() - began, 2))


def _warm_up(config: Config, runner: ModelRunner, size: PoolSize, vocab_size: int) -> None:
    """Compile the kernels that would otherwise make the first requests wait."""
    scheduler = config.scheduler
    began = time.monotonic()
    with _no_memory_for(
        "the first steps", "lower --gpu-memory-utilization, --num-pages, --max-num-batched-tokens or --max-num-seqs"
    ):
        num_steps = warm_up(
            runner,
            Limits(
                max_num_seqs=scheduler.max_num_seqs,
                max_num_batched_tokens=scheduler.max_num_batched_tokens,
                max_model_len=size.max_model_len,
                page_size=scheduler.page_size,
                num_pages=size.num_pages,
                vocab_size=vocab_size,
            ),
        )
    log.info("warmed up", steps=num_steps, seconds=round(time.monotonic() - began, 2))
    # Objects made at start-up live as long as the process, so the collector need not scan them between steps.
    gc.collect()
    gc.freeze()


@contextmanager
def _no_memory_for(what: str, remedy: str) -> Iterator[None]:
    """Turn a failed allocation into a sentence that says what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # Cleaning up after a failed capture may raise as well.
        if not is_out_of_memory(error) and not is_out_of_memory(error.__context__):
            raise
        raise NoMemoryError(f"out of memory: {what} do not fit; {remedy}") from None


def _log_ready(
    config: Config,
    groups: tuple[PageGroup, ...],
    device: Device,
    dtype: torch.dtype,
    kv: KVType,
    kernels: str,
    size: PoolSize,
    bytes_read: int,
    seconds: float,
) -> None:
    page_size = config.scheduler.page_size
    log.info(
        "model loaded",
        load_seconds=round(seconds, 2),
        read_mib=round(bytes_read / 2**20, 1),
        device=device.name,
        dtype=kv_name(dtype),
        kernels=kernels,
        kv_type=kv_name(kv),
        kv_pool_tokens=size.num_pages * page_size,
        kv_pool_mib=round(size.num_pages * page_bytes(groups, kv) / 2**20),
        max_model_len=size.max_model_len,
    )
    for number, group in enumerate(groups):
        log.info(
            "page group",
            number=number,
            layers=len(group.layers),
            window=group.window,
            page_size=group.page_size,
            bytes_per_token=group.bytes_per_token(kv),
            empty_percent=round(100 * (1 - group.page_size * group.bytes_per_token(kv) / page_bytes(groups, kv))),
        )


def _types(dtype: torch.dtype, kv: KVType) -> str:
    return kv_name(dtype) if kv == dtype else f"{kv_name(dtype)}, KV {kv_name(kv)}"
