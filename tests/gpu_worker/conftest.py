"""Fixtures of the worker's tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.gpu_worker.checkpoints import make_checkpoint

Checkpoint = tuple[Path, transformers.PreTrainedModel]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """Makes the checkpoint of a kind, once per session."""
    made: dict[str, Checkpoint] = {}

    def make(name: str, **changes: Any) -> Checkpoint:
        key = f"{name}{sorted(changes.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            made[key] = (folder, make_checkpoint(folder, name, **changes))
        return made[key]

    return make
