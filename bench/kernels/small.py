"""Cases of the kernels besides attention: each names the fewest bytes it can move and the calls to time."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from bench.kernels.timing import num_rotations
from penstock.kernels.activation import gated_activation
from penstock.kernels.attention.kv_quantization import KV_FORMATS, PageLayout
from penstock.kernels.attention.qk_norm_rope_write import QKNorms, qk_norm_rope_write
from penstock.kernels.experts.experts import group_rows, grouped_linear, sum_of_experts
from penstock.kernels.experts.routing import Routing, route
from penstock.kernels.norms import NormWeights, add_norm
from penstock.kernels.sampling.sampling import SamplingNeeds, SamplingState, sample
from penstock.kernels.sampling.top_logprobs import top_logprobs

Calls = list[Callable[[], object]]


@dataclass(frozen=True)
class Case:
    name: str
    bytes_per_call: int
    calls: Calls
    peers: tuple[tuple[str, Calls], ...] = field(default=())
    flops_per_call: int = 0  # of matrix products


def small_cases(dry: bool) -> list[Case]:
    """Qwen3-8B's shapes: hidden 4096, intermediate 12288, 32 query and 8 key-value heads of 128."""
    out = []
    for tokens in (3,) if dry else (1, 256, 8192):
        out += [_norm_case(tokens, 64 if dry else 4096, dry), _gate_case(tokens, 96 if dry else 12288, dry)]
        out.append(_rope_case(tokens, (4, 2, 16) if dry else (32, 8, 128), dry))
    return out


def kv_write_cases(dry: bool) -> list[Case]:
    """The last of `small_cases` with quantized KV of each format."""
    heads = (4, 2, 16) if dry else (32, 8, 128)
    return [_rope_case(tokens, heads, dry, kv) for kv in KV_FORMATS for tokens in ((3,) if dry else (1, 256, 8192))]


def sampling_cases(dry: bool) -> list[Case]:
    """fp32 logits of 151,936 tokens: greedy, plain temperature, filters, penalties, log-probabilities.

    Standard normal logits are flat for a model: at temperature 0.6, top-p 0.95 keeps half of the vocabulary. Those
    called peaked are four times as far apart, and it keeps a few tokens.
    """
    out = []
    vocab = 97 if dry else 151936
    for rows in (2,) if dry else (1, 64, 256):
        flat = _rotate((rows, vocab), dry, torch.float32)
        peaked, equal = 4 * flat, torch.ones_like(flat)
        top_p = SamplingNeeds(random=True, top_p=True)
        both = top_p._replace(top_k=True)
        few = torch.where(torch.arange(rows, device=flat.device) % 8 == 0, 0.95, 1.0)
        kinds: list[tuple[str, Tensor, SamplingNeeds, dict[str, float | Tensor]]] = [
            ("greedy", flat, SamplingNeeds(), {}),
            ("temperature", flat, SamplingNeeds(random=True), {}),
            ("top-k 20, top-p 0.95", flat, both, {"top_k": 20}),
            ("top-k 1000", flat, both, {"top_k": 1000, "top_p": 1.0}),
            ("top-p 0.95", flat, top_p, {}),
            ("top-p 0.95, peaked", peaked, top_p, {}),
            ("top-p 0.95, all equal", equal, top_p, {}),
            ("top-p 0.95, peaked, one row of eight", peaked, top_p, {"top_p": few}),
            ("min-p 0.05", flat, SamplingNeeds(random=True, min_p=True), {"min_p": 0.05}),
            ("penalties", flat, SamplingNeeds(random=True, penalties=True), {}),  # it changes the logits, so it is last
        ]
        for name, logits, needs, parameters in kinds:
            state = _state(rows, vocab, dry, parameters)
            at = torch.arange(rows, device=logits.device)
            positions = torch.full_like(at, 30)
            calls: Calls = [functools.partial(sample, part, at, positions, state, needs) for part in logits]
            out.append(Case(f"{name}, S={rows}", logits[0].numel() * 4, calls))
        chosen = torch.zeros(rows, dtype=torch.int32, device=flat.device)
        calls = [functools.partial(top_logprobs, part, chosen, 20) for part in flat]
        out.append(Case(f"20 log-probabilities, S={rows}", flat[0].numel() * 4, calls))
    return out


def expert_cases(dry: bool) -> list[Case]:
    """Mixtures of Qwen3-30B-A3B (128 experts, 8 for each token) and of gpt-oss-20b (32, 4), from logits to sums."""
    shapes = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "gpt-oss-20b": (32, 4, 2880, 2880)}
    if dry:
        shapes = {"tiny": (8, 2, 32, 16)}
    return [
        _mixture_case(name, tokens, shape, dry)
        for name, shape in shapes.items()
        for tokens in ((3,) if dry else (1, 8, 64, 512, 4096))
    ]


def _device(dry: bool) -> str:
    return "cpu" if dry else "cuda"


def _rotate(shape: tuple[int, ...], dry: bool, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[rotations, *shape] of random numbers."""
    size = dtype.itemsize * torch.Size(shape).numel()
    rotations = 1 if dry else num_rotations(size)
    return torch.randn(rotations, *shape, device=_device(dry), dtype=torch.float32 if dry else dtype)


def _norm_case(tokens: int, width: int, dry: bool) -> Case:
    x, residual, weight = _rotate((tokens, width), dry), _rotate((tokens, width), dry), _rotate((width,), dry)[0]
    calls: Calls = [functools.partial(add_norm, a, b, NormWeights(weight)) for a, b in zip(x, residual, strict=True)]
    peer: Calls = [functools.partial(functional.rms_norm, a, (width,), weight, 1e-6) for a in x]
    return Case(f"add + RMSNorm, T={tokens}", 4 * x[0].nbytes, calls, (("torch norm alone", peer),))


def _gate_case(tokens: int, width: int, dry: bool) -> Case:
    x = _rotate((tokens, 2 * width), dry)
    calls: Calls = [functools.partial(gated_activation, part, "silu") for part in x]
    return Case(f"SiLU * mul, T={tokens}", 3 * x[0].nbytes // 2, calls)


def _rope_case(tokens: int, heads: tuple[int, int, int], dry: bool, kv_format: str = "") -> Case:
    num_q, num_kv, dim = heads
    qkv = _rotate((tokens, (num_q + 2 * num_kv) * dim), dry)
    page_size = 16
    num_pages = tokens // page_size + 2
    layout = PageLayout(KV_FORMATS[kv_format], page_size, dim) if kv_format else None
    shape = (page_size, dim) if layout is None else (layout.used_bytes,)
    dtype = qkv.dtype if layout is None else torch.uint8
    kv = torch.zeros(len(qkv), 2, num_pages, num_kv, *shape, device=qkv.device, dtype=dtype)
    cos_sin = torch.rand(tokens, dim, device=qkv.device)
    norm = NormWeights(torch.rand(dim, device=qkv.device).to(qkv.dtype))
    at = torch.arange(tokens, device=qkv.device)
    calls: Calls = [
        functools.partial(
            qk_norm_rope_write, part, at, cos_sin, QKNorms(norm, norm), pages[0], pages[1], at, layout=layout
        )
        for part, pages in zip(qkv, kv, strict=True)
    ]
    num_bytes = 2 * qkv[0].nbytes  # of which those of k and v are fewer when they are written
    if layout is not None:
        num_bytes -= tokens * 2 * num_kv * (dim * qkv.element_size() - layout.format.head_bytes(dim))
    return Case(f"q/k norm + RoPE + KV write {kv_format}, T={tokens}".replace(" ,", ","), num_bytes, calls)


def _mixture_case(name: str, tokens: int, shape: tuple[int, int, int, int], dry: bool) -> Case:
    count, top_k, hidden, size = shape
    dtype = torch.float32 if dry else torch.bfloat16
    gate_up = torch.empty(count, 2 * size, hidden, dtype=dtype, device=_device(dry)).normal_(std=0.02)
    down = torch.empty(count, hidden, size, dtype=dtype, device=_device(dry)).normal_(std=0.02)
    x = _rotate((tokens, hidden), dry)[:16]  # the weights of other experts take the place of those in the cache
    logits = torch.randn(len(x), tokens, count, device=x.device)
    routing = Routing(top_k, renormalize=True)
    num_used = count * (1 - (1 - top_k / count) ** tokens)  # on the average
    of_each = 3 * hidden * size
    num_bytes = round(num_used * of_each * dtype.itemsize) + 2 * x[0].nbytes
    calls: Calls = [functools.partial(_mixture, *pair, routing, gate_up, down) for pair in zip(x, logits, strict=True)]
    return Case(f"{name}, T={tokens}", num_bytes, calls, (), 2 * tokens * top_k * of_each)


def _mixture(x: Tensor, logits: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> Tensor:
    ids, weights = route(logits, routing)
    grouped = group_rows(ids, len(down))
    rows = gated_activation(grouped_linear(x, grouped, gate_up, of_tokens=True), "silu")
    return sum_of_experts(grouped_linear(rows, grouped, down), grouped, weights)


def _state(rows: int, vocab: int, dry: bool, parameters: Mapping[str, float | Tensor]) -> SamplingState:
    device = _device(dry)

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    state = SamplingState(
        temperature=column(0.6), top_p=column(0.95), min_p=column(0.0), repetition_penalty=column(1.1),
        presence_penalty=column(0.5), frequency_penalty=column(0.2), seed=column(7, torch.int64),
        top_k=column(0, torch.int64), min_tokens=column(0, torch.int64), num_prompt_tokens=column(10, torch.int64),
        token_ids=torch.randint(0, vocab, (rows, 64), dtype=torch.int32, device=device),
        stop_ids=torch.full((rows, 1), -1, dtype=torch.int32, device=device),
        bias_ids=torch.full((rows, 1), -1, dtype=torch.int32, device=device),
        bias_values=torch.zeros(rows, 1, device=device),
    )  # fmt: skip
    for name, value in parameters.items():
        getattr(state, name).copy_(torch.as_tensor(value))
    return state
