"""Sampling kernels: random bits, adjustments, filters, the draw and the log-probabilities."""

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.sampling import philox
from penstock.kernels.sampling.sampling import (
    SamplingNeeds,
    SamplingState,
    adjusted_logits_reference,
    kept_reference,
    sample_reference,
)
from penstock.kernels.sampling.sampling_cpu import sample_cpu
from penstock.kernels.sampling.top_logprobs import top_logprobs_reference
from penstock.kernels.triton.sampling.adjust import adjust_logits
from penstock.kernels.triton.sampling.filter import find_kept
from penstock.kernels.triton.sampling.groups import groups_near_top
from penstock.kernels.triton.sampling.philox import philox_words
from penstock.kernels.triton.sampling.sampling import sample_triton
from penstock.kernels.triton.sampling.top_logprobs import top_logprobs_triton

ALL = SamplingNeeds(*[True] * 7)
VOCAB = 203


def make_state(device: str, vocab: int = VOCAB, num_rows: int = 8) -> SamplingState:
    """Row 0 greedy, row 1 plain, 2 top-k, 3 top-p, 4 min-p, 5 all filters, 6 penalties and bias, 7 everything."""

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values[:num_rows], dtype=dtype, device=device)

    generator = torch.Generator().manual_seed(5)
    return SamplingState(
        temperature=column([0, 1, 0.7, 1.3, 1, 0.9, 0.8, 0.6]),
        top_p=column([1, 1, 1, 0.8, 1, 0.7, 1, 0.95]),
        min_p=column([0, 0, 0, 0, 0.1, 0.02, 0, 0.01]),
        repetition_penalty=column([1, 1, 1, 1, 1, 1, 1.7, 1.2]),
        presence_penalty=column([0, 0, 0, 0, 0, 0, 0.5, -0.4]),
        frequency_penalty=column([0, 0, 0, 0, 0, 0, 0.25, 0.1]),
        seed=column([1, 2**40 + 3, 2**63 - 1, 7, 8, 9, 10, 11], torch.int64),
        top_k=column([0, 0, 5, 0, 0, 30, 0, 20], torch.int64),
        min_tokens=column([0, 0, 0, 0, 0, 0, 70, 2], torch.int64),
        num_prompt_tokens=column([3, 1, 9, 4, 2, 3, 20, 30], torch.int64),
        token_ids=torch.randint(0, vocab, (8, 80), generator=generator, dtype=torch.int32)[:num_rows].to(device),
        stop_ids=torch.tensor([[2, 9, -1]] * num_rows, dtype=torch.int32, device=device),
        bias_ids=torch.tensor([[-1, -1]] * 6 + [[2, 40], [0, -1]], dtype=torch.int32)[:num_rows].to(device),
        bias_values=torch.tensor([[5.0, 5.0]] * 6 + [[30.0, -3.0], [2.0, 9.0]])[:num_rows].to(device),
    )


def rows_and_positions(device: str, count: int) -> tuple[Tensor, Tensor]:
    rows = torch.arange(count, device=device).flip(0) % 8
    return rows, torch.tensor([40, 41, 77, 50, 60, 33, 79, 35], device=device)[rows]


@triton.jit(do_not_specialize=["position", "first"])  # else position 1 is a constant, without a type to convert
def words_kernel(out_ptr, seed_ptr, position, first, BLOCK: tl.constexpr):
    group = first + tl.arange(0, BLOCK)
    w0, w1, w2, w3 = philox_words(tl.load(seed_ptr), position, group)
    at = 4 * tl.arange(0, BLOCK)
    tl.store(out_ptr + at, w0.to(tl.int64))
    tl.store(out_ptr + at + 1, w1.to(tl.int64))
    tl.store(out_ptr + at + 2, w2.to(tl.int64))
    tl.store(out_ptr + at + 3, w3.to(tl.int64))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, 2**63 - 1])
@pytest.mark.parametrize("position", [1, 131072])
def test_random_bits_equal_the_cpu_path(device: str, seed: int, position: int) -> None:
    out = torch.empty(64, dtype=torch.int64, device=device)
    words_kernel[(1,)](out, torch.tensor([seed], device=device), position, 38000, BLOCK=16)
    groups = 38000 + torch.arange(16)
    expected = philox.philox_words(torch.tensor(seed), torch.tensor(position), groups).flatten()
    assert out.tolist() == expected.tolist()
    assert out[6].item() == philox.philox_reference(seed, position, 4 * 38001 + 2)


def test_adjusted_logits(device: str) -> None:
    state, (rows, positions) = make_state(device), rows_and_positions(device, 8)
    logits = 4 * torch.randn(8, VOCAB, device=device)
    expected = [
        adjusted_logits_reference(line, row, position, state)
        for line, row, position in zip(logits, rows.tolist(), positions.tolist(), strict=True)
    ]
    adjust_logits(logits, rows, positions, state, ALL)
    torch.testing.assert_close(logits.cpu(), torch.tensor(expected), rtol=1e-6, atol=1e-6)
    assert logits.isneginf().any()


def test_counts_begin_at_zero_where_they_are_used(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is as others left it, and only rows with penalties are cleared."""
    state, (rows, positions) = make_state(device), rows_and_positions(device, 8)
    logits = 4 * torch.randn(8, VOCAB, device=device)
    expected = logits.clone()
    adjust_logits(expected, rows, positions, state, ALL)
    made, empty = list[Tensor](), torch.empty

    def used(*args: Any, **kwargs: Any) -> Tensor:
        made.append(empty(*args, **kwargs).fill_(77))
        return made[-1]

    monkeypatch.setattr(torch, "empty", used)
    adjust_logits(logits, rows, positions, state, ALL)
    assert torch.equal(logits, expected)
    (counts,) = made
    without = (state.repetition_penalty == 1)[rows]
    assert bool((counts[without] == 77).all())


@pytest.mark.parametrize("ties", [False, True])
def test_filters_keep_what_the_reference_keeps(device: str, ties: bool) -> None:
    state, (rows, _) = make_state(device), rows_and_positions(device, 8)
    logits = 4 * torch.randn(8, VOCAB, device=device)
    if ties:
        logits = logits.round()
    logits[:, 17] = -math.inf
    lowest = find_kept(logits, rows, state, ALL).lowest
    for s, row in enumerate(rows.tolist()):
        temperature = float(state.temperature[row])
        if temperature == 0:
            continue
        z = logits[s] / state.temperature[row]
        kept = (logits[s] >= lowest[s]) & ~z.isneginf()
        assert kept.nonzero().squeeze(1).tolist() == kept_reference(z.tolist(), row, state)


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (VOCAB - 1, 1.0), (0, 0.0), (0, 1e-9), (0, 0.999999), (3, 0.5)])
@pytest.mark.parametrize("vocab", [20, VOCAB])
def test_filters_at_their_ends(device: str, vocab: int, top_k: int, top_p: float) -> None:
    state = make_state(device, num_rows=1)._replace(
        temperature=torch.ones(1, device=device),
        top_k=torch.tensor([top_k], device=device),
        top_p=torch.tensor([top_p], device=device),
    )
    row = torch.zeros(1, dtype=torch.int64, device=device)
    for logits in (torch.randn(1, vocab, device=device), torch.zeros(1, vocab, device=device)):
        logits[0, 5] -= 1e4  # far outliers must not hide the rest from the search
        kept = (logits[0] >= find_kept(logits, row, state, ALL).lowest).nonzero().squeeze(1).tolist()
        assert kept == kept_reference(logits[0].tolist(), 0, state)


LONG = 20011  # more than the filters look at after their first pass, and no multiple of a block
NOISE = torch.randn(LONG, generator=torch.Generator().manual_seed(2))
SPREAD = {
    "flat": NOISE,
    "peaked": 3 * NOISE,
    "all equal": torch.full((LONG,), 1.5),
    "two values": (NOISE > 0.3).float(),
    "signed zeros": torch.where(NOISE > 0.3, 0.0, -0.0),
    "few values": NOISE.round(),
    "bf16": NOISE.bfloat16().float(),
    "tiny": 1e-30 * NOISE,
    "one huge": torch.cat((NOISE[1:], torch.tensor([1e4]))),
    "one far below": torch.cat((NOISE[1:], torch.tensor([-3e38]))),
    "most masked": torch.where(NOISE > 1, NOISE, -math.inf),
    "few left, side by side": torch.where(torch.arange(LONG) // 100 == 7, NOISE, -math.inf),
    "evenly spread": torch.linspace(-10, 10, LONG),
}
# (temperature, top_k, top_p, min_p)
FILTERS = [
    (0.6, 0, 0.95, 0.0),
    (1.3, 0, 0.999, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 20, 0.95, 0.0),
    (0.7, 1000, 1.0, 0.0),
    (1.3, 5000, 0.9, 0.0),
    (1.0, LONG - 1, 1.0, 0.0),
    (1.0, LONG, 1.0, 0.0),
    (1.3, 0, 1.0, 0.1),
    (1.0, 0, 0.9, 1e-3),
    (1.3, 3000, 0.99, 1e-4),
]


def filtering(device: str, temperature: float, top_k: int, top_p: float, min_p: float) -> SamplingState:
    """A state with one row."""
    return make_state(device, num_rows=1)._replace(
        temperature=torch.tensor([temperature], device=device),
        top_k=torch.tensor([top_k], device=device),
        top_p=torch.tensor([top_p], device=device),
        min_p=torch.tensor([min_p], device=device),
    )


def lowest_in_doubles(z: Tensor, top_k: int, top_p: float, min_p: float) -> float:
    """The least tempered logit that is kept, with weights in float64."""
    kept = z[z > -math.inf].sort(descending=True).values
    if min_p > 0:
        kept = kept[kept >= kept[0] + torch.tensor(min_p).log()]
    if 0 < top_k < len(kept):
        kept = kept[kept >= kept[top_k - 1]]
    weights = (kept.double() - kept[0]).exp()
    if top_p < 1:
        before = weights.cumsum(0) - weights
        kept = kept[: max(1, int((before < top_p * weights.sum()).sum()))]
    return float(kept[-1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in the interpreter: infinity times zero
@pytest.mark.parametrize("name", SPREAD)
def test_filters_are_exact_however_the_logits_are_spread(device: str, name: str) -> None:
    """Sums in fp32 may put a token in whose end the share of top-p is reached, but for less than a millionth."""
    logits = SPREAD[name].to(device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    for temperature, top_k, top_p, min_p in FILTERS:
        state = filtering(device, temperature, top_k, top_p, min_p)
        lowest = find_kept(logits[None], row, state, ALL).lowest
        z = (logits / state.temperature).cpu()
        kept = z[(logits >= lowest).cpu() & (z > -math.inf)]
        assert len(kept) == int((z >= kept.min()).sum())  # all that tie
        most, least = (lowest_in_doubles(z, top_k, top_p * share, min_p) for share in (1 + 1e-6, 1 - 1e-6))
        assert most <= float(kept.min()) <= least, (temperature, top_k, top_p, min_p)


@triton.jit
def near_kernel(maxima_ptr, few_ptr, out_ptr, bar_ptr, num_groups, top_ptr, FEW: tl.constexpr, BLOCK: tl.constexpr):
    bar, groups, mask = groups_near_top(maxima_ptr, few_ptr, num_groups, tl.load(top_ptr), -1e4, FEW, BLOCK)
    tl.store(bar_ptr, bar)
    tl.store(out_ptr + tl.arange(0, FEW), tl.where(mask, groups, -1))


def test_groups_near_the_top_are_a_known_few(device: str) -> None:
    """As many as wanted, or up to an eighth less; all finite ones if those are fewer; none if more than wanted tie."""
    scattered = torch.randn(5000)
    few_left = torch.full((5000,), -math.inf)
    few_left[[3, 2047, 2048, 4999]] = torch.tensor([1.0, -3e38, 2.0, 3.0])
    for maxima, most, least in ((scattered, 128, 112), (few_left, 4, 4), (torch.ones(5000), 0, 0)):
        few, out = (torch.empty(128, dtype=torch.int32, device=device) for _ in range(2))
        bar = torch.empty(1, device=device)
        near_kernel[(1,)](maxima.to(device), few, out, bar, 5000, maxima.max().to(device), FEW=128, BLOCK=8192)
        groups = out[out >= 0].tolist()
        assert groups == (maxima >= float(bar)).nonzero().squeeze(1).tolist()
        assert least <= len(groups) <= most


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_filters_of_a_large_vocabulary(device: str) -> None:
    """Of more groups than are looked at at a time."""
    logits = torch.randn(151936, device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    for top_k, top_p in ((50, 1.0), (20, 0.95), (3000, 1.0), (0, 0.9)):
        lowest = find_kept(logits[None], row, filtering(device, 1.0, top_k, top_p, 0.0), ALL).lowest
        most, least = (lowest_in_doubles(logits.cpu(), top_k, top_p * share, 0.0) for share in (1 + 1e-6, 1 - 1e-6))
        assert most <= float(lowest) <= least
    chosen = torch.tensor([7], device=device)
    for got, wanted in zip(
        top_logprobs_triton(logits[None], chosen, 20), top_logprobs_reference(logits[None], chosen, 20), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (3, 0.52), (1001, 1.0), (1001, 0.9985)])
def test_tokens_that_tie_after_the_division_are_kept_together(device: str, top_k: int, top_p: float) -> None:
    """Two neighbouring fp32 numbers can have the same quotient. All logits here are such pairs.

    The shares of top-p are reached by the pairs before the last only if the last is counted as one token.
    """
    temperature = torch.tensor(1.3)
    one = torch.linspace(1.35, 1.95, 30000)
    other = one.nextafter(torch.tensor(2.0))
    pairs = torch.stack((one, other), 1)[one / temperature == other / temperature]
    assert len(pairs) > 5000  # so that all of them are more than the filters look at after their first pass
    logits = pairs.flatten().roll(777).to(device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    lowest = find_kept(logits[None], row, filtering(device, 1.3, top_k, top_p, 0.0), ALL).lowest
    assert int((logits >= lowest).sum()) == top_k + 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_filters_of_mixed_rows_are_those_of_each_row(device: str) -> None:
    """Rows that need no filter, that settle at once and that do not, in any order and of any dtype."""
    state = make_state(device)._replace(top_p=torch.tensor([1, 1, 1, 0.8, 1, 0.7, 0.95, 0.95], device=device))
    rows = torch.tensor([3, 0, 5, 6, 2, 1, 4, 7, 6, 3], device=device)
    logits = torch.stack([SPREAD["flat"] * (1 + s) for s in range(len(rows))]).to(device, torch.bfloat16)
    together = find_kept(logits, rows, state, ALL).lowest
    alone = [find_kept(logits[s : s + 1], rows[s : s + 1], state, ALL).lowest for s in range(len(rows))]
    assert torch.equal(together, torch.cat(alone))
    assert torch.isneginf(together[[1, 5]]).all()
    assert torch.isfinite(together[[0, 2, 3, 4, 6, 7, 8, 9]]).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("filtered", [False, True])
def test_draws_equal_the_cpu_path_however_the_logits_are_spread(device: str, filtered: bool) -> None:
    needs = SamplingNeeds(random=True, min_p=filtered, top_k=filtered, top_p=filtered)
    host = make_state("cpu", LONG)._replace(temperature=torch.tensor([0.0, 1, 0.7, 1.3, 100, 0.9, 1e-3, 0.6]))
    state = SamplingState(*(column.to(device) for column in host))
    rows, positions = rows_and_positions("cpu", 8)
    for name in ("flat", "two values", "few left, side by side", *(("peaked", "one huge") if filtered else ())):
        logits = SPREAD[name].repeat(8, 1)
        drawn = sample_triton(logits.to(device), rows.to(device), positions.to(device), state, needs)
        assert drawn.tolist() == sample_cpu(logits, rows, positions, host, needs).tolist(), name


@pytest.mark.parametrize("first", [0, LONG - 21])
def test_a_draw_that_is_nearly_a_tie_is_exact(device: str, first: int) -> None:
    """Of tokens whose scores differ by 1e-5 the better one wins, wherever it stands."""
    state = make_state(device, LONG)
    row, position = torch.tensor([1], device=device), torch.tensor([41], device=device)
    seed, ids = int(state.seed[1]), torch.arange(first, first + 20)
    words = torch.tensor([philox.philox_reference(seed, 41, token_id) for token_id in ids.tolist()])
    for winner in range(20):
        logits = torch.full((1, LONG), -50.0)
        logits[0, ids] = 3 - philox.gumbel_from_words(words)
        logits[0, first + winner] += 1e-5
        drawn = sample_triton(logits.to(device), row, position, state, SamplingNeeds(random=True))
        assert drawn.tolist() == [first + winner]


@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_draws_equal_the_reference(device: str, vocab: int) -> None:
    state, (rows, positions) = make_state(device, vocab), rows_and_positions(device, 8)
    logits = 3 * torch.randn(8, vocab, device=device)
    expected = sample_reference(logits, rows, positions, state)
    table = state.token_ids.clone()
    assert sample_triton(logits.clone(), rows, positions, state, ALL).tolist() == expected.tolist()
    table[rows, positions] = expected
    assert torch.equal(state.token_ids, table)
    assert len(set(expected.tolist())) > 4
    alone = [
        sample_triton(logits[s : s + 1].clone(), rows[s : s + 1], positions[s : s + 1], state, ALL) for s in range(8)
    ]
    assert torch.cat(alone).tolist() == expected.tolist()


def test_greedy_takes_the_first_of_equals(device: str) -> None:
    logits = torch.zeros(3, 9000, device=device)
    logits[0, [50, 8999]] = 1.0
    logits[1, [4095, 4096]] = 1.0
    rows = torch.zeros(3, dtype=torch.int32, device=device)
    state = make_state(device)
    assert sample_triton(logits, rows, rows, state, SamplingNeeds()).tolist() == [50, 4095, 0]
    assert sample_triton(logits, rows, rows, state, SamplingNeeds(random=True)).tolist() == [50, 4095, 0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in the interpreter: NaN, infinity less infinity
@pytest.mark.parametrize("needs", [SamplingNeeds(), SamplingNeeds(random=True), ALL], ids=["greedy", "plain", "all"])
def test_rows_without_a_token_are_told(device: str, needs: SamplingNeeds) -> None:
    """NaN anywhere, plus infinity, and nothing but minus infinity; the others draw as ever."""
    vocab = 5000
    state, (rows, positions) = make_state(device, vocab), rows_and_positions(device, 8)
    logits = 3 * torch.randn(8, vocab, device=device)
    expected = sample_triton(logits.clone(), rows, positions, state, needs)
    logits[1] = math.nan
    logits[2, 4500] = math.nan
    logits[3, 7] = math.inf
    logits[5] = -math.inf
    logits[6, :4990] = -math.nan
    drawn = sample_triton(logits.clone(), rows, positions, state, needs)
    expected[[1, 2, 3, 5, 6]] = torch.tensor([-1, -1, -1, -2, -1], dtype=torch.int32, device=device)
    assert drawn.tolist() == expected.tolist()
    assert state.token_ids[rows, positions].tolist() == expected.clamp(min=0).tolist()
    if needs == ALL:
        assert sample_reference(logits, rows, positions, state).tolist() == expected.tolist()


def test_draws_follow_the_distribution(device: str) -> None:
    """Chi-square over 8 tokens; the seed is fixed, so this cannot flicker."""
    draws = 64 if device == "cpu" else 20000
    state = make_state(device)._replace(
        temperature=torch.ones(8, device=device),
        token_ids=torch.zeros(8, draws, dtype=torch.int32, device=device),
    )
    line = torch.tensor([0.0, 0.5, 1.0, -1.0, 2.0, 0.1, -3.0, 1.5], device=device)
    rows = torch.ones(draws, dtype=torch.int32, device=device)
    positions = torch.arange(draws, dtype=torch.int32, device=device)
    drawn = sample_triton(line.expand(draws, 8).contiguous(), rows, positions, state, SamplingNeeds(random=True))
    counts = torch.bincount(drawn.long(), minlength=8).double().cpu()
    expected = line.double().softmax(0).cpu() * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3  # 99.9th percentile, 7 degrees of freedom


@pytest.mark.parametrize(("vocab", "num_top"), [(40, 0), (40, 5), (9001, 20)])
def test_top_logprobs(device: str, vocab: int, num_top: int) -> None:
    logits = (5 * torch.randn(3, vocab, device=device)).round(decimals=1)
    chosen = torch.tensor([0, vocab - 1, 7], device=device)
    expected = top_logprobs_reference(logits, chosen, num_top)
    for got, wanted in zip(top_logprobs_triton(logits, chosen, num_top), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in the interpreter: infinity less infinity
@pytest.mark.parametrize("num_top", [1, 20])
def test_top_logprobs_of_a_broken_row_leave_its_neighbour_alone(device: str, num_top: int) -> None:
    """A head that overflows has infinity in more places than are looked for."""
    logits = torch.randn(2, LONG, device=device)
    logits[0, ::40] = math.inf
    chosen = torch.tensor([7, LONG - 1], device=device)
    expected = top_logprobs_reference(logits[1:], chosen[1:], num_top)
    for got, wanted in zip(top_logprobs_triton(logits, chosen, num_top), expected, strict=True):
        torch.testing.assert_close(got[1:], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in the interpreter: infinity less infinity
@pytest.mark.parametrize("name", SPREAD)
def test_top_logprobs_however_the_logits_are_spread(device: str, name: str) -> None:
    """The order of equal logits included, and of those that are minus infinity."""
    logits = torch.stack((SPREAD[name], SPREAD[name].flip(0))).to(device)
    if name.startswith("few left"):
        logits[:, : 10007 - 3] = logits[:, 10007 + 3 :] = -math.inf
        logits[:, [3, 10007]] = torch.tensor([1.0, 2.0], device=device)
    chosen = torch.tensor([7, LONG - 1], device=device)
    for num_top in (1, 20):
        expected = top_logprobs_reference(logits, chosen, num_top)
        for got, wanted in zip(top_logprobs_triton(logits, chosen, num_top), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
