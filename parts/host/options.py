"""Options of the host tier."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from penstock.config.groups.base import INTERNAL, Shown
from penstock.config.options import Config
from penstock.config.part_options import PartOptions

PreemptionKind = Literal["recompute", "swap", "auto"]


class HostOptions(PartOptions, frozen=True):
    """KV pages in the host's memory ([tiers](kv-tiers.md))."""

    part: ClassVar[str] = "host"
    title: ClassVar[str] = "Host memory"
    beside: ClassVar[str] = "worker"

    host_kv_gib: Annotated[
        float,
        Meta(
            description="Host memory for KV pages that do not fit the pool, in GiB: cached prefixes that are evicted, "
            "and preempted sequences. 0: none.",
            ge=0.0,
        ),
        Shown(line="host memory for KV pages that do not fit the pool"),
    ] = 0.0
    preemption: Annotated[
        PreemptionKind,
        Meta(
            description="How a preempted sequence comes back: 'recompute' computes it again, 'swap' keeps its pages in "
            "host memory, and 'auto' takes what costs less as measured. Without --host-kv-gib all are computed again."
        ),
        INTERNAL,
    ] = "auto"

    @property
    def num_bytes(self) -> int:
        """The host's memory for pages of each worker."""
        return int(self.host_kv_gib * (1 << 30))

    def problem(self, config: Config) -> str:
        """What is swapped has a place."""
        if self.preemption == "swap" and not self.host_kv_gib:
            return "preemption swap needs host memory for the pages: set --host-kv-gib"
        return ""

    def problem_with_states(self) -> tuple[str, str] | None:
        """States are on the device alone."""
        if self.host_kv_gib:
            return "--host-kv-gib", "which has no lower tier: pages alone are no start"
        return None


PARTS = (HostOptions,)
