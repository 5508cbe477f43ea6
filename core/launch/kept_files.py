"""Files that decide what processes load: kept as they were at the start, for those that are restarted later."""

import shutil
from pathlib import Path

from msgspec.structs import replace

from penstock.core.config import Config, ConfigError


def with_kept_files(config: Config, folder: Path) -> Config:
    """Let workers read their own copy of --expert-load: all ranks must place experts alike, whenever they start.

    Raises:
        ConfigError: it cannot be read.
    """
    if not config.parallel.expert_load:
        return config
    kept = folder / "expert-load.json"
    try:
        shutil.copyfile(config.parallel.expert_load, kept)
    except OSError as error:
        raise ConfigError(f"--expert-load: cannot keep {config.parallel.expert_load!r}: {error.strerror}") from None
    return replace(config, parallel=replace(config.parallel, expert_load=str(kept)))
