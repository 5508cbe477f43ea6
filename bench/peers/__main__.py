"""Penstock beside vLLM, OpenVINO GenAI and llama.cpp on this machine's CPU, in one run.

    python -m bench.peers --shape qwen2.5-0.5b --peers vllm,openvino,llamacpp [--quick] [--out FOLDER]
    python -m bench.peers --format q8_0 --peers penstock-bf16,llamacpp

Makes a checkpoint of random weights, installs each peer into an environment of its own (kept for the next time; some
GB), and then lets all take turns, round after round: start, the workloads over HTTP with streaming (OpenVINO in
process), stop. Nothing else runs meanwhile, and nothing else should. Writes FOLDER/peers.json, .md and .svg; a peer
that cannot be installed or started is told in the table, and the others go on. With a `--format` all have the weights
in it, as far as they know it, but for penstock-bf16. `--draw FILE.json` makes table and plot of a record again.
"""

import argparse
import datetime
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.engine.decode_step import bytes_read
from bench.machine import commit, machine
from bench.peers.envs import PEERS, PeerError
from bench.peers.formats import AS_STORED, FORMATS, weight_bits
from bench.peers.model import harmless_ids, make_checkpoint
from bench.peers.plot import draw, is_available
from bench.peers.report import markdown
from bench.peers.systems import PENSTOCK, PENSTOCK_BF16, Asked, System, prepare, started
from bench.peers.workloads import QUICK, Sizes, WorkloadFailed, decode_bytes, measure_chat, measure_raw
from bench.shapes_folder import SHAPES, described
from penstock.config.cache_folder import cache_folder
from penstock.lab.calibration.rates import read_rate

_PEERS = (PENSTOCK_BF16, *PEERS)
_QUIET = 0.5
"""Load average up to which a machine counts as left alone."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare as told; 0 if every system that was asked for has all its figures."""
    args = _parser().parse_args(argv)
    if args.draw:
        _write(json.loads(args.draw.read_text()), args.draw.with_suffix(""))
        return 0
    if not is_available():
        _say("no plot now: it needs the extra `plan` (pip install 'penstock-llm[plan]'); --draw makes it later")
    names = [PENSTOCK, *dict.fromkeys(name for name in args.peers.split(",") if name)]
    sizes = QUICK if args.quick else Sizes()
    for folder in (args.out, args.envs):
        folder.mkdir(parents=True, exist_ok=True)
    checkpoint = make_checkpoint(args.shape, args.models, _say)
    model = described(checkpoint)
    record: dict[str, Any] = {
        "kind": "peers",
        "shape": args.shape,
        "format": args.format,
        "is_quick": args.quick,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "command": shlex.join(["python", "-m", "bench.peers", *(sys.argv[1:] if argv is None else argv)]),
        "machine": machine(),
        "threads": args.threads,
        "prefill_tokens": sizes.prefill,
        "decode_bytes": {},
        "decode_bytes_as_stored": {},
        "read_gb_per_s": [],
        "systems": {},
        "failures": {},
        "rounds": [],
    }
    if record["machine"]["load_before"] > _QUIET:
        _say(f"this machine is busy (load average {record['machine']['load_before']:.2f}): the figures will be rough")
    extra = dict(args.flags)
    asked = Asked(checkpoint, args.format, args.envs, args.threads, _say)
    systems = []
    for name in names:
        record["systems"][name] = {"versions": {}, "how": "", "flags": extra.get(name, "")}
        try:
            system = prepare(name, asked, extra.get(name, ""))
        except PeerError as error:
            _fail(record, name, error)
            continue
        record["systems"][name] |= {"versions": system.versions, "how": system.how}
        systems.append(system)
    for field, format in (("decode_bytes", args.format), ("decode_bytes_as_stored", AS_STORED)):
        bits = weight_bits(format, checkpoint, model.num_step_weights) if systems else 0.0
        record[field] = decode_bytes(sizes, partial(bytes_read, model, weight_bits=bits))
    vocabulary = harmless_ids(checkpoint)
    for round_ in range(args.rounds):
        record["rounds"].append({system.name: {} for system in systems})
        for part in ("raw", "chat"):
            for system in systems:
                record["read_gb_per_s"].append(read_rate(args.threads) / 1e9)
                _say(f"round {round_ + 1} of {args.rounds}, {part}: {system.name}")
                _take_turn(record, system, part, checkpoint, vocabulary, sizes, args.envs / f"{system.name}.log")
                _write(record, args.out / "peers")  # so that a run that is cut short leaves what it has
    print((args.out / "peers.md").read_text())
    return 1 if record["failures"] else 0


def _take_turn(
    record: dict[str, Any], system: System, part: str, checkpoint: Path, vocabulary: range, sizes: Sizes, log: Path
) -> None:
    """Start one system, do one part of the workloads, stop it; the figures go into the newest round."""
    rounds = record["rounds"]
    seed = 1000 * len(rounds)
    found = rounds[-1][system.name].setdefault(part, {})  # keeps what came before a failure
    try:
        with started(system, checkpoint.name, part == "chat", log) as (run, start_seconds):
            if part == "chat":
                measure_chat(run, vocabulary, sizes, seed + 500, found)
            else:
                found["start"] = {"seconds": start_seconds}
                measure_raw(run, vocabulary, sizes, seed, found, with_sweep=len(rounds) == 1)
    except (RuntimeError, OSError, WorkloadFailed) as error:
        _fail(record, system.name, error)
    shown = {name: {what: round(value, 2) for what, value in row.items()} for name, row in found.items()}
    _say(f"  {json.dumps(shown)}")


def _fail(record: dict[str, Any], name: str, error: Exception) -> None:
    record["failures"][name] = str(error)
    _say(f"{name} FAILED: {error}")


def _write(record: dict[str, Any], stem: Path) -> None:
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    stem.with_suffix(".md").write_text(markdown(record))
    if is_available():
        draw(record, stem.with_suffix(".svg"))


def _say(text: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", flush=True)


def _flags(text: str) -> tuple[str, str]:
    name, separator, flags = text.partition("=")
    if not separator or name not in (PENSTOCK, *_PEERS):
        raise ValueError(text)
    return name, flags


def _peers(text: str) -> str:
    unknown = [name for name in text.split(",") if name and name not in _PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such peer: {', '.join(unknown)}; there are {', '.join(_PEERS)}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", default="qwen2.5-0.5b", choices=sorted(folder.name for folder in SHAPES.iterdir()))
    add("--peers", type=_peers, default=",".join(PEERS), help="separated by commas (default: %(default)s)")
    add("--format", default=AS_STORED, choices=FORMATS, help="of all weights (default: %(default)s)")
    add("--threads", type=int, default=2, help="of each system (default: %(default)s)")
    add("--rounds", type=int, default=2, help="in which all take a turn (default: %(default)s)")
    add("--quick", action="store_true", help="everything much shorter: to see that it runs")
    add("--flags", type=_flags, action="append", default=[], metavar="SYSTEM=FLAGS", help="further flags of one server")
    add("--envs", type=Path, default=cache_folder() / "peers", help="the peers' environments (default: %(default)s)")
    add("--models", type=Path, default=cache_folder() / "shapes", help="the checkpoints (default: %(default)s)")
    add("--out", type=Path, default=Path("build/peers"), help="folder for the results (default: %(default)s)")
    add("--draw", type=Path, metavar="FILE.json", help="table and plot of this record, and nothing else")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server of the moment is stopped
    sys.exit(main())
