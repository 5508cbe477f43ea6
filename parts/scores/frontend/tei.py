"""The routes of text-embeddings-inference: /embed, /predict, /similarity, and / for the task that the model has.

Its /rerank shares its path with another API's, whose handler asks `as_rerank` and `ranked`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from penstock.frontend.api.body import decode, read
from penstock.frontend.api.service import Service
from penstock.frontend.embeddings.embeddings import floats, read_embedding, submit_inputs
from penstock.frontend.embeddings.schema import EmbeddingRequest
from penstock.frontend.errors import InvalidParameter
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.parts.scores.frontend import schema
from penstock.parts.scores.frontend.checks import check_texts, checked, model_of, most_tokens
from penstock.parts.scores.frontend.classes import check_classes, classified, probs_of, submit_classified
from penstock.parts.scores.frontend.pairs import Pairs, num_added, num_prompts, scores_of, submit_pairs


class EmbedRequest(Struct, kw_only=True):
    """POST /embed"""

    model: str | None = None
    inputs: str | list[str | int | list[int]] | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: int | None = None
    encoding_format: str | None = None


class PredictRequest(Struct, kw_only=True):
    """POST /predict"""

    model: str | None = None
    inputs: str | list[str | list[str]] | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None
    parameters: dict[str, Any] | None = None


class Sentences(Struct, frozen=True):
    """What is compared with what."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(Struct, frozen=True):
    """How."""

    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None


class SimilarityRequest(Struct, kw_only=True):
    """POST /similarity"""

    model: str | None = None
    inputs: Sentences | None = None
    parameters: SimilarityParameters = SimilarityParameters()


class TaskRequest(Struct):
    """POST /: what says which task it is for; the rest is as for the task's own route."""

    inputs: Any = None


class Predicted(Struct, frozen=True):
    """The probability of a class."""

    score: float
    label: str


class RankedText(Struct, frozen=True):
    """A text of an answer."""

    index: int
    score: float
    text: str | UnsetType = UNSET


_EMBED = msgspec.json.Decoder(EmbedRequest)
_PREDICT = msgspec.json.Decoder(PredictRequest)
_SIMILARITY = msgspec.json.Decoder(SimilarityRequest)
_TASK = msgspec.json.Decoder(TaskRequest)


async def embed(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """A list with the vector of each text.

    Raises:
        ApiError: if the request fails.
    """
    request, num_bytes = await read(_EMBED, record, body), len(body)
    service = await service.serving(request.model)
    if request.encoding_format not in (None, "float"):
        raise InvalidParameter("encoding_format: vectors are lists of numbers: 'float'", param="encoding_format")
    kept, side = _cut(request.truncate, request.truncation_direction)
    wanted = EmbeddingRequest(
        model=request.model,
        input=_given(request.inputs),
        truncate_prompt_tokens=kept,
        truncation_side=side,
        normalize=request.normalize is not False,
        prompt_name=request.prompt_name,
        dimensions=request.dimensions,
    )
    with await service.admit(record, num_bytes, draws=False) as admission:
        valid = read_embedding(service, admission.rules, wanted)
        admission.hold(valid.common, len(valid.inputs), num_added=valid.num_added)
        run = await submit_inputs(service, record, valid)
    with run:
        await run.answers()
        vectors = run.generation.pooled
        return Reply(await service.model.tokenizer.off_loop(lambda: msgspec.json.encode([*map(floats, vectors)])))


async def predict(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """The classes of each text, the most probable first: a list, or for a batch a list of lists.

    Raises:
        ApiError: if the request fails.
    """
    request, num_bytes = await read(_PREDICT, record, body), len(body)
    service = await service.serving(request.model)
    model = model_of(service)
    check_classes(service)
    texts, is_batch = _predicted(_given(request.inputs))
    kept, side = _cut(request.truncate, request.truncation_direction)
    wanted = schema.ClassifyRequest(
        model=request.model, input=[*texts], truncate_prompt_tokens=kept, truncation_side=side
    )
    with await service.admit(record, num_bytes, draws=False) as admission:
        valid = classified(service, wanted, admission.rules)
        admission.hold(valid.common, len(valid.inputs), num_added=valid.num_added)
        run = await submit_classified(service, record, valid, model)
    with run:
        await run.answers()
        found = [
            sorted(
                (Predicted(each, name) for each, name in zip(probs, service.model.classes, strict=True)),
                key=lambda one: -one.score,
            )
            for probs in probs_of(run, not request.raw_scores, model)
        ]
        return Reply(msgspec.json.encode(found if is_batch else found[0]))


async def similarity(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """A list with the score of the source sentence and each other one.

    Raises:
        ApiError: if the request fails.
    """
    request, num_bytes = await read(_SIMILARITY, record, body), len(body)
    service = await service.serving(request.model)
    model = model_of(service)
    asked = _given(request.inputs)
    kept, side = _cut(request.parameters.truncate, request.parameters.truncation_direction)
    if request.parameters.prompt_name is not None:
        raise InvalidParameter("prompt_name: /embed has it", param="parameters")
    wanted = schema.ScoreRequest(model=request.model, truncate_prompt_tokens=kept, truncation_side=side)
    with await service.admit(record, num_bytes, draws=False) as admission:
        valid = checked(service, wanted, admission.rules, "inputs.sentences")
        if not asked.sentences:
            raise InvalidParameter("inputs.sentences is empty", param="inputs")
        check_texts("inputs.source_sentence", [asked.source_sentence], admission.rules)
        check_texts("inputs.sentences", asked.sentences, admission.rules)
        fields = ("inputs.source_sentence", "inputs.sentences")
        pairs = Pairs([asked.source_sentence], asked.sentences, fields, most_tokens(valid), is_cut=kept is not None)
        admission.hold(valid, num_prompts(pairs, model), num_added=num_added(service, pairs, model))
        run = await submit_pairs(service, record, valid, pairs, model)
    with run:
        await run.answers()
        return Reply(msgspec.json.encode(scores_of(run, pairs, model)))


async def task(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """What the model is for: vectors of texts, their classes, or similarities if the inputs are such.

    Raises:
        ApiError: if the request fails.
    """
    asked = decode(_TASK, body)
    if isinstance(asked.inputs, dict):
        return await similarity(service, record, body)
    return await (predict if service.model.classes else embed)(service, record, body)


def as_rerank(request: schema.RerankRequest) -> bool:
    """Put the fields of this API, if the request has its `texts`, into those of the other one; return whether it has.

    Raises:
        InvalidParameter: both are used.
    """
    of_both = {
        "documents": ("truncate", "truncation_direction", "raw_scores", "return_text"),
        "texts": ("documents", "return_documents", "truncation_side", "truncate_prompt_tokens", "use_activation"),
    }
    has = "documents" if request.texts is None else "texts"
    for name in of_both[has]:
        if getattr(request, name) is not None:
            raise InvalidParameter(f"{name} and {has} are of different APIs", param=name)
    if request.texts is None:
        return False
    kept, side = _cut(request.truncate, request.truncation_direction)
    request.documents = list(request.texts or ())
    request.truncate, request.truncation_side = kept is not None, side
    request.return_documents = bool(request.return_text)
    if request.raw_scores:
        request.use_activation = False
    return True


def ranked(results: Sequence[schema.Ranked]) -> bytes:
    """The answer in this API's form."""
    return msgspec.json.encode(
        [
            RankedText(each.index, each.relevance_score, UNSET if each.document is UNSET else each.document.text)
            for each in results
        ]
    )


def _given(inputs: Any) -> Any:
    if inputs is None:
        raise InvalidParameter("inputs is required", param="inputs")
    return inputs


def _cut(truncate: bool | None, direction: str | None) -> tuple[int | None, str | None]:
    """How many tokens are kept, and which side goes; texts are cut unless the client does not want that."""
    side = None if direction is None else direction.lower()
    if direction is not None and side not in ("left", "right"):
        raise InvalidParameter(
            f"truncation_direction must be 'Left' or 'Right', got {direction[:64]!r}", param="truncation_direction"
        )
    return (None if truncate is False else -1), side


def _predicted(inputs: str | list[str | list[str]]) -> tuple[list[str], bool]:
    """The texts, and whether they are a batch: a list of lists, since a plain list is a pair of texts there."""
    if isinstance(inputs, str):
        return [inputs], False
    texts = [each[0] for each in inputs if isinstance(each, list) and len(each) == 1]
    if len(texts) != len(inputs) or not texts:
        raise InvalidParameter(
            'inputs: a text, or a batch of texts as [["one"], ["another"]]; classes of pairs are not predicted',
            param="inputs",
        )
    return texts, True
