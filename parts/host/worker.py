"""The host tier's memory in a worker. The pages themselves, and their copies, are the worker's (`HostPages`)."""

from msgspec.structs import replace

from penstock.config import Config
from penstock.gpu_worker.part import Context, WorkerPart
from penstock.ipc.messages import WorkerHello
from penstock.parts.host.options import HostOptions


class HostMemory(WorkerPart):
    """A host tier that is wanted, but could not be had."""

    @classmethod
    def host_bytes(cls, config: Config) -> int:
        return config.of(HostOptions).num_bytes

    @classmethod
    def of(cls, context: Context) -> WorkerPart | None:
        is_missing = context.host_pages is None and cls.host_bytes(context.config)
        return cls() if is_missing else None

    def hello(self, hello: WorkerHello) -> WorkerHello:
        return replace(hello, failed_tiers=(*hello.failed_tiers, "host"))


PARTS = (HostMemory,)
