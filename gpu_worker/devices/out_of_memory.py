"""What a failure means to whoever has to change something."""

import torch

from penstock.core.config import ConfigError


class NoMemoryError(ConfigError):
    """What the configuration asks for does not fit the memory that is free; the message says what to change."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device or the host had no memory left."""
    return (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        # Of the CPU's allocator; of pinned memory; of a library that takes device memory itself.
        or (isinstance(error, RuntimeError) and any(words in str(error) for words in _OTHER_WORDS))
    )


_OTHER_WORDS = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def failure_reason(error: Exception) -> str:
    """One sentence for the log and the scheduler."""
    if is_out_of_memory(error):
        return (
            "out of memory during a step; lower --max-num-batched-tokens, --max-num-seqs, "
            "--gpu-memory-utilization or --cpu-kv-cache-gib"
        )
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"[:256]
