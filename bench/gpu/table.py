"""The table at the end of `bench/gpu.sh`: what was measured beside what is wanted.

    python -m bench.gpu.table DIR

Shares are of the memory and bf16 matrix rates that the same run measured on the same card. A row without a
measurement says so; nothing is filled in.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]
_LARGE_KV = 0.25e9
"""Bytes of KV a call, from which on the decode attention should run at the card's bandwidth."""
_LONG_PROMPT = 8192


_H200_BYTES_PER_S = 4.3e12
_H200_FLOP_PER_S = 7.9e14
"""What an H200 measures; the targets below are written for it, and scaled to the card."""


class Row(NamedTuple):
    """One line; `good` and `top` are the targets for this card, in the unit of `measured`."""

    what: str
    measured: float | None
    unit: str
    good: float
    top: float
    lower_is_better: bool = False
    share: str = ""

    @property
    def verdict(self) -> str:
        """Whether a target is met."""
        if self.measured is None:
            return "not measured"
        sign = -1 if self.lower_is_better else 1
        if sign * self.measured >= sign * self.top:
            return "top"
        return "good" if sign * self.measured >= sign * self.good else "missed"


def load(folder: Path) -> list[Record]:
    """All results of a run, by file name."""
    return [json.loads(path.read_text()) | {"file": path.name} for path in sorted(folder.glob("*.json"))]


def rows(records: Sequence[Record]) -> list[Row]:
    """The table's lines."""
    kernels = next((record for record in records if "limits" in record), None)
    limits: dict[str, float] = kernels["limits"] if kernels else {}
    results: list[Record] = kernels["results"] if kernels else []
    # Decoding waits for memory, prompts for the matrix units; what has no measured limits is compared with an H200.
    memory = limits.get("memory_bytes_per_s", _H200_BYTES_PER_S) / _H200_BYTES_PER_S
    matrix = limits.get("matrix_flop_per_s", _H200_FLOP_PER_S) / _H200_FLOP_PER_S
    found = [
        Row(
            "decode attention, KV >= 0.25 GB, worst case",
            _least(100 * r["share"] for r in results if r["part"] == "decode" and _kv_bytes(r) >= _LARGE_KV),
            "% of memory",
            85,
            92,
        ),
        Row(
            "prefill attention, fresh prompts >= 8k, worst case",
            _least(r["rate"] for r in results if r["part"] == "prefill" and _fresh_len(r) >= _LONG_PROMPT),
            "TFLOP/s",
            400 * matrix,
            550 * matrix,
            share=_share_of(results, "prefill", lambda r: _fresh_len(r) >= _LONG_PROMPT),
        ),
    ]
    for shape, good, top in (("llama-3.1-8b", 4.36, 4.0), ("qwen3-0.6b", 0.90, 0.60)):
        row = _decode_row(records, shape, 1)
        found.append(
            Row(
                f"{shape} bf16, B=1, one decode step",
                row["step_ms"] if row else None,
                "ms",
                good / memory,
                top / memory,
                lower_is_better=True,
                share=_bandwidth_share(row, limits),
            )
        )
    found.append(
        Row(
            "offline qwen3-0.6b, 256 sequences",
            _offline(records, "qwen3-0.6b", "uniform"),
            "tok/s",
            24000 * memory,
            28000 * memory,
        )
    )
    found.append(
        Row(
            "256 x 1024/1024 qwen3-8b",
            _offline(records, "qwen3-8b", "1024x1024"),
            "tok/s",
            8500 * memory,
            9200 * memory,
        )
    )
    exposed = [row["exposed_ms"] for record in records if record.get("kind") == "decode_step" for row in record["rows"]]
    found.append(
        Row(
            "exposed host time per step, worst batch", max(exposed, default=None), "ms", 0.3, 0.02, lower_is_better=True
        )
    )
    return found


def more_lines(records: Sequence[Record]) -> list[str]:
    """What has no target: larger batches, other workloads, the served figures."""
    lines = []
    for record in records:
        if record.get("kind") == "decode_step":
            for row in record["rows"]:
                times = ", ".join(
                    f"{name} {row[name + '_ms']:.3f} ms" for name in ("step", "queued", "exposed", "launch")
                )
                lines.append(f"{_named(record)} B={row['batch']} context {row['context']}: {times}")
        elif record.get("kind") == "mixed_step":
            for row in record["rows"]:
                times = ", ".join(f"{name} {row[name + '_ms']:.3f} ms" for name in ("step", "device", "idle", "launch"))
                lines.append(f"{record['shape']} B={row['batch']:.0f} beside a chunk of {row['chunk']:.0f}: {times}")
        elif record.get("kind") == "profile":
            for row in record["profiles"]:
                most = ", ".join(f"{k['name']} {k['us']:.0f}" for k in row["kernels"][:4])
                lines.append(
                    f"{record['shape']} B={row['batch']}: {row['busy_us']:.0f} of {row['step_us']:.0f} us busy; {most}"
                )
        elif record.get("kind") == "offline":
            figures = record["figures"]
            lines.append(
                f"offline {_named(record)} {record['workload']}: {figures['output_tokens_per_s']:.0f} tok/s, "
                f"ready after {record['start_seconds']:.1f} s"
            )
        elif "summary" in record:
            summary = record["summary"]
            lines.append(
                f"{record['file'].removesuffix('.json')}: {_figure(summary['output_tokens_per_s'], 0)} tok/s, "
                f"TTFT p50 {_figure(summary['ttft_ms']['p50'], 1)} ms, "
                f"ITL p50 {_figure(summary['itl_ms']['p50'], 2)} ms, p99 {_figure(summary['itl_ms']['p99'], 2)} ms, "
                f"failed {summary['num_failed']}"
            )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of a folder of results."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    records = load(Path(arguments[0]))
    kernels = next((record for record in records if "limits" in record), None)
    is_dry = any(record.get("dry") for record in records)
    if is_dry:
        print("DRY RUN on the CPU at tiny sizes: it proves that the script runs. No figure below means anything.")
    if kernels:
        memory, matrix = kernels["limits"]["memory_bytes_per_s"] / 1e12, kernels["limits"]["matrix_flop_per_s"] / 1e12
        print(f"{kernels['device']}: memory {memory:.2f} TB/s, bf16 matrix product {matrix:.0f} TFLOP/s")
    print("good and top: what is wanted of a card with this bandwidth and matrix rate")
    print(f"{'':52s} {'measured':>10s} {'unit':10s} {'good':>7s} {'top':>7s}  {'':12s} of the card")
    for row in rows(records):
        measured = "-" if row.measured is None else f"{row.measured:.4g}"
        verdict = "dry" if is_dry and row.measured is not None else row.verdict
        print(
            f"{row.what:52s} {measured:>10s} {row.unit:10s} {row.good:7.4g} {row.top:7.4g}  {verdict:12s} {row.share}"
        )
    for line in more_lines(records):
        print(f"  {line}")
    return 0


def _named(record: Record) -> str:
    """The shape, and what is not usual."""
    kv = record.get("kv_cache_dtype", "auto")
    parts = [record["shape"], record.get("quantization", ""), "" if kv == "auto" else f"KV {kv}"]
    return " ".join(filter(None, (*parts, *record.get("options", ()))))


def _figure(value: float | None, num_decimals: int) -> str:
    """A number, or a dash where there was nothing to measure: a failed run, or answers of one token."""
    return "-" if value is None else f"{value:.{num_decimals}f}"


def _least(values: Iterable[float]) -> float | None:
    return min(values, default=None)


def _kv_bytes(result: Record) -> float:
    return float(result["rate"] * 1e9 * result["seconds"])


def _fresh_len(result: Record) -> int:
    """Tokens of a prefill case's single fresh prompt; 0 for other cases."""
    fields = dict(field.split("=") for field in result["case"].split() if "=" in field)
    return int(fields["new"]) if fields.get("B") == "1" and fields.get("new") == fields.get("context") else 0


def _share_of(results: Sequence[Record], part: str, chosen: Callable[[Record], bool]) -> str:
    share = _least(100 * r["share"] for r in results if r["part"] == part and chosen(r))
    return "" if share is None else f"{share:.0f} % of matrix rate"


def _decode_row(records: Sequence[Record], shape: str, batch: int) -> Record | None:
    for record in records:
        if record.get("kind") == "decode_step" and record["shape"] == shape and not record.get("quantization"):
            return next((row for row in record["rows"] if row["batch"] == batch), None)
    return None


def _bandwidth_share(row: Record | None, limits: dict[str, float]) -> str:
    if row is None or not limits:
        return ""
    floor = row["bytes_read"] / limits["memory_bytes_per_s"]
    return f"{100 * floor / (row['step_ms'] / 1e3):.0f} % of memory (floor {floor * 1e3:.2f} ms)"


def _offline(records: Sequence[Record], shape: str, workload: str) -> float | None:
    for record in records:
        is_it = record.get("kind") == "offline" and (record["shape"], record["workload"]) == (shape, workload)
        if is_it and record.get("kv_cache_dtype", "auto") == "auto" and not record.get("options"):
            return float(record["figures"]["output_tokens_per_s"])
    return None


if __name__ == "__main__":
    sys.exit(main())
