"""The served benchmark of a GPU machine: `penstock serve` with random weights, and `penstock bench serve` against it.

    python -m bench.gpu.serve --shape qwen3-0.6b --out DIR

Prompts of 1024 and outputs of 128 tokens at concurrency 1, 16, 64 and 256; the prefix cache is off.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.load import serve
from bench.server_process import free_port, running
from bench.shapes_folder import servable_folder

_LOADS = {1: 8, 16: 64, 64: 192, 256: 512}
"""Requests by concurrency: enough for steady figures in about ten seconds each."""
_DRY_LOADS = {2: 4}
_START_SECONDS = 240.0


@contextmanager
def serving(folder: Path, flags: Sequence[str]) -> Iterator[str]:
    """A server on a free port, ready; its address.

    Raises:
        RuntimeError: if it ends, or is not ready in time.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "penstock.cli",
        "serve",
        str(folder),
        "--port",
        str(port),
        *flags,
    ]
    with running(command, f"{url}/ready", os.environ | {"PENSTOCK_LOG_FORMAT": "json"}, _START_SECONDS):
        yield url


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one shape and load it at each concurrency; 0 if every request got its answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", help="a folder name in bench/shapes")
    parser.add_argument("--dry", action="store_true", help="a tiny shape and load on the CPU")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    args = parser.parse_args(argv)
    shape = "tiny" if args.dry else args.shape
    flags = ["--load-format", "dummy", "--no-enable-prefix-caching"]
    if args.dry:
        flags += ["--device", "cpu", "--num-threads", "1", "--max-num-seqs", "4"]
    else:
        flags += ["--device", "cuda", "--max-model-len", "4096", "--num-frontends", "2"]
    code = 0
    with TemporaryDirectory() as temporary:
        folder = servable_folder(shape, Path(temporary) / shape)
        with serving(folder, flags) as url:
            for concurrency, num_requests in (_DRY_LOADS if args.dry else _LOADS).items():
                load = ["--base-url", url, "--concurrency", str(concurrency), "--num-requests", str(num_requests)]
                load += ["--input-len", "12" if args.dry else "1024", "--output-len", "6" if args.dry else "128"]
                load += ["--warmup", str(min(2, num_requests)), "--processes", "4" if concurrency >= 64 else "1"]
                load += ["--save", str(args.out / f"served-{shape}-c{concurrency}.json")]
                code |= serve.main(load)
    return code


if __name__ == "__main__":
    sys.exit(main())
