"""Grammars made ready beside the steps: once per text, within bounds, and made anew when their automaton is full."""

import random
import threading
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from penstock.ipc.messages import SamplingParams
from penstock.models import grammar_tokens as grammar_config
from penstock.models.finding.registry import open_checkpoint
from penstock.models.grammar_tokens import grammar_vocabulary
from penstock.parts.grammars.child.read import read_grammar
from penstock.parts.grammars.messages import GrammarPrepared, PrepareGrammar
from penstock.parts.grammars.worker import store as grammar_store
from penstock.parts.grammars.worker.row import GrammarRow
from penstock.parts.grammars.worker.store import GrammarStore
from tests.e2e.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "bytes"
    make_checkpoint(folder)
    return folder


def regex(folder: Path, pattern: str) -> str:
    return read_grammar(grammar_vocabulary(open_checkpoint(folder)), "regex", pattern).text


def test_a_text_is_made_once_and_remembered(folder: Path) -> None:
    store = GrammarStore(open_checkpoint(folder))
    text = regex(folder, "[a-z]+")
    store.prepare(PrepareGrammar(1, text))
    assert store.is_busy
    assert store.get(1) is None
    assert store.take_prepared(wait=True) == [GrammarPrepared(1)]
    assert not store.is_busy
    first = store.get(1)
    assert first is not None
    store.drop(1)
    assert store.get(1) is None
    store.prepare(PrepareGrammar(2, text))
    assert store.take_prepared() == [GrammarPrepared(2)]  # at once
    assert store.get(2) is first


def test_a_slow_grammar_holds_up_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def make(*args: object) -> object:
        go_on.wait(30)
        return grammar_config.make_matcher(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(grammar_store, "make_matcher", make)
    store = GrammarStore(open_checkpoint(folder))
    store.prepare(PrepareGrammar(1, regex(folder, "a")))
    store.prepare(PrepareGrammar(2, regex(folder, "b")))
    assert store.take_prepared() == []
    store.drop(1)
    go_on.set()
    assert store.take_prepared(wait=True) == [GrammarPrepared(1), GrammarPrepared(2)]
    assert store.get(2) is not None


def test_what_is_dropped_before_it_is_ready_is_not_in_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that leave while their grammars are prepared neither fill the memory nor hold up the others'."""
    go_on = threading.Event()
    texts: list[str] = []

    def make(vocabulary: LLTokenizer, text: str) -> LLMatcher:
        texts.append(text)
        go_on.wait(30)
        return grammar_config.make_matcher(vocabulary, text)

    monkeypatch.setattr(grammar_store, "make_matcher", make)
    monkeypatch.setattr(grammar_store, "MAX_IDLE", 0)
    store = GrammarStore(open_checkpoint(folder))
    for i in range(4):
        store.prepare(PrepareGrammar(i, regex(folder, f"a{i}")))
    while not texts:
        time.sleep(0.001)
    for i in range(3):
        store.drop(i)
    go_on.set()
    assert store.take_prepared(wait=True) == [GrammarPrepared(i) for i in range(4)]
    assert [i for i in range(4) if store.get(i) is not None] == [3]
    assert store.num_known == 1
    assert texts == [regex(folder, "a0"), regex(folder, "a3")], "what had begun, and what was still wanted"


def test_what_fails_is_told(folder: Path, tmp_path: Path) -> None:
    store = GrammarStore(open_checkpoint(folder))
    store.prepare(PrepareGrammar(1, "start: nothing"))
    [answer] = store.take_prepared(wait=True)
    assert "cannot be used" in answer.error
    assert store.num_known == 0
    none = GrammarStore(open_checkpoint(tmp_path))
    none.prepare(PrepareGrammar(7, "start: nothing"))
    [answer] = none.take_prepared(wait=True)
    assert (answer.grammar_id, "this model's tokenizer" in answer.error) == (7, True)


def test_after_clear_nothing_old_is_answered(folder: Path) -> None:
    store = GrammarStore(open_checkpoint(folder))
    store.prepare(PrepareGrammar(1, regex(folder, "a")))
    store.clear()
    assert store.take_prepared(wait=True) == []
    assert store.get(1) is None


def test_idle_ones_are_bounded_in_number_and_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_store, "MAX_IDLE", 5)
    store = GrammarStore(open_checkpoint(folder))
    for i in range(12):
        store.prepare(PrepareGrammar(i, regex(folder, f"a{i}")))
        store.take_prepared(wait=True)
        if i > 2:
            store.drop(i)
    assert store.num_known == 3 + 5
    store.prepare(PrepareGrammar(100, regex(folder, "large"), num_bytes=grammar_store.MAX_IDLE_BYTES + 1))
    store.take_prepared(wait=True)
    assert store.num_known == 3 + 5 + 1
    store.drop(100)
    assert store.num_known == 3  # all older idle ones go first
    assert store.get(0) is not None


def walk(folder: Path, row: GrammarRow, text: str) -> str:
    """Follow a text; the row's error, if it has one."""
    words = np.zeros((1, 9), dtype=np.int32)
    for token_id in Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids:
        if error := row.fill(words, 259):
            return error
        row._follow(token_id)
    return row.fill(words, 259)


def rows_over(folder: Path, pattern: str, max_states: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarRow]:
    """Rows that follow a pattern, one after the other, in automata of so many states at most."""
    text = regex(folder, pattern)
    monkeypatch.setattr(grammar_config, "MAX_LEXER_STATES", max_states)
    monkeypatch.setattr(grammar_store, "MAX_RENEWAL_SECONDS", inf)  # however slow a busy machine is
    store = GrammarStore(open_checkpoint(folder))
    store.prepare(PrepareGrammar(1, text))
    store.take_prepared(wait=True)
    while True:
        row = GrammarRow(store.get(1), SamplingParams(max_tokens=500, stop_token_ids=(2,)), ())
        row.prepare()
        yield row


def test_a_full_automaton_is_made_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one grammar share its automaton: what the first ones needed may leave too little for the next one."""
    draw = random.Random(0)
    generations = set()
    for _, row in zip(range(40), rows_over(folder, "[ab]*a[ab]{10}c", 300, monkeypatch), strict=False):
        assert walk(folder, row, "".join(draw.choices("ab", k=40))) == ""
        generations.add(row._generation)
    assert len(generations) > 1


def test_looking_at_guesses_in_a_full_automaton_ends_no_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    generations = set()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for _, row in zip(range(20), rows_over(folder, "[ab]*a[ab]{10}c", 300, monkeypatch), strict=False):
        ids = tokenizer.encode("".join(draw.choices("ab", k=40)), add_special_tokens=False).ids
        for i, token_id in enumerate(ids):
            guesses = row.extend(ids[i : i + 4], 4, 259)
            assert guesses == ids[i : i + len(guesses)]
            assert row.fill(np.zeros((1 + len(guesses), 9), dtype=np.int32), 259, guesses) == ""
            row._follow(token_id)
        generations.add(row._generation)
    assert len(generations) > 1


def test_a_row_that_fills_every_automaton_at_once_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(rows_over(folder, "[ab]*a[ab]{10}c", 20, monkeypatch))
    said = walk(folder, row, "abbabaabbbabaabbabbabababbbaaabbabababbbab")
    assert "the form is too complex to go on after the first" in said
