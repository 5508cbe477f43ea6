"""Options: addresses between the processes."""

from typing import Annotated

from msgspec import Meta

from penstock.config.groups.base import INTERNAL, Options, Shown


class IpcOptions(Options, frozen=True):
    """Where the processes meet, and how long a peer may be silent."""

    frontend_address: Annotated[
        str,
        Meta(
            description="ZeroMQ address where scheduler and frontends meet; those of several engines are separated by "
            "commas. Empty: a private ipc:// socket."
        ),
        Shown(line="where scheduler and frontends meet, if started apart"),
    ] = ""
    worker_address: Annotated[
        str,
        Meta(
            description="ZeroMQ address where scheduler and workers meet; those of several engines are separated by "
            "commas. Empty: a private ipc:// socket."
        ),
        Shown(line="where scheduler and workers meet, if started apart"),
    ] = ""
    rendezvous_address: Annotated[
        str,
        Meta(
            description="Where the workers of an engine meet: tcp://HOST:PORT of the first one, if they are on several "
            "hosts (with --channel-key-file). That network must be private: whoever reaches it could send them data. "
            "Empty: a private file."
        ),
    ] = ""
    runtime_dir: Annotated[
        str, Meta(description="Folder (mode 0700) for ipc:// sockets. Empty: a new temporary one."), Shown("PATH")
    ] = ""
    channel_key_file: Annotated[
        str,
        Meta(
            description="File with the CURVE keys for tcp:// addresses (`penstock keys --channel FILE` makes "
            "one). All processes of a launch need the same file; without it nobody can connect."
        ),
        Shown("PATH", "keys for tcp:// addresses (`penstock keys --channel`)"),
    ] = ""
    heartbeat_timeout: Annotated[
        float,
        Meta(
            description="Seconds of silence after which a process counts as lost. Processes show signs of life every "
            "second, or ten times in this time if that is more often.",
            gt=0.0,
        ),
    ] = 10.0
    max_heartbeat_interval: Annotated[float, Meta(description="Most seconds between heartbeats.", gt=0.0), INTERNAL] = (
        1.0
    )

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between heartbeats: several may be late before a process counts as lost."""
        return min(self.max_heartbeat_interval, self.heartbeat_timeout / 10)
