"""On PYTHONPATH: hides the parts that PENSTOCK_TEST_HIDDEN names, in this process and in all that it starts."""

import os
import sys
from importlib.abc import MetaPathFinder

HIDDEN = tuple(f"penstock.parts.{name}" for name in os.environ.get("PENSTOCK_TEST_HIDDEN", "").split())


class _Hides(MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if name in HIDDEN or name.startswith(tuple(f"{hidden}." for hidden in HIDDEN)):
            raise ModuleNotFoundError(f"No module named {name!r}: it is hidden", name=name)


sys.meta_path.insert(0, _Hides())
