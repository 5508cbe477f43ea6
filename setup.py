"""What pyproject.toml cannot say: a wheel holds compiled CPU kernels, so it is one for a platform.

`PENSTOCK_KERNELS` names a folder of libraries that are compiled already, and `PENSTOCK_WHEEL_PLATFORM` the platform tag
that they deserve: so does `make wheels`. Otherwise a library is compiled for this machine's family of processors, if
there is a C++ compiler; without one, the first start says what is missing.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_NATIVE = Path(__file__).parent / "penstock" / "kernels" / "native"  # by the name that the source archive has, too


def _build_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_of_kernels", _NATIVE / "build.py")
    if spec is None or spec.loader is None:
        raise ImportError("kernels/native/build.py is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class WithBinaries(Distribution):
    """Goes where packages with compiled parts go."""

    def has_ext_modules(self) -> bool:
        """Its libraries are no extension modules, but as bound to a platform."""
        return True


class BuildWithKernels(build_py):
    """Puts compiled kernels beside their sources."""

    def run(self) -> None:
        """Copy the sources, then compile or copy the kernels."""
        super().run()
        if self.editable_mode:  # the sources stay where they are, and so does what `make` or the first start compiles
            return
        folder = Path(self.build_lib) / "penstock" / "kernels" / "native"
        for left in folder.glob("*.so"):  # by another build in the same folder
            left.unlink()
        if made := os.environ.get("PENSTOCK_KERNELS"):
            for path in sorted(Path(made).glob("*.so")):
                shutil.copy2(path, folder)
            return
        build = _build_module()
        try:
            build.build_fitting(folder)
        except build.BuildError as error:
            print(f"CPU kernels: not compiled at installation; {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """Any Python, no ABI of it, one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag of the wheel's name."""
        return "py3", "none", os.environ.get("PENSTOCK_WHEEL_PLATFORM") or super().get_tag()[2]


setup(distclass=WithBinaries, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
