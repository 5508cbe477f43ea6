"""The flood of images is one: what a server has encoded already would cost it nothing."""

import itertools

from bench.images.flood import pictures


def test_no_file_comes_twice() -> None:
    made = list(itertools.islice(pictures(256), 200))
    assert len(set(made)) == len(made)
