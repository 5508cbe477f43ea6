"""POST /v1/embeddings, as OpenAI's clients and vLLM's send it."""

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from penstock.frontend.schema import Bill, PromptTokensDetails, Unsupported


class EmbeddingRequest(Struct, kw_only=True):
    """POST /v1/embeddings"""

    model: str | None = None
    input: str | list[str | int | list[int]] | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None  # else as the server does
    priority: int | None = None
    cache_salt: str | None = None
    return_bill: bool | None = None
    messages: Unsupported = None
    chat_template: Unsupported = None
    prompt_embeds: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    prompt_name: str | None = None  # of the model's prompts, as sentence-transformers calls it
    input_type: str | None = None  # the same, as Cohere calls it
    task: str | None = None  # the same, as Jina calls it


class Embedding(Struct, frozen=True):
    """One input's vector."""

    index: int
    embedding: list[float] | str  # base64 of little-endian fp32
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct, frozen=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    bill: Bill | UnsetType = UNSET


class Embeddings(Struct, frozen=True):
    """The answer."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


EMBEDDINGS = msgspec.json.Decoder(EmbeddingRequest)
