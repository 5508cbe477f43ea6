"""Tables and targets of a comparison, out of its record. A ratio over 1 means that Penstock is better."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from bench.peers.formats import AS_STORED
from bench.peers.systems import PENSTOCK, PENSTOCK_BF16

_NONE = "-"
UNRESOLVED = 1.15
"""One system alone drifts by 13 % within an hour: factors below this say nothing."""

Record = Mapping[str, Any]


class Row(NamedTuple):
    """One figure: where it lies in a system's table, its name and unit, and which way is better."""

    part: Literal["raw", "chat"]
    workload: str
    figure: str
    label: str
    better: Literal["low", "high"]


_MIXED = (
    ("tokens_per_s", "output tok/s", "high"),
    ("itl_mean_ms", "mean ITL, ms", "low"),
    ("itl_p99_ms", "p99 ITL, ms", "low"),
)
_CHAT = (("tokens_per_s", "output tok/s", "high"), ("ttft_ms", "TTFT, ms", "low"), ("itl_p99_ms", "p99 ITL, ms", "low"))

_Targets = Mapping[str, Mapping[tuple[str, str], float]]

_AGAINST_THE_SAME_FILE = {
    ("decode 1", "step_ms"): 1.2,
    ("decode 16", "step_ms"): 3.0,
    ("mixed", "tokens_per_s"): 3.0,
    ("start", "seconds"): 1 / 1.2,
}

TARGETS: Mapping[str, _Targets] = {
    "qwen2.5-0.5b": {
        "vllm": {
            ("decode 1", "step_ms"): 1.3,
            ("decode 4", "step_ms"): 1.3,
            ("decode 16", "step_ms"): 1.2,
            ("prefill", "tokens_per_s"): 1.1,
            ("mixed", "tokens_per_s"): 1.3,
            ("mixed", "itl_p99_ms"): 2.0,
            ("start", "seconds"): 10.0,
        },
        "openvino": {
            ("decode 1", "step_ms"): 1.0,
            ("decode 4", "step_ms"): 1.0,
            ("decode 16", "step_ms"): 1.0,
            ("prefill", "tokens_per_s"): 1.1,
            ("mixed", "tokens_per_s"): 1.15,
            ("mixed", "itl_p99_ms"): 1.0,
        },
        "llamacpp": {
            ("decode 4", "step_ms"): 2.0,
            ("decode 16", "step_ms"): 4.0,
            ("prefill", "tokens_per_s"): 5.0,
            ("mixed", "tokens_per_s"): 3.0,
            ("start", "seconds"): 1.0,
        },
    },
    "qwen2.5-0.5b in int8": {
        "penstock-bf16": {
            ("decode 1", "step_ms"): 1.7,
            ("decode 16", "step_ms"): 1.8,
            ("prefill", "tokens_per_s"): 2.0,
        },
        "openvino": {("prefill", "tokens_per_s"): 1.2},
    },
    "qwen2.5-0.5b in int4": {"penstock-bf16": {("decode 1", "step_ms"): 2.6}},
    "qwen2.5-0.5b in q8_0": {"llamacpp": _AGAINST_THE_SAME_FILE},
    "qwen2.5-0.5b in q4_k_m": {"llamacpp": _AGAINST_THE_SAME_FILE},
    "llama-tiny": {
        "vllm": {
            ("decode 1", "step_ms"): 2.0,
            ("decode 16", "step_ms"): 2.0,
            ("mixed", "tokens_per_s"): 1.8,
            ("start", "seconds"): 10.0,
        },
        "openvino": {
            ("decode 1", "step_ms"): 0.9,
            ("decode 16", "step_ms"): 0.9,
            ("mixed", "tokens_per_s"): 0.9,
        },
        "llamacpp": {
            ("decode 1", "step_ms"): 1.0,
            ("decode 16", "step_ms"): 6.0,
            ("mixed", "tokens_per_s"): 6.0,
            ("start", "seconds"): 1.0,
        },
    },
}
"""By shape, peer and figure. They were set for a processor with AMX."""


def rows_of(record: Record) -> list[Row]:
    """The rows that the record's rounds have figures for."""
    decodes = [
        Row("raw", name, "step_ms", f"decode, B={name.split()[1]}, ms/step", "low") for name in record["decode_bytes"]
    ]
    mixed = [Row("raw", "mixed", name, f"mixed, {label}", better) for name, label, better in _MIXED]  # type: ignore[arg-type]
    chat = [Row("chat", "chat", name, f"shared prefix, {label}", better) for name, label, better in _CHAT]  # type: ignore[arg-type]
    prefill = Row("raw", "prefill", "tokens_per_s", f"prefill of {record['prefill_tokens']}, tok/s", "high")
    return [*decodes, prefill, *mixed, Row("raw", "start", "seconds", "start to ready, s", "low"), *chat]


def figures(record: Record, system: str, row: Row) -> list[float | None]:
    """One figure of a system in each round; None where it has none."""
    return [
        round_.get(system, {}).get(row.part, {}).get(row.workload, {}).get(row.figure) for round_ in record["rounds"]
    ]


def ratios(record: Record, peer: str, row: Row) -> list[float]:
    """Of each round in which both have the figure: how many times better Penstock is."""
    pairs = zip(figures(record, PENSTOCK, row), figures(record, peer, row), strict=True)
    both = [(own, its) for own, its in pairs if own and its]
    return [its / own if row.better == "low" else own / its for own, its in both]


def verdict(ratio: float, target: float | None) -> str:
    """What a ratio says of its target: nothing, where it misses it by less than what drifts."""
    if target is None:
        return "no difference resolved" if 1 / UNRESOLVED < ratio < UNRESOLVED else ""
    if ratio >= target:
        return f"target {target:g}: met"
    return f"target {target:g}: {'unresolved' if ratio * UNRESOLVED > target else 'missed'}"


def markdown(record: Record) -> str:
    """The whole page."""
    systems = [name for name in record["systems"] if any(name in round_ for round_ in record["rounds"])]
    machine = record["machine"]
    features = ", ".join(machine["features"]) or "no features known"
    amx = "yes" if machine["has_amx"] else "no"
    lines = [
        f"# {record['shape']}{_of_format(record)}: Penstock beside "
        + ", ".join(name for name in record["systems"] if name != PENSTOCK),
        "",
        f"{record['date']}, commit {record['commit'] or 'unknown'}: `{record['command']}`",
        "",
        f"{machine['processor']}, {machine['memory_gb']:.0f} GB; {features}; AMX: {amx}; "
        f"huge pages: {machine['huge_pages']}; load average before: {machine['load_before']:.2f}. "
        f"Memory is read at {_read_rate(record):.1f} GB/s. "
        f"{record['threads']} threads each; {len(record['rounds'])} rounds, taking turns.",
        "",
    ]
    if record["is_quick"]:
        lines += ["**The quick form: it shows that everything runs, its figures are rough.**", ""]
    lines += [f"- {name}: {_description(record, name)}" for name in record["systems"]]
    lines += ["", "## Figures (median of the rounds)", "", *_figures_table(record, systems)]
    lines += ["", "`of memory`: the bytes that a step must read, over the rate at which this machine reads memory.", ""]
    lines += ["## Ratios (over 1: Penstock is better)", "", *_ratio_table(record, systems), ""]
    lines.append(
        "Each ratio is the median of the rounds' ratios, with their range. A system alone drifts by more than a tenth "
        "within an hour: a ratio that misses its target by less than 15 % counts as unresolved. "
        "Targets were set for a processor with AMX."
    )
    return "\n".join(lines) + "\n"


def _of_format(record: Record) -> str:
    format = record.get("format", AS_STORED)
    return "" if format == AS_STORED else f" in {format}"


def _figures_table(record: Record, systems: Sequence[str]) -> list[str]:
    head = [_line("", *systems), _line("---", *("---:" for _ in systems))]
    return head + [_line(*row) for row in figures_rows(record, systems)]


def figures_rows(record: Record, systems: Sequence[str]) -> list[list[str]]:
    """The table of figures as cells: a row's name, then each system's median over the rounds."""
    rows = []
    for row in rows_of(record):
        cells = []
        for system in systems:
            values = [value for value in figures(record, system, row) if value is not None]
            cells.append(_number(_median(values)) if values else _NONE)
            if values and row.workload in record["decode_bytes"]:
                needed = record["decode_bytes_as_stored" if system == PENSTOCK_BF16 else "decode_bytes"]
                share = needed[row.workload] / (_read_rate(record) * 1e9)
                cells[-1] += f" ({share / (_median(values) / 1e3):.0%} of memory)"
        rows.append([row.label, *cells])
    return rows


def _ratio_table(record: Record, systems: Sequence[str]) -> list[str]:
    peers = [name for name in systems if name != PENSTOCK]
    targets = TARGETS.get(record["shape"] + _of_format(record), {})
    lines = [_line("", *(f"against {name}" for name in peers)), _line("---", *("---" for _ in peers))]
    for row in rows_of(record):
        cells = []
        for peer in peers:
            found = ratios(record, peer, row)
            if not found:
                cells.append(_NONE)
                continue
            middle = _median(found)
            told = verdict(middle, targets.get(peer, {}).get((row.workload, row.figure)))
            spread = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
            cells.append(f"**{middle:.2f}**{spread}{'; ' if told else ''}{told}")
        lines.append(_line(row.label, *cells))
    return lines


def _description(record: Record, name: str) -> str:
    system = record["systems"][name]
    told = ", ".join(f"{package} {version}" for package, version in system["versions"].items())
    parts = [part for part in (told, system["how"], f"flags {system['flags']}" if system["flags"] else "") if part]
    failure = record["failures"].get(name)
    if failure:
        first, *rest = failure.splitlines()
        parts.append(" ".join(["**FAILED**:", first, *(line.strip() for line in rest[-1:])]))
    return "; ".join(parts)


def _read_rate(record: Record) -> float:
    """GB/s: the best that was measured, for that is what the memory can do."""
    return max(record["read_gb_per_s"], default=float("nan"))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 100 else f"{value:.1f}"
