"""Conversations for training, drawn from the facts and grammars with a seeded generator."""

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from penstock.demo.arithmetic import small_sums
from penstock.demo.chatml import ChatMessage
from penstock.demo.facts import Fact, load_facts
from penstock.demo.grammar import rhyme_turn, story_turn
from penstock.demo.newcomers import newcomers_keys
from penstock.demo.phrasings import TEMPLATES, noisy, normalized
from penstock.demo.unknown import unknown_turn

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are Penstock's demo model.", "You are a helpful and honest assistant.",
    "Answer briefly.", "Be concise.", "You are an expert on LLM serving.", "You are an assistant. Answer in English.",
)  # fmt: skip
_NOTHING_MORE = (
    "That is all I know about it. Ask me about something else, for example the KV cache or Penstock's flags."
)
_SUMS = tuple(s for s in small_sums() if not s.held_out)


@dataclass(frozen=True, slots=True)
class _Known:
    """The facts, looked up in the ways that drawing needs."""

    facts: tuple[Fact, ...]
    small_talk: tuple[Fact, ...]
    stressed: tuple[Fact, ...]  # those of which half the questions are about; all, if nothing is stressed
    by_id: dict[str, Fact]
    by_hand: dict[str, tuple[str, ...]]  # fact id -> its hand-written training questions


def _known(stressed_topics: Collection[str]) -> _Known:
    facts = load_facts()
    return _Known(
        facts=facts,
        small_talk=tuple(fact for fact in facts if fact.topic == "chat"),
        stressed=tuple(fact for fact in facts if fact.topic in stressed_topics) or facts,
        by_id={fact.fact_id: fact for fact in facts},
        by_hand={fact.fact_id: tuple(q for q in fact.training if q in fact.written) for fact in facts},
    )


def held_out_keys() -> frozenset[str]:
    """Normalized phrasings that no training conversation may contain."""
    return newcomers_keys() | {normalized(question) for fact in load_facts() for question in fact.held_out}


def conversations(seed: int, stressed_topics: Collection[str] = ()) -> Iterator[list[ChatMessage]]:
    """Endless conversations of one to five turns; the same seed gives the same ones.

    Of the questions about facts, half are about the stressed topics, if there are any.
    """
    rng = random.Random(seed)
    known = _known(stressed_topics)
    forbidden = held_out_keys()
    while True:
        messages: list[ChatMessage] = []
        if rng.random() < 0.2:
            messages.append({"role": "system", "content": rng.choice(_SYSTEM_PROMPTS)})
        turns = rng.choices((1, 2, 3, 4), weights=(55, 25, 12, 8))[0]
        for _ in range(turns):
            for question, answer in _turns(rng, known):
                typed = noisy(question, rng)
                if normalized(typed) in forbidden:  # a slip or a lost letter can turn one phrasing into another
                    typed = question
                messages.append({"role": "user", "content": typed})
                messages.append({"role": "assistant", "content": answer})
        yield messages


def _turns(rng: random.Random, known: _Known) -> Iterator[tuple[str, str]]:
    """One exchange, or two where the second asks for more about the first."""
    draw = rng.random()
    if draw < 0.66:
        facts = known.stressed if draw > 0.36 else known.facts if draw > 0.05 else known.small_talk
        fact = rng.choice(facts)
        # Hand-written questions differ more from one another than templates do: show them more often.
        written = known.by_hand[fact.fact_id] if rng.random() < 0.35 else ()
        yield rng.choice(written or fact.training), fact.answer
        if rng.random() < 0.08:
            yield rng.choice(TEMPLATES["more"]), known.by_id[fact.more].answer if fact.more else _NOTHING_MORE
    elif draw < 0.73:
        small_sum = rng.choice(_SUMS)
        yield small_sum.question, small_sum.answer
    elif draw < 0.77:
        yield story_turn(rng)
    elif draw < 0.80:
        yield rhyme_turn(rng)
    else:
        yield unknown_turn(rng)
