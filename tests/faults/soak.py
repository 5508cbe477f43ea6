"""Which form of the long tests runs: the small one, or with PENSTOCK_SOAK=1 the whole."""

import os
from typing import TypeVar

import pytest

T = TypeVar("T")

IS_SOAK = bool(os.environ.get("PENSTOCK_SOAK"))
only_in_soak = pytest.mark.skipif(not IS_SOAK, reason="set PENSTOCK_SOAK=1, or run `make soak`")


def sized(small: T, whole: T) -> T:
    """A size for each form."""
    return whole if IS_SOAK else small
