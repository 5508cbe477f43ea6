"""What the answers of several ranks mean together."""

from collections.abc import Iterable
from operator import attrgetter

from msgspec.structs import replace

from penstock.core.scheduling.answers import FromAll
from penstock.parts.images.messages import ImageEncoded
from tests.core.driver import hello, make_limits


def heard(answers: FromAll, said: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """What a group of two ranks answers to what they say, one after the other: of which embedding, and the error."""
    rank = replace(hello(make_limits()), num_ranks=2)
    told = (answers.take(rank, ImageEncoded(embedding_id, error=error)) for embedding_id, error in said)
    return [(answer.embedding_id, answer.error) for answer in told if isinstance(answer, ImageEncoded)]


def in_order() -> FromAll:
    return FromAll(attrgetter("embedding_id"), is_in_order=True)


def test_all_must_answer() -> None:
    assert heard(in_order(), [(1, ""), (2, ""), (1, ""), (2, "")]) == [(1, ""), (2, "")]


def test_an_error_counts_at_once_and_only_once() -> None:
    answers = in_order()
    assert heard(answers, [(1, "bad"), (1, "bad")]) == [(1, "bad")]
    assert not answers._answers
    assert not answers._failed


def test_an_error_of_a_rank_that_is_ahead_does_not_end_what_the_other_has_yet_to_answer() -> None:
    assert heard(in_order(), [(1, ""), (2, "bad"), (1, ""), (2, "")]) == [(2, "bad"), (1, "")]


def test_what_a_rank_skipped_is_forgotten_once_all_are_behind_it() -> None:
    answers = in_order()
    assert heard(answers, [(1, ""), (2, ""), (2, "")]) == [(2, "")]
    assert not answers._answers
