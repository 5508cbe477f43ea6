"""How large steps may be, if the options leave it to the device."""

from math import inf
from typing import NamedTuple, Self

from msgspec.structs import replace

from penstock.config.groups.scheduling import SchedulerOptions

USUAL_LEN = 1024
"""Tokens of a usual sequence, prompt and output: a row is of use only if the KV pool has room for it."""


class StepLimits(NamedTuple):
    """The sizes that options may leave to the device."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    page_size: int = 16

    @classmethod
    def for_device(cls, gpu_memory: float | None, num_usual: float = inf) -> Self:
        """Choose for a device.

        A step of a GPU reads all weights, however few rows it has, and a GPU multiplies thousands of tokens in the time
        of hundreds. So steps are as large as the memory of their activations allows.

        Args:
            gpu_memory: all of the GPU's bytes; None for a CPU.
            num_usual: how many sequences of `USUAL_LEN` tokens fit beside the weights.
        """
        least = cls()
        if gpu_memory is None or gpu_memory < 20e9:
            return least
        most_rows = 128 if gpu_memory < 40e9 else 256
        num_rows = int(min(most_rows, num_usual)) // 8 * 8
        return cls(max(least.max_num_seqs, num_rows), 4096 if gpu_memory < 60e9 else 8192, least.page_size)

    def fill(self, options: SchedulerOptions) -> SchedulerOptions:
        """Return the options with these sizes where they have none."""
        return replace(options, **{name: getattr(options, name) or size for name, size in self._asdict().items()})


def bounded(option: int, of_worker: int) -> int:
    """Return the worker's size, or the option's where it is smaller; an option of 0 leaves it to the worker."""
    return min(option or of_worker, of_worker)
