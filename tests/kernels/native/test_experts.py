"""The CPU's own mixtures of experts: against the rules in fp64, and bit for bit against themselves in other batches."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.activation import ActivationKind, activation_reference, gated_activation_reference
from penstock.kernels.experts.held_experts import HeldExperts, held_experts
from penstock.kernels.experts.routing import Routing, route_reference
from penstock.kernels.native.experts.packed import PackedExperts
from penstock.kernels.native.library import Library, PackedLinear
from penstock.kernels.native.program.builder import ACTIVATIONS
from tests.kernels.native.native_library import load_library, native_experts, native_route
from tests.kernels.routings import ROUTINGS

_TOKENS = 70


class Case(NamedTuple):
    """One layer's experts."""

    routing: Routing
    num_experts: int = 12
    hidden: int = 48
    inner: int = 40
    activation: ActivationKind = "silu"
    has_bias: bool = False
    is_corrected: bool = False
    multiplies_input: bool = False
    is_gated: bool = True


_CASES = {
    "Mixtral": Case(Routing(top_k=2, renormalize=True), 8, 64, 96),
    "gpt-oss": Case(Routing(top_k=4, kind="top_softmax"), 32, 72, 72, "clamped_swiglu", has_bias=True),
    "DeepSeek-V3": Case(ROUTINGS["sigmoid, groups, corrected"], 24, is_corrected=True),
    "Llama 4": Case(Routing(top_k=1, kind="sigmoid"), 16, multiplies_input=True),
    "two inputs are multiplied": Case(Routing(top_k=2, kind="sigmoid"), 16, hidden=47, multiplies_input=True),
    "all experts": Case(Routing(top_k=12), activation="gelu_tanh"),
    "one expert": Case(Routing(top_k=1), 1, activation="gelu"),
    "no gates": Case(Routing(top_k=3, kind="sigmoid"), 16, 47, 33, "relu2", has_bias=True, is_gated=False),
    "no gates, inputs are multiplied": Case(Routing(top_k=2), 8, multiplies_input=True, is_gated=False),
    "odd sizes": Case(Routing(top_k=3), 130, 47, 33),
    "more than one block of inputs": Case(Routing(top_k=2), 3, 300, 200),
}


class Mixture:
    """Random weights of a case, and what they compute."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(4)

        def random(*shape: int) -> Tensor:
            return torch.empty(shape).normal_(0, 0.3, generator=generator)

        def bias(*shape: int) -> Tensor | None:
            return random(*shape) if case.has_bias else None

        count, width = case.num_experts, (1 + case.is_gated) * case.inner
        self.case = case
        self.router, self.router_bias = random(count, case.hidden).to(dtype), bias(count)
        self.gate_up, self.gate_up_bias = random(count, width, case.hidden).to(dtype), bias(count, width)
        self.down, self.down_bias = random(count, case.hidden, case.inner).to(dtype), bias(count, case.hidden)
        self.correction = random(count) / 3 if case.is_corrected else None
        self.x = torch.randn(_TOKENS, case.hidden, generator=generator)

    def pack(self, library: Library, *, rounds_inputs: bool = False, held: HeldExperts | None = None) -> PackedExperts:
        case = self.case
        here = range(case.num_experts) if held is None else (held.numbers >= 0).nonzero().flatten().tolist()

        def packed(weights: Tensor, biases: Tensor | None, *, interleaved: bool = False) -> list[PackedLinear]:
            each = [None] * len(weights) if biases is None else list(biases)
            return [
                library.pack(weights[i], each[i], interleaved=interleaved, rounds_inputs=rounds_inputs) for i in here
            ]

        return PackedExperts(
            library.pack(self.router, self.router_bias),
            packed(self.gate_up, self.gate_up_bias, interleaved=case.is_gated),
            packed(self.down, self.down_bias),
            case.routing,
            self.correction,
            ACTIVATIONS.index(case.activation),
            is_gated=case.is_gated,
            multiplies_input=case.multiplies_input,
            held=held,
        )

    def expected(self) -> Tensor:
        """fp64 [T, H]: token by token, expert by expert."""
        case, x = self.case, self.x.double()
        activation = gated_activation_reference if case.is_gated else activation_reference

        def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return functional.linear(inputs, weight.double(), None if bias is None else bias.double())

        logits = linear(x, self.router, self.router_bias)
        ids, weights = route_reference(logits.float(), case.routing, self.correction)
        out = torch.zeros_like(x)
        for t in range(len(x)):
            for expert, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
                biases = (None if of is None else of[expert] for of in (self.gate_up_bias, self.down_bias))
                up_bias, down_bias = biases
                inputs = x[t] * weight if case.multiplies_input else x[t]
                inner = activation(linear(inputs, self.gate_up[expert], up_bias), case.activation)
                outputs = linear(inner.double(), self.down[expert], down_bias)
                out[t] += outputs if case.multiplies_input else outputs * weight
        return out


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def library(request: pytest.FixtureRequest) -> Library:
    return load_library(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_like_the_rules(library: Library, case: Case, dtype: torch.dtype) -> None:
    mixture = Mixture(case, dtype)
    expected = mixture.expected()
    found = native_experts(library, mixture.pack(library), mixture.x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss", "DeepSeek-V3", "Llama 4", "no gates", "odd sizes"])
def test_ranks_compute_a_part_each(library: Library, name: str) -> None:
    """Parts add up to the whole, and the tokens that were counted to all; a part has the same bits in any batch."""
    case = _CASES[name]
    mixture = Mixture(case, torch.float32)
    ranks_of = [(0, 1, 2), (1, 2), *((expert % 3,) for expert in range(2, case.num_experts))]
    ids = torch.arange(_TOKENS, dtype=torch.int32) * 7 % 11
    positions = torch.arange(_TOKENS) * 5 % 13
    total, counted = torch.zeros(_TOKENS, case.hidden), torch.zeros(case.num_experts, dtype=torch.int64)
    for rank in range(3):
        held = held_experts(rank, ranks_of, torch.device("cpu"))
        experts = mixture.pack(library, held=held)
        part = native_experts(library, experts, mixture.x, (ids, positions))
        total += part
        counted[held.numbers >= 0] += held.tokens[:-1]
        for t in (0, 1, 2, _TOKENS - 1):
            one = slice(t, t + 1)
            assert torch.equal(native_experts(library, experts, mixture.x[one], (ids[one], positions[one])), part[one])
    expected = mixture.expected()
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))
    logits = mixture.x @ mixture.router.T + (0 if mixture.router_bias is None else mixture.router_bias)
    chosen, _ = route_reference(logits, case.routing, mixture.correction)
    assert torch.equal(counted, chosen.flatten().bincount(minlength=case.num_experts))


@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16, rounded inputs"])
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_the_same_bits_in_any_batch(library: Library, case: Case, kind: str) -> None:
    mixture = Mixture(case, torch.float32 if kind == "fp32" else torch.bfloat16)
    experts = mixture.pack(library, rounds_inputs=kind.endswith("rounded inputs"))
    whole = native_experts(library, experts, mixture.x)
    reversed_rows = native_experts(library, experts, mixture.x.flip(0)).flip(0)
    assert torch.equal(whole, reversed_rows)
    for size in (1, 2, 13):
        for rows, expected in zip(mixture.x.split(size), whole.split(size), strict=True):
            assert torch.equal(native_experts(library, experts, rows), expected)
    again = mixture.x[:1].expand(40, -1).contiguous()  # all of one expert's tokens in several tiles
    assert torch.equal(native_experts(library, experts, again), whole[:1].expand(40, -1))


def test_rounded_inputs_are_near(library: Library) -> None:
    mixture = Mixture(_CASES["Mixtral"], torch.bfloat16)
    exact, rounded = (native_experts(library, mixture.pack(library, rounds_inputs=r), mixture.x) for r in (False, True))
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).abs().max() < 0.03 * exact.abs().max()


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("num_experts", [12, 24, 132])
def test_routes_like_the_reference(library: Library, name: str, num_experts: int) -> None:
    """In the same order, which is that of the reference; where the choice goes by logits, also among equal ones."""
    generator = torch.Generator().manual_seed(5)
    routing = ROUTINGS[name]
    correction = torch.randn(num_experts, generator=generator) / 5 if "corrected" in name else None
    logits = torch.randn(100, num_experts, generator=generator) * 3
    if routing.goes_by_logits(correction):
        logits = logits.round()
    ids, weights = native_route(library, logits, routing, correction)
    expected_ids, expected_weights = route_reference(logits, routing, correction)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_any_logits_give_different_experts(library: Library, name: str, bad: float) -> None:
    logits = torch.zeros(3, 12)
    logits[0, 3], logits[1, ::2], logits[2] = bad, bad, bad
    ids, _ = native_route(library, logits, ROUTINGS[name], torch.zeros(12) if "corrected" in name else None)
    for row in ids.tolist():
        assert len(set(row)) == len(row)
        assert set(row) <= set(range(12))


def test_more_tokens_than_there_is_room_for() -> None:
    """They are computed one part after the other."""
    library, mixture = load_library(2), Mixture(_CASES["all experts"], torch.bfloat16)
    experts = mixture.pack(library)
    expected = native_experts(library, experts, mixture.x)
    count = 320  # times 70 tokens, of 3,136 floats each
    assert torch.equal(native_experts(library, experts, mixture.x.repeat(count, 1)), expected.repeat(count, 1))
