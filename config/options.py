"""Every option of Penstock, once: name, type, default, bounds and meaning.

The command line (`flags.py`), the messages between supervisor and children, and the reference in
the docs are all made from the structs in `groups/`, so they cannot drift apart.
"""

import re
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar, get_type_hints

import msgspec
from msgspec.structs import replace

from penstock.config.groups.base import Options
from penstock.config.groups.frontend import FrontendOptions
from penstock.config.groups.ipc import IpcOptions
from penstock.config.groups.log import LogFormat, LogOptions
from penstock.config.groups.model import ModelImpl, ModelOptions
from penstock.config.groups.parallel import ParallelOptions
from penstock.config.groups.scheduling import SchedulerOptions
from penstock.config.groups.worker import CpuKernels, DTypeName, KVCacheDType, WorkerOptions
from penstock.config.networks import problem_with_network
from penstock.config.observing import problem_with_observers
from penstock.config.part_options import PartOptions, part_options
from penstock.ipc.addresses import addresses_in, is_tcp
from penstock.ipc.key_file import ChannelKeys, KeyFileError, read_key_file

__all__ = [
    "Config",
    "ConfigError",
    "CpuKernels",
    "DTypeName",
    "FrontendOptions",
    "IpcOptions",
    "KVCacheDType",
    "LogFormat",
    "LogOptions",
    "ModelImpl",
    "ModelOptions",
    "Options",
    "ParallelOptions",
    "SchedulerOptions",
    "WorkerOptions",
    "channel_keys",
    "check_engines",
    "option_groups",
    "problem_with_keys",
    "validate",
]


_Part = TypeVar("_Part", bound=PartOptions)


class Config(Options, frozen=True, dict=True):
    """All options of one launch, by group. Frozen: whoever needs another value makes another Config."""

    model: ModelOptions = ModelOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    worker: WorkerOptions = WorkerOptions()
    parallel: ParallelOptions = ParallelOptions()
    frontend: FrontendOptions = FrontendOptions()
    ipc: IpcOptions = IpcOptions()
    log: LogOptions = LogOptions()
    parts: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Options of parts, by the part's name, as plain values and without defaults: ask `of` for them."""

    def __hash__(self) -> int:
        return hash(msgspec.json.encode(self))  # some cache by it, and `parts` has no hash

    def of(self, kind: type[_Part]) -> _Part:
        """The options of a part."""
        found: _Part | None = self._of_parts.get(kind)
        if found is None:
            found = self._of_parts[kind] = msgspec.convert(self.parts.get(kind.part, {}), kind)
        return found

    def of_parts(self) -> tuple[PartOptions, ...]:
        """The options of all parts that there are."""
        return tuple(self.of(kind) for kind in part_options().values())

    def with_options(self, *options: PartOptions) -> Self:
        """Return the same configuration with other options of parts."""
        parts = self.parts | {each.part: msgspec.json.decode(msgspec.json.encode(each)) for each in options}
        return replace(self, parts={name: values for name, values in parts.items() if values})

    @cached_property
    def _of_parts(self) -> dict[type[PartOptions], Any]:
        return {}


def option_groups() -> dict[str, type[Options]]:
    """All groups of options: the fields of `Config`, then those that parts bring, by the part's name."""
    own = {name: kind for name, kind in get_type_hints(Config).items() if isinstance(kind, type) and name != "parts"}
    return {**own, **part_options()}


_ANYWHERE = {"0.0.0.0", "::", "*"}
"""All addresses of a host: to listen on, but not to connect to."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\sA-Z/*,?#@]+")
"""As browsers write it: lower case, no path."""


class ConfigError(ValueError):
    """An option, or the checkpoint that it names, cannot work; the message is one clear sentence."""


def validate(config: Config) -> Config:
    """Check what one field's bounds cannot say; return the config unchanged.

    Raises:
        ConfigError: with the option's flag and its value.
    """
    page_size = config.scheduler.page_size
    if page_size & (page_size - 1):
        raise ConfigError(f"--page-size must be a power of two, got {page_size}")
    if config.parallel.pipeline_layers and config.parallel.pipeline_parallel_size == 1:
        raise ConfigError("pipeline_layers has no effect without --pipeline-parallel-size")
    try:
        admin_address = config.frontend.admin_address
    except ValueError as error:
        raise ConfigError(f"--admin-port {config.frontend.admin_port!r}: {error}") from None
    if admin_address is not None and 0 < admin_address[1] == config.frontend.port:
        raise ConfigError(f"--admin-port ({config.frontend.admin_port}) must be another port than --port")
    if problem := problem_with_observers(config.frontend):
        raise ConfigError(problem)
    for origin in config.frontend.cors_origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origins {origin!r}: an origin is scheme://host or scheme://host:port, nothing else"
            )
    for given in config.frontend.trusted_proxies:
        if problem := problem_with_network(given):
            raise ConfigError(f"--trusted-proxies {given!r}: {problem}")
    for flag, address in (
        ("--frontend-address", config.ipc.frontend_address),
        ("--worker-address", config.ipc.worker_address),
    ):
        if problem := problem_with_keys(flag, address, config):
            raise ConfigError(problem)
    for address in filter(None, addresses_in(config.ipc.rendezvous_address)):
        if problem := _problem_with_rendezvous(address, has_keys=bool(config.ipc.channel_key_file)):
            raise ConfigError(f"--rendezvous-address {address!r}{problem}")
    for options in config.of_parts():
        if problem := options.problem(config):
            raise ConfigError(problem)
    channel_keys(config)
    return config


def problem_with_keys(flag: str, address: str, config: Config) -> str:
    """Why an option's addresses, with commas between them, are unsafe without keys; "" if they are not."""
    if config.ipc.channel_key_file or not any(map(is_tcp, addresses_in(address))):
        return ""
    return (
        f"{flag} {address!r} needs --channel-key-file (make one with `penstock keys --channel FILE`): "
        "without keys anybody who reaches it could send and read messages"
    )


def _problem_with_rendezvous(address: str, *, has_keys: bool) -> str:
    """Return what is wrong with the place where ranks meet, to be read after it; empty if nothing is."""
    kind, _, where = address.partition("://")
    host, _, port = where.rpartition(":")
    if kind != "file" and (kind != "tcp" or not host or not port.isdecimal()):
        return ": it must be tcp://HOST:PORT, or file://PATH on one machine"
    if kind == "tcp" and host.strip("[]") in _ANYWHERE:
        return " is no place to meet: name the host of the first worker as the other workers reach it"
    if kind == "tcp" and not has_keys:
        return (
            " needs --channel-key-file (make one with `penstock keys --channel FILE`) and a private network: workers "
            "that meet over TCP listen on all addresses of their hosts; on one machine, leave the option out"
        )
    return ""


def check_engines(config: Config) -> None:
    """Check the options of a launch that starts all its engines.

    Raises:
        ConfigError: with the option's flag.
    """
    num_engines = config.parallel.data_parallel_size
    ipc = config.ipc
    for flag, given in (
        ("--frontend-address", ipc.frontend_address),
        ("--worker-address", ipc.worker_address),
        ("--rendezvous-address", ipc.rendezvous_address),
    ):
        if given and len({*addresses_in(given)}) != num_engines:
            raise ConfigError(
                f"{flag} {given!r}: with --data-parallel-size {num_engines} it has as many addresses, one for each "
                "engine, separated by commas"
            )


def channel_keys(config: Config) -> ChannelKeys | None:
    """The keys of the launch's tcp:// addresses, if it has any.

    Raises:
        ConfigError: if the file cannot be used.
    """
    if not config.ipc.channel_key_file:
        return None
    try:
        return read_key_file(Path(config.ipc.channel_key_file))
    except KeyFileError as error:
        raise ConfigError(f"--channel-key-file {error}") from None
