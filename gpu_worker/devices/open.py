"""From options to a device, and to a dtype that suits it."""

import os
from collections.abc import Collection

import structlog
import torch

from penstock.config import ConfigError
from penstock.config.options import CpuKernels, DTypeName
from penstock.config.slow_kernels import slow_kernels
from penstock.gpu_worker.devices.cpu import CpuDevice, computes_in_bf16, num_cores
from penstock.gpu_worker.devices.cuda import CudaDevice
from penstock.gpu_worker.devices.device import Device
from penstock.kernels.native.build import BuildError, build, built_library, find_compiler
from penstock.kernels.native.library import Library

log = structlog.get_logger()


def open_device(wanted: str, num_threads: int, kernels: CpuKernels = "torch", cores: Collection[int] = ()) -> Device:
    """The device that an option names.

    Args:
        wanted: the value of `--device`; or `auto:N`, the Nth GPU if there are any.
        num_threads: for a CPU; 0 for one per core.
        kernels: for a CPU, the value of `--cpu-kernels`.
        cores: CPU cores to which this thread and its future child threads are pinned; empty: any.

    Raises:
        ConfigError: if there is no such device, or its kernels cannot be compiled.
    """
    kind, _, number = wanted.partition(":")
    name = wanted
    if kind == "auto":
        name = f"cuda:{number or 0}" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        if cores:
            os.sched_setaffinity(0, cores)
            log.info("pinned to cores", cores=len(cores), first=min(cores), last=max(cores))
        return CpuDevice(num_threads, _library(kernels, num_threads or num_cores()))
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type != "cuda":
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got {wanted!r}")
    index = device.index or 0
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise ConfigError(f"--device {wanted}: this machine offers {torch.cuda.device_count()} CUDA devices")
    return CudaDevice(index)


def _library(kernels: CpuKernels, num_threads: int) -> Library | None:
    """The native CPU kernels if the option selects them; None for torch's."""
    if kernels == "torch":
        return None
    path = built_library()
    if path is None and (kernels == "native" or find_compiler() is not None):
        log.info("compiling the CPU kernels: once, in about ten seconds")
        try:
            path = build()
        except BuildError as error:
            if kernels == "native":
                raise ConfigError(f"--cpu-kernels native: {error}") from None
            log.warning("CPU kernels not compiled", error=str(error))
    if path is None:
        log.warning("no native CPU kernels", reason=slow_kernels("cpu", "torch"))
    return None if path is None else Library(path, num_threads)


def choose_dtype(
    wanted: DTypeName,
    checkpoint: str,
    device: torch.device,
    cpu_flags: str | None = None,
    *,
    is_quantized: bool = False,
) -> torch.dtype:
    """The dtype of weights, activations and KV.

    On a GPU, `auto` is the checkpoint's dtype. On a CPU it is bfloat16 for a half-precision checkpoint if the processor
    computes in bfloat16, else float32; float16 is slow there. For quantized weights it is bfloat16 on any CPU with
    native kernels: then these multiply integers, which is fast everywhere, while float32 would mean exact inputs.

    Args:
        wanted: the option.
        checkpoint: the checkpoint's own dtype.
        device: where the model runs.
        cpu_flags: the processor's feature words; read from /proc/cpuinfo if None.
        is_quantized: whether native kernels multiply quantized weights.

    Raises:
        ConfigError: for float16 on a CPU, or a checkpoint dtype that is not supported.
    """
    if wanted == "auto":
        if checkpoint not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"the checkpoint's dtype {checkpoint!r} is not supported; choose one with --dtype")
        if device.type == "cuda":
            return _torch_dtype(checkpoint)
        is_bf16 = is_quantized or (checkpoint == "bfloat16" and computes_in_bf16(cpu_flags))
        return torch.bfloat16 if is_bf16 else torch.float32
    if wanted == "float16" and device.type == "cpu":
        raise ConfigError("--dtype float16 is slow on a CPU and not supported there; use bfloat16, float32 or auto")
    return _torch_dtype(wanted)


def _torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
