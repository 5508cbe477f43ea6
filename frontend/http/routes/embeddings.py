"""Embeddings, as OpenAI's clients expect them."""

from penstock.frontend.embeddings.embeddings import embeddings
from penstock.frontend.embeddings.schema import EmbeddingRequest, Embeddings
from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.statuses import GENERATES

ROUTES = (
    Route(
        "POST", "/v1/embeddings", embeddings, "Turn texts into vectors",
        Embeddings, EmbeddingRequest, GENERATES, required=("input",),
    ),
)  # fmt: skip
