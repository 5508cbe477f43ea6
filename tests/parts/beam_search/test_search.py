"""The search finds what transformers' `generate` finds with as many beams, on random models in fp32."""

from typing import Any

import pytest
import torch
import transformers

from penstock.parts.beam_search.frontend.search import Scored, Search

VOCAB = 40
PROMPT = [5, 9, 30, 12]


def model_of(seed: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.35, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config).eval()


def theirs(model: Any, width: int, max_tokens: int, stops: list[int], min_tokens: int, **rules: Any) -> Any:
    """Outputs, with stop tokens, and their scores."""
    settings = transformers.GenerationConfig(
        num_beams=width, num_return_sequences=width, do_sample=False, max_new_tokens=max_tokens, pad_token_id=0,
        eos_token_id=stops or None, min_new_tokens=min_tokens or None, output_scores=True,
        return_dict_in_generate=True, **rules,
    )  # fmt: skip
    found = model.generate(torch.tensor([PROMPT]), generation_config=settings)
    return [shortened(row[len(PROMPT) :].tolist(), stops) for row in found.sequences], found.sequences_scores.tolist()


def shortened(outputs: list[int], stops: list[int]) -> list[int]:
    """Without what fills the tensor up."""
    ends = [i for i, token in enumerate(outputs) if token in stops]
    return outputs[: ends[0] + 1] if ends else outputs


@torch.inference_mode()
def best_after(model: Any, outputs: list[list[int]], num: int) -> list[list[Scored]]:
    logits = model(torch.tensor([PROMPT + each for each in outputs])).logits[:, -1]
    logprobs, ids = logits.log_softmax(-1).topk(num)
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return [[Scored(*each, rank) for rank, each in enumerate(zip(*pair, strict=True), 1)] for pair in pairs]


def ours(model: Any, width: int, max_tokens: int, stops: list[int], min_tokens: int, **rules: Any) -> Search:
    search = Search(width, max_tokens, stops, min_tokens=min_tokens, **rules)
    while search.beams:
        search.advance(best_after(model, [list(beam.token_ids) for beam in search.beams], search.num_best))
    return search


RULES: list[dict[str, Any]] = [
    {},
    {"length_penalty": 0.0},
    {"length_penalty": 2.0},
    {"length_penalty": -1.0},
    {"early_stopping": True},
    {"early_stopping": True, "length_penalty": 0.3},
    {"early_stopping": "never"},
    {"early_stopping": "never", "length_penalty": -0.5},
    {"early_stopping": "never", "length_penalty": 1.7},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_it_finds_what_transformers_finds(rules: dict[str, Any]) -> None:
    num_stopped = num_full = num_early = 0
    for seed in range(3):
        model = model_of(seed)
        for width, stops, min_tokens in ((3, [7], 0), (4, [7, 11, 23], 0), (2, [7, 11, 23, 4, 17], 4)):
            case = (model, width, 10, stops, min_tokens)
            search = ours(*case, **rules)
            expected, scores = theirs(*case, **rules)
            assert [list(beam.token_ids) for beam in search.found] == expected
            penalty = rules.get("length_penalty", 1.0)
            worths = [beam.score / len(beam.tokens) ** penalty for beam in search.found]
            assert worths == pytest.approx(scores, rel=1e-4)
            for beam in search.found:
                assert beam.has_stopped == (beam.token_ids[-1] in stops)
                assert len(beam.tokens) >= min_tokens
                assert beam.score == pytest.approx(sum(token.logprob for token in beam.tokens), rel=1e-5)
            num_stopped += sum(beam.has_stopped for beam in search.found)
            num_full += sum(len(beam.tokens) == 10 for beam in search.found)
            num_early += all(len(beam.tokens) < 10 for beam in search.found)
    assert num_stopped > 0 or rules.get("length_penalty", 1.0) > 1
    assert num_full + num_early > 0


def test_one_beam_is_greedy() -> None:
    model = model_of(3)
    settings = transformers.GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0)
    expected = model.generate(torch.tensor([PROMPT]), generation_config=settings)[0, len(PROMPT) :].tolist()
    assert [list(beam.token_ids) for beam in ours(model, 1, 9, [], 0).found] == [expected]


def test_it_ends_at_the_full_length_without_stop_tokens() -> None:
    search = ours(model_of(1), 3, 5, [], 0)
    assert [len(beam.tokens) for beam in search.found] == [5] * 3
    assert not any(beam.has_stopped for beam in search.found)
    assert theirs(model_of(1), 3, 5, [], 0)[0] == [list(beam.token_ids) for beam in search.found]


def test_penalties_beyond_fp32() -> None:
    """All is worth nothing, or infinitely little, and the search ends."""
    for penalty in (-100.0, 100.0):
        search = Search(2, 4000, length_penalty=penalty)
        for _ in range(4000):
            search.advance([[Scored(1, -0.1, 1), Scored(2, -0.2, 2)]] * len(search.beams))
        assert [len(beam.tokens) for beam in search.found] == [4000] * 2
