"""The addresses that a configuration means, once there is a folder for sockets."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.config.engines import numbered
from penstock.config.options import Config, ConfigError
from penstock.ipc.addresses import ipc_address


def with_addresses(config: Config, folder: Path) -> Config:
    """Fill the addresses that were left empty with `ipc://` sockets, and files, in `folder`: one for each engine."""
    num_engines = config.parallel.data_parallel_size

    def addresses(name: str, address: Callable[[str], str]) -> str:
        return ",".join(address(numbered(name, number, num_engines)) for number in range(num_engines))

    return msgspec.structs.replace(
        config,
        ipc=msgspec.structs.replace(
            config.ipc,
            frontend_address=config.ipc.frontend_address
            or addresses("frontends", lambda name: ipc_address(folder, name)),
            worker_address=config.ipc.worker_address or addresses("workers", lambda name: ipc_address(folder, name)),
            rendezvous_address=config.ipc.rendezvous_address
            or addresses("ranks", lambda name: f"file://{folder}/{name}"),
        ),
    )


def require_addresses(config: Config, *, frontend: bool = False, worker: bool = False) -> Config:
    """Check the addresses that a process started on its own needs; they are given or come from `--runtime-dir`.

    Raises:
        ConfigError: naming the flag that is missing.
    """
    if config.ipc.runtime_dir:
        config = with_addresses(config, Path(config.ipc.runtime_dir))
    if frontend and not config.ipc.frontend_address:
        raise ConfigError("give --frontend-address or --runtime-dir: where scheduler and frontends meet")
    if worker and not config.ipc.worker_address:
        raise ConfigError("give --worker-address or --runtime-dir: where scheduler and workers meet")
    return config


def clear_rendezvous(config: Config) -> None:
    """Remove the file in which workers met before; call it when none of them is left."""
    kind, _, path = config.ipc.rendezvous_address.partition("://")
    if kind == "file":
        Path(path).unlink(missing_ok=True)
