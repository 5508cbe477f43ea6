"""Time to the first token of a long prompt that a server has answered before it was started again.

    python -m bench.kv.disk --out disk_kv.json

Three servers, one after the other: without tiers; with an empty folder for --disk-kv; with what that one wrote. Each
gets the same prompt first and some others beside it. Their greedy tokens must be equal.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.machine import commit, machine
from bench.server_process import free_port, running
from bench.shapes_folder import NUM_BYTES, servable_folder

_START_SECONDS = 600.0
_WRITE_SECONDS = 120.0


class Server:
    """A server that answers, at its address."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model

    def ask(self, prompt: list[int], max_tokens: int) -> tuple[float, str]:
        """Return the seconds to the first token, and the text."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True}
        request = urllib.request.Request(
            f"{self._url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        began, first, text = time.monotonic(), 0.0, ""
        with urllib.request.urlopen(request, timeout=3600) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic() - began
                    text += json.loads(line[6:])["choices"][0]["text"]
        return first, text

    def metric(self, name: str) -> float:
        """One figure of /metrics; 0 before the engine has told it."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=10) as answer:
            found = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    def wait_until_written(self, num_pages: int) -> float:
        """Wait until so many pages are on the disk; return the seconds."""
        began = time.monotonic()
        while self.metric("penstock_disk_kv_cached_pages") < num_pages:
            if time.monotonic() - began > _WRITE_SECONDS:
                raise RuntimeError("the pages were not written in time")
            time.sleep(0.2)
        return time.monotonic() - began


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Server]:
    """A server of a shape with random weights."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "penstock.cli", "serve", str(folder), "--load-format", "dummy", *flags]
    command += ["--port", str(port), "--served-model-name", "model"]
    with running(command, f"{url}/ready", dict(os.environ), _START_SECONDS, folder / "log.txt"):
        yield Server(url, "model")


def measure(shape: str, num_tokens: int, max_tokens: int, flags: list[str]) -> dict[str, Any]:
    """Run the three servers; times are in seconds."""
    with tempfile.TemporaryDirectory() as root:
        folder = servable_folder(shape, Path(root) / shape)
        prompt = [(i * 7919) % NUM_BYTES + (i * 31) % 97 * NUM_BYTES for i in range(num_tokens)]
        warm_up = prompt[1:65]
        disk = ["--disk-kv", f"{Path(root) / 'disk'}:8"]
        found: dict[str, Any] = {}
        texts: list[str] = []
        servers: tuple[tuple[str, list[str]], ...] = (("without", []), ("first", disk), ("again", disk))
        for name, extra in servers:
            with serving(folder, *flags, *extra) as server:
                server.ask(warm_up, 4)
                if name == "again":
                    server.wait_until_written(1)
                found[f"{name}_ttft"], text = server.ask(prompt, max_tokens)
                texts.append(text)
                if name == "first":
                    found["write_seconds"] = server.wait_until_written(num_tokens // 16)
                if name == "again":
                    found["loaded_pages"] = server.metric("penstock_disk_kv_loaded_pages_total")
                    found["page_cache_ttft"], _ = server.ask(prompt, max_tokens)
        found["disk_bytes"] = sum(path.stat().st_size for path in (Path(root) / "disk").rglob("*.kv"))
    found["tokens_are_equal"] = len(set(texts)) == 1
    found["ratio"] = found["without_ttft"] / found["again_ttft"]
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--prompt-len", type=int, default=8192)
    parser.add_argument("--output-len", type=int, default=8)
    parser.add_argument("--flags", default="", help="further options of the servers")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    told = machine()
    found = measure(chosen.shape, chosen.prompt_len, chosen.output_len, chosen.flags.split())
    for name, value in found.items():
        print(f"{name:18} {value:.3f}" if isinstance(value, float) else f"{name:18} {value}")
    if chosen.out is not None:
        record = {"commit": commit(), "machine": told, "options": {k: str(v) for k, v in vars(chosen).items()}} | found
        chosen.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
