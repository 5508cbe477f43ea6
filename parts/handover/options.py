"""Options of handovers."""

from typing import Annotated, ClassVar, Literal, Self

from msgspec import Meta
from msgspec.structs import replace

from penstock.config.groups.base import INTERNAL, Shown
from penstock.config.options import Config, problem_with_keys
from penstock.config.part_options import PartOptions

RoleName = Literal["both", "prefill", "decode"]
KVTransportName = Literal["auto", "shared_memory", "zmq", "nixl"]


class HandoverOptions(PartOptions, frozen=True):
    """Prompts that one engine computes and another one goes on with ([prefill and decode](prefill-decode.md))."""

    part: ClassVar[str] = "handover"
    title: ClassVar[str] = "Prefill and decode"
    beside: ClassVar[str] = "parallel"

    role: Annotated[
        tuple[RoleName, ...],
        Meta(
            description="What engines do: 'prefill' computes prompts and hands their KV pages over, 'decode' goes on "
            "with them, 'both' serves alone and can become either (`penstock role`). One for all engines, or one for "
            "each, with commas. None: engines serve alone, and hand nothing over."
        ),
        Shown("ROLE", "prefill, decode or both, for all engines or for each"),
    ] = ()
    kv_transport: Annotated[
        KVTransportName,
        Meta(
            description="How KV pages go from engine to engine: 'shared_memory' on one host with CPU workers, 'zmq' "
            "over sockets, 'nixl' by NIXL, which must be installed. 'auto' takes the best of these that both have."
        ),
        INTERNAL,
    ] = "auto"
    kv_transfer_address: Annotated[
        str,
        Meta(
            description="Address of a worker's socket for readers of its KV pages, as other hosts reach it: "
            "tcp://HOST:PORT, PORT 0 for any; rank R takes PORT + R. Empty: an ipc:// socket beside --worker-address."
        ),
    ] = ""

    def problem(self, config: Config) -> str:
        """Pages are handed over between engines that can read each other's, and are reached by nobody else."""
        num_engines = config.parallel.data_parallel_size
        if self.role and config.parallel.pipeline_parallel_size > 1:
            return "--role: pages cannot be handed over between pipelines; --tensor-parallel-size can be more"
        if self.role and not config.scheduler.enable_prefix_caching:
            return "--role needs the prefix cache, in which pages of other engines arrive"
        if len(self.role) not in (0, 1, num_engines):
            return (
                f"--role {','.join(self.role)}: one role for all engines or one for each of the "
                f"--data-parallel-size {num_engines}"
            )
        return problem_with_keys("--kv-transfer-address", self.kv_transfer_address, config)

    def problem_with_states(self) -> tuple[str, str] | None:
        """States are not handed over."""
        return ("--role", "which is not handed over: pages alone are no start") if self.role else None

    def of_engine(self, number: int) -> Self:
        """With its own role."""
        return replace(self, role=self.role[number : number + 1]) if len(self.role) > 1 else self


PARTS = (HandoverOptions,)
