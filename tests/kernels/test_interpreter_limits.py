"""A numpy that is too new for Triton's interpreter is told, and not sixty failures."""

import numpy as np
import pytest

from tests.kernels.interpreter_limits import why_not

OLD = 'scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data))'
NEW = 'scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))'


@pytest.mark.parametrize(
    ("numpy_version", "source", "is_told"),
    [
        ("2.4.6", OLD, False),
        ("2.5.0", OLD, True),
        ("2.10.1", OLD, True),
        ("3.0.0rc1", OLD, True),
        ("2.5.2", NEW, False),
    ],
)
def test_which_pairs_do_not_go_together(numpy_version: str, source: str, is_told: bool) -> None:
    assert bool(why_not(numpy_version, source)) is is_told


def test_the_installed_ones_go_together() -> None:
    """They are pinned; who installs others is told by a skip."""
    assert not why_not() or tuple(map(int, np.__version__.split(".")[:2])) >= (2, 5)
