"""Output files named by options: tried before anything is loaded, so that a full disk is reported at once."""

from pathlib import Path

from penstock.core.config import Config, ConfigError

_TRIAL = b"\n" * 4096  # one block: a full file system accepts an empty file, but not this


def check_output_files(config: Config) -> None:
    """Make sure that the step trace and the profile can be written.

    Raises:
        ConfigError: naming the file and the system's reason.
    """
    if path := config.scheduler.step_trace:
        try:
            _try_to_write(Path(path))
        except OSError as error:
            raise ConfigError(f"cannot write the step trace {path!r}: {error.strerror}") from None
    if folder := config.worker.profile:
        trial = Path(folder) / ".trial"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            _try_to_write(trial)
            trial.unlink()
        except OSError as error:
            raise ConfigError(f"cannot write a profile into {folder!r}: {error.strerror}") from None


def _try_to_write(path: Path) -> None:
    with path.open("wb") as file:
        file.write(_TRIAL)
        file.flush()
        if file.seekable():
            file.truncate(0)
