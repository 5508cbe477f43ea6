"""The text that the demo model learns: repeatable, true to the program, and free of what is held out."""

import itertools
import random
import re

import pytest

from penstock.config.flags import flags
from penstock.config.step_limits import StepLimits
from penstock.demo.arithmetic import small_sums
from penstock.demo.corpus import conversations, held_out_keys
from penstock.demo.facts import load_facts
from penstock.demo.grammar import held_out_requests
from penstock.demo.newcomers import newcomers_questions
from penstock.demo.phrasings import TEMPLATES, fill, is_plural, noisy, normalized
from penstock.demo.unknown import held_out_questions, unknown_turn
from penstock.frontend.http.routes import ROUTES

FACTS = load_facts()
OTHER_COMMANDS = {"--help", "--gpu", "--format", "--build", "--detach", "--wait"}  # plan, quantize, docker compose


def test_there_are_enough_facts_and_phrasings() -> None:
    assert len(FACTS) >= 250
    assert min(len(fact.training) for fact in FACTS) >= 7
    assert all(fact.held_out and fact.expected in fact.answer.lower() for fact in FACTS)
    phrasings = sum(len(fact.training) + len(fact.held_out) for fact in FACTS)
    assert sum(len(fact.held_out) for fact in FACTS) == pytest.approx(phrasings / 10, rel=0.15)
    known = {fact.fact_id for fact in FACTS}
    assert all(fact.more in known for fact in FACTS if fact.more)


def test_a_seed_fixes_the_conversations() -> None:
    first = list(itertools.islice(conversations(3), 300))
    assert first == list(itertools.islice(conversations(3), 300))
    assert first != list(itertools.islice(conversations(4), 300))


def test_a_stressed_topic_is_in_half_of_the_facts() -> None:
    topic_of = {fact.answer: fact.topic for fact in FACTS}

    def share(stressed: tuple[str, ...]) -> float:
        answers = [m["content"] for c in itertools.islice(conversations(1, stressed), 1500) for m in c[1::2]]
        told = [topic_of[answer] for answer in answers if answer in topic_of]
        return told.count("models") / len(told)

    assert share(()) < 0.2
    assert 0.4 < share(("models",)) < 0.65


def test_held_out_questions_are_never_trained() -> None:
    held_out = held_out_keys()
    held_out |= {normalized(question) for question, _ in held_out_requests()}
    held_out |= {normalized(question) for question in held_out_questions()}
    held_out |= {normalized(s.question) for s in small_sums() if s.held_out}
    trained = {normalized(question) for fact in FACTS for question in fact.training}
    assert not trained & held_out
    asked = [m["content"] for c in itertools.islice(conversations(0), 6000) for m in c if m["role"] == "user"]
    assert not [text for text in asked if normalized(text) in held_out]


def test_newcomers_questions_are_never_trained_but_can_be_answered() -> None:
    keys = {normalized(question) for question, _ in newcomers_questions()}
    assert len(keys) == len(newcomers_questions()) >= 40
    assert not keys & {normalized(question) for fact in FACTS for question in (*fact.training, *fact.held_out)}
    assert keys <= held_out_keys()
    answers = [fact.answer.lower() for fact in FACTS]
    assert not [words for _, words in newcomers_questions() if not any(words in answer for answer in answers)]


def test_unknown_questions_never_name_held_out_things() -> None:
    rng = random.Random(0)
    asked = {normalized(unknown_turn(rng)[0]) for _ in range(5000)}
    assert not asked & {normalized(question) for question in held_out_questions()}
    assert len(held_out_questions()) > 40


def test_every_flag_and_endpoint_that_is_named_exists() -> None:
    known = {flag.name for flag in flags()} | {"--no-enable-prefix-caching"} | OTHER_COMMANDS
    told = {name for fact in FACTS for name in re.findall(r"--[a-z][a-z-]+", fact.answer)}
    assert told - known == set()
    assert len(told) > 25
    routes = {route.path for route in ROUTES}
    endpoints = {fact.fact_id.split()[-1] for fact in FACTS if fact.fact_id.startswith("flags/endpoint")}
    assert endpoints <= routes
    assert len(endpoints) >= 7


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--max-num-seqs", "the default is {}"),
        ("--page-size", "the default is {}"),
        ("--max-num-batched-tokens", "{} by default"),
        ("--max-num-queued-seqs", "{} by default"),
        ("--gpu-memory-utilization", "the default is {}"),
        ("--port", "{} by default"),
        ("--host", "{} by default"),
    ],
)
def test_defaults_are_told_as_they_are(flag: str, told: str) -> None:
    [default] = [known.default or StepLimits()._asdict()[known.field] for known in flags() if known.name == flag]
    [fact] = [fact for fact in FACTS if fact.fact_id == f"flags/flag {flag}"]
    assert told.format(default) in fact.answer.lower()


def test_names_agree_with_their_verbs() -> None:
    assert fill("What {is} {s}?", "logits") == "What are logits?"
    assert fill("How {does} {s} work?", "the KV cache") == "How does the KV cache work?"
    assert fill("{Is} {s} supported?", "GGUF models") == "Are GGUF models supported?"
    assert fill("{Does} {s} work?", "LoRA") == "Does LoRA work?"
    assert fill("{s}?", "a page") == "A page?"
    assert not is_plural("tensor parallelism")
    assert is_plural("CUDA graphs")


def test_noise_keeps_a_question_readable() -> None:
    rng = random.Random(1)
    question = "What is the KV cache?"
    typed = {noisy(question, rng) for _ in range(400)}
    assert question in typed
    assert question.lower().rstrip("?") in typed
    assert len(typed) > 50
    assert all(len(text) < len(question) + 40 for text in typed)


def test_templates_are_distinct() -> None:
    for kind, templates in TEMPLATES.items():
        assert len(set(templates)) == len(templates), kind
        assert len(templates) >= 10
