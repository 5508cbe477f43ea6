"""Decode steps of rows with adapters beside those of the model alone.

    python -m bench.engine.adapters --shape qwen2.5-0.5b [--rows 16] [--rank 16] [--threads 2] [--out FILE.json]

Three batches take turns: rows without adapters, rows each with another adapter of all the model's matrices, and half of
each kind. The figure is the median time of a step, and its ratio to that of rows without adapters. Then as many
adapters as `--many` take turns in `--slots` slots: how long it takes to read one and to put it in place. Weights are
random.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.engine.decode_step import decode_times
from bench.engine.offline import sampling_of
from bench.local_engine import LocalEngine
from bench.machine import machine
from bench.shapes_folder import shape_folder
from penstock.gpu_worker.models.adapters import SitePart
from penstock.parts.adapters.keys import key_of
from penstock.parts.adapters.messages import LoadAdapter
from penstock.parts.adapters.scheduler import AdapterGate
from penstock.parts.adapters.worker.rows import AdapterRows

_NUM_STEPS = 40
_PROMPT = 16


def write(folder: Path, modules: Mapping[str, SitePart], rank: int) -> None:
    """A random adapter of all modules, in bf16."""
    folder.mkdir()
    tensors = {}
    for name, its in modules.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, its.num_inputs).bfloat16() * 0.01
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(its.num_outputs, rank).bfloat16() * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def main() -> None:
    """Run and print; with --out FILE also save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--many", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = {"max_num_seqs": args.rows, "max_loras": args.slots, "num_threads": args.threads, "dtype": "bfloat16"}
    engine = LocalEngine(shape_folder(args.shape), max_model_len=512, **options)
    rows = next(part for part in engine.runner.parts if isinstance(part, AdapterRows))
    gate = engine.scheduler.parts.get(AdapterGate)
    assert gate is not None
    prompts = [[1 + row] * _PROMPT for row in range(args.rows)]
    sampling = sampling_of([_NUM_STEPS] * args.rows)
    with tempfile.TemporaryDirectory() as name:
        keys = []
        for number in range(args.many):
            folder = Path(name) / f"a{number}"
            write(folder, rows.modules, args.rank)
            keys.append(key_of(folder.name, str(folder)))
            gate.load(LoadAdapter(keys[-1], str(folder)))
        kinds = {
            "without": [""] * args.rows,
            "each another": keys[: args.rows],
            "half": [key if number % 2 else "" for number, key in enumerate(keys[: args.rows])],
        }
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(args.rounds + 1):
            for kind, adapters in kinds.items():
                found = decode_times(engine.run(prompts, sampling, adapters), args.rows)
                if number:  # the first time they are read
                    times[kind].append(statistics.median(found))
        began = time.perf_counter()
        for first in range(0, args.many, args.rows):
            some = keys[first : first + args.rows]
            engine.run(prompts[: len(some)], sampling_of([1] * len(some)), some)
        turns = time.perf_counter() - began
    step = {kind: statistics.median(each) for kind, each in times.items()}
    print(f"{'batch':14} {'ms a step':>10} {'speed':>6}")
    for kind, seconds in step.items():
        print(f"{kind:14} {1e3 * seconds:10.2f} {step['without'] / seconds:6.2f}")
    print(f"{args.many} adapters in {args.slots} slots, a token each: {1e3 * turns / args.many:.1f} ms an adapter")
    if args.out:
        figures = {"machine": machine(), "args": {**vars(args), "out": str(args.out)}, "seconds": step}
        args.out.write_text(json.dumps(figures | {"seconds_an_adapter": turns / args.many}, indent=1) + "\n")


if __name__ == "__main__":
    main()
