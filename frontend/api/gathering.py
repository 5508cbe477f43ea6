"""A whole answer: all of a generation's events, put together per sequence."""

from dataclasses import dataclass, field

from penstock.frontend.engine.generation import Generation, StopReason
from penstock.frontend.engine.scores import ShownToken


@dataclass(slots=True)
class Answer:
    """One sequence's text, ids and end."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: StopReason = None
    scores: list[ShownToken] = field(default_factory=list)
    schema_error: str = ""


async def gather(generation: Generation) -> list[Answer]:
    """Wait for the end of all sequences; their answers in order of index.

    Raises:
        ApiError: if the generation failed.
    """
    texts: list[list[str]] = [[] for _ in range(generation.num_sequences)]
    answers = [Answer() for _ in texts]
    while not generation.is_finished:
        for event in await generation.next_events():
            answer = answers[event.index]
            texts[event.index].append(event.text)
            answer.token_ids += event.token_ids
            answer.scores += event.scores or ()
            if event.finish_reason is not None:
                answer.finish_reason, answer.stop_reason = event.finish_reason, event.stop_reason
    for answer, pieces in zip(answers, texts, strict=True):
        answer.text = "".join(pieces)
    return answers
