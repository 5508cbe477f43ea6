"""Scores and classes are what transformers computes of the same pairs and texts, in fp32."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from penstock import ApiError, ConfigError, PoolingParams
from penstock.parts.scores.frontend.templates import TEMPLATES
from tests.parts.encoders.checkpoints import WORDS, says
from tests.parts.scores.conftest import Load, Loaded

QUERY = "w1 w2 w3"
DOCUMENTS = ["w4 w5", " ".join(WORDS[10:40]), "w7", "w1 w2 w3"]
TOLERANCE = 2e-5


def pair(loaded: Loaded, first: str, second: str) -> tuple[list[int], int]:
    encoding = loaded.tokenizer.encode(first, second)
    return encoding.ids, encoding.type_ids.index(1) if 1 in encoding.type_ids else 0


@pytest.mark.parametrize("case", ["roberta, one class"])
def test_cross_encoder(load: Load, case: str) -> None:
    """A sigmoid of the only logit."""
    loaded = load(case)
    outputs = loaded.llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    right = [torch.sigmoid(loaded.reference.logits(*pair(loaded, QUERY, each))[0]) for each in DOCUMENTS]
    assert [output.outputs.score for output in outputs] == pytest.approx([float(each) for each in right], abs=TOLERANCE)
    [one] = loaded.llm.score("w9", "w8", use_tqdm=False)
    assert one.num_prompt_tokens == 5


def test_types_of_pairs(load: Load) -> None:
    """BERT tells the two texts apart; and logits are not always put through a sigmoid."""
    more: dict[str, Any] = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    loaded = load("bert, one class", **more)
    outputs = loaded.llm.score([QUERY] * len(DOCUMENTS), DOCUMENTS, use_tqdm=False)
    right = [float(loaded.reference.logits(*pair(loaded, QUERY, each))[0]) for each in DOCUMENTS]
    assert pair(loaded, QUERY, "w4")[1] == 5
    assert [output.outputs.score for output in outputs] == pytest.approx(right, abs=TOLERANCE)


@pytest.mark.parametrize("case", ["bert, classes", "modernbert, classes of means", "xlm-r, classes"])
def test_classes(load: Load, case: str) -> None:
    loaded = load(case)
    texts = [QUERY, *DOCUMENTS]
    outputs = loaded.llm.classify(texts, use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        right = loaded.reference.logits(loaded.tokenizer.encode(text).ids).softmax(0)
        assert output.outputs.probs == pytest.approx(right.tolist(), abs=TOLERANCE)
        assert output.outputs.label == f"LABEL_{int(right.argmax())}"
        assert output.outputs.num_classes == len(right)
    [raw] = loaded.llm.encode(QUERY, use_tqdm=False)
    assert raw.outputs.data == pytest.approx(outputs[0].outputs.probs)
    for what in (loaded.llm.score, loaded.llm.embed):
        with pytest.raises(ApiError, match="classes") as caught:
            what(*[QUERY] * (2 if what == loaded.llm.score else 1), use_tqdm=False)
        assert caught.value.status == 404


def test_several_labels(load: Load) -> None:
    loaded = load("bert, classes", problem_type="multi_label_classification")
    [output] = loaded.llm.classify(QUERY, use_tqdm=False)
    right = loaded.reference.logits(loaded.tokenizer.encode(QUERY).ids).sigmoid()
    assert output.outputs.probs == pytest.approx(right.tolist(), abs=TOLERANCE)


def test_cosines(load: Load) -> None:
    """Of an encoder's embeddings."""
    loaded = load("bert")
    outputs = loaded.llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    vectors = [
        functional.normalize(loaded.reference.states(loaded.tokenizer.encode(text).ids).mean(0), dim=0)
        for text in (QUERY, *DOCUMENTS)
    ]
    right = [float(vectors[0] @ vector) for vector in vectors[1:]]
    assert [output.outputs.score for output in outputs] == pytest.approx(right, abs=TOLERANCE)
    assert right[-1] == pytest.approx(1.0)
    [pooled] = loaded.llm.encode(QUERY, pooling_task="embed", use_tqdm=False)
    assert pooled.outputs.data == pytest.approx(vectors[0].tolist(), abs=TOLERANCE)
    for ask in (loaded.llm.classify, loaded.llm.generate):
        with pytest.raises(ApiError) as caught:
            ask(QUERY, use_tqdm=False)
        assert caught.value.status == 404


def test_pooling_params(load: Load) -> None:
    """vLLM's spelling of the same parameters; what has no meaning is refused."""
    llm = load("bert").llm
    [short] = llm.embed(QUERY, pooling_params=PoolingParams(dimensions=8, use_activation=False), use_tqdm=False)
    [right] = llm.embed(QUERY, dimensions=8, normalize=False, use_tqdm=False)
    assert short.outputs.embedding == right.outputs.embedding
    [pooled] = llm.encode(QUERY, PoolingParams(dimensions=8, normalize=False), pooling_task="embed", use_tqdm=False)
    assert pooled.outputs.data == pytest.approx(right.outputs.embedding)
    with pytest.raises(ValueError, match="beside it"):
        llm.embed(QUERY, dimensions=4, pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
    with pytest.raises(ValueError, match="set one"):
        llm.embed(QUERY, pooling_params=PoolingParams(normalize=True, use_activation=False), use_tqdm=False)
    with pytest.raises(ValueError, match="score has no dimensions"):
        llm.score(QUERY, QUERY, pooling_params=PoolingParams(dimensions=8), use_tqdm=False)


def test_logits_by_pooling_params(load: Load) -> None:
    loaded = load("bert, one class", "one")
    raw = PoolingParams(use_activation=False, truncate_prompt_tokens=5)
    [scored] = loaded.llm.score(QUERY, " ".join(WORDS[:9]), pooling_params=raw, use_tqdm=False)
    assert scored.num_prompt_tokens == 5
    [classified] = loaded.llm.classify(QUERY, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    right = loaded.reference.logits(loaded.tokenizer.encode(QUERY).ids)
    assert classified.outputs.probs == pytest.approx(right.tolist(), abs=TOLERANCE)


def asked(loaded: Loaded, query: str, document: str) -> list[int]:
    template = TEMPLATES["qwen3-reranker"]
    text = template.pair.format(instruction=template.instruction, query=query, document=document)
    parts = (template.before, text, template.behind)
    return [i for part in parts for i in loaded.tokenizer.encode(part, add_special_tokens=False).ids]


def test_a_reranker_that_says_yes_or_no(load: Load) -> None:
    """The share of "yes" among both answers, after the template that belongs to the model's name."""
    loaded = load("Qwen3ForCausalLM", "Qwen3-Reranker-tiny")
    outputs = loaded.llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    for document, output in zip(DOCUMENTS, outputs, strict=True):
        with torch.inference_mode():
            logits = loaded.reference.model(torch.tensor([asked(loaded, QUERY, document)])).logits[0, -1]
        no, yes = (logits[loaded.tokenizer.token_to_id(word)] for word in ("no", "yes"))
        assert output.outputs.score == pytest.approx(float(torch.stack([no, yes]).softmax(0)[1]), abs=TOLERANCE)
    assert loaded.llm.generate("w1", use_tqdm=False)[0].outputs[0].token_ids  # it still generates


def test_a_reranker_as_sentence_transformers_saves_it(load: Load, tmp_path: Path) -> None:
    """Its module names the tokens that answer; under a name that no template has, one must be named."""
    words = {"true_token_id": 17, "false_token_id": 23}
    for folder in ("Qwen3-Reranker-tiny", "another"):
        (tmp_path / folder).mkdir()
        says(tmp_path / folder, ("Transformer", {}), ("LogitScore", words))
    loaded = load("Qwen3ForCausalLM", "Qwen3-Reranker-tiny")
    [output] = loaded.llm.score(QUERY, DOCUMENTS[1], use_tqdm=False)
    with torch.inference_mode():
        logits = loaded.reference.model(torch.tensor([asked(loaded, QUERY, DOCUMENTS[1])])).logits[0, -1]
    assert output.outputs.score == pytest.approx(float((logits[17] - logits[23]).sigmoid()), abs=TOLERANCE)
    loaded.llm.close()
    with pytest.raises(ConfigError, match="--score-template"):
        load("Qwen3ForCausalLM", "another").llm.score(QUERY, QUERY, use_tqdm=False)


@pytest.mark.parametrize("name", ["Qwen3-Reranker-0.6B-seq-cls", "another"])
def test_a_reranker_with_a_head(load: Load, name: str) -> None:
    """With the template that belongs to its name, or with the texts as the tokenizer puts them together."""
    loaded = load("Qwen3ForSequenceClassification", name)
    for document, output in zip(DOCUMENTS, loaded.llm.score(QUERY, DOCUMENTS, use_tqdm=False), strict=True):
        ids = asked(loaded, QUERY, document) if name != "another" else pair(loaded, QUERY, document)[0]
        logit = float(loaded.reference.logits(ids)[0])
        assert output.outputs.score == pytest.approx(1 / (1 + math.exp(-logit)), abs=TOLERANCE)


def test_lengths(load: Load) -> None:
    """Longer pairs are refused, or cut where the client wants that: the longer text first, and no mark."""
    loaded = load("roberta, one class")
    long, short = " ".join(WORDS * 6), "w3 w4"
    with pytest.raises(ApiError, match="takes 256 tokens, text_2 has 563"):
        loaded.llm.score(short, long, use_tqdm=False)
    [output] = loaded.llm.score(short, long, truncate_prompt_tokens=20, use_tqdm=False)
    assert output.num_prompt_tokens == 20
    ids = loaded.tokenizer.encode(short, long).ids
    right = torch.sigmoid(loaded.reference.logits([*ids[:19], 2])[0])
    assert output.outputs.score == pytest.approx(float(right), abs=TOLERANCE)
