"""What the bits of a worker's results depend on besides requests: its weights, and what computes with them."""

import platform
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from penstock.core.checkpoint.decoder import Decoder
from penstock.core.checkpoint.families.registry import expected_tensors
from penstock.core.checkpoint.model_config import ModelConfig
from penstock.core.checkpoint.quantization import recipes_of
from penstock.core.checkpoint.source import Checkpoint
from penstock.core.checkpoint.weights_digest import weights_digest
from penstock.gpu_worker.devices.cpu import num_cores
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.loading.stored import BytesRead
from penstock.gpu_worker.models.model import Model

_NUM_THREADS = 4
"""For the digest: as many keep up with a fast disk."""


@contextmanager
def reading_weights(
    checkpoint: Checkpoint, config: ModelConfig, load_format: str, bytes_read: BytesRead
) -> Iterator[Callable[[], str]]:
    """Read the weights for their digest beside the loader, which reads them too; gives a function that waits for it.

    A rank that has a part of them reads no others: its digest is of what the loader reads.

    Weights that are not the checkpoint's have a name for a digest, and what is made of them at load is named, too.
    """
    made = f" {config.quantization.name}" if recipes_of(config) and config.quantization is not None else ""
    if load_format == "dummy" or expected_tensors(config) == {}:
        yield lambda: "none" if load_format != "dummy" else f"dummy{made}"
        return
    if isinstance(config, Decoder) and config.shard is not None:
        yield lambda: bytes_read.digest + made
        return
    with ThreadPoolExecutor(1, "penstock-weights") as thread:
        digest: Future[str] = thread.submit(
            lambda: weights_digest(checkpoint.tensors(), min(_NUM_THREADS, num_cores()))
        )
        yield lambda: digest.result() + made


def arithmetic(device: Device, model: Model) -> str:
    """The programs and the processor that compute, as far as another one might round otherwise."""
    used = [f"torch {torch.__version__}"]
    if model.kernels.startswith("native") and device.library is not None:
        used.append(device.library.name)
    if device.torch_device.type == "cuda":
        import triton  # not needed anywhere else in this process if there is no GPU

        major, minor = torch.cuda.get_device_capability(device.torch_device)
        used += [f"triton {triton.__version__}", device.name, f"sm_{major}{minor}"]
    elif not model.is_batch_invariant:
        used += [platform.machine(), torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()} threads"]
    return ", ".join(used)[:256]
