"""Every command that README and docs tell people to type, run."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.fences import KINDS, ROOT, Fence, fences, names
from tests.faults.soak import IS_SOAK

_START_SECONDS = 200.0
_SAID_IN_CHAT = "What is a KV cache?\n/stats\n/quit\n"
_NOT_COPIED = {".git", ".venv", "build"}
_OF_THE_MAKE_ABOVE = {
    "FLAGS",
    "JOBS",
    "MODEL",
    "MAKEFLAGS",
    "MAKELEVEL",
}  # `make test FLAGS=...` is not for `make serve`


def of_kind(*kinds: str, among: Callable[[Fence], bool] = lambda _: True) -> pytest.MarkDecorator:
    chosen = [fence for fence in fences() if fence.kind in kinds and among(fence)]
    return pytest.mark.parametrize("fence", chosen, ids=names(chosen))


class Workplace:
    """A folder that looks like a fresh clone with its `.venv` made, and a port for the server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        for path in ROOT.iterdir():
            if path.name not in _NOT_COPIED:
                (folder / path.name).symlink_to(path)
        (folder / "tmp").mkdir()
        tools = folder / ".venv" / "bin"
        tools.mkdir(parents=True)
        self._script(tools / "penstock", f'exec {sys.executable} -m penstock.cli "$@"')
        self._script(tools / "python", f'exec {sys.executable} "$@"')
        curl = shutil.which("curl")
        assert curl is not None, "the pages tell people to use curl"
        self._script(tools / "curl", f'exec {curl} -sS --fail-with-body --max-time 60 "$@"')
        mine = {name: value for name, value in os.environ.items() if name not in _OF_THE_MAKE_ABOVE}
        self.environment = mine | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PENSTOCK_LOG_FORMAT": "json",
            "PENSTOCK_NUM_THREADS": "1",
            "PENSTOCK_SPARE_WORKER": "false",
            "PENSTOCK_PORT": str(self.port),
            "PENSTOCK_DATA_DIR": str(folder / "kept"),
        }

    def replace_penstock(self, program: str) -> None:
        """From now on the command is this Python program."""
        (self.folder / "checked.py").write_text(program)
        self._script(self.folder / ".venv/bin/penstock", f'exec {sys.executable} {self.folder}/checked.py "$@"')

    @staticmethod
    def _script(path: Path, line: str) -> None:
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def adapt(self, text: str) -> str:
        """The commands as they are typed here: this port, this folder's files, the demo model."""
        text = re.sub(r"localhost:\d+", f"localhost:{self.port}", text)
        text = re.sub(r"--port \d+", f"--port {self.port}", text)
        text = text.replace("/tmp/", f"{self.folder}/tmp/")  # before this clone's paths, which may lie there themselves
        text = text.replace("/path/to/checkpoint", str(ROOT / "demo" / "model"))
        return re.sub(r"^make ", "make --old-file=.venv/.made ", text, flags=re.MULTILINE)

    def run(self, fence: Fence, said: str = "") -> subprocess.CompletedProcess[str]:
        """Run a block to its end."""
        text = self.adapt(fence.text)
        command = ["bash", "-euc", text] if fence.language == "bash" else [sys.executable, "-c", text]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, input=said, capture_output=True, text=True, timeout=250,
            check=False,
        )  # fmt: skip

    def start(self, line: str) -> subprocess.Popen[str]:
        """Start one command; its log goes to a file that `log` reads."""
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
                ["bash", "-uc", f"exec {line}" if "=" not in line.split()[0] else line],
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def wait_ready(self, processes: list[subprocess.Popen[str]]) -> None:
        """Until a request would be served."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_ready():
            assert all(process.poll() is None for process in processes), self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=60) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def end(self, processes: list[subprocess.Popen[str]]) -> None:
        """As a terminal's closing window would: a signal to each command's process group."""
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            process.wait(90)

    def log(self) -> str:
        return (self.folder / "log").read_text()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A workplace where the demo model is served."""
    workplace = Workplace(tmp_path_factory.mktemp("clone"))
    server = workplace.start(".venv/bin/penstock serve")
    try:
        workplace.wait_ready([server])
        yield workplace
    finally:
        workplace.end([server])
    assert server.returncode == 0, workplace.log()


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


def test_the_pages_have_commands_of_known_kinds() -> None:
    found = fences()
    assert {fence.kind for fence in found} <= set(KINDS)
    assert len([fence for fence in found if fence.kind == "run"]) > 10


_ELSEWHERE = r"-m bench|--gpu this|^penstock run-batch|doctor --quick|--plot plan.svg|--num-requests 600"
"""These take long, and have tests of their own."""


def is_quick(fence: Fence) -> bool:
    """Others are in soak only, and so are scripts that load a model, but for the first page's and those of a loop."""
    if IS_SOAK:
        return True
    loads = re.search(r"^from penstock import .*\bLLM\b", fence.text, flags=re.MULTILINE)
    return not re.search(_ELSEWHERE, fence.text, flags=re.MULTILINE) and (
        loads is None or fence.page == "README.md" or "AsyncLLM" in fence.text
    )


@of_kind("run", among=is_quick)
def test_a_command_works(fence: Fence, serving: Workplace) -> None:
    done = serving.run(fence)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'data: {"error"' not in done.stdout


@of_kind("refused")
def test_a_command_is_refused_as_the_page_says(fence: Fence, serving: Workplace) -> None:
    done = serving.run(fence)
    assert done.returncode == 22  # curl's code for a status of 400 and more
    assert '"error"' in done.stdout


@of_kind("chat")
def test_a_chat_answers(fence: Fence, serving: Workplace) -> None:
    text = fence.text if "--url" in fence.text else f"{fence.text.rstrip()} --url http://localhost:{serving.port}"
    done = serving.run(fence._replace(text=text), _SAID_IN_CHAT)
    assert done.returncode == 0, done.stderr
    assert "keys and values" in " ".join(done.stdout.split())
    assert "tokens/s" in done.stdout


def test_the_demo_model_says_what_the_readme_shows(serving: Workplace) -> None:
    table = (ROOT / "README.md").read_text().split("| asked | answered |")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|-][^|]*) \| ([^|]+) \|$", table, flags=re.MULTILINE)
    assert len(rows) == 11
    for question, answer in rows:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{serving.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            said = json.load(reply)["choices"][0]["message"]["content"]
        assert said.replace("\n", "<br>") == answer


def is_started(fence: Fence) -> bool:
    """Its server starts here; what others say is only read and checked, but in soak."""
    return IS_SOAK or fence.page == "README.md"


@of_kind("serve", among=is_started)
def test_a_server_starts(fence: Fence, workplace: Workplace) -> None:
    server = workplace.start(workplace.adapt(fence.text).strip())
    try:
        workplace.wait_ready([server])
    finally:
        workplace.end([server])
    last = json.loads([line for line in workplace.log().splitlines() if line.startswith("{")][-1])
    assert (last["event"], last["exit_code"]) == ("server stopped", 0)


_ACCEPTED = """import sys
from penstock.cli.__main__ import main
from penstock.core.launch import supervisor
supervisor.serve = lambda config: 0
code = main()
print("code", code)
sys.exit(code)"""


@of_kind("serve", among=lambda fence: not is_started(fence))
def test_a_server_would_start(fence: Fence, workplace: Workplace) -> None:
    """All that is checked before the first process starts."""
    workplace.replace_penstock(_ACCEPTED)
    done = workplace.run(fence)
    assert (done.returncode, done.stdout) == (0, "code 0\n"), done.stderr


@of_kind("serve together")
def test_servers_find_each_other(fence: Fence, workplace: Workplace) -> None:
    servers = [workplace.start(line) for line in workplace.adapt(fence.text).strip().splitlines()]
    try:
        workplace.wait_ready(servers)
    finally:
        workplace.end(servers)
    assert [server.returncode for server in servers] == [0] * len(servers), workplace.log()


@of_kind("dry run")
def test_make_knows_its_targets(fence: Fence, workplace: Workplace) -> None:
    lines = [line.split("#")[0].strip() for line in fence.text.splitlines()]
    assert all(line.startswith("make ") for line in lines), "only make can be looked through"
    text = "\n".join(line.replace("make ", "make --dry-run ") for line in lines)
    done = workplace.run(fence._replace(text=text))
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl (no cluster)")
@of_kind("kubectl")
def test_a_command_of_kubectl_works(fence: Fence, workplace: Workplace) -> None:
    done = workplace.run(fence)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(600)
@pytest.mark.skipif(not IS_SOAK, reason="starts clusters of Ray: PENSTOCK_SOAK=1")
@of_kind("ray")
def test_a_command_on_ray_works(fence: Fence, workplace: Workplace) -> None:
    pytest.importorskip("ray")
    environment = workplace.environment | {"RAY_USAGE_STATS_ENABLED": "0"}
    for name in ("ray", "serve"):
        tool = Path(sys.executable).with_name(name)
        (workplace.folder / ".venv/bin" / name).symlink_to(tool)
    command = ["bash", "-euc", fence.text]  # with Serve's own port
    done = subprocess.run(
        command, cwd=workplace.folder, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.docker
@pytest.mark.timeout(1500)
@pytest.mark.skipif(
    os.environ.get("PENSTOCK_TEST_DOCKER") != "1", reason="needs a Docker engine and PENSTOCK_TEST_DOCKER=1"
)
@of_kind("docker")
def test_a_docker_command_works(fence: Fence) -> None:
    environment = os.environ | {"COMPOSE_PROJECT_NAME": f"penstock-docs-{os.getpid()}"}
    run: Callable[..., subprocess.CompletedProcess[bytes]] = subprocess.run
    try:
        run(["bash", "-euc", fence.text], cwd=ROOT, env=environment, check=True, timeout=1400)
    finally:
        run(["docker", "compose", "--profile", "monitoring", "down"], cwd=ROOT, env=environment, check=True)
