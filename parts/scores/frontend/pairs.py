"""Pairs of texts to prompts, and what comes back to scores. A score needs one prompt, or for cosines one per text."""

import math
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.frontend.api.run import Run, submit
from penstock.frontend.api.service import Service
from penstock.frontend.embeddings.embeddings import floats
from penstock.frontend.embeddings.prompts import as_tokenized, same_prompt
from penstock.frontend.errors import ContextLengthExceeded, InvalidParameter, NotGenerated
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.validation.common import ValidRequest
from penstock.ipc.messages import Pooling
from penstock.parts.scores.frontend.model import Asking, ScoreModel, activated

_MOST_BODIES = 4
"""All pairs together, in which a query is repeated for each document, are at most so many times the largest body."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """What is to be scored."""

    firsts: list[str]  # queries: one for each second text, or one for all
    seconds: list[str]  # documents
    fields: tuple[str, str]  # what requests call the two
    most: int  # tokens of a pair, or of a text whose cosine is asked for
    is_cut: bool  # whether longer ones are cut, or refused
    most_of_second: int = 0  # tokens; 0: as many as there is room for
    instruction: str | None = None
    are_searched: bool = False  # firsts are queries and seconds documents: a model may have prompts for each
    is_activated: bool = True

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def num_chars(self) -> int:
        """Characters of all pairs, and of what is repeated in each."""
        of_firsts = sum(map(len, self.firsts)) * (len(self) if len(self.firsts) == 1 else 1)
        return of_firsts + sum(map(len, self.seconds)) + len(self) * len(self.instruction or "")

    def each(self) -> list[tuple[str, str]]:
        """The pairs."""
        firsts = self.firsts * (len(self.seconds) if len(self.firsts) == 1 else 1)
        return [*zip(firsts, self.seconds, strict=True)]


def num_prompts(pairs: Pairs, model: ScoreModel) -> int:
    """How many prompts the pairs become."""
    return len(pairs.firsts) + len(pairs.seconds) if model.kind == "cosine" else len(pairs)


def num_added(service: Service, pairs: Pairs, model: ScoreModel) -> int:
    """Return the most tokens that all prompts together have beyond the body's bytes: what each of them repeats."""
    if model.kind == "cosine":
        sides = zip(_prompts_of(service, pairs), (pairs.firsts, pairs.seconds), strict=True)
        return sum(len(prompt.encode()) * len(side) for prompt, side in sides)
    added = sum(service.model.tokenizer.added)
    if model.asking is not None:
        template = model.asking.template
        instruction = template.instruction if pairs.instruction is None else pairs.instruction
        added = len(model.asking.before) + len(model.asking.behind) + len((template.pair + instruction).encode())
    repeated = len(pairs.firsts[0].encode()) if len(pairs.firsts) == 1 else 0
    return len(pairs) * (added + repeated)


async def submit_pairs(
    service: Service, record: RequestRecord, valid: ValidRequest, pairs: Pairs, model: ScoreModel
) -> Run:
    """Make prompts of pairs, and send them to the engine.

    Raises:
        NotGenerated: the model sorts texts into several classes, and scores nothing.
        InvalidParameter: many pairs repeat too long a text.
        ApiError: a text cannot be tokenized; or as `submit`.
    """
    if model.kind == "none":
        raise NotGenerated(
            f"the served model, {service.model.names[0]}, sorts texts into {len(service.model.classes)} classes, and "
            "scores no pairs: POST /classify does what it can"
        )
    if model.kind == "cosine":
        kind = service.model.embeddings
        prompts = await _texts(service, record, pairs)
        poolings = [Pooling(kind.kind)] * len(prompts)
    elif pairs.num_chars > (most := _MOST_BODIES * service.max_body_bytes):
        raise InvalidParameter(
            f"{len(pairs)} pairs have {pairs.num_chars} characters, with what each of them repeats; at most {most} are "
            "read",
            param=pairs.fields[1],
        )
    elif model.asking is not None:
        prompts = await _asked(service, record, pairs, model.asking)
        poolings = [model.pooling] * len(prompts)
    else:
        encoded = await service.prompts.encode_pairs(
            pairs.each(),
            record.tenant,
            field=valid.prompt_field,
            most=pairs.most if pairs.is_cut else 0,
            most_of_second=pairs.most_of_second,
        )
        prompts = [ids for ids, _ in encoded]
        poolings = [replace(model.pooling, second_from=second_from) for _, second_from in encoded]
    _check_lengths(prompts, pairs, valid.prompt_field)
    return await submit(service, record, valid, prompts, is_prompt_only=True, poolings=poolings)


def scores_of(run: Run, pairs: Pairs, model: ScoreModel) -> list[float]:
    """The score of each pair, once all vectors have come.

    Raises:
        InvalidLogits: some are not finite numbers.
    """
    vectors = [floats(vector) for vector in run.generation.pooled]
    if model.kind == "cosine":
        firsts, seconds = vectors[: len(pairs.firsts)], vectors[len(pairs.firsts) :]
        firsts *= len(seconds) if len(firsts) == 1 else 1
        return [math.fsum(a * b for a, b in zip(*pair, strict=True)) for pair in zip(firsts, seconds, strict=True)]
    if model.kind == "tokens":  # no and yes
        return [activated(logits, "softmax")[1] if pairs.is_activated else logits[1] - logits[0] for logits in vectors]
    return [activated(logits, model.score if pairs.is_activated else "identity")[0] for logits in vectors]


async def _texts(service: Service, record: RequestRecord, pairs: Pairs) -> list[list[int]]:
    """The prompts of all texts by themselves: the firsts, then the seconds."""
    kind = service.model.embeddings
    prompts: list[list[int]] = []
    for prompt, side, field in zip(
        _prompts_of(service, pairs), (pairs.firsts, pairs.seconds), pairs.fields, strict=True
    ):
        texts = [as_tokenized(text, prompt, kind) for text in side]
        prompts += await service.prompts.encode_inputs(texts, record.tenant, field=field, add_special_tokens=True)
    added = service.model.tokenizer.added
    mosts = [pairs.most] * len(pairs.firsts)
    mosts += [min(pairs.most, pairs.most_of_second or pairs.most)] * len(pairs.seconds)
    if not pairs.is_cut:
        return prompts
    return [_cut(prompt, most, added) for prompt, most in zip(prompts, mosts, strict=True)]


def _prompts_of(service: Service, pairs: Pairs) -> list[str]:
    """What goes before the firsts and the seconds."""
    kind = service.model.embeddings
    usual = kind.prompts.get(kind.default_prompt, "")
    if not pairs.are_searched:
        return [usual, usual]
    found = [same_prompt(name, kind) for name in ("query", "document")]
    return [usual if prompt is None else prompt for prompt in found]


def _cut(prompt: list[int], most: int, added: tuple[int, int]) -> list[int]:
    """The start of a prompt, with the special tokens at its end."""
    if len(prompt) <= most:
        return prompt
    behind = added[1] if added[1] < most else 0
    return [*prompt[: most - behind], *prompt[len(prompt) - behind :]]


async def _asked(service: Service, record: RequestRecord, pairs: Pairs, asking: Asking) -> list[list[int]]:
    """The prompts of a template. What clients write is plain text, whatever special tokens it spells."""
    template = asking.template
    instruction = template.instruction if pairs.instruction is None else pairs.instruction
    texts = [template.pair.format(instruction=instruction, query=one, document=two) for one, two in pairs.each()]
    # A space before a document is mostly part of its first token, and by itself would be one more.
    heads = [template.pair.format(instruction=instruction, query=one, document="").rstrip() for one in pairs.firsts]
    found = await service.prompts.encode_plain([*texts, *heads], record.tenant, field="documents")
    encoded, of_heads = found[: len(texts)], found[len(texts) :]
    of_heads *= len(texts) if len(of_heads) == 1 else 1
    prompts = []
    for ids, head in zip(encoded, of_heads, strict=True):
        most = pairs.most - len(asking.before) - len(asking.behind) if pairs.is_cut else len(ids)
        if pairs.most_of_second:
            most = min(most, len(head) + pairs.most_of_second)
        prompts.append([*asking.before, *ids[: max(1, most)], *asking.behind])
    return prompts


def _check_lengths(prompts: list[list[int]], pairs: Pairs, field: str) -> None:
    longest = max(map(len, prompts))
    if longest > pairs.most:
        raise ContextLengthExceeded(
            f"the model takes {pairs.most} tokens, {field} has {longest}; truncate_prompt_tokens cuts it", param=field
        )
