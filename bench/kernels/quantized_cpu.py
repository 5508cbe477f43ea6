"""Products of quantized weights by the CPU's own kernels, beside those of bf16 ones, taking turns in one run.

    python -m bench.kernels.quantized_cpu [--shape NAME] [--formats bf16,INT8,...] [--tokens 1,16,1024] [--threads N]

A step is all products of a dense shape's layers and of its output matrix, which is quantized, too; there is no
attention. Weights are random. `of memory` is the rate at which a step of the fewest tokens reads the packed weights,
over the rate at which this machine reads memory with the same threads.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench.machine import processor
from bench.shapes_folder import described, shape_folder
from penstock.kernels.native.build import build
from penstock.kernels.native.library import Library, PackedLinear
from penstock.kernels.native.pool import NativePool
from penstock.kernels.native.program.builder import ProgramBuilder
from penstock.kernels.native.program.program import Program
from penstock.kernels.quantized.weight import InputRounding, QuantizedWeight
from penstock.lab.calibration.rates import read_rate
from penstock.models.description.decoder import Attention, Decoder, DenseMLP

Make = Callable[[int, int], QuantizedWeight | Tensor]


def _groups(bits: int, group: int, *, has_zeros: bool = False) -> Make:
    def make(n: int, k: int) -> QuantizedWeight:
        size = group or k
        codes = torch.randint(2**bits, (n, k), dtype=torch.uint8)
        scales = (torch.rand(n, -(-k // size)) / (k**0.5 * 2**bits)).half()
        zeros = torch.randint(2**bits, scales.shape, dtype=torch.uint8) if has_zeros else 1 << (bits - 1)
        return QuantizedWeight(codes, bits, size, scales, zeros)

    return make


def _k_quant(bits: int, group: int, *, has_minimums: bool) -> Make:
    def make(n: int, k: int) -> QuantizedWeight:
        scales = torch.randint(64, (n, -(-k // group)), dtype=torch.uint8)
        supers = (torch.rand(n, -(-k // 256)) / (64 * k**0.5 * 2**bits)).half()
        plain = _groups(bits, group)(n, k)
        assert isinstance(plain, QuantizedWeight)
        if not has_minimums:
            return plain._replace(scales=scales.to(torch.int8), super_scales=supers)
        return plain._replace(scales=scales, zeros=0, minimums=scales, super_scales=supers, super_minimums=supers)

    return make


def _w8a8(n: int, k: int) -> QuantizedWeight:
    plain = _groups(8, 0)(n, k)
    assert isinstance(plain, QuantizedWeight)
    return plain._replace(inputs=InputRounding("int8"))


FORMATS: dict[str, Make] = {
    "bf16": lambda n, k: (torch.rand(n, k) / k**0.5).bfloat16(),
    "INT8": _groups(8, 0),
    "W8A8": _w8a8,
    "Q8_0": _groups(8, 32),
    "INT4": _groups(4, 128),
    "AWQ": _groups(4, 128, has_zeros=True),
    "Q4_0": _groups(4, 32),
    "Q4_K": _k_quant(4, 32, has_minimums=True),
    "Q5_K": _k_quant(5, 32, has_minimums=True),
    "Q6_K": _k_quant(6, 16, has_minimums=False),
    "Q3_K": _k_quant(3, 16, has_minimums=False),
    "Q2_K": _k_quant(2, 16, has_minimums=True),
}


class Products:
    """A shape's products with weights of one format."""

    def __init__(self, config: Decoder, make: Make, library: Library) -> None:
        self.num_bytes, self._library, self._make = 0, library, make
        hidden = config.hidden_size
        builder = ProgramBuilder(hidden)
        x = builder.slot(hidden)
        builder.embed(torch.rand(16, hidden), x)
        for layer in config.layers:
            mixer, mlp = layer.mixer, layer.mlp
            if not isinstance(mixer, Attention) or not isinstance(mlp, DenseMLP):
                raise ValueError("only dense shapes with attention")
            q_size = mixer.num_heads * mixer.head_dim
            qkv_size = q_size + 2 * mixer.num_kv_heads * mixer.head_dim
            qkv, inner = builder.slot(qkv_size), builder.slot(mlp.size)
            builder.product(self._pack(qkv_size, hidden), x, qkv)
            builder.product(self._pack(hidden, q_size), qkv, x, "add")
            builder.product(self._pack(2 * mlp.size, hidden, interleaved=True), x, inner, "gate")
            builder.product(self._pack(hidden, mlp.size), inner, x, "add")
        builder.norm(None, x, ProgramBuilder.OUT, hidden)
        self._program: Program = builder.build(library, self._pack(config.vocab_size, hidden))
        self._pool = NativePool([])

    def _pack(self, n: int, k: int, *, interleaved: bool = False) -> PackedLinear:
        weight = self._make(n, k)
        if isinstance(weight, Tensor):
            packed = self._library.pack(weight, interleaved=interleaved, rounds_inputs=True)
        else:
            packed = self._library.pack_quantized(weight, interleaved=interleaved, rounds_inputs=True)
        self.num_bytes += packed.weight.nbytes
        return packed

    def seconds(self, num_tokens: int) -> float:
        """Of a step; of a prompt, its last token has logits."""
        ids = torch.zeros(num_tokens, dtype=torch.int32)
        loc = torch.tensor([0, num_tokens], dtype=torch.int32)
        begin = time.perf_counter()
        hidden = self._program.forward(ids, ids.long(), loc, loc[1:], [], [], self._pool)
        self._program.logits(hidden if num_tokens < 128 else hidden[-1:])
        return time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="a folder name in bench/shapes")
    parser.add_argument("--formats", default=",".join(FORMATS), help="separated by commas; the first is compared with")
    parser.add_argument("--tokens", default="1,16,1024", help="of a step, separated by commas")
    parser.add_argument("--steps", type=int, default=20, help="of each format and number of tokens")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    config = described(shape_folder(args.shape))
    if not isinstance(config, Decoder):
        raise ValueError("only decoders")
    library = Library(build(), args.threads)
    formats = {name: Products(config, FORMATS[name], library) for name in args.formats.split(",")}
    sizes = [int(size) for size in args.tokens.split(",")]
    rate = read_rate(args.threads)
    times: dict[str, list[list[float]]] = {name: [[] for _ in sizes] for name in formats}
    for i, size in enumerate(sizes):
        for step in range(-1, args.steps if size < 128 else max(3, args.steps // 7)):
            for name, products in formats.items():
                seconds = products.seconds(size)
                if step >= 0:
                    times[name][i].append(seconds)
    medians = {name: [statistics.median(found) for found in its] for name, its in times.items()}
    print(f"{args.shape}; {processor()}; {args.threads} threads; memory read at {rate / 1e9:.1f} GB/s")
    print(f"{'':8} {'MB':>6} {'of memory':>10}" + "".join(f"{f'{size} tokens, ms':>18}{'':7}" for size in sizes))
    first = next(iter(medians.values()))
    for name, products in formats.items():
        of_memory = products.num_bytes / rate / medians[name][0]
        cells = [f"{1e3 * its:18.2f}{other / its:6.2f}x" for its, other in zip(medians[name], first, strict=True)]
        print(f"{name:8} {products.num_bytes / 1e6:6.0f} {of_memory:10.0%}" + "".join(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
