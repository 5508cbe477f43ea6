"""The training script, at a scale of seconds."""

import itertools
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from penstock.demo.batches import batches
from penstock.demo.chatml import pieces
from penstock.demo.corpus import conversations
from penstock.demo.make import Recipe, new_model, save, train
from penstock.demo.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(0, 400)


def test_tokenizer_is_repeatable_and_lossless(tokenizer: PreTrainedTokenizerFast) -> None:
    again = train_tokenizer(0, 400)
    assert tokenizer.backend_tokenizer.to_str() == again.backend_tokenizer.to_str()
    for text in ("Hello, world", "--page-size 16\n", "a café ☕ 12345", " two  spaces"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    digits = tokenizer.convert_ids_to_tokens(tokenizer.encode("12345"))
    assert digits == list("12345")


def test_training_text_is_what_the_chat_template_makes(tokenizer: PreTrainedTokenizerFast) -> None:
    for messages in itertools.islice(conversations(5), 50):
        as_dicts = cast("list[dict[str, str]]", messages)
        in_parts = [i for text, _ in pieces(messages) for i in tokenizer.encode(text)]
        whole = tokenizer.apply_chat_template(as_dicts, return_dict=False)
        asked = tokenizer.apply_chat_template(as_dicts[:-1], add_generation_prompt=True, return_dict=False)
        assert in_parts == whole
        assert whole[: len(asked)] == asked


def test_batches_learn_only_what_the_assistant_says(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = next(batches(tokenizer, 0, 4, 256))
    again = next(batches(tokenizer, 0, 4, 256))
    assert batch.shape == (2, 4, 256)
    assert torch.equal(batch, again)
    ids, labels = batch
    learned = labels != -100
    assert torch.equal(ids[learned], labels[learned])
    assert 0.4 < learned.float().mean() < 0.8
    text = tokenizer.decode(ids.flatten()[~learned.flatten()])
    assert "<|im_start|>user" in text
    starts = (ids == 1) | (ids == 0)
    assert not (starts & learned).any()


def test_a_short_training_run_learns_and_saves(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    ids, labels = next(batches(tokenizer, 9, 2, 128))

    def loss_of(model: torch.nn.Module) -> float:
        with torch.no_grad():
            return float(model(input_ids=ids, labels=labels).loss)

    model = new_model(len(tokenizer), seed=0)
    before = loss_of(model)
    recipe = Recipe(num_tokens=12 * 256, rows=2, length=128, learning_rate=2e-3)
    train(model, tokenizer, recipe, torch.device("cpu"), seed=1, compiled=False)
    after = loss_of(model)
    assert after < before - 0.5
    save(model, tokenizer, tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors", ".jinja"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loss_of(loaded) == pytest.approx(after, abs=0.05)  # bf16 weights
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template
