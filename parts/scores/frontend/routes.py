"""The routes."""

from typing import Any

from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.statuses import GENERATES
from penstock.parts.scores.frontend import cohere, handlers, schema, tei

ROUTES = (
    Route(
        "POST", "/v1/rerank", handlers.rerank, "Order documents by their relevance for a query",
        schema.Ranking, schema.RerankRequest, GENERATES,
    ),
    Route(
        "POST", "/v2/rerank", handlers.rerank_as_cohere, "The same; documents are repeated only if that is asked for",
        schema.Ranking, schema.RerankRequest, GENERATES,
    ),
    Route(
        "POST", "/v1/score", handlers.score, "Score pairs of texts",
        schema.Scores, schema.ScoreRequest, GENERATES,
    ),
    Route(
        "POST", "/v1/classify", handlers.classify, "Sort texts into the model's classes",
        schema.Classes, schema.ClassifyRequest, GENERATES,
    ),
    Route(
        "POST", "/pooling", handlers.pooling, "What the model pools of texts: vectors or classes",
        schema.PooledTexts, schema.PoolingRequest, GENERATES,
    ),
    Route(
        "POST", "/v1/embed", cohere.embed_v1, "Turn texts into vectors, as Cohere's clients ask for them",
        cohere.CohereEmbeddings, cohere.CohereEmbedRequest, GENERATES, is_only_versioned=True,
    ),
    Route(
        "POST", "/v2/embed", cohere.embed_v2, "The same; vectors come by their types",
        cohere.CohereEmbeddings, cohere.CohereEmbedRequest, GENERATES,
    ),
    Route(
        "POST", "/embed", tei.embed, "Turn texts into vectors, as clients of text-embeddings-inference ask for them",
        list[list[float]], tei.EmbedRequest, GENERATES,
    ),
    Route(
        "POST", "/predict", tei.predict, "Sort texts into the model's classes, for the same clients",
        list[tei.Predicted | list[tei.Predicted]], tei.PredictRequest, GENERATES,
    ),
    Route(
        "POST", "/similarity", tei.similarity, "Score a text beside others, for the same clients",
        list[float], tei.SimilarityRequest, GENERATES,
    ),
    Route(
        "POST", "/", tei.task, "/predict if the model has classes, otherwise /similarity or /embed",
        list[Any], tei.TaskRequest, GENERATES,
    ),
)  # fmt: skip
