"""Sampling on the CPU, by torch and by the own kernels: the reference's tokens, the right distribution, and noise that
depends on nothing else."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.native import build
from penstock.kernels.native.library import Library, NativeSampler
from penstock.kernels.sampling.philox import gumbel_from_words, philox_reference, philox_words
from penstock.kernels.sampling.sampling import (
    NOT_FINITE,
    NOTHING_LEFT,
    SamplingNeeds,
    SamplingState,
    sample,
    sample_reference,
)
from penstock.kernels.sampling.top_logprobs import token_ranks, top_logprobs, top_logprobs_reference
from tests.kernels.native.native_library import load_library

ALL = SamplingNeeds(random=True, bias=True, min_tokens=True, penalties=True, min_p=True, top_k=True, top_p=True)
Draw = Callable[[Tensor, Tensor, Tensor, SamplingState, SamplingNeeds], Tensor]
"""As `sample`."""


@pytest.fixture(params=["torch", "native", "native, two threads"])
def draw(request: pytest.FixtureRequest) -> Draw:
    if request.param == "torch":
        return sample
    try:
        library = Library(build.build(), 2 if "two" in request.param else 1, worth_waking=0)
    except build.BuildError as error:
        pytest.skip(str(error))

    def draw_natively(
        logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, _needs: SamplingNeeds
    ) -> Tensor:
        table = state.token_ids.clone()
        drawn = NativeSampler(library, state).draw(logits, rows.int().numpy(), positions.int().numpy())
        table[rows, positions] = drawn.clamp(min=0)
        assert torch.equal(state.token_ids, table)
        return drawn

    return draw_natively


def make_state(num_rows: int, max_len: int = 12) -> SamplingState:
    """Everything off."""
    return SamplingState(
        temperature=torch.ones(num_rows),
        top_p=torch.ones(num_rows),
        min_p=torch.zeros(num_rows),
        repetition_penalty=torch.ones(num_rows),
        presence_penalty=torch.zeros(num_rows),
        frequency_penalty=torch.zeros(num_rows),
        seed=torch.arange(num_rows) * 7919,
        top_k=torch.zeros(num_rows, dtype=torch.int64),
        min_tokens=torch.zeros(num_rows, dtype=torch.int64),
        num_prompt_tokens=torch.ones(num_rows, dtype=torch.int64),
        token_ids=torch.zeros(num_rows, max_len, dtype=torch.int32),
        stop_ids=torch.full((num_rows, 4), -1, dtype=torch.int32),
        bias_ids=torch.full((num_rows, 4), -1, dtype=torch.int32),
        bias_values=torch.zeros(num_rows, 4),
    )


def random_state(num_rows: int, vocab: int, seed: int) -> SamplingState:
    """Each feature on in about half of the rows."""
    g = torch.Generator().manual_seed(seed)

    def choose(on: Tensor, off: float) -> Tensor:
        return torch.where(torch.rand(num_rows, generator=g) < 0.5, on, torch.full_like(on, off))

    def rand(low: float, high: float) -> Tensor:
        return torch.rand(num_rows, generator=g) * (high - low) + low

    state = make_state(num_rows)
    lists = [torch.randperm(vocab, generator=g)[:4] for _ in range(2 * num_rows)]
    return state._replace(
        temperature=choose(rand(0.3, 1.8), 0.0),
        top_p=choose(rand(0.2, 0.99), 1.0),
        min_p=choose(rand(0.01, 0.3), 0.0),
        repetition_penalty=choose(rand(0.7, 1.6), 1.0),
        presence_penalty=choose(rand(-1, 1), 0.0),
        frequency_penalty=choose(rand(-1, 1), 0.0),
        seed=torch.randint(0, 2**63 - 1, (num_rows,), generator=g),
        top_k=choose(torch.randint(1, vocab + 10, (num_rows,), generator=g), 0),
        min_tokens=torch.randint(0, 9, (num_rows,), generator=g),
        num_prompt_tokens=torch.randint(1, 4, (num_rows,), generator=g),
        token_ids=torch.randint(0, vocab, (num_rows, 12), generator=g, dtype=torch.int32),
        stop_ids=torch.stack(lists[:num_rows]).int(),
        bias_ids=torch.stack(lists[num_rows:]).int(),
        bias_values=torch.randn(num_rows, 4, generator=g),
    )


@pytest.mark.parametrize("seed", range(6))
def test_equal_to_the_reference(draw: Draw, seed: int) -> None:
    num_rows, vocab = 40, 53
    state = random_state(num_rows, vocab, seed)
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    rows = torch.randperm(num_rows)
    positions = torch.randint(4, 12, (num_rows,))
    expected = sample_reference(logits, rows, positions, state)
    assert torch.equal(draw(logits.clone(), rows, positions, state, ALL), expected)


@pytest.mark.parametrize("needs", [SamplingNeeds(), ALL], ids=["greedy", "all"])
@pytest.mark.parametrize("vocab", [53, 5000])
def test_rows_without_a_token_are_told(draw: Draw, needs: SamplingNeeds, vocab: int) -> None:
    """NaN anywhere, plus infinity, and nothing but minus infinity; the others draw as ever."""
    num_rows = 40
    state = random_state(num_rows, vocab, 3) if needs.random else make_state(num_rows)
    if not needs.random:
        state = state._replace(temperature=torch.zeros(num_rows))
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(3)) * 3
    rows, positions = torch.randperm(num_rows), torch.full((num_rows,), 11)
    expected = sample_reference(logits, rows, positions, state)
    logits[0::8] = math.nan
    logits[1::8, vocab - 1] = math.nan
    logits[2::8, 0] = -math.nan
    logits[3::8, 7] = math.inf
    logits[4::8] = -math.inf
    for first, failure in enumerate((NOT_FINITE, NOT_FINITE, NOT_FINITE, NOT_FINITE, NOTHING_LEFT)):
        expected[first::8] = failure
    assert torch.equal(draw(logits.clone(), rows, positions, state, needs), expected)
    assert torch.equal(state.token_ids[rows, positions], expected.clamp(min=0))
    assert torch.equal(sample_reference(logits, rows, positions, state), expected)


def test_top_p_beyond_the_best_thousand(draw: Draw) -> None:
    """A flat distribution over a large vocabulary: the mass is not in the tokens sorted first."""
    vocab = 5000
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1)) * 0.01
    state = make_state(4)._replace(top_p=torch.tensor([0.9, 0.3, 0.001, 1.0]))
    rows, positions = torch.arange(4), torch.full((4,), 3)
    needs = SamplingNeeds(random=True, top_p=True)
    expected = sample_reference(logits, rows, positions, state)
    assert torch.equal(draw(logits.clone(), rows, positions, state, needs), expected)


def test_philox() -> None:
    """The words of the published test vectors, and of the plain form."""
    # Random123's known answers for philox4x32-10: counter and key all zeros.
    assert [philox_reference(0, 0, i) for i in range(4)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    seeds = torch.tensor([0, 5, 2**63 - 1, 2**40 + 3])
    positions = torch.tensor([0, 3, 100000, 9])
    words = philox_words(seeds[:, None], positions[:, None], torch.arange(5)).flatten(1)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        assert words[row].tolist() == [philox_reference(seed, position, i) for i in range(20)]


def test_noise_is_finite_at_the_ends() -> None:
    noise = gumbel_from_words(torch.tensor([0, 2**32 - 1]))
    assert noise.isfinite().all()
    assert noise[0] == pytest.approx(-math.log(24 * math.log(2)), abs=1e-5)
    assert noise[1] == pytest.approx(16.64, abs=0.01)


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_the_distribution_is_the_softmax(draw: Draw, vary: str) -> None:
    """20,000 draws over 12 tokens, by seed or by position: chi-square with 11 degrees of freedom, p > 0.001."""
    num_draws, vocab = 20_000, 12
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0))
    temperature = 0.7
    if vary == "seed":
        state, rows, positions = make_state(num_draws), torch.arange(num_draws), torch.full((num_draws,), 9)
    else:
        state, rows, positions = make_state(1, num_draws), torch.zeros(num_draws).long(), torch.arange(num_draws)
    state.temperature.fill_(temperature)
    drawn = draw(logits.expand(num_draws, -1).clone(), rows, positions, state, SamplingNeeds(random=True))
    counts = torch.bincount(drawn, minlength=vocab)
    assert chi_square(counts, (logits / temperature).softmax(-1)) < 31.3


def test_filters_keep_the_right_tokens(draw: Draw) -> None:
    """Over many draws exactly the kept tokens appear."""
    num_draws = 4000
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    logits = probabilities.log().expand(num_draws, -1)
    rows, positions = torch.arange(num_draws), torch.full((num_draws,), 2)

    def seen(needs: SamplingNeeds, **fields: float) -> list[int]:
        state = make_state(num_draws)
        for name, value in fields.items():
            tensor: Tensor = getattr(state, name)
            tensor.fill_(value)
        return sorted(set(draw(logits.clone(), rows, positions, state, needs).tolist()))

    assert seen(SamplingNeeds(random=True)) == [0, 1, 2, 3, 4, 5]
    assert seen(SamplingNeeds(random=True, top_k=True), top_k=2) == [0, 1]
    assert seen(SamplingNeeds(random=True, top_p=True), top_p=0.7) == [0, 1, 2]
    assert seen(SamplingNeeds(random=True, min_p=True), min_p=0.2) == [0, 1, 2, 3]
    # Top-p shares out what top-k has left: 0.4 of 0.65 is 0.62 of it.
    assert seen(SamplingNeeds(random=True, top_k=True, top_p=True), top_k=2, top_p=0.6) == [0]


@pytest.mark.parametrize("vocab", [50, 3001])
def test_a_draw_does_not_depend_on_the_batch(draw: Draw, vocab: int) -> None:
    state = random_state(16, vocab, seed=3)
    logits = torch.randn(16, vocab, generator=torch.Generator().manual_seed(3)) * 2
    positions = torch.randint(4, 12, (16,))
    together = draw(logits.clone(), torch.arange(16), positions, state, ALL)
    for row in range(16):
        alone = draw(logits[row : row + 1].clone(), torch.tensor([row]), positions[row : row + 1], state, ALL)
        assert alone[0] == together[row]
    backwards = torch.arange(15, -1, -1)
    assert torch.equal(draw(logits[backwards], backwards, positions[backwards], state, ALL), together[backwards])


def test_greedy_takes_the_first_of_equals(draw: Draw) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    row, position = torch.tensor([0]), torch.tensor([2])
    state = make_state(1)._replace(temperature=torch.zeros(1))
    assert draw(logits, row, position, state, SamplingNeeds()).tolist() == [1]
    assert draw(logits.clone(), row, position, state, ALL).tolist() == [1]


def test_filters_of_large_vocabularies(draw: Draw) -> None:
    """Peaked and flat rows, with equal logits among them and minus infinity, through each pair of filters."""
    num_rows, vocab = 48, 1003
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(num_rows, vocab, generator=generator) * torch.logspace(-2, 1.3, num_rows)[:, None]
    logits[::3] = logits[::3].round()
    logits[::4, ::5] = -torch.inf
    logits[7] = 0.25  # all are equal to the k-th
    state = make_state(num_rows)._replace(
        top_p=torch.linspace(0.05, 1.0, num_rows),
        top_k=torch.tensor([0, 1, 40, 900] * 12),
        min_p=torch.tensor([0, 0, 0, 0, 0.02, 1e-12] * 8),
        temperature=torch.tensor([1.0, 0.4, 1.3] * 16),
    )
    rows, positions = torch.arange(num_rows), torch.full((num_rows,), 3)
    expected = sample_reference(logits, rows, positions, state)
    assert torch.equal(draw(logits.clone(), rows, positions, state, ALL), expected)


def test_nothing_can_be_drawn(draw: Draw) -> None:
    """Minus infinity throughout is told, and loses no other row."""
    logits = torch.zeros(2, 37)
    logits[0] = -torch.inf
    logits[1, 20] = 9
    state = make_state(2)._replace(top_k=torch.tensor([3, 1]), top_p=torch.tensor([0.5, 0.5]))
    drawn = draw(logits, torch.arange(2), torch.full((2,), 3), state, ALL).tolist()
    assert drawn == [NOTHING_LEFT, 20]


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit rows"):
        sample(torch.zeros(2, 5), torch.zeros(3), torch.zeros(3), make_state(3), SamplingNeeds())


@pytest.fixture(scope="module", params=["torch", "native", "native, two threads"])
def library(request: pytest.FixtureRequest) -> Library | None:
    """The compiled kernels that add up exponentials, or none."""
    return None if request.param == "torch" else load_library(2 if "two" in request.param else 1)


@pytest.mark.parametrize(("vocab", "num_top"), [(50, 0), (50, 1), (50, 20), (20, 20), (3001, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_logprobs(vocab: int, num_top: int, dtype: torch.dtype, library: Library | None) -> None:
    """In bf16 many logits are equal: the lowest ids come first all the same."""
    logits = (3 * torch.randn(7, vocab)).to(dtype)
    logits[1] = 1.0
    logits[2, 5:12] = logits[2].max()
    logits[3, ::2] = -torch.inf
    chosen = torch.randint(0, vocab, (7,))
    expected = top_logprobs_reference(logits, chosen, num_top)
    for got, wanted in zip(top_logprobs(logits, chosen, num_top, library), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    ranks = [1 + int((row > row[token]).sum()) for row, token in zip(logits, chosen, strict=True)]
    assert token_ranks(logits, chosen).tolist() == ranks


@pytest.mark.parametrize("vocab", [49_152, 262_144])
def test_a_row_s_logprobs_have_the_same_bits_in_any_batch(vocab: int, library: Library | None) -> None:
    """Whatever its number of rows, and wherever the row is: log-probabilities are part of an answer."""
    num_rows = 64
    logits = 4 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab))
    chosen = torch.arange(num_rows) * 100
    whole = top_logprobs(logits, chosen, 3, library)
    for size in (1, 2, 7):
        for first in (0, 5, num_rows - size):
            rows = slice(first, first + size)
            part = top_logprobs(logits[rows].clone(), chosen[rows], 3, library)
            assert all(torch.equal(got, of_all[rows]) for got, of_all in zip(part, whole, strict=True))
    exact = logits.double().logsumexp(-1)
    of_chosen = logits.double().gather(1, chosen[:, None]).squeeze(1) - exact
    torch.testing.assert_close(whole[2].double(), of_chosen, rtol=0, atol=4e-6)


@pytest.mark.parametrize("vocab", [1, 5, 16, 37, 1024, 1025, 50_257])
def test_sums_of_exponentials(vocab: int, library: Library | None) -> None:
    """Of rows that end within a vector, and of rows that have no finite sum."""
    if library is None:
        pytest.skip("torch's own")
    logits = 5 * torch.randn(9, vocab)
    logits[1] = -torch.inf
    logits[2, 0] = torch.inf
    logits[3, -1] = torch.nan
    logits[4, : vocab // 2] = -torch.inf
    logits[5] += 1e4
    logits[6] -= 1e4
    logits[7, vocab // 2 :] -= 300.0
    found = library.log_sum_exp(logits)
    torch.testing.assert_close(found, logits.double().logsumexp(-1).float(), rtol=3e-7, atol=1e-6, equal_nan=True)
    with pytest.raises(ValueError, match="contiguous"):
        library.log_sum_exp(logits.double())
