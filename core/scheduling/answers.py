"""How the answers of several ranks to one order become the group's.

Each kind of message has its own `Answers`: which of a rank's messages count, and when all have come.
"""

from collections.abc import Callable, Collection, Hashable
from typing import Any

from penstock.ipc.messages import Message, WorkerHello


class Answers:
    """One kind of message that workers send. This one takes every rank's, each by itself, even before all are there."""

    needs_group = False
    """Whether answers count only while all ranks are there."""

    def take(self, rank: WorkerHello, message: Any) -> Message | None:
        """A rank has sent this; return what the group answers, once that is known."""
        answer: Message = message
        return answer

    def clear(self) -> None:
        """The group is a new one: what the old one was asked is forgotten."""


class FromOne(Answers):
    """What counts is what the rank says that answers for its group."""

    needs_group = True

    def take(self, rank: WorkerHello, message: Any) -> Message | None:
        answer: Message = message
        return answer if rank.answers else None


class FromAll(Answers):
    """Each rank answers each order, and the last answer counts for all."""

    needs_group = True

    def __init__(
        self,
        key: Callable[[Any], Hashable],
        together: Callable[[Collection[Any]], Message] | None = None,
        *,
        ends_at_error: bool = True,
        is_in_order: bool = False,
    ) -> None:
        """
        Args:
            key: tells which order a message answers.
            together: makes one answer of all; None: the last one is as good as any.
            ends_at_error: whether an answer with an error counts at once, and those that come later do not.
            is_in_order: whether each rank answers by rising keys, and may leave out some.
        """
        self._key = key
        self._together = together
        self._ends_at_error = ends_at_error
        self._is_in_order = is_in_order
        self._answers: dict[Any, list[Any]] = {}
        self._failed: set[Hashable] = set()

    def take(self, rank: WorkerHello, message: Any) -> Message | None:
        key = self._key(message)
        answers = self._answers.setdefault(key, [])
        answers.append(message)
        is_known = key in self._failed
        fails = self._ends_at_error and bool(message.error)
        if fails:
            self._failed.add(key)
        is_last = len(answers) == rank.num_ranks
        if is_last:
            del self._answers[key]
            self._failed.discard(key)
            if self._is_in_order:  # no rank answers for lower keys any more
                self._answers = {its: who for its, who in self._answers.items() if its > key}
                self._failed.intersection_update(self._answers)
        if is_known or not (fails or is_last):
            return None
        answer: Message = message if fails or self._together is None else self._together(answers)
        return answer

    def clear(self) -> None:
        self._answers.clear()
        self._failed.clear()


Heard = tuple[tuple[type[Message], Callable[[], Answers]], ...]
"""The workers' messages that are a part's, and how those of several ranks become one."""
