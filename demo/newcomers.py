"""Questions as newcomers ask them: one of each, held out of training whole."""

import tomllib
from functools import cache
from pathlib import Path

from penstock.demo.phrasings import normalized

_PATH = Path(__file__).parent / "words" / "newcomers.toml"


@cache
def newcomers_questions() -> tuple[tuple[str, str], ...]:
    """Each question, with the lower-case words that a right answer contains."""
    tables = tomllib.loads(_PATH.read_text("utf-8"))["question"]
    return tuple((table["ask"], table["expected"]) for table in tables)


@cache
def newcomers_keys() -> frozenset[str]:
    """The questions, normalized: what no training conversation may contain."""
    return frozenset(normalized(question) for question, _ in newcomers_questions())
