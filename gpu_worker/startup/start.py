"""From a configuration to a runner that can take plans: device, weights, KV pool."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import structlog
import torch
from msgspec.structs import replace

from penstock.core.checkpoint.families.registry import parse_model_config
from penstock.core.checkpoint.registry import open_model
from penstock.core.checkpoint.source import fingerprint
from penstock.core.config import Config
from penstock.core.config.ranks import ONLY_RANK, Rank
from penstock.gpu_worker.devices.device import Device, Graphs
from penstock.gpu_worker.devices.open import choose_dtype, open_device
from penstock.gpu_worker.devices.out_of_memory import NoMemoryError, is_out_of_memory
from penstock.gpu_worker.models.loader import dummy_model, load_model
from penstock.gpu_worker.startup.memory_profile import pool_budget
from penstock.gpu_worker.startup.replacement import start_again, wait_until_settled
from penstock.gpu_worker.startup.warm_up import Limits, warm_up
from penstock.gpu_worker.state.kv_pool import (
    KVPool,
    PageGroup,
    PoolSize,
    page_bytes,
    page_groups,
    plan_pool,
)
from penstock.gpu_worker.steps.model_runner import ModelRunner
from penstock.ipc.messages import PROTOCOL_VERSION, WindowGroup, WorkerHello

log = structlog.get_logger()


class Started(NamedTuple):
    """A ready worker, and its hello."""

    runner: ModelRunner
    hello: WorkerHello


def start_replacement(config: Config, rank: Rank) -> Started:
    """Load everything while a worker that has just died may still hold memory.

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
    model_config = parse_model_config(checkpoint.config, config.model.model_impl)
    device = open_device(config.worker.device, config.worker.num_threads, config.worker.cpu_kernels)
    device.adapt_to(4 * model_config.num_step_weights)
    dtype = choose_dtype(config.worker.dtype, model_config.checkpoint_dtype, device.torch_device)
    log.info(
        "loading",
        model=str(checkpoint.path),
        architecture=model_config.architecture,
        device=str(device.torch_device),
        dtype=_name(dtype),
    )
    with _no_memory_for("the weights", "choose a smaller --dtype, a smaller model or another --device"):
        if config.worker.load_format == "dummy":
            model = dummy_model(model_config, dtype, device)
        else:
            model = load_model(checkpoint, model_config, dtype, device)
    loaded = time.monotonic()
    if not model.can_be_captured:
        config = replace(config, worker=replace(config.worker, enforce_eager=True))
    scheduler = config.scheduler
    largest = f"a batch of {scheduler.max_num_batched_tokens} tokens and {scheduler.max_num_seqs} rows"
    with _no_memory_for(f"{largest} beside the weights", "lower --max-num-batched-tokens or --max-num-seqs"):
        budget = 0 if config.worker.num_pages else pool_budget(config, model, dtype, device)
    groups = page_groups(model.config, scheduler.page_size)
    size = plan_pool(config, model_config, groups, dtype, budget)
    graphs = None if config.worker.enforce_eager else device.graphs
    with _no_memory_for(
        f"{size.num_pages} KV pages and {scheduler.max_num_seqs} rows of {size.max_model_len} tokens",
        "lower --num-pages, --gpu-memory-utilization, --cpu-kv-cache-gib, --max-num-seqs or --max-model-len",
    ):
        has_dummy_page = graphs is not None  # of padded rows
        kv = KVPool(groups, size.num_pages, dtype, device.torch_device, has_dummy_page=has_dummy_page)
        runner = ModelRunner(model, kv, device, scheduler.max_num_seqs, size.max_model_len, checkpoint)
    if graphs is not None:
        _capture(runner, graphs)
    if device.compiles_launches:
        _warm_up(config, runner, size, model_config.vocab_size)
    _log_ready(config, groups, device, dtype, model.kernels, size, loaded - began)
    classes = model.config.prompt_classes
    hello = WorkerHello(
        protocol_version=PROTOCOL_VERSION,
        name=rank.name,
        rank=rank.number,
        model_fingerprint=fingerprint(checkpoint),
        device=device.name,
        dtype=_name(dtype),
        vocab_size=model_config.vocab_size,
        max_model_len=size.max_model_len,
        page_size=scheduler.page_size,
        num_pages=size.num_pages,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        pid=os.getpid(),
        kernels=model.kernels,
        num_ranks=rank.num_ranks,
        longest_usual_prompt=0 if classes is None else classes.up_to,
        is_each_length_special=classes is not None and classes.each_length,
        window_groups=tuple(WindowGroup(group.page_size, group.window or 0) for group in groups[1:]),
    )
    return Started(runner, hello)


def _capture(runner: ModelRunner, graphs: Graphs) -> None:
    began = time.monotonic()
    with _no_memory_for(
        "CUDA graphs", "lower --gpu-memory-utilization, --num-pages or --max-num-seqs, or set --enforce-eager"
    ):
        runner.capture_graphs(graphs)
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
    # Objects made at start-up live as long as the process: the collector need not scan them between steps.
    gc.collect()
    gc.freeze()


@contextmanager
def _no_memory_for(what: str, remedy: str) -> Iterator[None]:
    """Turn a failed allocation into a sentence that says what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # Cleaning up after a failed capture may raise in turn.
        if not is_out_of_memory(error) and not is_out_of_memory(error.__context__):
            raise
        raise NoMemoryError(f"out of memory: {what} do not fit; {remedy}") from None


def _log_ready(
    config: Config,
    groups: tuple[PageGroup, ...],
    device: Device,
    dtype: torch.dtype,
    kernels: str,
    size: PoolSize,
    seconds: float,
) -> None:
    page_size = config.scheduler.page_size
    log.info(
        "model loaded",
        load_seconds=round(seconds, 2),
        device=device.name,
        dtype=_name(dtype),
        kernels=kernels,
        kv_pool_tokens=size.num_pages * page_size,
        kv_pool_mib=round(size.num_pages * page_bytes(groups, dtype) / 2**20),
        max_model_len=size.max_model_len,
    )
    for number, group in enumerate(groups):
        log.info(
            "page group",
            number=number,
            layers=len(group.layers),
            window=group.window,
            page_size=group.page_size,
            bytes_per_token=group.bytes_per_token(dtype),
            empty_percent=round(100 * (1 - group.page_size * group.bytes_per_token(dtype) / page_bytes(groups, dtype))),
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
