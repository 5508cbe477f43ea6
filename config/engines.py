"""The engines of one launch: what each one's configuration is, and how its processes are told apart."""

from pathlib import Path

from msgspec.structs import replace

from penstock.config.options import Config
from penstock.ipc.addresses import addresses_in


def numbered(name: str, number: int, num_engines: int) -> str:
    """A name with an engine's number, if there are several."""
    return name if num_engines == 1 else f"{name}-{number}"


def of_engine(config: Config, number: int) -> Config:
    """Return the configuration of one engine: if there are several, each has its own sockets and files,
    and perhaps a role of its own."""
    if config.parallel.data_parallel_size == 1:
        return config
    ipc = config.ipc
    return replace(
        with_own_files(config, number),
        ipc=replace(
            ipc,
            frontend_address=addresses_in(ipc.frontend_address)[number],
            worker_address=addresses_in(ipc.worker_address)[number],
            rendezvous_address=addresses_in(ipc.rendezvous_address)[number],
        ),
    )


def with_own_files(config: Config, number: int) -> Config:
    """Give one of several engines its own files: folders get a subfolder, files a number before their suffix."""
    if config.parallel.data_parallel_size == 1:
        return config
    worker = config.worker
    worker = replace(worker, profile=worker.profile and str(Path(worker.profile) / f"engine-{number}"))
    return replace(config, worker=worker).with_options(*(options.of_engine(number) for options in config.of_parts()))


def numbered_file(name: str, number: int) -> str:
    """The file of one of several engines in place of a file that an option names; "" stays so."""
    path = Path(name)
    return name and str(path.with_name(f"{path.stem}-{number}{path.suffix}"))
