"""The routes."""

from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.statuses import GENERATES
from penstock.parts.scores.frontend import handlers, schema

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
)  # fmt: skip
