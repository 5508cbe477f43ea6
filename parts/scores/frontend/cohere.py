"""POST /v1/embed and /v2/embed: vectors, as Cohere's clients ask for them."""

import base64
from array import array
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from penstock.frontend.api.body import read
from penstock.frontend.api.service import Service
from penstock.frontend.embeddings.embeddings import Vectors, floats, read_embedding, submit_inputs
from penstock.frontend.embeddings.schema import EmbeddingRequest
from penstock.frontend.errors import InvalidParameter, UnsupportedParameter
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.schema import Unsupported
from penstock.frontend.validation.common import refuse_unsupported
from penstock.parts.scores.frontend.checks import id_of

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
_SIDES = {"END": "right", "START": "left"}
"""Which side of a text goes."""


class Content(Struct, frozen=True):
    """A piece of an input."""

    type: str
    text: str | None = None


class Input(Struct, frozen=True):
    """An input of pieces, which are put together."""

    content: list[Content]


class CohereEmbedRequest(Struct, kw_only=True):
    """POST /v1/embed, /v2/embed"""

    model: str | None = None
    texts: list[str] | None = None
    inputs: list[Input] | None = None
    input_type: str | None = None
    embedding_types: list[str] | None = None
    output_dimension: int | None = None
    max_tokens: int | None = None
    truncate: str | None = None
    priority: int | None = None
    images: Unsupported = None


class ByType(Struct, frozen=True, omit_defaults=True):
    """The vectors of all texts, in each form that was asked for."""

    floats: list[list[float]] | None = field(default=None, name="float")
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class _ApiVersion(Struct, frozen=True):
    version: str


class _BilledUnits(Struct, frozen=True):
    input_tokens: int


class EmbedMeta(Struct, frozen=True):
    """What the clients read."""

    api_version: _ApiVersion
    billed_units: _BilledUnits


class CohereEmbeddings(Struct, frozen=True):
    """The answer."""

    id: str
    embeddings: list[list[float]] | ByType
    texts: list[str]
    meta: EmbedMeta
    response_type: Literal["embeddings_floats", "embeddings_by_type"] | UnsetType = UNSET


_EMBED = msgspec.json.Decoder(CohereEmbedRequest)


async def embed_v1(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """Vectors as lists of numbers, or by their types if the request names some.

    Raises:
        ApiError: if the request fails.
    """
    return await _embed(service, record, body, version="1")


async def embed_v2(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """Vectors by their types.

    Raises:
        ApiError: if the request fails.
    """
    return await _embed(service, record, body, version="2")


async def _embed(service: Service, record: RequestRecord, body: bytes, *, version: str) -> Reply:
    request, num_bytes = await read(_EMBED, record, body), len(body)
    service = await service.serving(request.model)
    with await service.admit(record, num_bytes, draws=False) as admission:
        refuse_unsupported(request)
        types = _types(request)
        texts = _texts(request)
        valid = read_embedding(service, admission.rules, _as_embedding(request, texts))
        admission.hold(valid.common, len(valid.inputs), num_added=valid.num_added)
        run = await submit_inputs(service, record, valid)
    with run:
        await run.answers()
        used = await run.final_usage()
        meta = EmbedMeta(_ApiVersion(version), _BilledUnits(used.prompt_tokens))
        is_by_type = version != "1" or request.embedding_types is not None
        kind: Any = UNSET if version != "1" else "embeddings_by_type" if is_by_type else "embeddings_floats"
        vectors = run.generation.pooled

        def written() -> bytes:
            found = _by_type(vectors, types)
            shown = found if is_by_type else found.floats or []
            return msgspec.json.encode(CohereEmbeddings(id_of("embed", record), shown, texts, meta, kind))

        return Reply(await service.model.tokenizer.off_loop(written))


def _types(request: CohereEmbedRequest) -> list[str]:
    types = request.embedding_types or ["float"]
    known = EmbeddingType.__args__  # type: ignore[attr-defined]
    for name in types:
        if name in ("int8", "uint8"):
            raise UnsupportedParameter(
                f"embedding_types: {name} needs the ranges of the model's numbers, which checkpoints do not have; "
                f"supported: {', '.join(known)}",
                param="embedding_types",
            )
        if name not in known:
            raise InvalidParameter(
                f"embedding_types must be of {', '.join(known)}, got {name[:64]!r}", param="embedding_types"
            )
    return types


def _texts(request: CohereEmbedRequest) -> list[str]:
    if (request.texts is None) == (request.inputs is None):
        raise InvalidParameter("one of texts and inputs is required", param="texts")
    if request.inputs is None:
        return request.texts or []
    for index, each in enumerate(request.inputs):
        for piece in each.content:
            if piece.type != "text" or piece.text is None:
                raise UnsupportedParameter(
                    f"inputs[{index}]: only pieces of the type 'text' become vectors here", param="inputs"
                )
    return ["".join(piece.text or "" for piece in each.content) for each in request.inputs]


def _as_embedding(request: CohereEmbedRequest, texts: list[str]) -> EmbeddingRequest:
    side = request.truncate or "END"
    if side != "NONE" and side not in _SIDES:
        raise InvalidParameter(f"truncate must be NONE, START or END, got {side[:64]!r}", param="truncate")
    kept = None if side == "NONE" else -1 if request.max_tokens is None else request.max_tokens
    return EmbeddingRequest(
        model=request.model,
        input=[*texts],
        input_type=request.input_type,
        dimensions=request.output_dimension,
        priority=request.priority,
        truncate_prompt_tokens=kept,
        truncation_side=_SIDES.get(side),
    )


def _by_type(vectors: Vectors, types: list[str]) -> ByType:
    numbers = [floats(vector) for vector in vectors]
    bits = [_packed(each) for each in numbers] if {"binary", "ubinary"} & {*types} else []
    return ByType(
        floats=numbers if "float" in types else None,
        base64=[base64.b64encode(array("f", each).tobytes()).decode() for each in numbers]
        if "base64" in types
        else None,
        binary=[[byte - 128 for byte in each] for each in bits] if "binary" in types else None,
        ubinary=[[*each] for each in bits] if "ubinary" in types else None,
    )


def _packed(numbers: list[float]) -> bytes:
    """A bit for each number that is positive, the first one highest; zeros fill the last byte."""
    found = bytearray((len(numbers) + 7) // 8)
    for index, number in enumerate(numbers):
        if number > 0:
            found[index >> 3] |= 0x80 >> (index & 7)
    return bytes(found)
