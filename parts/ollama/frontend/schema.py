"""Ollama's requests and answers.

The fields are those of its `api/types.go`. Every field may be absent, so that we can report a missing one ourselves, in
Ollama's shape.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.frontend.errors import ApiError, ErrorShape
from penstock.frontend.schema import Messages, Tools, Unsupported

Images = list[str]
KeepAlive = Annotated[
    int | float | str | None, Meta(description="Accepted: the model stays loaded for as long as the server runs.")
]


class ModelRequest(Struct, kw_only=True):
    """What requests to a loaded model share."""

    model: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive = None


class OllamaRequest(ModelRequest, kw_only=True):
    """What requests for output share."""

    stream: bool | None = None  # true if it is absent
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    template: str | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """POST /api/chat"""

    messages: Messages | None = None
    tools: Tools | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """POST /api/generate"""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: Images | None = None
    width: Unsupported = None
    height: Unsupported = None
    steps: Unsupported = None


class OllamaEmbedRequest(ModelRequest, kw_only=True):
    """POST /api/embed"""

    input: str | list[str] | None = None
    truncate: bool | None = None  # true if it is absent
    dimensions: int | None = None


class OllamaEmbeddingsRequest(ModelRequest, kw_only=True):
    """POST /api/embeddings"""

    prompt: str | None = None


class NamingRequest(Struct, kw_only=True):
    """What requests about a model share."""

    model: str | None = None
    name: str | None = None  # from older clients

    @property
    def asked(self) -> str | None:
        """The model's name."""
        return self.model or self.name


class OllamaShowRequest(NamingRequest, kw_only=True):
    """POST /api/show"""

    verbose: bool | None = None


class OllamaPullRequest(NamingRequest, kw_only=True):
    """POST /api/pull and /api/push"""

    insecure: bool | None = None
    stream: bool | None = None


class OllamaManageRequest(NamingRequest, kw_only=True):
    """POST /api/create, POST /api/copy, DELETE /api/delete"""

    source: str | None = None
    destination: str | None = None


# --- answers --------------------------------------------------------------------------------


class OllamaError(Struct, frozen=True):
    error: str


class OllamaCalledFunction(Struct, frozen=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(Struct, frozen=True):
    id: str
    function: OllamaCalledFunction


class OllamaMessage(Struct, frozen=True):
    content: str
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaTopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class OllamaLogprob(OllamaTopLogprob, frozen=True):
    top_logprobs: list[OllamaTopLogprob] | UnsetType = UNSET


class OllamaFigures(Struct, frozen=True, kw_only=True):
    """How an answer came about; durations are nanoseconds."""

    total_duration: int
    load_duration: int  # until the request had a row: the model is loaded, but others may come first
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int


class OllamaAnswer(Struct, frozen=True, kw_only=True):
    """A whole answer, or a piece of one: a piece that is not the last has no figures."""

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[OllamaLogprob] | UnsetType = UNSET
    schema_error: str | UnsetType = UNSET  # why the text does not match a schema that could not be enforced


class OllamaChatAnswer(OllamaAnswer, frozen=True, kw_only=True):
    message: OllamaMessage


class OllamaGenerateAnswer(OllamaAnswer, frozen=True, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


class OllamaEmbedAnswer(Struct, frozen=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int | UnsetType = UNSET  # nanoseconds
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET


class OllamaEmbeddingsAnswer(Struct, frozen=True):
    embedding: list[float]


class OllamaDetails(Struct, frozen=True):
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    parent_model: str = ""


class OllamaModel(Struct, frozen=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(Struct, frozen=True):
    models: list[OllamaModel]


class OllamaRunningModel(Struct, frozen=True):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(Struct, frozen=True):
    models: list[OllamaRunningModel]


class OllamaShown(Struct, frozen=True):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaStatus(Struct, frozen=True):
    status: str


class OllamaVersion(Struct, frozen=True):
    version: str  # of Ollama's API
    penstock: str


CHAT = msgspec.json.Decoder(OllamaChatRequest)
GENERATE = msgspec.json.Decoder(OllamaGenerateRequest)
EMBED = msgspec.json.Decoder(OllamaEmbedRequest)
EMBEDDINGS = msgspec.json.Decoder(OllamaEmbeddingsRequest)
SHOW = msgspec.json.Decoder(OllamaShowRequest)
PULL = msgspec.json.Decoder(OllamaPullRequest)


def error_line(error: ApiError) -> bytes:
    """An error as Ollama writes it: the body of an answer, or a stream's last line."""
    return msgspec.json.encode(OllamaError(error.message))


SHAPE = ErrorShape(OllamaError, error_line)
