"""From a configuration to a runner that can take plans: device, weights, KV pool."""

import time
from typing import NamedTuple

import structlog
import torch

from penstock.core.config import Config
from penstock.core.config.checkpoint import fingerprint, model_dir
from penstock.gpu_worker.device import CpuDevice, CudaDevice, choose_dtype, default_threads, open_device
from penstock.gpu_worker.kv_pool import PoolSize, allocate, cpu_budget, page_bytes, plan_pool
from penstock.gpu_worker.loader import dummy_model, load_model, load_model_config
from penstock.gpu_worker.memory_profile import cuda_budget
from penstock.gpu_worker.model_config import ModelConfig
from penstock.gpu_worker.model_runner import ModelRunner
from penstock.ipc.messages import PROTOCOL_VERSION, WorkerHello

log = structlog.get_logger()


class Started(NamedTuple):
    """A worker that is ready, and how it introduces itself."""

    runner: ModelRunner
    hello: WorkerHello


@torch.inference_mode()
def start(config: Config, name: str) -> Started:
    """Load everything.

    Raises:
        ConfigError: if the configuration or the checkpoint cannot work.
    """
    began = time.monotonic()
    folder = model_dir(config)
    model_config = load_model_config(folder)
    num_threads = config.worker.num_threads or default_threads(4 * model_config.num_step_weights)
    device = open_device(config.worker.device, num_threads)
    dtype = choose_dtype(config.worker.dtype, model_config.checkpoint_dtype, device.torch_device)
    log.info(
        "loading",
        model=str(folder),
        architecture=model_config.architecture,
        device=str(device.torch_device),
        dtype=_name(dtype),
    )
    if config.worker.load_format == "dummy":
        model = dummy_model(model_config, dtype, device.torch_device)
    else:
        model = load_model(folder, model_config, dtype, device.torch_device)
    loaded = time.monotonic()
    scheduler = config.scheduler
    if config.worker.num_pages:
        budget = 0  # not asked for
    elif isinstance(device, CudaDevice):
        budget = cuda_budget(config, model, dtype, device)
    else:
        budget = cpu_budget(config, device)
    size = plan_pool(config, model_config, dtype, budget)
    with_graphs = isinstance(device, CudaDevice) and not config.worker.enforce_eager
    num_pages = size.num_pages + with_graphs  # one more: the dummy page of padded rows
    kv = allocate(model_config, num_pages, scheduler.page_size, dtype, device)
    runner = ModelRunner(model, kv, device, scheduler.max_num_seqs, size.max_model_len)
    if with_graphs:
        assert isinstance(device, CudaDevice)
        capturing = time.monotonic()
        runner.capture_graphs(device)
        log.info("captured CUDA graphs", seconds=round(time.monotonic() - capturing, 2))
    _log_ready(config, model_config, device, dtype, size, loaded - began)
    hello = WorkerHello(
        protocol_version=PROTOCOL_VERSION,
        name=name,
        rank=0,
        model_fingerprint=fingerprint(folder),
        device=_device_name(device),
        dtype=_name(dtype),
        vocab_size=model_config.vocab_size,
        max_model_len=size.max_model_len,
        page_size=scheduler.page_size,
        num_pages=size.num_pages,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
    )
    return Started(runner, hello)


def _log_ready(
    config: Config,
    model: ModelConfig,
    device: CpuDevice | CudaDevice,
    dtype: torch.dtype,
    size: PoolSize,
    seconds: float,
) -> None:
    page_size = config.scheduler.page_size
    log.info(
        "model loaded",
        load_seconds=round(seconds, 2),
        device=_device_name(device),
        dtype=_name(dtype),
        kv_pool_tokens=size.num_pages * page_size,
        kv_pool_mib=round(size.num_pages * page_bytes(model, page_size, dtype) / 2**20),
        max_model_len=size.max_model_len,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: CpuDevice | CudaDevice) -> str:
    if isinstance(device, CudaDevice):
        return torch.cuda.get_device_name(device.torch_device)
    return f"cpu ({torch.get_num_threads()} threads)"
