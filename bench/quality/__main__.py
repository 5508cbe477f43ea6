"""What quantized weights and quantized keys and values cost in quality.

    python -m penstock.bench.quality                          the demo model, on conversations held out of its training
                                                              (in a clone, which has them)
    python -m penstock.bench.quality MODEL --text FILE.txt    another one, on a text of yours
    python -m penstock.bench.quality --variants int8,int4/int8,/fp8_e4m3,path/of/a/quantized/checkpoint

A variant is WEIGHTS/KV: what `--quantization` and `--kv-cache-dtype` are set to, or another checkpoint of the same
model. Each is computed by the engine itself, and compared with the same model in float32:

    top-1       share of tokens whose most likely successor is the same; of the demo model's also in answers alone,
                because it has never learned to predict questions
    KL          mean Kullback-Leibler divergence of the predictions, in thousandths of a nat; and its 99th percentile
    perplexity  of the text; of conversations, of the answers
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from penstock.bench.quality.engine import ScoringEngine
from penstock.bench.quality.measure import Quality, Reference, measure
from penstock.bench.quality.texts import Text, conversations, tokenizer_of, windows
from penstock.config.options import ConfigError
from penstock.ipc.process import EXIT_CONFIG
from penstock.models.finding.registry import model_path, open_checkpoint
from penstock.models.formats.made import MADE_FORMATS
from penstock.options import config_of, quiet

KV_DTYPES = ("int8", "fp8_e4m3", "fp8_e5m2", "int4")
VARIANTS = ("", *MADE_FORMATS, *(f"/{kv}" for kv in KV_DTYPES), "int8/int8", "fp8/fp8_e4m3", "int4/int8", "int4/int4")


class Row(NamedTuple):
    """One variant's figures."""

    weights: str
    kv: str
    kernels: str
    seconds: float
    quality: Quality

    def as_json(self) -> dict[str, Any]:
        """Flat."""
        return {name: value for name, value in self._asdict().items() if name != "quality"} | self.quality._asdict()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; return the exit code (2: the options cannot work)."""
    args = _parser().parse_args(argv)
    quiet("warning")
    try:
        rows = measured(args.model, _texts(args), args.variants, args.context, dtype=args.dtype, device=args.device)
    except (ConfigError, OSError) as error:
        print(f"penstock.bench.quality: {error}", file=sys.stderr)
        return EXIT_CONFIG
    if args.out is not None:
        args.out.write_text(
            json.dumps({"model": args.model or "demo", "rows": [row.as_json() for row in rows]}, indent=1)
        )
    print_table(rows, has_answers=args.text is None)
    return 0


def measured(model: str, texts: Sequence[Text], variants: Sequence[str], context: int, **options: Any) -> list[Row]:
    """The figures of each variant; the first row is the float model itself.

    Args:
        model: as for `penstock serve`; empty for the demo model.
        texts: what to predict.
        variants: WEIGHTS/KV each.
        context: tokens of the longest text.
        options: of the engine; `dtype` is that of the variants.
    """
    exact = ScoringEngine(model, context, **options | {"dtype": "float32"})
    reference = Reference(exact.logits)
    rows = [_row("float32", "float32", exact, reference, texts)]
    for variant in variants:
        weights, kv = split(variant)
        made = weights in MADE_FORMATS
        its: dict[str, Any] = {"quantization": weights} if made else {}
        its |= {"kv_cache_dtype": kv} if kv else {}
        engine = ScoringEngine(model if made else weights or model, context, **options | its)
        rows.append(_row(weights or engine.dtype, kv or engine.dtype, engine, reference, texts))
        engine.close()
    exact.close()
    return rows


def split(variant: str) -> tuple[str, str]:
    """Its weights and its keys and values. The weights may be a path."""
    weights, slash, kv = variant.rpartition("/")
    is_both = slash and kv in KV_DTYPES and not Path(variant).exists()
    return (weights, kv) if is_both else (variant, "")


def print_table(rows: Sequence[Row], *, has_answers: bool) -> None:
    """For people; the same columns as in the docs."""
    table = Table(box=None, header_style="bold")
    columns = ["weights", "KV", "top-1", *(["of answers"] if has_answers else []), "KL", "KL 99 %", "perplexity"]
    for column in columns:
        is_name = column in ("weights", "KV")
        table.add_column(column, justify="left" if is_name else "right", overflow="fold" if is_name else "ellipsis")
    for row in rows:
        its = row.quality
        shares = [its.top1, its.answer_top1] if has_answers else [its.top1]
        cells = [row.weights, row.kv, *(f"{100 * share:.2f} %" for share in shares)]
        cells += [f"{1e3 * its.kl:.2f}", f"{1e3 * its.kl_99:.1f}", f"{its.perplexity:.4f}"]
        table.add_row(*cells)
    console = Console()
    console.print(table)
    console.print(f"{rows[0].quality.num_tokens} tokens, {sum(row.seconds for row in rows):.0f} s")


def _row(weights: str, kv: str, engine: ScoringEngine, reference: Reference, texts: Sequence[Text]) -> Row:
    began = time.monotonic()
    quality = measure(reference, engine.logits, texts)
    return Row(weights, kv, engine.kernels, time.monotonic() - began, quality)


def _texts(args: argparse.Namespace) -> list[Text]:
    path = model_path(config_of({"model": args.model}, {}))
    tokenizer = tokenizer_of(open_checkpoint(path))
    if args.text is None:
        if args.model:
            raise ConfigError("say --text FILE: the conversations that are bundled are those of the demo model")
        return conversations(tokenizer, args.tokens, args.context)
    return windows(tokenizer, args.text, args.tokens, args.context)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.bench.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", default="", help="checkpoint; default: the demo model")
    parser.add_argument("--text", type=Path, help="a text file; default: conversations with the demo model")
    parser.add_argument("--tokens", type=int, default=12_000, help="of the text (%(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="tokens that are read at once (%(default)s)")
    parser.add_argument(
        "--variants",
        type=lambda value: value.split(","),
        default=list(VARIANTS),
        help="WEIGHTS/KV,...; default: all formats that can be made, and all of keys and values",
    )
    parser.add_argument("--dtype", default="auto", help="of the variants' activations (%(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
