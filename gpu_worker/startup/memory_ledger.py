"""What a start has put into a GPU's memory, part by part."""

import structlog

from penstock.gpu_worker.devices.device import Device

log = structlog.get_logger()


class MemoryLedger:
    """Counts what the device says is in use from one part of the start to the next. On a CPU it counts nothing."""

    def __init__(self, device: Device) -> None:
        """What is in use already: the driver's context, and other processes."""
        self._device = device
        self._counts = device.torch_device.type == "cuda"
        self._parts: dict[str, int] = {}
        self._in_use = 0
        self.note("other")

    def note(self, part: str) -> None:
        """Everything since the last call belongs to this part."""
        if self._counts:
            in_use, _ = self._device.memory_use()
            self._parts[part] = self._parts.get(part, 0) + in_use - self._in_use
            self._in_use = in_use

    def tell(self, activations: int) -> None:
        """Log the parts; `activations`: bytes that the largest step takes while it is computed, from what is free."""
        if not self._counts:
            return
        _, total = self._device.memory_use()
        parts = self._parts | {"largest_step": activations, "free": total - self._in_use}
        log.info("memory", **{f"{name}_mib": round(num_bytes / 2**20) for name, num_bytes in parts.items()})
