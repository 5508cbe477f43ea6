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
    ipc, parallel = config.ipc, config.parallel
    role = parallel.role[number : number + 1] if len(parallel.role) > 1 else parallel.role
    return replace(
        with_own_files(config, number),
        parallel=replace(parallel, role=role),
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
    scheduler, worker, folder = config.scheduler, config.worker, f"engine-{number}"
    return replace(
        config,
        scheduler=replace(
            scheduler,
            step_trace=_numbered_file(scheduler.step_trace, number),
            record=_numbered_recording(scheduler.recording, number),
        ),
        worker=replace(
            worker,
            disk_kv=_subfolder(worker.disk_kv, folder),
            profile=worker.profile and str(Path(worker.profile) / folder),
        ),
    )


def _numbered_recording(recording: tuple[Path, int] | None, number: int) -> str:
    return "" if recording is None else f"{_numbered_file(str(recording[0]), number)}:{recording[1]}"


def _subfolder(disk_kv: str, name: str) -> str:
    folder, _, size = disk_kv.rpartition(":")
    return disk_kv and f"{Path(folder) / name}:{size}"


def _numbered_file(name: str, number: int) -> str:
    path = Path(name)
    return name and str(path.with_name(f"{path.stem}-{number}{path.suffix}"))
