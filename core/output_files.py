"""Files that options name for writing: tried before anything is loaded, so that a full disk is said at once."""

from pathlib import Path

from penstock.core.config import Config, ConfigError

_TRIAL = b"\n" * 4096  # a block: a file system that is full takes an empty file, but not this


def check_output_files(config: Config) -> None:
    """Make sure that the step trace can be written.

    Raises:
        ConfigError: naming the file and the system's reason.
    """
    path = config.scheduler.step_trace
    if not path:
        return
    try:
        with Path(path).open("wb") as file:
            file.write(_TRIAL)
            file.flush()
            if file.seekable():
                file.truncate(0)
    except OSError as error:
        raise ConfigError(f"cannot write the step trace {path!r}: {error.strerror}") from None
