"""Ollama's API. Its own server reads bodies of any Content-Type, and its users leave the header out."""

from functools import partial

from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.statuses import GENERATES, READS_BODY
from penstock.parts.ollama.frontend import embedding, generating, models, schema

_get = partial(Route, "GET", error_shape=schema.SHAPE, errors=(500,))
_takes = partial(Route, error_shape=schema.SHAPE, errors=READS_BODY, takes_any_type=True)
_streams = partial(_takes, "POST", streams=True, stream_type="application/x-ndjson")

ROUTES: tuple[Route, ...] = (
    _streams(
        "/api/chat", generating.chat, "Answer a conversation, as Ollama",
        schema.OllamaChatAnswer, schema.OllamaChatRequest, errors=GENERATES,
    ),
    _streams(
        "/api/generate", generating.generate, "Answer or continue a text, as Ollama",
        schema.OllamaGenerateAnswer, schema.OllamaGenerateRequest, errors=GENERATES,
    ),
    _takes(
        "POST", "/api/embed", embedding.embed, "Turn texts into vectors, as Ollama",
        schema.OllamaEmbedAnswer, schema.OllamaEmbedRequest, errors=GENERATES,
    ),
    _takes(
        "POST", "/api/embeddings", embedding.embeddings, "Turn a text into a vector, as Ollama did",
        schema.OllamaEmbeddingsAnswer, schema.OllamaEmbeddingsRequest, errors=GENERATES,
    ),
    _get("/api/tags", models.tags, "The models, as Ollama lists them", schema.OllamaModels),
    _get("/api/ps", models.running, "The models that are loaded", schema.OllamaRunningModels),
    _get("/api/version", models.version, "The version of Ollama's API", schema.OllamaVersion),
    _takes(
        "POST", "/api/show", models.show, "One model, as Ollama shows it",
        schema.OllamaShown, schema.OllamaShowRequest,
    ),
    _streams(
        "/api/pull", models.pull, "Success, if the model is served", schema.OllamaStatus, schema.OllamaPullRequest
    ),
    _takes("POST", "/api/push", models.push, "Refused", schema.OllamaStatus, schema.OllamaPullRequest),
    _takes("POST", "/api/create", models.create, "Refused", schema.OllamaStatus, schema.OllamaManageRequest),
    _takes("POST", "/api/copy", models.copy, "Refused", schema.OllamaStatus, schema.OllamaManageRequest),
    _takes("DELETE", "/api/delete", models.delete, "Refused", schema.OllamaStatus, schema.OllamaManageRequest),
    Route(
        "POST", "/api/blobs/{id}", models.put_blob, "Refused", schema.OllamaStatus, errors=(400, 500),
        error_shape=schema.SHAPE,
    ),
)  # fmt: skip
