"""The end-to-end tests' checkpoint, and one model for all tests that do not need their own."""

from collections.abc import Iterator
from typing import Any

import pytest

from penstock import LLM
from tests.e2e.conftest import Checkpoint, checkpoint

__all__ = ["Checkpoint", "checkpoint"]

SMALL: dict[str, Any] = {"num_threads": 1, "num_pages": 400, "dtype": "float32"}


@pytest.fixture
def llm(checkpoint: Checkpoint) -> Iterator[LLM]:
    with LLM(checkpoint.folder, **SMALL) as made:
        yield made
