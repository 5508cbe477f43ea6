"""A checkpoint whose tokenizer grammars are read for."""

from pathlib import Path

import pytest

from tests.frontend.checkpoint_folder import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
