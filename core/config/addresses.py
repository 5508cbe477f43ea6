"""The addresses that a configuration means, once there is a folder for sockets."""

from pathlib import Path

import msgspec

from penstock.core.config.options import Config, ConfigError
from penstock.ipc.addresses import ipc_address


def with_addresses(config: Config, folder: Path) -> Config:
    """Fill the addresses that were left empty with `ipc://` sockets in `folder`."""
    return msgspec.structs.replace(
        config,
        ipc=msgspec.structs.replace(
            config.ipc,
            frontend_address=config.ipc.frontend_address or ipc_address(folder, "frontends"),
            worker_address=config.ipc.worker_address or ipc_address(folder, "workers"),
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
        raise ConfigError(
            "--frontend-address (or --runtime-dir) says where scheduler and frontends meet; it is missing"
        )
    if worker and not config.ipc.worker_address:
        raise ConfigError("--worker-address (or --runtime-dir) says where scheduler and workers meet; it is missing")
    return config
