"""Folders as sentence-transformers saves them: its own vectors and scores, in fp32, prompts and lengths included."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers
import torch
import transformers
from sentence_transformers.sentence_transformer import modules

from penstock import LLM, ApiError, ConfigError
from tests.parts.encoders.checkpoints import CASES, SIZES, WORDS, add_tokenizer, make, says

TEXTS = ["w1 w2", " ".join(WORDS[3:30]), "w7", "w9 w8 w7 w6", "w1 w2"]
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_num_batched_tokens": 256}
TOLERANCE = 1e-5


def encoder(folder: Path, case: str = "bert") -> Path:
    reference = make(CASES[case], folder)
    add_tokenizer(folder, has_types=reference.case.has_types)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoder(tmp_path_factory.mktemp("plain"))


def saved(plain: Path, folder: Path, *behind: Any, **options: Any) -> Any:
    """What the library makes of an encoder and these modules, saved and read again."""
    transformer = modules.Transformer(str(plain), max_seq_length=40)
    model = sentence_transformers.SentenceTransformer(modules=[transformer, *behind], device="cpu", **options)
    model.save(str(folder))
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


def check(found: Any, right: Any) -> None:
    assert np.abs(np.array(found) - np.array(right)).max() < TOLERANCE


@pytest.mark.parametrize("mode", ["cls", "mean", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"])
@pytest.mark.parametrize("is_normalized", [False, True])
def test_modules(plain: Path, tmp_path: Path, mode: str, is_normalized: bool) -> None:
    behind = [modules.Pooling(64, mode)] + [modules.Normalize()] * is_normalized
    model = saved(plain, tmp_path / "saved", *behind)
    with LLM(tmp_path / "saved", **SMALL) as llm:
        check([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)], model.encode(TEXTS))


def test_dense(plain: Path, tmp_path: Path) -> None:
    """The vector has the size of the last module; it is cut before it gets length 1."""
    behind = modules.Pooling(64, "mean"), modules.Dense(64, 24), modules.Dense(24, 16, bias=False), modules.Normalize()
    model = saved(plain, tmp_path / "saved", *behind)
    with LLM(tmp_path / "saved", **SMALL) as llm:
        check([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)], model.encode(TEXTS))
        [short] = llm.embed(TEXTS[0], dimensions=8, use_tqdm=False)
        right = model.encode(TEXTS[0], truncate_dim=8)
        check(short.outputs.embedding, right / np.linalg.norm(right))
        with pytest.raises(ApiError, match="dimensions must be"):
            llm.embed("w1", dimensions=17, use_tqdm=False)


def test_prompts(plain: Path, tmp_path: Path) -> None:
    """The default one goes before every text; a length is a limit, and texts are cut only if that is asked for."""
    prompts = {"query": "w50 w51 ", "passage": "w60 "}
    model = saved(plain, tmp_path / "saved", modules.Pooling(64, "mean"), prompts=prompts, default_prompt_name="query")
    with LLM(tmp_path / "saved", **SMALL) as llm:
        check([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)], model.encode(TEXTS))
        long = " ".join(WORDS)
        with pytest.raises(ApiError, match="context length is 40 tokens"):
            llm.embed(long, use_tqdm=False)
        [cut] = llm.embed(long, truncate_prompt_tokens=-1, use_tqdm=False)
        assert len(cut.prompt_token_ids) == 40
        check(cut.outputs.embedding, model.encode(long))


def test_a_plain_encoder(plain: Path) -> None:
    """Without modules.json it pools the mean, as the library does; we scale it to length 1."""
    model = sentence_transformers.SentenceTransformer(str(plain), device="cpu")
    with LLM(plain, **SMALL) as llm:
        found = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
    check(found, model.encode(TEXTS, normalize_embeddings=True))


def test_what_is_refused(plain: Path, tmp_path: Path) -> None:
    saved(plain, tmp_path / "saved", modules.Pooling(64, ("cls", "mean")))
    with pytest.raises(ConfigError, match="pooling_mode"), LLM(tmp_path / "saved", **SMALL) as llm:
        llm.embed("w1", use_tqdm=False)


def test_vectors_of_tokens_are_refused(plain: Path, tmp_path: Path) -> None:
    """ColBERT's files say it in either of two ways: a vector that is pooled after all would be of no use."""
    saved(plain, tmp_path / "saved", modules.Pooling(64, "mean"))
    said = tmp_path / "saved" / "config_sentence_transformers.json"
    for kind in ("ColBERT", "MultiVectorEncoder", "SparseEncoder"):
        said.write_text(json.dumps(json.loads(said.read_text()) | {"model_type": kind}))
        with pytest.raises(ConfigError, match=kind), LLM(tmp_path / "saved", **SMALL):
            pass
    says(plain, ("Transformer", {}), ("Dense", {"in_features": 64, "out_features": 8}))
    try:
        with pytest.raises(ConfigError, match="no Pooling"), LLM(plain, **SMALL):
            pass
    finally:
        (plain / "modules.json").unlink()


@pytest.mark.parametrize("case", ["bert, one class", "roberta, one class"])
def test_cross_encoders(tmp_path: Path, case: str) -> None:
    folder = encoder(tmp_path / "model", case)
    model = sentence_transformers.CrossEncoder(str(folder), device="cpu")
    model.save_pretrained(str(tmp_path / "saved"))
    pairs = [(TEXTS[0], text) for text in TEXTS]
    right = model.predict(pairs)
    with LLM(tmp_path / "saved", **SMALL) as llm:
        found = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    check(found, right)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_decoder_stored_without_its_head(tmp_path: Path, is_tied: bool) -> None:
    """As Qwen3-Embedding is: by its config.json a causal model, but saved as the library holds it."""
    torch.manual_seed(5)
    config = transformers.Qwen3Config(
        **SIZES, num_key_value_heads=2, head_dim=16, bos_token_id=1, eos_token_id=2, tie_word_embeddings=is_tied
    )
    base = transformers.Qwen3Model(config).eval()
    with torch.no_grad():
        for weight in base.parameters():
            weight.copy_(0.15 * torch.randn_like(weight) + (weight.ndim == 1))
    base.save_pretrained(tmp_path / "base")
    add_tokenizer(tmp_path / "base")
    prompts = {"query": "w50 w51 ", "document": ""}
    model = saved(
        tmp_path / "base", tmp_path / "saved", modules.Pooling(64, "lasttoken"), modules.Normalize(), prompts=prompts
    )
    path = tmp_path / "saved" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["Qwen3ForCausalLM"]}))
    with LLM(tmp_path / "saved", **SMALL) as llm:
        check([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)], model.encode(TEXTS))
        if is_tied:
            assert llm.generate("w1", use_tqdm=False)[0].outputs
        else:
            with pytest.raises(ApiError, match="generates none"):
                llm.generate("w1", use_tqdm=False)
