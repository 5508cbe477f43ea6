"""Conversations whose questions training never saw, with the answers that a perfect pupil gives."""

import random
from collections.abc import Iterator

from penstock.demo.arithmetic import small_sums
from penstock.demo.chatml import ChatMessage
from penstock.demo.facts import load_facts
from penstock.demo.grammar import HEROES, RHYMES, held_out_requests, story
from penstock.demo.unknown import ANSWERS, held_out_questions


def held_out_conversations(seed: int, most_turns: int = 8) -> Iterator[list[ChatMessage]]:
    """Endless conversations of one turn or more, of all topics in the shares in which `corpus.py` draws them."""
    rng = random.Random(seed)
    facts = [(question, fact.answer) for fact in load_facts() for question in fact.held_out]
    sums = [(each.question, each.answer) for each in small_sums() if each.held_out]
    unknown = [(question, ANSWERS[0]) for question in held_out_questions()]
    requests = [request for request, _ in held_out_requests()]
    while True:
        messages: list[ChatMessage] = []
        for _ in range(rng.randint(1, most_turns)):
            kind = rng.choices(("fact", "sum", "unknown", "rhyme", "story"), weights=(66, 7, 20, 3, 4))[0]
            if kind == "story":
                number = rng.randrange(len(HEROES))
                question, answer = requests[number], story(HEROES[number], rng)
            elif kind == "rhyme":
                number = rng.randrange(len(RHYMES))
                question, answer = requests[len(HEROES) + number], tuple(RHYMES.values())[number]
            else:
                question, answer = rng.choice({"fact": facts, "sum": sums, "unknown": unknown}[kind])
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        yield messages
