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
from penstock.kernels.sampling.top_logprobs import top_logprobs_reference
from penstock.kernels.triton.sampling.adjust import adjust_logits
from penstock.kernels.triton.sampling.filter import filter_bounds
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
    has_penalties = (state.repetition_penalty != 1)[rows]
    assert bool((counts[~has_penalties] == 77).all())
    assert not bool((counts[has_penalties] == 77).any())


@pytest.mark.parametrize("ties", [False, True])
def test_filters_keep_what_the_reference_keeps(device: str, ties: bool) -> None:
    state, (rows, _) = make_state(device), rows_and_positions(device, 8)
    logits = 4 * torch.randn(8, VOCAB, device=device)
    if ties:
        logits = logits.round()
    logits[:, 17] = -math.inf
    bounds = filter_bounds(logits, rows, state, ALL)
    for s, row in enumerate(rows.tolist()):
        temperature = float(state.temperature[row])
        if temperature == 0:
            continue
        z = logits[s] / state.temperature[row]
        kept = (z > bounds[s, 0]) & (z >= bounds[s, 1]) & ~z.isneginf()
        assert kept.nonzero().squeeze(1).tolist() == kept_reference(z.tolist(), row, state)


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (VOCAB - 1, 1.0), (0, 0.0), (0, 1e-9), (0, 0.999999), (3, 0.5)])
def test_filters_at_their_ends(device: str, top_k: int, top_p: float) -> None:
    state = make_state(device, num_rows=1)._replace(
        temperature=torch.ones(1, device=device),
        top_k=torch.tensor([top_k], device=device),
        top_p=torch.tensor([top_p], device=device),
    )
    row = torch.zeros(1, dtype=torch.int64, device=device)
    for logits in (torch.randn(1, VOCAB, device=device), torch.zeros(1, VOCAB, device=device)):
        logits[0, 5] -= 1e4  # far outliers must not hide the rest from the search
        bounds = filter_bounds(logits, row, state, ALL)
        kept = ((logits[0] > bounds[0, 0]) & (logits[0] >= bounds[0, 1])).nonzero().squeeze(1).tolist()
        assert kept == kept_reference(logits[0].tolist(), 0, state)


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
