"""Ray's own modules warn while they are imported; ours must not."""

import warnings
from contextlib import suppress

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with suppress(ImportError):
        import ray.serve  # noqa: F401
