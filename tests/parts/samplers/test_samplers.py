"""Each sampler against its formula in plain Python, on random logits; and what is drawn after them."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from penstock.config.samplers import Draw, samplers
from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.state.row_state import RowState
from penstock.ipc.messages import NewRow, SamplerUse, SamplingParams, StepPlan
from penstock.kernels.sampling.sampling import SamplingNeeds, sample
from penstock.parts.samplers.worker.rows import SamplerRows
from tests.gpu_worker.state.test_row_state import int32

NEVER = -math.inf
TOKENS = [3, 7, 7, 1, 4, 3, 7, 2, 9, 3, 7]
NUM_PROMPT_TOKENS = 4

Logits = list[float]


def softmax(z: Logits) -> list[float]:
    top = max(z)
    weights = [math.exp(x - top) for x in z]
    return [weight / sum(weights) for weight in weights]


def entropy_of(z: Logits) -> float:
    return -sum(p * math.log(p) for p in softmax(z) if p > 0)


def kept(z: Logits, which: Callable[[int], bool]) -> Logits:
    return [x if which(i) else NEVER for i, x in enumerate(z)]


def until(order: Sequence[int], p: list[float], mass: float) -> set[int]:
    found, total = set[int](), 0.0
    for i in order:
        if found and total >= mass:
            break
        found.add(i)
        total += p[i]
    return found


def typical(z: Logits, mass: float) -> Logits:
    p, entropy = softmax(z), entropy_of(z)
    order = sorted(range(len(z)), key=lambda i: abs(-math.log(p[i]) - entropy) if p[i] else math.inf)
    return kept(z, until(order, p, mass).__contains__)


def top_n_sigma(z: Logits, n: float) -> Logits:
    finite = [x for x in z if x > NEVER]
    mean = sum(finite) / len(finite)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in finite) / len(finite))
    return kept(z, lambda i: z[i] >= max(z) - n * deviation)


def xtc(z: Logits, probability: float, threshold: float) -> Logits:
    """With a uniform number of 0.5."""
    p = softmax(z)
    tops = sorted((i for i in range(len(z)) if p[i] >= threshold), key=lambda i: -p[i])
    return kept(z, lambda i: i not in tops[:-1]) if probability >= 0.5 else z


def smoothing(z: Logits, factor: float, curve: float) -> Logits:
    top, k, s = max(z), (3 - curve) / 2, (curve - 1) / 2
    return [x if x == NEVER else top - k * factor * (x - top) ** 2 + s * factor * (x - top) ** 3 for x in z]


def dynatemp(z: Logits, low: float, high: float, exponent: float) -> Logits:
    num = sum(x > NEVER for x in z)
    temperature = low + (high - low) * (entropy_of(z) / math.log(num)) ** exponent
    return [x / temperature for x in z]


def epsilon(z: Logits, least: float) -> Logits:
    p = softmax(z)
    return kept(z, lambda i: p[i] >= least or z[i] == max(z))


def eta(z: Logits, least: float) -> Logits:
    return epsilon(z, min(least, math.sqrt(least) * math.exp(-entropy_of(z))))


def dry(z: Logits, multiplier: float, base: float, allowed: float, window: float, *breakers: float) -> Logits:
    tokens = TOKENS[-int(window) :] if window else TOKENS
    longest: Counter[int] = Counter()
    for i in range(len(tokens) - 1):
        length = 0
        while length <= i and tokens[i - length] == tokens[-1 - length] and tokens[-1 - length] not in breakers:
            length += 1
        longest[tokens[i + 1]] = max(longest[tokens[i + 1]], length)
    loses = [longest[i] >= allowed and i not in breakers for i in range(len(z))]
    return [x - multiplier * base ** (longest[i] - allowed) * loses[i] for i, x in enumerate(z)]


def mirostat(z: Logits, version: float, tau: float, eta: float, mu: float = 4.0) -> Logits:
    p, order = softmax(z), sorted(range(len(z)), key=lambda i: -z[i])
    if version == 2:
        return kept(z, lambda i: i == order[0] or (p[i] > 0 and -math.log2(p[i]) <= mu))
    pairs = [(i, a, b) for i, (a, b) in enumerate(pairwise(order)) if i < 99 and p[b] > 0]
    steps = [math.log((i + 2) / (i + 1)) for i, _, _ in pairs]
    falls = [math.log(p[a] / p[b]) for _, a, b in pairs]
    exponent = sum(t * b for t, b in zip(steps, falls, strict=True)) / sum(t * t for t in steps)
    excess = exponent - 1
    num = ((excess * 2**mu) / (1 - len(z) ** -excess)) ** (1 / exponent)
    return kept(z, order[: max(int(num), 1)].__contains__)


def penalties(z: Logits, repetition: float, presence: float, frequency: float) -> Logits:
    counts = Counter(TOKENS[NUM_PROMPT_TOKENS:])
    z = [(x / repetition if x > 0 else x * repetition) if i in TOKENS else x for i, x in enumerate(z)]
    return [x - frequency * counts[i] - presence * (counts[i] > 0) for i, x in enumerate(z)]


def top_p(z: Logits, mass: float) -> Logits:
    order = sorted(range(len(z)), key=lambda i: -z[i])
    return kept(z, until(order, softmax(z), mass).__contains__)


def top_k(z: Logits, k: float) -> Logits:
    return kept(z, lambda i: z[i] >= sorted(z, reverse=True)[int(k) - 1])


def min_p(z: Logits, p: float) -> Logits:
    return kept(z, lambda i: softmax(z)[i] >= p * max(softmax(z)) * (1 - 1e-9))


def temperature(z: Logits, t: float) -> Logits:
    return [x / t for x in z] if t else kept(z, lambda i: i == z.index(max(z)))


def bias(z: Logits, *pairs: float) -> Logits:
    added = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return [x + added.get(i, 0) for i, x in enumerate(z)]


CASES: list[tuple[str, Callable[..., Logits], tuple[float, ...]]] = [
    ("typical_p", typical, (0.2,)),
    ("typical_p", typical, (0.9,)),
    ("top_n_sigma", top_n_sigma, (1.0,)),
    ("top_n_sigma", top_n_sigma, (0.3,)),
    ("xtc", xtc, (1.0, 0.05)),
    ("xtc", xtc, (0.4, 0.05)),
    ("xtc", xtc, (1.0, 0.5)),
    ("smoothing", smoothing, (0.3, 1.0)),
    ("smoothing", smoothing, (0.2, 2.5)),
    ("dynamic_temperature", dynatemp, (0.2, 1.8, 1.0)),
    ("dynamic_temperature", dynatemp, (0.5, 1.0, 2.5)),
    ("epsilon_cutoff", epsilon, (0.03,)),
    ("eta_cutoff", eta, (0.05,)),
    ("dry", dry, (0.8, 1.75, 2, 0)),
    ("dry", dry, (0.8, 1.75, 1, 0)),
    ("dry", dry, (0.8, 1.75, 2, 5)),
    ("dry", dry, (0.8, 1.75, 1, 0, 3)),
    ("dry", dry, (0.8, 1.75, 1, 0, 7)),
    ("dry", dry, (0.8, 1.75, 1, 0, 2)),  # it would continue a repetition
    ("penalties", penalties, (1.3, 0.4, 0.2)),
    ("top_p", top_p, (0.7,)),
    ("top_k", top_k, (5,)),
    ("min_p", min_p, (0.2,)),
    ("temperature", temperature, (0.6,)),
    ("temperature", temperature, (0.0,)),
    ("logit_bias", bias, (2, 1.5, 11, -3.0)),
    ("mirostat", mirostat, (1, 2.0, 0.1)),
    ("mirostat", mirostat, (2, 2.0, 0.1)),
]


@pytest.mark.parametrize(("name", "reference", "values"), CASES, ids=[f"{name}{values}" for name, _, values in CASES])
def test_it_is_its_formula(name: str, reference: Callable[..., Logits], values: tuple[float, ...]) -> None:
    draws = random.Random(name)
    changed = 0
    for num_never in (0, 3):
        for _ in range(20):
            z = [draws.gauss(0, 2) for _ in range(24)]
            for i in draws.sample(range(24), num_never):
                z[i] = NEVER
            z = torch.tensor(z).tolist()  # as fp32
            draw = Draw(torch.tensor(TOKENS, dtype=torch.int32), NUM_PROMPT_TOKENS, lambda: 0.5, torch.tensor(4.0))
            found = samplers()[name].apply(torch.tensor(z), values, draw).tolist()
            expected = reference(z, *values)
            assert [x > NEVER for x in found] == [x > NEVER for x in expected]
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)
            changed += found != z
    assert changed == 0 if reference(z, *values) == z else changed > 20


def test_every_sampler_has_a_case() -> None:
    assert {name for name, *_ in CASES} == {*samplers()}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("tau", "eta"), [(3.0, 0.1), (1.0, 0.7), (0.0, 0.1)])
def test_mirostat_follows_its_target(version: int, tau: float, eta: float) -> None:
    """Token after token: what is kept, and mu; interrupted and continued by another worker, with guesses in between."""
    draws = random.Random(version)
    params = SamplingParams(max_tokens=99, seed=5, samplers=(SamplerUse("mirostat", (version, tau, eta)),))
    num_known, mu, state = 2, 2 * tau, None
    tokens = torch.zeros(1, 99, dtype=torch.int32)
    surprises = []
    for _ in range(10):
        part = SamplerRows(torch.device("cpu"))
        known = tokens[0, :num_known].numpy().tobytes()
        part.enter(StepPlan(0, b"", b"", b"", b"", (NewRow(0, known, 2, params, b"", sampler_state=state),)))
        for _ in range(4):
            num = draws.choice((1, 1, 3))  # the last two are guesses, of which one is right
            z = [torch.tensor([draws.gauss(0, 3) for _ in range(200)]) for _ in range(num)]
            logits, wanted = torch.stack(z), []
            tokens[0, num_known : num_known + num] = torch.tensor([draws.randrange(3) for _ in range(num)])
            drawn_tokens = []
            for i in range(num):
                wanted.append(mirostat(z[i].tolist(), version, tau, eta, mu))
                among = softmax(wanted[i])
                drawn_tokens += draws.choices(range(200), among)
                if i + 1 < num:  # its guess
                    tokens[0, num_known + i] = drawn_tokens[i] if i == 0 else 7
                surprises.append(-math.log2(among[drawn_tokens[i]]))
                mu -= eta * (surprises[-1] - tau)
                if i == 1:
                    break
            rows, positions = np.zeros(num, dtype=np.int32), num_known + np.arange(num)
            assert part.shape(logits, rows, positions, tokens) == ()
            for found, expected in zip(logits, wanted, strict=False):
                assert found.tolist() == pytest.approx(expected)
            for i, token in enumerate(drawn_tokens):
                tokens[0, num_known + i] = token
            sent = part.sends()
            assert sent is not None
            assert sent.values is not None
            states = sent.values.view(torch.float32).tolist()
            assert states[len(drawn_tokens) - 1] == pytest.approx(mu, abs=1e-3)
            mu, num_known = states[len(drawn_tokens) - 1], num_known + len(drawn_tokens)
        state = mu
    if tau and eta < 0.5:
        assert sum(surprises[20:]) / len(surprises[20:]) == pytest.approx(tau, rel=0.25)


def drawn(uses: tuple[SamplerUse, ...], z: Logits, num: int) -> list[int]:
    """Tokens at `num` positions of one row with these logits."""
    state = RowState(1, num + 1, 16, CpuDevice(1))
    params = SamplingParams(max_tokens=9, seed=5, samplers=uses)
    plan = StepPlan(0, b"", b"", b"", b"", (NewRow(0, int32(1), 1, params, int32(0)),))
    state.apply(plan)
    part = SamplerRows(torch.device("cpu"))
    part.enter(plan)
    rows, positions = np.zeros(num, dtype=np.int32), np.arange(1, num + 1)
    logits = torch.tensor(z).repeat(num, 1)
    assert part.shape(logits, rows, positions, state.token_ids) == ()
    at = torch.from_numpy(positions)
    return sample(logits, torch.from_numpy(rows), at, state.sampling, SamplingNeeds(random=True)).tolist()


def test_a_top_p_of_0_keeps_the_best_token() -> None:
    z = [1.0, 3.0, 2.0]
    assert {*drawn((SamplerUse("top_p", (0.0,)),), z, 50)} == {1}


def test_what_is_drawn_has_its_distribution() -> None:
    """By chi-square with 5 degrees of freedom: above 20.5 in one of a thousand cases."""
    z, num = [2.0, 1.5, 1.0, 0.0, -0.5, -1.0], 4000
    with_xtc, without = softmax(xtc(z, 1.0, 0.15)), softmax(z)
    expected = [0.3 * a + 0.7 * b for a, b in zip(with_xtc, without, strict=True)]
    counts = Counter(drawn((SamplerUse("xtc", (0.3, 0.15)),), z, num))
    assert sum((counts[i] - num * p) ** 2 / (num * p) for i, p in enumerate(expected)) < 20.5
    assert sum((counts[i] - num * p) ** 2 / (num * p) for i, p in enumerate(without)) > 20.5


def test_a_sampler_that_fails_or_is_missing_ends_its_row_only() -> None:
    part = SamplerRows(torch.device("cpu"))
    z = torch.zeros(2, 9)
    new = [
        NewRow(row, int32(1), 1, SamplingParams(max_tokens=9, samplers=(SamplerUse(name, ()),)), int32(0))
        for row, name in ((0, "made_up"), (1, "temperature"))
    ]
    part.enter(StepPlan(0, b"", b"", b"", b"", tuple(new)))
    table = torch.ones(3, 9, dtype=torch.int32)
    errors = part.shape(z, np.array([0, 1], dtype=np.int32), np.array([1, 1]), table)
    assert [(error.sample_idx, error.code) for error in errors] == [(0, "internal"), (1, "internal")]
    assert "no sampler 'made_up'" in str(errors[0])
    part.enter(StepPlan(0, b"", b"", b"", b"", freed_rows=int32(0, 1)))
    assert not part.rows


def test_logits_without_a_distribution_are_for_the_draw_to_tell() -> None:
    part = SamplerRows(torch.device("cpu"))
    params = SamplingParams(max_tokens=9, samplers=(SamplerUse("typical_p", (0.5,)), SamplerUse("top_p", (0.5,))))
    part.enter(StepPlan(0, b"", b"", b"", b"", (NewRow(0, int32(1), 1, params, int32(0)),)))
    for bad in (math.nan, math.inf, NEVER):
        z = torch.full((1, 9), bad)
        assert part.shape(z, np.zeros(1, dtype=np.int32), np.array([1]), torch.ones(1, 9, dtype=torch.int32)) == ()
        assert not z.max().isfinite()


def test_ends_are_not_drawn_before_their_time() -> None:
    """Stop tokens go first: a filter must leave others."""
    part = SamplerRows(torch.device("cpu"))
    params = SamplingParams(
        max_tokens=9, min_tokens=3, stop_token_ids=(4,), samplers=(SamplerUse("temperature", (0.0,)),)
    )
    part.enter(StepPlan(0, b"", b"", b"", b"", (NewRow(0, int32(1), 1, params, int32(0)),)))
    z = torch.tensor([[0.0, 1.0, 0.0, 0.0, 5.0]]).repeat(2, 1)
    part.shape(z, np.zeros(2, dtype=np.int32), np.array([3, 4]), torch.ones(1, 9, dtype=torch.int32))
    assert z.argmax(-1).tolist() == [1, 4]
