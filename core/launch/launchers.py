"""Starts the workers of an engine as `--launcher` says: by this machine's supervisor, or by another program.

Each other launcher is a module with the functions of `Launcher`, imported only on demand.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from penstock.config.addresses import with_addresses
from penstock.config.options import Config, ConfigError
from penstock.config.ranks import Rank
from penstock.core.launch.child import Child
from penstock.core.launch.spare import Spare

_MODULES = {"ray": ("penstock.deploy.ray.launcher", "ray", "pip install 'penstock-llm[ray]'")}
"""Name -> module, the library that it needs, and the command that installs it."""


class Launcher(Protocol):
    """The functions of a launcher's module."""

    def addressed(self, config: Config, folder: Path) -> Config:
        """Return the configuration with all addresses, like `with_addresses`.

        Raises:
            ConfigError: if there is nothing to start workers on.
        """

    def workers(self, config: Config, ranks: Sequence[Rank]) -> list[Child]:
        """The workers of one engine, not started yet."""


def _launcher(config: Config) -> Launcher | None:
    name = config.parallel.launcher
    if name == "local":
        return None
    module, library, remedy = _MODULES[name]
    try:
        return cast(Launcher, import_module(module))
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise ConfigError(f"--launcher {name} needs a library that is not installed: {remedy}") from None


def addressed(config: Config, folder: Path) -> Config:
    """The configuration with all addresses; sockets and files are in `folder`.

    Raises:
        ConfigError: if the launcher cannot be used here.
    """
    launcher = _launcher(config)
    return with_addresses(config, folder) if launcher is None else launcher.addressed(config, folder)


def workers(config: Config, ranks: Sequence[Rank], spare: Spare | None) -> list[Child]:
    """The workers of one engine, not started yet; local ones are forked off the spare."""
    launcher = _launcher(config)
    if launcher is not None:
        return launcher.workers(config, ranks)
    return [
        Child(rank.name, "penstock.gpu_worker", rank.share(config), *rank.arguments, spare=spare)
        for rank in (each.on_this_machine() for each in ranks)
    ]
