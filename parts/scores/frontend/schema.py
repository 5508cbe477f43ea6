"""Bodies and answers of the routes, as the clients of Cohere, Jina and vLLM know them."""

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from penstock.frontend.embeddings.schema import EmbeddingUsage
from penstock.frontend.schema import Unsupported


class Document(Struct, frozen=True):
    """A document of a request; it may also be a plain text."""

    text: str


class _Common(Struct, kw_only=True):
    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_bill: bool | None = None
    mm_processor_kwargs: Unsupported = None


class RerankRequest(_Common, kw_only=True):
    """POST /v1/rerank, /v2/rerank"""

    query: str | None = None
    documents: list[str | Document] | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None  # for models that are asked with a template
    use_activation: bool | None = None
    rank_fields: Unsupported = None
    max_chunks_per_doc: Unsupported = None
    texts: list[str] | None = None  # documents, as text-embeddings-inference calls them, with the fields below
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None


class ScoreRequest(_Common, kw_only=True):
    """POST /v1/score; the texts have several names, as in releases of vLLM."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    instruction: str | None = None
    use_activation: bool | None = None
    encoding_format: str | None = None


class ClassifyRequest(_Common, kw_only=True):
    """POST /v1/classify"""

    input: str | list[str | int | list[int]] | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    messages: Unsupported = None


class PoolingRequest(_Common, kw_only=True):
    """POST /pooling"""

    input: str | list[str | int | list[int]] | None = None
    task: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    messages: Unsupported = None


class Ranked(Struct, frozen=True):
    """A document of an answer."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class _ApiVersion(Struct, frozen=True):
    version: str = "2"


class _BilledUnits(Struct, frozen=True):
    search_units: int = 1


class Meta(Struct, frozen=True):
    """What Cohere's clients read."""

    api_version: _ApiVersion = _ApiVersion()
    billed_units: _BilledUnits = _BilledUnits()


class Ranking(Struct, frozen=True):
    """The documents, the most relevant first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[Ranked]
    meta: Meta = Meta()
    object: Literal["list"] = "list"


class Scored(Struct, frozen=True):
    """The score of a pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class Scores(Struct, frozen=True):
    """The scores of all pairs, in their order."""

    id: str
    created: int
    model: str
    data: list[Scored]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class Classified(Struct, frozen=True):
    """The classes of a text."""

    index: int
    label: str  # of the most probable one
    probs: list[float]
    num_classes: int


class Classes(Struct, frozen=True):
    """The classes of all texts, in their order."""

    id: str
    created: int
    model: str
    data: list[Classified]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class Pooled(Struct, frozen=True):
    """What was pooled of a text."""

    index: int
    data: list[float] | str  # base64 of little-endian fp32
    object: Literal["pooling"] = "pooling"


class PooledTexts(Struct, frozen=True):
    """What was pooled of all texts, in their order."""

    id: str
    created: int
    model: str
    data: list[Pooled]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


RERANK = msgspec.json.Decoder(RerankRequest)
SCORE = msgspec.json.Decoder(ScoreRequest)
CLASSIFY = msgspec.json.Decoder(ClassifyRequest)
POOLING = msgspec.json.Decoder(PoolingRequest)
