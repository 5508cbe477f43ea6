"""`penstock quantize`: writes a checkpoint with fewer bits, which transformers and other engines read, too.

penstock quantize MODEL OUT --format int8
penstock quantize MODEL OUT --format int4 --group-size 128 --calibration TEXT.txt
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.config import Config, ConfigError
from penstock.config.argument_types import positive
from penstock.config.groups.model import ModelOptions
from penstock.config.parser import Parser
from penstock.ipc.logs import setup_logging
from penstock.ipc.process import EXIT_CONFIG
from penstock.models.check import check_checkpoint
from penstock.models.files.folder import HuggingFaceFolder
from penstock.models.finding.located import located
from penstock.models.finding.registry import open_model
from penstock.models.formats.made import GROUP_SIZES, HEAD, MADE_FORMATS, Recipe

_INTERRUPTED = 130
_USUAL_TOKENS = 16_384


def main(argv: Sequence[str] | None = None) -> int:
    """Quantize; return the exit code (0: written, 2: it cannot be done)."""
    args = _parser().parse_args(argv)
    try:
        return _quantize(args)
    except (ConfigError, OSError) as error:
        print(f"penstock quantize: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        print("penstock quantize: stopped; nothing was written", file=sys.stderr)
        return _INTERRUPTED


def _quantize(args: argparse.Namespace) -> int:
    _check_options(args)  # before a download
    source = _source(args)
    body = Recipe(args.format, args.group_size or GROUP_SIZES[0], args.zero_points)
    # torch is slow to import, so errors in options and files have been reported before.
    from tqdm import tqdm

    from penstock.gpu_worker.formats.group_rounding import Correlation
    from penstock.quantize.calibration import measured_inputs
    from penstock.quantize.checkpoint import QuantizedCheckpoint, Wanted

    began = time.monotonic()
    wanted = Wanted(body, None if args.head == "float" else HEAD, tuple(args.ignore))
    correlations: Mapping[str, Correlation] = {}
    if args.calibration is not None:
        QuantizedCheckpoint(source, wanted)  # reports errors before the work begins
        correlations = measured_inputs(source, args.calibration, args.calibration_tokens or _USUAL_TOKENS)
    checkpoint = QuantizedCheckpoint(source, wanted, correlations)
    with tqdm(
        total=checkpoint.num_bytes, desc="Quantizing", unit="B", unit_scale=True, leave=False, disable=None
    ) as bar:
        checkpoint.write(args.out, lambda job: bar.update(job.num_bytes) and None)
    before, after, seconds = checkpoint.num_source_bytes, checkpoint.num_bytes, time.monotonic() - began
    print(
        f"{args.out}: {checkpoint.num_matrices} matrices became {args.format}; {before / 1e6:.0f} MB became "
        f"{after / 1e6:.0f} MB ({after / before:.0%}), in {seconds:.0f} s"
    )
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that would have no effect.

    Raises:
        ConfigError: naming the option.
    """
    is_int4 = args.format == "int4"
    only_int4 = {"--calibration": args.calibration, "--group-size": args.group_size, "--zero-points": args.zero_points}
    for name, value in only_int4.items():
        if value and not is_int4:
            raise ConfigError(f"{name} has no effect with --format {args.format}, only with int4")
    if args.calibration_tokens is not None and args.calibration is None:
        raise ConfigError("--calibration-tokens has no effect without --calibration TEXT")


def _source(args: argparse.Namespace) -> HuggingFaceFolder:
    """The checkpoint to read; it must be one that can be served.

    Raises:
        ConfigError: it cannot be served, or is not a folder of safetensors.
    """
    config = located(
        Config(model=ModelOptions(model=args.model)), before_download=lambda: setup_logging("penstock", "info", "auto")
    )
    checkpoint = open_model(config)
    if not isinstance(checkpoint, HuggingFaceFolder):
        raise ConfigError(f"{str(checkpoint.path)!r} is no folder of safetensors, which alone can be quantized")
    check_checkpoint(checkpoint)
    return checkpoint


def _parser() -> Parser:
    parser = Parser(
        "penstock quantize",
        "Write a checkpoint with fewer bits, in the layout of compressed-tensors: Penstock, transformers "
        "and other engines read it.",
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder, or ORG/NAME of the Hugging Face hub")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write; it must not exist")
    parser.add_argument(
        "--format",
        choices=MADE_FORMATS,
        required=True,
        help="int8: weights and inputs of products; int8_weight_only; int4: weights, in groups; fp8: e4m3, weights and "
        "inputs",
    )
    parser.add_argument(
        "--group-size", type=int, choices=GROUP_SIZES, help=f"weights that share a scale, in int4 ({GROUP_SIZES[0]})",
    )  # fmt: skip
    parser.add_argument(
        "--zero-points",
        action="store_true",
        help="a zero for each group, too, in int4: a tenth less error (transformers reads these with dequantize=True)",
    )
    parser.add_argument(
        "--head", choices=("float", "int8"), default="float",
        help="what the output matrix becomes (%(default)s, which all engines read); int8: 8 bits, apart from the "
        "embedding",
    )  # fmt: skip
    parser.add_argument(
        "--ignore", metavar="MODULE", action="append", default=[],
        help='a module that stays as it is, or a pattern: "*.down_proj"; may be repeated',
    )  # fmt: skip
    parser.add_argument(
        "--calibration", metavar="TEXT", type=Path,
        help="a text file of the kind that the model will see: int4 is then rounded so that products change least",
    )  # fmt: skip
    parser.add_argument("--calibration-tokens", type=positive, help=f"how much of it is read ({_USUAL_TOKENS})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
