"""One random checkpoint for all end-to-end tests."""

from pathlib import Path
from typing import NamedTuple

import pytest
import transformers

from tests.e2e.checkpoints import make_checkpoint


class Checkpoint(NamedTuple):
    """A folder, and transformers' model of it (the oracle)."""

    folder: Path
    model: transformers.PreTrainedModel


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    return Checkpoint(folder, make_checkpoint(folder))
