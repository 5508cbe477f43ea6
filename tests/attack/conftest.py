"""One server for all attacks; every test ends with the same check."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack.after_check import Victim, victim
from tests.e2e.checkpoints import make_checkpoint
from tests.internal_fields import internal


@pytest.fixture(scope="package")
def _attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    folder: Path = tmp_path_factory.mktemp("attacked") / "model"
    make_checkpoint(folder)
    impatient = internal(head_timeout=2.0, body_timeout=3.0)
    with victim(folder, "--max-body-bytes", str(8 << 20), **impatient) as found:
        yield found


@pytest.fixture
def server(_attacked: Victim) -> Iterator[Victim]:
    yield _attacked
    _attacked.check()
