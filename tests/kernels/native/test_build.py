"""How the CPU's own kernels are compiled and found; on other machines, and with a compiler that looks for errors."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels.native import build
from tests.faults.soak import only_in_soak

ROOT = Path(__file__).parents[3]
ELF, AARCH64 = b"\x7fELF", (183).to_bytes(2, "little")  # the number of its machine, in bytes 18 and 19
# Zig's clang takes families by another name, and knows no 8.0.
ZIG = """#!/bin/sh
march=$(echo "$*" | sed -n "s/.*-march=armv8\\.\\([0-9]\\)-a.*/+v8_\\1a/p")
set -- $(echo "$*" | sed "s/-march=[^ ]*//")
exec {python} -m ziglang c++ -target aarch64-linux-gnu -mcpu=generic$march -Wno-psabi "$@"
"""
# What finds errors -> its libraries. The bits stay the same: -O3 is not touched.
SANITIZERS = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
SANITIZED = (
    "tests/kernels/native/test_native.py",
    "tests/kernels/native/test_attention.py",
    "tests/kernels/native/test_experts.py",
    "tests/kernels/native/test_latent.py",
    "tests/kernels/native/test_program.py",
    "tests/kernels/native/test_quantized.py",
    "tests/kernels/native/test_quantized_floats.py",
    "tests/gpu_worker/models/test_native_decoder.py",
    "tests/kernels/test_cpu_sampling.py",
)


def test_who_cannot_compile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_FOLDER", tmp_path)  # without libraries for families
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\necho no such target >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert build.built_library() is None
    with pytest.raises(build.BuildError, match="no such target"):
        build.build()
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    with pytest.raises(build.BuildError, match="need a C\\+\\+ compiler"):
        build.build()


def test_what_others_could_have_written_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_FOLDER", tmp_path)  # without libraries for families
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    made = build.build()
    assert made.read_text() == "made\n"
    assert build.built_library() == made
    made.chmod(0o666)
    assert build.built_library() is None


def test_a_kept_library_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was made before is used where the compiler is gone; another compiler makes its own."""
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    (tmp_path / "library.cpp").write_text("// some source")
    made = []
    for name in ("first", "second"):
        compiler = tmp_path / name
        compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        assert build.built_library() is None
        made.append(build.build())
    os.utime(made[0], (1, 1))
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    assert build.built_library() == build.build() == made[1]
    made[1].chmod(0o666)  # others could have written it
    assert build.built_library() == made[0]
    (tmp_path / "library.cpp").write_text("// a newer source")
    assert build.built_library() is None


def test_libraries_for_families_of_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (tmp_path / "library.cpp").write_text("// some source")
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\nall="$*"\nwhile [ "$1" != -o ]; do shift; done\necho "$all" > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    made = build.build_portable()
    assert ["-mavx512bf16" in path.read_text() for path in made] == [True, True, False, False]
    assert ["-mamx-bf16" in path.read_text() for path in made] == [True, False, False, False]
    assert ["-march=x86-64-v4" in path.read_text() for path in made] == [True, True, True, False]
    assert ["-march=x86-64-v3" in path.read_text() for path in made] == [False, False, False, True]
    amx, bf16, v4, v3 = (" ".join(needed) for needed in build._FAMILIES["x86_64"].values())
    found = [
        (f"{v3} {amx}", made[0]),
        (f"{v3} {bf16}", made[1]),
        (f"{v3} {v4} more", made[2]),
        (f"{v3} avx512f", made[3]),
        ("sse2", None),
    ]
    for flags, expected in found:
        monkeypatch.setattr(build, "_processor", lambda flags=flags: f"flags : {flags}")
        assert build.built_library() == expected
    monkeypatch.setattr(build, "_processor", lambda: f"flags : {v3} {v4}")
    own = build.build()
    assert "-march=native" in own.read_text()
    assert build.built_library() == own
    (tmp_path / "library.cpp").write_text("// a newer source")
    assert build.built_library() is None


def test_an_installation_has_the_best_library_that_the_compiler_can_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a family, since it may be copied to another machine; an old compiler knows only older ones."""
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    has = " ".join(set[str]().union(*build._FAMILIES["x86_64"].values()))
    monkeypatch.setattr(build, "_processor", lambda: f"flags : {has}")
    compiler = tmp_path / "cxx"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *amx*) exit 1;; esac\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    made = build.build_fitting(tmp_path)
    assert made.name.startswith("kernels-x86-64-v4-bf16-")
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    assert build.built_library() == made
    monkeypatch.setattr(build, "_processor", lambda: "flags : sse2")
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.BuildError, match="no known family"):
        build.build_fitting(tmp_path)


def test_every_family_has_a_name_for_the_cross_compiler() -> None:
    assert set(build._ZIG_PROCESSORS) == {family for families in build._FAMILIES.values() for family in families}


def test_families_of_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    newer, older = build.build_portable()
    for features, expected in [("fp asimd evtstrm aes atomics asimdrdm", newer), ("fp asimd evtstrm", older)]:
        monkeypatch.setattr(build, "_processor", lambda features=features: f"CPU part : 0xd0c\nFeatures : {features}")
        assert build.built_library() == expected


@only_in_soak
@pytest.mark.timeout(1800)
def test_the_kernels_compile_for_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a cross-compiler: GCC's of the system, else Zig's of the package index. Warnings are errors."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        if importlib.util.find_spec("ziglang") is None:
            pytest.skip("there is no cross-compiler: pip install ziglang")
        path = tmp_path / "cxx"
        path.write_text(ZIG.format(python=sys.executable))
        path.chmod(0o755)
        compiler = str(path)
    sources = shutil.copytree(build._FOLDER, tmp_path / "sources", ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PENSTOCK_TEST_CXXFLAGS", "-Wall -Werror")
    monkeypatch.setattr(build, "_FOLDER", sources)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    made = build.build_portable()
    assert len(made) == len(build._FAMILIES["aarch64"])
    for library in made:
        begin = library.read_bytes()[:20]
        assert (begin[:4], begin[18:]) == (ELF, AARCH64)


@only_in_soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", SANITIZERS)
def test_the_kernels_under_sanitizers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests of the kernels, in a process whose memory and threads the compiler's runtime watches."""
    compiler = build.find_compiler() or pytest.skip("there is no compiler")
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in SANITIZERS[kind]
    ]
    if not all(Path(library).is_absolute() for library in libraries):
        pytest.skip(f"the compiler has no {', '.join(SANITIZERS[kind])}")
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    flags = f"-g -fsanitize={kind} -fno-omit-frame-pointer"
    monkeypatch.setenv("PENSTOCK_TEST_CXXFLAGS", flags if kind == "thread" else f"{flags} -fno-sanitize-recover=all")
    build.build()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=900", *SANITIZED],
        cwd=ROOT,
        env=os.environ | {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-5000:]
    assert " passed" in done.stdout
    assert "Sanitizer" not in said, said[-5000:]
