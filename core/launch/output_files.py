"""Checks the output files that options name before anything is loaded, so that a full disk is reported at once."""

import os
from pathlib import Path

from penstock.config import Config, ConfigError
from penstock.config.writable import try_to_write


def check_output_files(config: Config) -> None:
    """Make sure that the profile, --data-dir and the files of parts can be written.

    Raises:
        ConfigError: naming the file and the system's reason.
    """
    if folder := config.worker.profile:
        trial = Path(folder) / ".trial"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            try_to_write(trial)
            trial.unlink()
        except OSError as error:
            raise ConfigError(f"cannot write a profile into {folder!r}: {error.strerror}") from None
    if folder := config.frontend.data_dir:
        _check_data_dir(Path(folder))
    for options in config.of_parts():
        options.check_files()


def _check_data_dir(folder: Path) -> None:
    """Create the folder for its owner alone. An existing one keeps its mode; files written into it are private."""
    trial = folder / f".trial-{os.getpid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            try_to_write(trial)
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--data-dir {str(folder)!r} cannot be used: {error.strerror}") from None
