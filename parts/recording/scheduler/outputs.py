"""Checks the files of recordings before anything is loaded."""

import os
from pathlib import Path

from penstock.config import ConfigError
from penstock.core.launch.output_files import TRIAL
from penstock.parts.recording.writer import may_hold_recording


def check_recording(path: Path) -> None:
    """Continue an existing recording; never change any other file. Pipes and devices are not tried."""
    if path.exists() and not path.is_file():
        return
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if may_hold_recording(path):
                size = os.fstat(file).st_size
                os.pwrite(file, TRIAL, size)
                os.ftruncate(file, size)
                return
        finally:
            os.close(file)
    except OSError as error:
        raise ConfigError(f"cannot write the recording {str(path)!r}: {error.strerror}") from None
    raise ConfigError(f"--record {str(path)!r}: this file is there and is no recording")
