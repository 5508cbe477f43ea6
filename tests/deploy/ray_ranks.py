"""`penstock serve --launcher ray` with a rank on each of two raylets: `python -m tests.deploy.ray_ranks --out FILE`.

Streams are compared with those of one worker on this machine; then the process of a rank is killed within a stream.
"""

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}

import psutil
import ray
from ray.cluster_utils import Cluster

COMMON = ["--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--cpu-kv-cache-gib", "0.1"]
QUESTIONS = ("What is a KV cache?", "What is paged attention?", "Hello")


class Server:
    """`penstock serve` with these options, on this port."""

    def __init__(self, port: int, *options: str, log: Path) -> None:
        command = [sys.executable, "-m", "penstock.cli.__main__", "serve", "--port", str(port), *COMMON, *options]
        self._log = log.open("w")
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self._port = port

    def wait(self, seconds: float) -> None:
        """Until it takes requests."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the server has ended"
            with suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.2)
        raise TimeoutError("the server is not ready")

    def ask(self, question: str, num_tokens: int, kill_at: int = 0) -> str:
        """A stream's text; after so many pieces of it a rank is killed."""
        body = {
            "messages": [{"role": "user", "content": question}],
            "stream": True, "temperature": 0, "max_tokens": num_tokens, "ignore_eos": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response, pieces = connection.getresponse(), []
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data.startswith("{"):
                event = json.loads(data)
                assert "error" not in event, event
                pieces += [choice["delta"].get("content", "") for choice in event["choices"]]
                if kill_at and len(pieces) == kill_at:
                    os.kill(rank_pids()[-1], signal.SIGKILL)
        return "".join(pieces)

    def stop(self) -> int:
        """End it; the exit code."""
        self.process.terminate()
        code = self.process.wait(60)
        self._log.close()
        return code


def rank_pids() -> list[int]:
    """The ranks' processes, by their names."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        title = "".join((process.info["cmdline"] or [""])[:1])
        if title.startswith("penstock-worker-"):
            with suppress(psutil.Error):
                if "RankHost" in " ".join(psutil.Process(process.pid).parent().cmdline()):
                    found.append((title, process.pid))
    return [pid for _, pid in sorted(found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--port", type=int, default=8126)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    folder, report = given.out.parent, dict[str, Any]()
    alone = Server(given.port, log=folder / "alone.log")
    alone.wait(120)
    report["expected"] = [alone.ask(question, given.tokens) for question in QUESTIONS]
    alone.stop()
    node = {"num_cpus": 1, "object_store_memory": 80_000_000}  # room for one rank
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    os.environ["RAY_ADDRESS"] = cluster.address
    server = None
    try:
        cluster.add_node(**node)
        began = time.monotonic()
        options = ("--launcher", "ray", "--tensor-parallel-size", "2")
        server = Server(given.port, *options, log=folder / "ray.log")
        server.wait(180)
        report["start_seconds"] = round(time.monotonic() - began, 1)
        report["num_ranks"] = len(rank_pids())
        report["nodes"] = len({psutil.Process(pid).parent().parent().pid for pid in rank_pids()})
        report["found"] = [server.ask(question, given.tokens) for question in QUESTIONS]
        began = time.monotonic()
        report["after_kill"] = server.ask(QUESTIONS[0], given.tokens, kill_at=8)
        report["kill_seconds"] = round(time.monotonic() - began, 1)
        report["exit_code"] = server.stop()
        deadline = time.monotonic() + 20
        while rank_pids() and time.monotonic() < deadline:
            time.sleep(0.1)
        report["left"] = len(rank_pids())
        given.out.write_text(json.dumps(report, indent=2))
        print(json.dumps(report, indent=2), flush=True)
    finally:
        if server is not None and server.process.poll() is None:
            server.process.kill()
        with suppress(Exception):
            ray.shutdown()
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
