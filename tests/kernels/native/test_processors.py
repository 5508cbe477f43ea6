"""Products of quantized weights have the same bits on all processors that fuse multiplications with additions."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels.native import build
from tests.faults.soak import only_in_soak

ROOT = Path(__file__).parents[3]
TILES = f"-include {Path(__file__).parent / 'emulated_tiles.h'}"
# How a library is compiled -> what the processor must have to run it.
VARIANTS = {
    ("x86-64-v3", ""): {"avx2", "fma"},
    ("x86-64-v3", "-mavxvnni"): {"avx2", "fma", "avx_vnni"},
    ("x86-64-v4", ""): build._V4,
    ("x86-64-v4", "-mavx512vnni"): build._V4 | {"avx512_vnni"},
    ("x86-64-v4", TILES): build._V4,
}


def bits_of(path: Path) -> str:
    command = [sys.executable, "-m", "tests.kernels.quantized_bits", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@only_in_soak
@pytest.mark.timeout(3600)
def test_the_same_bits_by_other_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of AVX2, AVX-VNNI, AVX-512 and its VNNI; tiles (AMX) are emulated."""
    if platform.machine() != "x86_64" or build.find_compiler() is None:
        pytest.skip("needs an x86 processor and a compiler")
    has, found = set(build._processor().split()), {}
    for number, ((march, flags), needed) in enumerate(VARIANTS.items()):
        if needed <= has:
            monkeypatch.setenv("PENSTOCK_TEST_CXXFLAGS", flags)
            path = tmp_path / f"{number}.so"
            build._compile(march, path)
            found[march, flags] = bits_of(path)
    assert len(set(found.values())) == 1, found


def test_attention_by_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By emulated tiles, in the cases that other instructions compute; a processor with tiles needs no emulation."""
    has = set(build._processor().split())
    if build.find_compiler() is None or not build._V4 | {"avx512_bf16"} <= has or "amx_bf16" in has:
        pytest.skip("needs a compiler, and a processor that multiplies pairs of bf16, but no tiles")
    monkeypatch.setenv("PENSTOCK_TEST_CXXFLAGS", f"{TILES} -mavx512bf16 -O1")
    library = tmp_path / "kernels.so"
    build._compile("x86-64-v4", library)
    monkeypatch.setenv("PENSTOCK_TEST_KERNELS", str(library))
    tests = ["tests/kernels/native/test_attention.py", "-k", "plain_softmax or picture or large"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@only_in_soak
@pytest.mark.timeout(600)
def test_the_kernels_compile_for_tiles(tmp_path: Path) -> None:
    """For a processor that has them; they are used there."""
    if platform.machine() != "x86_64" or build.find_compiler() is None:
        pytest.skip("needs an x86 processor and a compiler")
    build._compile("sapphirerapids", tmp_path / "kernels.so")
    code = subprocess.run(["objdump", "-d", tmp_path / "kernels.so"], capture_output=True, text=True, check=True).stdout
    assert "tdpbsud" in code
    assert "tdpbf16ps" in code
