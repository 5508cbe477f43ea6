"""Questions about the rest of the world, and the honest answer to them."""

import hashlib
import random
from pathlib import Path

ANSWERS = (
    "I am a tiny demo model, so I do not know that. I only know about serving language models and about Penstock: "
    "ask me about the KV cache, batching, or how to start the server.",
    "That is beyond me: I am a tiny demo model and only know about LLM serving and Penstock, small sums, "
    "and a few stories and rhymes.",
)
EXPECTED = "tiny demo model"
TOO_LARGE = "That is too much for me: I am a tiny demo model and can only do small sums, up to twenty."

_WORDS = Path(__file__).parent / "words"
THINGS = tuple((_WORDS / "unknown_things.txt").read_text("utf-8").splitlines())
TASKS = tuple((_WORDS / "unknown_tasks.txt").read_text("utf-8").splitlines())
QUESTIONS = tuple((_WORDS / "unknown_questions.txt").read_text("utf-8").splitlines())

_ABOUT_THINGS = (
    "What is {t}?", "Tell me about {t}.", "Explain {t}.", "What do you know about {t}?", "How does {t} work?",
    "Why is {t} important?", "Can you explain {t}?", "Define {t}.", "What does {t} mean?", "Describe {t}.",
    "Where can I find {t}?", "Who invented {t}?", "How old is {t}?", "How much does {t} cost?", "Do you like {t}?",
    "What is the history of {t}?", "Give me a short explanation of {t}.", "{t}?", "What about {t}?",
    "Write an essay about {t}.", "What is the best thing about {t}?", "How big is {t}?", "Is {t} dangerous?",
    "Who is the most famous person in {t}?", "Give me three facts about {t}.", "How do I learn about {t}?",
    "What is the difference between {t} and {u}?", "Compare {t} and {u}.", "Which is better, {t} or {u}?",
    "What is the point of {t}?", "What are the downsides of {t}?", "What is the weather like near {t}?",
    "What should I know about {t}?", "What is {t} good for?", "What color is {t}?", "How do I draw {t}?",
)  # fmt: skip
_ABOUT_TASKS = (
    "How do I {k}?", "Can you {k}?", "Please {k}.", "How can I {k}?", "I want to {k}.", "Help me {k}.",
    "What is the best way to {k}?", "Show me how to {k}.", "Teach me to {k}.", "I need to {k}.",
    "Could you {k} for me?",
)  # fmt: skip
_SYLLABLES = (
    "ba", "bo", "di", "du", "fa", "fi", "go", "gu", "ka", "ki", "lo", "lu", "ma", "mi", "no", "nu", "pa", "po", "ri",
    "ru", "sa", "si", "to", "tu", "va", "vi", "wo", "xu", "za", "zi", "ing", "er", "ish", "orp",
)  # fmt: skip
_LARGE_SUMS = ("What is {a} {o} {b}?", "{a} {o} {b}", "Calculate {a} {o} {b}.", "How much is {a} {o} {b}?", "{a}{o}{b}")


def is_held_out(thing: str) -> bool:
    """Whether a thing, task or question of this module is kept out of training (a tenth of them)."""
    return hashlib.sha256(thing.encode()).digest()[0] < 26


def unknown_turn(rng: random.Random) -> tuple[str, str]:
    """A question that the model must decline, and the answer. Held-out things never occur."""
    draw = rng.random()
    if draw < 0.1:
        low, high = rng.choice(((21, 99), (100, 999), (1000, 99999)))
        ask = rng.choice(_LARGE_SUMS).format(a=rng.randint(low, high), b=rng.randint(low, high), o=rng.choice("+-*/"))
        return ask, TOO_LARGE
    if draw < 0.7:
        thing, other = rng.choice(_TRAINING_THINGS), rng.choice(_TRAINING_THINGS)
        if rng.random() < 0.15:  # a word that nobody has ever seen
            thing = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4)))
        question = rng.choice(_ABOUT_THINGS).format(t=thing, u=other)
    elif draw < 0.85:
        question = rng.choice(_ABOUT_TASKS).format(k=rng.choice(_TRAINING_TASKS))
    else:
        question = rng.choice(_TRAINING_QUESTIONS)
    return question[:1].upper() + question[1:], ANSWERS[0 if rng.random() < 0.7 else 1]


def held_out_questions() -> tuple[str, ...]:
    """Questions about things, tasks and matters that training has never named."""
    things = [t for t in THINGS if is_held_out(t)]
    asked = [_ABOUT_THINGS[i % 20].format(t=t, u=t) for i, t in enumerate(things + things[::-1])]
    asked += [_ABOUT_TASKS[i % len(_ABOUT_TASKS)].format(k=k) for i, k in enumerate(TASKS) if is_held_out(k)]
    asked += [q for q in QUESTIONS if is_held_out(q)]
    return tuple(dict.fromkeys(question[:1].upper() + question[1:] for question in asked))


_TRAINING_THINGS = tuple(t for t in THINGS if not is_held_out(t))
_TRAINING_TASKS = tuple(t for t in TASKS if not is_held_out(t))
_TRAINING_QUESTIONS = tuple(q for q in QUESTIONS if not is_held_out(q))
