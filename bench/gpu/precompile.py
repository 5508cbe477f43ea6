"""Fill Triton's cache for a shape, so that the benchmarks of it start quickly.

    python -m bench.gpu.precompile --shape qwen3-8b

A model of one layer needs the same kernels as the whole one. `bench/gpu.sh` runs this for some shapes, beside
the tests.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.local_engine import LocalEngine
from bench.shapes_folder import shape_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Start an engine of one layer, which compiles what serving launches, and end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", help="a folder name in bench/shapes")
    parser.add_argument("--dry", action="store_true", help="the tiny shape on the CPU")
    args = parser.parse_args(argv)
    shape = "tiny" if args.dry else args.shape
    config = json.loads((shape_folder(shape) / "config.json").read_text())
    with TemporaryDirectory() as temporary:
        (Path(temporary) / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
        engine = LocalEngine(
            Path(temporary),
            device="cpu" if args.dry else "cuda",
            max_num_seqs=4 if args.dry else 256,
            max_num_batched_tokens=64 if args.dry else 16384,
            max_model_len=128 if args.dry else 4096,
            num_pages=64 if args.dry else 1024,
        )
    print(f"kernels of {shape} are there after {engine.start_seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
