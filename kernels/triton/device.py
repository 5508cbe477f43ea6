"""Device properties that the launch rules need."""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """`num_sms` multiprocessors; `capability` as (major, minor), e.g. (9, 0) for Hopper."""

    num_sms: int
    capability: tuple[int, int]

    @property
    def is_large(self) -> bool:
        """Whether it is a data centre GPU of Hopper or Blackwell: warpgroup products, 227 KiB of shared memory a block.

        Blackwell's other GPUs, 12.x, have neither, and are treated like Ampere's.
        """
        return self.capability[0] in (9, 10)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a block may have."""
        if self.is_large:
            return 227 << 10
        return (163 if self.capability in ((8, 0), (8, 7)) else 99) << 10


HOPPER = DeviceFacts(num_sms=132, capability=(9, 0))


@functools.lru_cache(maxsize=64)
def device_facts(device: torch.device) -> DeviceFacts:
    """Properties of a CUDA device. Any other device (Triton's interpreter runs on CPU tensors) gets Hopper's."""
    if device.type != "cuda":
        return HOPPER
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(properties.multi_processor_count, (properties.major, properties.minor))


def next_power_of_two(n: int) -> int:
    """The smallest power of two >= n (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
