"""From a failed allocation or step to a sentence that says what to change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.config import ConfigError


class NoMemoryError(ConfigError):
    """The configuration does not fit into the free memory; the message says what to change."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device or the host ran out of memory."""
    return (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        # Raised by the CPU's allocator, for pinned memory, or by a library that allocates device memory itself.
        or (isinstance(error, RuntimeError) and any(words in str(error) for words in _OTHER_WORDS))
    )


_OTHER_WORDS = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@contextmanager
def no_memory_for(what: str, remedy: str) -> Iterator[None]:
    """Turn a failed allocation into a sentence that says what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # Cleaning up after a failed capture may raise as well.
        if not is_out_of_memory(error) and not is_out_of_memory(error.__context__):
            raise
        raise NoMemoryError(f"out of memory: {what} do not fit; {remedy}") from None


def failure_reason(error: Exception) -> str:
    """One sentence for the log and the scheduler."""
    if is_out_of_memory(error):
        return (
            "out of memory during a step; lower --max-num-batched-tokens, --max-num-seqs, "
            "--gpu-memory-utilization or --cpu-kv-cache-gib"
        )
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"[:256]
