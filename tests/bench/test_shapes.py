"""Every shape is understood from its config.json alone: benchmarks make its weights."""

from pathlib import Path

import pytest

from bench.shapes_folder import SHAPES, described, shape_folder


@pytest.mark.parametrize("folder", sorted(SHAPES.iterdir()), ids=lambda folder: folder.name)
def test_a_shape_needs_no_weights(folder: Path) -> None:
    assert described(shape_folder(folder.name)).vocab_size > 0
