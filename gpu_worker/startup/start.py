"""From a configuration to a runner that can take plans: device, weights, KV pool."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import structlog
import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.config import Config, channel_keys
from penstock.config.parts import brought
from penstock.config.ranks import ONLY_RANK, Rank
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.devices.open import open_device
from penstock.gpu_worker.devices.out_of_memory import no_memory_for
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.gpu_worker.part import Context, WorkerPart
from penstock.gpu_worker.startup.hello import hello_of
from penstock.gpu_worker.startup.loaded import Loaded, load
from penstock.gpu_worker.startup.pool import PoolPlan, choose_pool, log_pool, make_host_pages, make_pool
from penstock.gpu_worker.startup.replacement import start_again, wait_until_settled
from penstock.gpu_worker.startup.warm_up import warm_up, warm_up_parts
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.gpu_worker.steps.made_up_plans import Limits
from penstock.gpu_worker.steps.model_runner import ModelRunner
from penstock.gpu_worker.steps.row_part import RowPart
from penstock.ipc.messages import WorkerHello

if TYPE_CHECKING:
    from penstock.gpu_worker.steps.stage_runner import StageRunner

log = structlog.get_logger()


class Started(NamedTuple):
    """A ready worker, and its hello."""

    runner: ModelRunner
    hello: WorkerHello
    ranks: Ranks
    parts: list[WorkerPart]  # what it does beside its steps
    bytes_read: int = 0  # of the checkpoint's tensors
    stage: "StageRunner | None" = None  # in a pipeline, it drives the runner


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
    loaded = load(config, rank)
    config, model, ranks = loaded.config, loaded.model, loaded.ranks
    if not model.can_be_captured:
        config = replace(config, worker=replace(config.worker, enforce_eager=True))
    plan = choose_pool(config, loaded)
    runner, kv = _make_runner(config, rank, loaded, plan)
    log_pool(config, loaded, plan)
    hello = hello_of(config, rank, loaded, plan, runner.host_pages)
    context = Context(
        config, rank, hello, loaded.checkpoint, model, loaded.device, kv, runner.host_pages, loaded.adapters
    )
    with ExitStack() as opened:
        parts = _open_parts(context, opened)
        runner.use([part for part in parts if isinstance(part, RowPart)])
        if loaded.device.compiles_launches:
            _warm_up(config, loaded, plan, partial(warm_up_parts, runner))
            _capture_for_parts(config, loaded, runner)
            # Objects made at start-up live as long as the process, so the collector need not scan them between steps.
            gc.collect()
            gc.freeze()
        loaded.ledger.tell(plan.activations)
        for part in parts:
            hello = part.hello(hello)
        stage = open_stage(config, runner, ranks, loaded.device)
        opened.pop_all()
    return Started(runner, hello, ranks, parts, loaded.bytes_read, stage)


def _open_parts(context: Context, opened: ExitStack) -> list[WorkerPart]:
    """The parts that this worker has; `opened` closes them if the start fails."""
    parts = []
    for kind in brought("worker", WorkerPart):
        if (part := kind.of(context)) is not None:
            opened.callback(part.close)
            parts.append(part)
    return parts


def _make_runner(config: Config, rank: Rank, loaded: Loaded, plan: PoolPlan) -> tuple[ModelRunner, KVPool]:
    """Allocate the pool and the rows, and compile and capture what steps will launch."""
    scheduler, size, device = config.scheduler, plan.size, loaded.device
    graphs = None if config.worker.enforce_eager else device.graphs
    with no_memory_for(
        f"{size.num_pages} KV pages and {scheduler.max_num_seqs} rows of {size.max_model_len} tokens",
        "lower --num-pages, --gpu-memory-utilization, --cpu-kv-cache-gib, --state-snapshots-gib, --max-num-seqs or "
        "--max-model-len",
    ):
        kv = make_pool(config, loaded, plan, has_dummy_page=graphs is not None)
        runner = ModelRunner(loaded.model, kv, device, scheduler.max_num_seqs, size.max_model_len)
        runner.host_pages = make_host_pages(config, kv, device, size.max_model_len)
        place = loaded.ranks.place
        if config.parallel.check_ranks and place.num_tensor > 1 and place.is_last_stage:
            runner.check_drawn = rank_check(loaded.ranks)
        runner.work_ahead(partial(loaded.ahead.attach, num_pages=size.num_pages, rank=rank))
    loaded.ledger.note("pool_and_rows")
    most_drafts = loaded.ahead.most
    if graphs is not None:
        with _capturing("decodes"):
            runner.capture_graphs(graphs, loaded.dtype, most_drafts)
        loaded.ledger.note("graphs")
    if device.compiles_launches:
        _warm_up(config, loaded, plan, partial(warm_up, runner))
    if graphs is not None:
        with _capturing("steps with prompts"):
            runner.capture_mixed_graphs(graphs, scheduler.max_num_batched_tokens, most_drafts)
        loaded.ledger.note("graphs")
    return runner, kv


def _capture_for_parts(config: Config, loaded: Loaded, runner: ModelRunner) -> None:
    graphs = None if config.worker.enforce_eager else loaded.device.graphs
    if graphs is None or not any(part.recording() for part in runner.parts):
        return
    with _capturing("steps with rows of parts"):
        most, most_drafts = config.scheduler.max_num_batched_tokens, loaded.ahead.most
        runner.capture_graphs_of_parts(graphs, loaded.dtype, most, most_drafts)
    loaded.ledger.note("graphs")


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


@contextmanager
def _capturing(what: str) -> Iterator[None]:
    began = time.monotonic()
    with no_memory_for(
        "CUDA graphs", "lower --gpu-memory-utilization, --num-pages or --max-num-seqs, or set --enforce-eager"
    ):
        yield
    log.info("captured CUDA graphs", of=what, seconds=round(time.monotonic() - began, 2))


def _warm_up(config: Config, loaded: Loaded, plan: PoolPlan, run: Callable[[Limits], int]) -> None:
    """Compile the kernels that would otherwise make the first requests wait; `run` returns how many steps it took."""
    scheduler = config.scheduler
    began = time.monotonic()
    limits = Limits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=plan.size.max_model_len,
        page_size=scheduler.page_size,
        num_pages=plan.size.num_pages,
        vocab_size=loaded.part.vocab_size,
    )
    with no_memory_for(
        "the first steps", "lower --gpu-memory-utilization, --num-pages, --max-num-batched-tokens or --max-num-seqs"
    ):
        num_steps = run(limits)
    if num_steps:
        log.info("warmed up", steps=num_steps, seconds=round(time.monotonic() - began, 2))
    loaded.ledger.note("first_steps")
