"""The bench of quality: its figures against their definitions, its logits against transformers', and its goals."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.bench.quality.__main__ import main, measured, split
from penstock.bench.quality.engine import ScoringEngine
from penstock.bench.quality.measure import Reference, measure
from penstock.bench.quality.texts import Text, conversations, tokenizer_of, windows
from penstock.config import Config, ConfigError
from penstock.demo.facts import load_facts
from penstock.demo.phrasings import normalized
from penstock.models.finding.registry import model_path, open_checkpoint

DEMO = model_path(Config())


def demo_texts(num_tokens: int) -> list[Text]:
    return conversations(tokenizer_of(open_checkpoint(DEMO)), num_tokens, 512)


def test_figures_are_what_they_are_called() -> None:
    generator = torch.Generator().manual_seed(0)
    exact, other = (torch.randn(9, 5, generator=generator, dtype=torch.float64) for _ in "ab")
    text = Text([3, 1, 4, 1, 2, 0, 2, 4, 3, 3], np.arange(9) % 2 == 0)
    calls = 0

    def predict(ids: list[int]) -> Tensor:
        nonlocal calls
        calls += 1
        return exact

    reference = Reference(predict)
    found = measure(reference, lambda ids: other, [text])
    p, q = exact.softmax(-1), other.softmax(-1)
    each = [sum(float(p[i, v]) * math.log(p[i, v] / q[i, v]) for v in range(5)) for i in range(9)]
    same = [int(p[i].argmax() == q[i].argmax()) for i in range(9)]
    loss = [-math.log(q[i, text.token_ids[i + 1]]) for i in range(0, 9, 2)]
    assert found.kl == pytest.approx(sum(each) / 9)
    assert found.kl_99 == pytest.approx(np.quantile(each, 0.99))
    assert found.top1 == pytest.approx(sum(same) / 9)
    assert found.answer_top1 == pytest.approx(sum(same[::2]) / 5)
    assert found.perplexity == pytest.approx(math.exp(sum(loss) / 5))
    measure(reference, lambda ids: other, [text])
    assert calls == 1


@torch.inference_mode()
def test_logits_are_transformers() -> None:
    (text,) = demo_texts(1)
    engine = ScoringEngine("", 512, dtype="float32", num_threads=1)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    expected = model(torch.tensor([text.token_ids])).logits[0, :-1]
    torch.testing.assert_close(engine.logits(text.token_ids), expected, rtol=1e-3, atol=2e-3)


def test_conversations_were_held_out() -> None:
    """Training has seen none of the questions about facts; and only answers count as such."""
    tokenizer = tokenizer_of(open_checkpoint(DEMO))
    trained = {normalized(question) for fact in load_facts() for question in fact.training}
    answers = {fact.answer for fact in load_facts()}
    asked = 0
    for text in demo_texts(3000):
        said = tokenizer.decode(text.token_ids, skip_special_tokens=False)
        for turn in said.split("<|im_start|>user\n")[1:]:
            question, _, answer = turn.partition("<|im_end|>")
            answer = answer.partition("assistant\n")[2].partition("<|im_end|>")[0]
            asked += answer in answers
            assert normalized(question) not in trained
        learned = [token for token, is_answer in zip(text.token_ids[1:], text.is_answer, strict=True) if is_answer]
        assert "<|im_start|>" not in tokenizer.decode(learned, skip_special_tokens=False)
    assert asked > 10


def test_an_installation_without_the_conversations_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wheel has the demo model alone."""
    monkeypatch.setitem(sys.modules, "penstock.demo.held_out", None)
    assert main([]) == 2
    assert "say --text FILE: the conversations of the demo model are not installed" in capsys.readouterr().err


def test_a_text_file_is_cut_into_windows(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(open_checkpoint(DEMO))
    path = tmp_path / "text.txt"
    path.write_text("The KV cache holds keys and values. " * 30)
    whole = tokenizer.encode(path.read_text()).ids
    texts = windows(tokenizer, path, 100, 40)
    assert [len(text.token_ids) for text in texts] == [40, 40, 40]
    assert [token for text in texts for token in text.token_ids] == whole[:120]
    path.write_text("The")
    with pytest.raises(ConfigError, match="too short"):
        windows(tokenizer, path, 100, 40)


@pytest.mark.parametrize(
    ("variant", "parts"),
    [
        ("", ("", "")),
        ("int8", ("int8", "")),
        ("/int8", ("", "int8")),
        ("a/b/int4", ("a/b", "int4")),
        ("a/b", ("a/b", "")),
    ],
)
def test_a_variant_has_two_parts(variant: str, parts: tuple[str, str]) -> None:
    assert split(variant) == parts


def test_formats_keep_the_demo_models_predictions() -> None:
    """As the documentation promises; it has the figures over more tokens. Questions are what it never learned."""
    variants = ["int8", "int8/int8", "fp8/fp8_e4m3", "int4/int8"]
    rows = measured("", demo_texts(5000), variants, 512, dtype="auto", num_threads=1)
    top1 = {(row.weights, row.kv): (row.quality.answer_top1, row.quality.top1) for row in rows}
    exact, int8, int8_kv, fp8, int4 = top1.values()
    assert exact == (1, 1)
    assert min(int8[0], int8_kv[0]) >= 0.99
    assert min(int8[1], int8_kv[1]) >= 0.98
    assert fp8[0] >= 0.98
    assert fp8[1] >= 0.97
    assert int4[0] >= 0.98


def test_the_command_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, text = tmp_path / "figures.json", tmp_path / "text.txt"
    text.write_text("What is a page table? It says which pages a sequence has. " * 4)
    assert main(["--text", str(text), "--variants", "int8", "--context", "64", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["weights"] for row in rows] == ["float32", "int8"]
    assert rows[0]["kl"] == 0 < rows[1]["kl"]
    assert "of answers" not in capsys.readouterr().out
    assert main(["--variants", "int8", str(tmp_path)]) == 2
