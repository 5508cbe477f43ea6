"""Reasoning and answer, in whatever pieces they come."""

import random

import pytest

from penstock.frontend.parsing.parts import Content, Reasoning
from penstock.frontend.parsing.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningSplitter,
    reasoning_format_of,
)

THINK = REASONING_FORMATS["think"]


def split(reasoning_format: ReasoningFormat, pieces: list[str], *, is_open: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(reasoning_format, is_open=is_open)
    reasoning = content = ""
    for part in [part for piece in pieces for part in splitter.feed(piece)] + splitter.finish():
        if isinstance(part, Reasoning):
            assert not content
            reasoning += part.text
        else:
            assert isinstance(part, Content)
            content += part.text
    return reasoning, content


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_random_texts_in_random_pieces(name: str) -> None:
    marks = REASONING_FORMATS[name]
    around = (marks.start, marks.end, *(marks.answer or ()))
    pool = [*around, *(mark[:4] for mark in around), "\n", " ", "word", "é", "🙂", "<", "]"]
    for seed in range(500):
        rng = random.Random(seed)
        text = "".join(rng.choice(pool) for _ in range(rng.randint(0, 12)))
        is_open = rng.random() < 0.5
        whole = split(marks, [text], is_open=is_open)
        assert split(marks, list(text), is_open=is_open) == whole
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(marks, pieces, is_open=is_open) == whole


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>hm</think>\n<answer>\nYes.\n</answer>\n", False, ("hm", "Yes.")),
        ("<answer> Yes. </answer>", False, ("", "Yes.")),
        ("hm</think><answer>Yes.</ans", True, ("hm", "Yes.</ans")),
        ("hm</think>Yes <answer>no</answer>", True, ("hm", "Yes <answer>no</answer>")),
        ("hm</think><answer>a</answer>\n\n<more>", True, ("hm", "a\n\n<more>")),
        ("<answer>a", True, ("<answer>a", "")),
        ("<ans", False, ("", "<ans")),
    ],
)
def test_an_answer_between_marks(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    marks = REASONING_FORMATS["think_answer"]
    assert split(marks, [text], is_open=is_open) == split(marks, list(text), is_open=is_open) == expected


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nhm\n</think>\n\nHello ", False, ("hm", "Hello ")),
        ("\n<think>hm</think>Hello", False, ("hm", "Hello")),
        ("hm\n</think>\n\nHello", True, ("hm", "Hello")),
        ("<think>hm</think>Hello", True, ("hm", "Hello")),
        ("hm, <b", True, ("hm, <b", "")),
        ("<think>hm </thin", False, ("hm </thin", "")),
        ("<think>", False, ("", "")),
        ("<thi", False, ("", "<thi")),
        (" Hello <think>no</think> ", False, ("", " Hello <think>no</think> ")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
    ],
)
def test_case(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    assert split(THINK, [text], is_open=is_open) == expected


def test_reasoning_comes_as_it_is_written() -> None:
    splitter = ReasoningSplitter(THINK, is_open=False)
    assert splitter.feed("<think>\nLet me") == [Reasoning("Let me")]
    assert splitter.feed(" see.\n</th") == [Reasoning(" see.")]
    assert splitter.feed("ink>\n\n") == []
    assert splitter.is_over
    assert splitter.feed("Yes") == [Content("Yes")]


def test_what_opens_reasoning() -> None:
    assert THINK.is_opened_by("<|im_start|>assistant\n<think>\n")
    assert not THINK.is_opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not THINK.is_opened_by("what is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert THINK.is_opened_by("<think>so far", "<think>so far")
    assert not THINK.is_opened_by("<think>hm</think>so far", "<think>hm</think>so far")


def test_what_closes_reasoning() -> None:
    assert THINK.is_closed_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not THINK.is_closed_by("<|im_start|>assistant\n")
    assert THINK.is_closed_by("so far", "so far")
    assert THINK.is_closed_by("<think>hm</think>so far", "<think>hm</think>so far")
    assert not THINK.is_closed_by("<think>so far", "<think>so far")


def test_format_of_a_template() -> None:
    assert reasoning_format_of("{{ content.split('</think>')[-1] }}") is THINK
    assert reasoning_format_of("{{ '<think></think>' }} {{ '<response>' + content }}") is THINK
    assert reasoning_format_of("<think></think> {{ '<response>\\n' }}") is REASONING_FORMATS["think_response"]
    assert reasoning_format_of("{{ '[THINK]' }}") is REASONING_FORMATS["mistral"]
    assert reasoning_format_of("{{ content }}") is None
