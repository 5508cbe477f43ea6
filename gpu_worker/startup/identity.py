"""What a worker's results depend on, bit for bit, besides requests: its weights, and the software that computes."""

import platform
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from penstock.gpu_worker.devices.cpu import num_cores
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.loading.stored import BytesRead
from penstock.gpu_worker.models.model import Model
from penstock.models.description.decoder import Decoder
from penstock.models.description.model_config import ModelConfig
from penstock.models.families.registry import expected_tensors
from penstock.models.files.source import Checkpoint
from penstock.models.files.weights_digest import weights_digest
from penstock.models.quantization import recipes_of

_NUM_THREADS = 4
"""Threads for the digest: this many keep up with a fast disk."""


@contextmanager
def reading_weights(
    checkpoint: Checkpoint, config: ModelConfig, load_format: str, bytes_read: BytesRead
) -> Iterator[Callable[[], str]]:
    """Compute the digest of the weights while the loader reads them, too; gives a function that waits for the digest.

    A rank with a part of the weights reads only this part: its digest covers what the loader reads.

    Weights that are not from the checkpoint have a name in place of a digest. The name of a quantization made at load
    is appended.
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
    """The libraries and the processor that compute, as far as others might round differently."""
    used = [f"torch {torch.__version__}"]
    if model.kernels.startswith("native") and device.library is not None:
        used.append(device.library.name)
    if device.torch_device.type == "cuda":
        import triton  # without a GPU, nothing in this process needs it

        major, minor = torch.cuda.get_device_capability(device.torch_device)
        used += [f"triton {triton.__version__}", device.name, f"sm_{major}{minor}"]
    elif not model.is_batch_invariant:
        used += [platform.machine(), torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()} threads"]
    return ", ".join(used)[:256]
