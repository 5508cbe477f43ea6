"""`penstock ps` and `penstock run`: the servers of this machine are found, and one is started where there is none."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.cli import ps, run
from penstock.cli.engines import Server
from penstock.cli.running import Running, running

MODELS = {"data": [{"id": "org/model", "kernels": "triton"}, {"id": "another"}]}
METRICS = "penstock_device_memory_used_bytes 1073741824.0\n"


class Proc:
    """What the system would tell of these processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "net").mkdir()
        (folder / "net/tcp").write_text("  sl  local_address rem_address   st ... inode\n")
        (folder / "uptime").write_text("1000.00 1.00\n")

    def add(self, pid: int, parent: int, name: str, *inodes: int) -> None:
        own = self.folder / str(pid)
        (own / "fd").mkdir(parents=True)
        (own / "cmdline").write_bytes(name.encode() + b"\0\0")
        begun = 700 * os.sysconf("SC_CLK_TCK")
        (own / "stat").write_text(f"{pid} (a) name) S {parent} {' 0' * 17} {begun} 0\n")
        (own / "smaps_rollup").write_text("0-1 ---p 0 00:00 0 [rollup]\nRss: 9 kB\nPss:  1024 kB\n")
        for number, inode in enumerate(inodes):
            (own / "fd" / str(number)).symlink_to(f"socket:[{inode}]")

    def listen(self, port: int, inode: int, host: str = "0100007F", state: str = "0A") -> None:
        with (self.folder / "net/tcp").open("a") as file:
            file.write(f"   0: {host}:{port:04X} 00000000:0000 {state} 0:0 00:0 0 0 0 {inode} 1\n")


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


class Answers(BaseHTTPRequestHandler):
    """A server's answers."""

    def do_GET(self) -> None:
        body = METRICS if self.path == "/metrics" else json.dumps(MODELS)
        self.send_response(200 if self.headers.get("Authorization") == "Bearer right" else 401)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def of(proc: Proc, port: int) -> list[Running]:
    proc.add(10, 1, "penstock-supervisor", 99)
    proc.add(11, 10, "penstock-frontend-0", 500, 501)
    proc.add(12, 10, "penstock-worker-0")
    proc.add(13, 12, "something it has started")
    proc.add(20, 1, "bash", 502)
    proc.listen(port, 500)
    proc.listen(1, 501, state="01")  # a connection
    proc.listen(2, 502)  # of another program
    return running(proc.folder)


def test_servers_are_found_by_their_processes(proc: Proc, port: int) -> None:
    [found] = of(proc, port)
    assert found.pid == 10
    assert found.urls == [f"http://127.0.0.1:{port}"]
    assert found.memory_bytes == 4 << 20
    assert found.uptime_seconds == 300.0
    answers = found.asked("right")
    assert answers == (found.urls[0], ("org/model", "another"), float(1 << 30), "")
    refused = found.asked("wrong")
    assert refused.models == ()
    assert refused.reason == "wants an API key"


def test_servers_of_this_machine_are_not_asked_through_a_proxy(
    proc: Proc, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    [found] = of(proc, port)
    assert found.asked("right").models == ("org/model", "another")
    assert Server(f"http://localhost:{port}", "right").get("/v1/models") == MODELS


@pytest.mark.parametrize("command", [("chat",), ("top", "--once"), ("drain",), ("role", "0", "both")])
def test_a_url_may_be_a_host_and_a_port(command: tuple[str, ...]) -> None:
    words = [sys.executable, "-m", "penstock.cli", *command, "--url", "localhost:9"]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode != 0
    assert "no server answers at http://localhost:9 (Connection refused)" in done.stderr


def test_addresses_as_clients_type_them(proc: Proc) -> None:
    proc.add(30, 1, "penstock-frontend-0", 1, 2)  # one that was started alone
    proc.listen(8000, 1, host="00000000")
    (proc.folder / "net/tcp6").write_text(f"head\n 0: {'00000000' * 3}01000000:1F41 0:0 0A 0:0 00:0 0 0 0 2 1\n")
    proc.add(40, 1, "penstock-supervisor")
    alone, starting = running(proc.folder)
    assert alone.urls == ["http://127.0.0.1:8000", "http://[::1]:8001"]
    assert starting.urls == []
    assert starting.asked("").reason == "starting"


def test_what_is_printed(
    proc: Proc, port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ps, "running", lambda: of(proc, port))
    assert ps.main(["--api-key", "right"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["pid", "model", "address", "memory", "GPU", "memory", "uptime"]
    assert re.split("  +", line) == [
        "10", "org/model, another", f"http://127.0.0.1:{port}", "4.0 MiB", "1.0 GiB", "5 min 0 s"
    ]  # fmt: skip
    monkeypatch.setattr(ps, "running", list)
    assert ps.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert ps.main([]) == 0
    assert "`penstock serve` starts one" in capsys.readouterr().out


def test_run_takes_a_server_that_has_the_model(
    proc: Proc, port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, talks = of(proc, port), list[tuple[object, ...]]()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    monkeypatch.setattr(run, "running", lambda: found)

    def talk(*place: object, **said: object) -> int:
        talks.append((*place, *said.values()))
        return 0

    monkeypatch.setattr(run, "_talk", talk)
    for words in (["org/model"], ["-m", "org/model", "how", "many?"], ["org/model", "--system", "brief", "how many?"]):
        assert run.main(words) == 0
    url = f"http://127.0.0.1:{port}"
    assert talks == [
        (url, "org/model", "right", "", ""),
        (url, "org/model", "right", "", "how many?"),
        (url, "org/model", "right", "brief", "how many?"),
    ]
    assert run.main(["org/other"]) == 2  # it is not on this machine
    assert run.main(["org/model", "-tp", "1"]) == 2  # with options a server of its own is wanted
    assert len(talks) == 3


def test_run_starts_a_server_for_itself() -> None:
    variables = os.environ | {"PENSTOCK_PORT": "1", "PENSTOCK_HOST": "192.0.2.1", "PENSTOCK_API_KEY": "of another"}
    command = [sys.executable, "-m", "penstock.cli", "run", "--no-spare-worker", "-t", "1", "--max-num-seqs", "2"]
    done = subprocess.run(
        command, input="What is prefill?\n", env=variables, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stderr) == (0, "")
    greeting, _, answer, *_ = done.stdout.splitlines()
    assert greeting.startswith("penstock-demo at http://127.0.0.1:")
    assert "/help" in greeting
    assert answer.startswith("Prefill is the first phase")
    [url] = [word.strip(";") for word in greeting.split() if word.startswith("http")]
    assert url not in {each for server in running() for each in server.urls}
