"""The devices for which plans can be made."""

from pathlib import Path

import msgspec

from penstock.config.options import ConfigError
from penstock.lab.planning.step_costs import StepCosts

_OURS = Path(__file__).with_name("machines.toml")


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device; see machines.toml."""

    name: str
    memory: float
    bandwidth: float
    link: float
    flops: dict[str, float]  # by format: "fp16" (the same for bf16), and "int8" and "fp8" if it has them
    runtime: float = 2e9  # bytes of the driver, the libraries' workspaces and the captured graphs
    most: int = 64  # devices that a plan may have
    weights: str = "fp16"  # the format in which it computes a 16-bit checkpoint, one of `costs.BYTES`
    kv: str = "fp16"
    steps: StepCosts | None = None  # measured with the engine, for these formats; None: steps follow the roofline
    measured_at: float = 0.0  # seconds since 1970; 0: published figures

    @property
    def gpu_memory(self) -> float | None:
        """Bytes of a GPU; None for a CPU: only CPUs are measured."""
        return self.memory if self.steps is None else None

    def rate(self, product: str) -> float:
        """Operations per second; formats that the device cannot multiply are computed in 16 bits."""
        return self.flops.get(product, self.flops["fp16"])


def load_machines(more: Path | None = None) -> dict[str, Machine]:
    """Return all known devices by name, with those of another file of the same form added.

    Raises:
        ConfigError: the file cannot be read, or has another form.
    """
    found: dict[str, Machine] = {}
    for path in (_OURS, more):
        if path is None:
            continue
        try:
            found |= msgspec.toml.decode(path.read_bytes(), type=dict[str, Machine])
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{path}: {error}") from None
    for key, machine in found.items():
        if "fp16" not in machine.flops or min(machine.memory, machine.bandwidth, *machine.flops.values()) <= 0:
            raise ConfigError(f"machine {key}: memory, bandwidth and flops.fp16 must be there and positive")
    return found
