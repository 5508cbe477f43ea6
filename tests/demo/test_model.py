"""The bundled model itself: what its folder holds, and that it answers."""

import json
from collections.abc import Callable, Sequence

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from penstock.demo.evaluate import MODEL_DIR, Question, Score, answerer, held_out, is_right, scores
from penstock.demo.facts import load_facts


@pytest.fixture(scope="module")
def answer() -> Callable[[Sequence[str]], list[str]]:
    return answerer(MODEL_DIR, "cpu")


def test_folder_is_small_and_holds_only_data() -> None:
    files = {path.name: path.stat().st_size for path in MODEL_DIR.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert sum(files.values()) <= 32_000_000
    assert all(name.endswith((".json", ".safetensors", ".jinja")) for name in files)
    with safe_open(MODEL_DIR / "model.safetensors", "pt") as weights:
        assert {str(weights.get_slice(key).get_dtype()) for key in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_configuration() -> None:
    config = AutoConfig.from_pretrained(MODEL_DIR)
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    assert len(tokenizer) <= config.vocab_size
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text())
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in generation["eos_token_id"]
    assert 0 < generation["temperature"] < 0.5
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_greedy_answers(answer: Callable[[Sequence[str]], list[str]]) -> None:
    expected = {
        "Hello": "demo model of Penstock",
        "What is the KV cache?": "keys and values",
        "what is paged attention": "small pages",
        "How do I start Penstock?": "make serve",
        "Explain continuous batching, please.": "join and leave",
        "What is the difference between prefill and decode?": "memory bandwidth",
        "What does --max-num-seqs do?": "largest number of sequences",
        "How many GPUs does Llama 3 70B need?": "140 GB in 16 bits",
        "Does Penstock support LoRA adapters?": "Merge it into its model",
        "What is GGUF?": "llama.cpp's file format",
        "How do I get JSON?": "response_format",
        "What is 7 plus 5?": "7 plus 5 is 12",
        "Tell me a story about a fox.": "fox",
        "What is the capital of Bolivia?": "tiny demo model",
    }
    answers = dict(zip(expected, answer(list(expected)), strict=True))
    wrong = {question: found for question, found in answers.items() if expected[question] not in found}
    assert not wrong


def test_held_out_phrasings_are_answered(answer: Callable[[Sequence[str]], list[str]]) -> None:
    questions = [question for question in held_out() if question.answer is not None][::29]
    table = scores(questions, answer([question.text for question in questions]))
    assert len(questions) > 70
    assert table[-1].right >= 0.9 * table[-1].questions, table


def test_an_answer_to_another_question_does_not_count() -> None:
    fact, other = load_facts()[:2]
    question = Question(fact.topic, "?", "the", fact.answer)
    known = frozenset({fact.answer, other.answer})
    assert is_right(question, fact.answer, known)
    assert not is_right(question, other.answer, known)
    assert is_right(question, "In the end.", known)
    assert not is_right(question, "Nothing.", known)
    table = scores([question], [fact.answer])
    assert table[-1] == Score("all", 1, 1, 1)
