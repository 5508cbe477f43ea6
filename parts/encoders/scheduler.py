"""Texts that are computed whole, because all of their positions see each other."""

from typing import TYPE_CHECKING, Self

from penstock.core.scheduling.part import SchedulerPart
from penstock.core.sequences.intake import Refusal
from penstock.core.sequences.limits import WorkerLimits
from penstock.core.sequences.sequence import Request, Sequence

if TYPE_CHECKING:
    from penstock.core.scheduling.scheduler import Scheduler


class WholeTexts(SchedulerPart):
    """For encoders: a text has a single chunk, which waits for a step with enough room."""

    __slots__ = ("_limits",)

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits

    @classmethod
    def of(cls, scheduler: "Scheduler", before: Self | None) -> Self | None:
        return cls(scheduler.limits) if scheduler.limits.texts_are_whole else None

    def accepts(self, request: Request) -> Refusal | None:
        if request.sampling.pooling is None:
            return Refusal("internal", "this model turns texts into vectors or classes, and generates no text")
        most = self._limits.max_num_batched_tokens
        if request.num_prompt_tokens > most:
            return Refusal(
                "too_long",
                f"the text has {request.num_prompt_tokens} tokens, which this model computes at once; a step has "
                f"{most} (--max-num-batched-tokens)",
            )
        return None

    def chunk_end(self, seq: Sequence, start: int, end: int, most: int) -> int:
        return seq.num_tokens if seq.num_tokens <= most else start


PARTS = (WholeTexts,)
