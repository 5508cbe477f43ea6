"""From a configuration to a runner that can take plans: device, weights, KV pool."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import structlog
import torch

from penstock.core.checkpoint.families.registry import parse_model_config
from penstock.core.checkpoint.registry import open_model
from penstock.core.checkpoint.source import fingerprint
from penstock.core.config import Config, ConfigError
from penstock.core.config.ranks import ONLY_RANK, Rank
from penstock.gpu_worker.devices.device import (
    CpuDevice,
    CudaDevice,
    choose_dtype,
    multiplies_bf16_matrices,
    open_device,
)
from penstock.gpu_worker.devices.out_of_memory import NoMemoryError, is_out_of_memory
from penstock.gpu_worker.models.loader import dummy_model, load_model
from penstock.gpu_worker.startup.memory_profile import cuda_budget
from penstock.gpu_worker.startup.replacement import start_again, wait_until_settled
from penstock.gpu_worker.startup.warm_up import Limits, warm_up
from penstock.gpu_worker.state.kv_pool import (
    KVPool,
    PageGroup,
    PoolSize,
    cpu_budget,
    page_bytes,
    page_groups,
    plan_pool,
)
from penstock.gpu_worker.steps.model_runner import ModelRunner
from penstock.ipc.messages import PROTOCOL_VERSION, WorkerHello
from penstock.kernels.native.build import BuildError, build, built_library
from penstock.kernels.native.library import Library

log = structlog.get_logger()

_SMALL_MODEL_BYTES = 64 << 20
"""Below, a step of torch's kernels is as fast on one thread as on two, which leaves a core to the other processes."""


class Started(NamedTuple):
    """A worker that is ready, and how it introduces itself."""

    runner: ModelRunner
    hello: WorkerHello


def start_replacement(config: Config, rank: Rank) -> Started:
    """Load everything, where a worker that has just died may still hold memory.

    Raises:
        ConfigError: if the configuration or the checkpoint cannot work.
        StillNoMemoryError: if there is too little memory, and no more comes.
    """
    device = open_device(config.worker.device, 1)
    if isinstance(device, CudaDevice):
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
    model_config = parse_model_config(checkpoint.config)
    num_threads = config.worker.num_threads or len(os.sched_getaffinity(0))
    device = open_device(config.worker.device, num_threads)
    library = None
    if isinstance(device, CpuDevice):
        library = device.library = _cpu_kernels(config, num_threads)
        if (library or not config.worker.num_threads) and 4 * model_config.num_step_weights < _SMALL_MODEL_BYTES:
            torch.set_num_threads(1)  # native kernels have their own
    dtype = choose_dtype(config.worker.dtype, model_config.checkpoint_dtype, device.torch_device)
    log.info(
        "loading",
        model=str(checkpoint.path),
        architecture=model_config.architecture,
        device=str(device.torch_device),
        dtype=_name(dtype),
    )
    long_on_torch = config.worker.cpu_kernels == "auto" and multiplies_bf16_matrices()
    with _no_memory_for("the weights", "choose a smaller --dtype, a smaller model or another --device"):
        if config.worker.load_format == "dummy":
            model = dummy_model(model_config, dtype, device.torch_device, library, long_on_torch=long_on_torch)
        else:
            model = load_model(
                checkpoint, model_config, dtype, device.torch_device, library, long_on_torch=long_on_torch
            )
    loaded = time.monotonic()
    scheduler = config.scheduler
    if config.worker.num_pages:
        budget = 0  # not asked for
    elif isinstance(device, CudaDevice):
        largest = f"a batch of {scheduler.max_num_batched_tokens} tokens and {scheduler.max_num_seqs} rows"
        with _no_memory_for(f"{largest} beside the weights", "lower --max-num-batched-tokens or --max-num-seqs"):
            budget = cuda_budget(config, model, dtype, device)
    else:
        budget = cpu_budget(config, device)
    groups = page_groups(model_config, scheduler.page_size)
    size = plan_pool(config, model_config, groups, dtype, budget)
    with_graphs = isinstance(device, CudaDevice) and not config.worker.enforce_eager
    with _no_memory_for(
        f"{size.num_pages} KV pages and {scheduler.max_num_seqs} rows of {size.max_model_len} tokens",
        "lower --num-pages, --gpu-memory-utilization, --cpu-kv-cache-gib, --max-num-seqs or --max-model-len",
    ):
        kv = KVPool(groups, size.num_pages, dtype, device.torch_device, has_dummy_page=with_graphs)  # of padded rows
        runner = ModelRunner(model, kv, device, scheduler.max_num_seqs, size.max_model_len, checkpoint)
    if isinstance(device, CudaDevice):
        _prepare_launches(config, runner, device, size, model_config.vocab_size)
    _log_ready(config, groups, device, dtype, model.kernels, size, loaded - began)
    hello = WorkerHello(
        protocol_version=PROTOCOL_VERSION,
        name=rank.name,
        rank=rank.number,
        model_fingerprint=fingerprint(checkpoint),
        device=_device_name(device),
        dtype=_name(dtype),
        vocab_size=model_config.vocab_size,
        max_model_len=size.max_model_len,
        page_size=scheduler.page_size,
        num_pages=size.num_pages,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        pid=os.getpid(),
        num_ranks=rank.num_ranks,
    )
    return Started(runner, hello)


def _cpu_kernels(config: Config, num_threads: int) -> Library | None:
    """The CPU's own kernels as the option says; None for torch's."""
    if config.worker.cpu_kernels == "torch":
        return None
    path = built_library()
    if path is None and config.worker.cpu_kernels == "native":
        log.info("compiling the CPU kernels")
        try:
            path = build()
        except BuildError as error:
            raise ConfigError(f"--cpu-kernels native: {error}") from None
    return None if path is None else Library(path, num_threads)


def _prepare_launches(config: Config, runner: ModelRunner, device: CudaDevice, size: PoolSize, vocab_size: int) -> None:
    """Capture graphs, compile kernels: what would make the first requests wait."""
    began = time.monotonic()
    scheduler = config.scheduler
    if not config.worker.enforce_eager:
        with _no_memory_for(
            "CUDA graphs", "lower --gpu-memory-utilization, --num-pages or --max-num-seqs, or set --enforce-eager"
        ):
            runner.capture_graphs(device)
        log.info("captured CUDA graphs", seconds=round(time.monotonic() - began, 2))
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
    # What start-up made lives as long as the process: the collector need not look at it again between steps.
    gc.collect()
    gc.freeze()


@contextmanager
def _no_memory_for(what: str, remedy: str) -> Iterator[None]:
    """Turn a failed allocation into a sentence that says what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # What ends a failed capture may raise in its turn.
        if not is_out_of_memory(error) and not is_out_of_memory(error.__context__):
            raise
        raise NoMemoryError(f"out of memory: {what} do not fit; {remedy}") from None


def _log_ready(
    config: Config,
    groups: tuple[PageGroup, ...],
    device: CpuDevice | CudaDevice,
    dtype: torch.dtype,
    kernels: str,
    size: PoolSize,
    seconds: float,
) -> None:
    page_size = config.scheduler.page_size
    log.info(
        "model loaded",
        load_seconds=round(seconds, 2),
        device=_device_name(device),
        dtype=_name(dtype),
        kernels=kernels,
        kv_pool_tokens=size.num_pages * page_size,
        kv_pool_mib=round(size.num_pages * page_bytes(groups, dtype) / 2**20),
        max_model_len=size.max_model_len,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: CpuDevice | CudaDevice) -> str:
    if isinstance(device, CudaDevice):
        return torch.cuda.get_device_name(device.torch_device)
    return f"cpu ({device.library.num_threads if device.library else torch.get_num_threads()} threads)"
