"""Facts with their phrasings, read from `facts/*.toml`; a tenth of the phrasings is held out of training.

Format of the files, one per topic:

    [[subject]]   names = [...], and answers what/why/how/downside; ask.<kind> = further questions
    [[howto]]     names = verb phrases, answer, ask
    [[support]]   names = what somebody may want to use, answer, ask
    [[size]]      names = models whose hardware is asked about, answer, ask
    [[flag]]      name, answer, ask           [[endpoint]]  the same
    [[compare]]   pair = [[names], [names]], answer
    [[free]]      ask = [...], answer

In an answer the words between two asterisks are the expected fact. The asterisks are not shown.
"""

import hashlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock.demo.newcomers import newcomers_keys
from penstock.demo.phrasings import TEMPLATES, capitalized, fill, normalized

FACTS_DIR = Path(__file__).parent / "facts"
HELD_OUT_SHARE = 10  # one phrasing in ten
_SUBJECT_KINDS = ("what", "why", "how", "downside")


@dataclass(frozen=True, slots=True)
class Fact:
    """One answer and all the questions that it answers."""

    fact_id: str
    topic: str
    answer: str
    expected: str  # lower case; a right answer contains it
    training: tuple[str, ...]
    held_out: tuple[str, ...]
    written: frozenset[str]  # those of both that were written by hand, not made from a template
    more: str = ""  # another fact about the same thing, for "tell me more"


@cache
def load_facts(folder: Path = FACTS_DIR) -> tuple[Fact, ...]:
    """All facts, in the order of the files' names.

    Raises:
        ValueError: if two facts answer the same question, or an answer marks no expected words.
    """
    taken: dict[str, str] = {}
    facts: list[Fact] = []
    for path in sorted(folder.glob("*.toml")):
        for entry in _entries(tomllib.loads(path.read_text("utf-8"))):
            facts.append(_fact(path.stem, entry, taken))
    known = {fact.fact_id for fact in facts}
    if len(known) != len(facts):
        raise ValueError("two facts have the same id")
    return tuple(facts)


def topics() -> tuple[str, ...]:
    """The names of the files, in order."""
    return tuple(sorted(path.stem for path in FACTS_DIR.glob("*.toml")))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One fact as written in a file, its templates filled in."""

    name: str
    answer: str
    templated: list[str]
    written: list[str]
    more: str = ""


def _fact(topic: str, entry: _Entry, taken: dict[str, str]) -> Fact:
    fact_id, answer = f"{topic}/{entry.name}", entry.answer
    parts = answer.split("*")
    if len(parts) != 3 or not parts[1].strip():
        raise ValueError(f"{fact_id}: mark the expected words with two asterisks")
    unique: dict[str, str] = {}
    for question in entry.templated + entry.written:
        if normalized(question) not in newcomers_keys():
            unique.setdefault(normalized(question), question)
    for key in unique:
        if key in taken:
            raise ValueError(f"{fact_id} and {taken[key]} both answer {key!r}")
        taken[key] = fact_id
    ranked = sorted(unique.values(), key=lambda q: hashlib.sha256(f"{fact_id}|{q}".encode()).digest())
    count = max(1, round(len(ranked) / HELD_OUT_SHARE))
    return Fact(
        fact_id=fact_id,
        topic=topic,
        answer="".join(parts),
        expected=parts[1].lower(),
        training=tuple(sorted(ranked[count:])),
        held_out=tuple(sorted(ranked[:count])),
        written=frozenset(entry.written) & frozenset(unique.values()),
        more=f"{topic}/{entry.more}" if entry.more else "",
    )


def _entries(tables: dict[str, Any]) -> Iterator[_Entry]:
    for subject in tables.get("subject", ()):
        yield from _subject(subject)
    for kind in ("howto", "support", "size", "flag", "endpoint"):
        for table in tables.get(kind, ()):
            names = table.get("names") or [table["name"]]
            asked = [fill(template, name) for name in names for template in TEMPLATES[kind]]
            yield _Entry(f"{kind} {names[0]}", table["answer"], asked, table.get("ask", []))
    for table in tables.get("compare", ()):
        left, right = table["pair"]
        pairs = [(a, b) for a in left for b in right] + [(b, a) for a in left for b in right]
        asked = [capitalized(t.format(a=a, b=b)) for a, b in pairs for t in TEMPLATES["compare"]]
        yield _Entry(f"{left[0]} and {right[0]}", table["answer"], asked, table.get("ask", []))
    for table in tables.get("free", ()):
        yield _Entry(normalized(table["ask"][0]), table["answer"], [], table["ask"])


def _subject(subject: dict[str, Any]) -> Iterator[_Entry]:
    names: list[str] = subject["names"]
    present = [kind for kind in _SUBJECT_KINDS if kind in subject]
    for place, kind in enumerate(present):
        # "Why" and "how" fall back to the definition where nothing better is written; "downside" does not.
        asked_as = [kind] if kind != "what" else ["what", *(k for k in ("why", "how") if k not in subject)]
        templated = [fill(template, name) for k in asked_as for name in names for template in TEMPLATES[k]]
        written: list[str] = [q for k in asked_as for q in subject.get("ask", {}).get(k, [])]
        following = f"{names[0]} {present[place + 1]}" if place + 1 < len(present) else ""
        yield _Entry(f"{names[0]} {kind}", subject[kind], templated, written, following)
