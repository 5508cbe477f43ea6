"""Mixtral."""

from tests.gpu_worker.families.case import Case

CASES = {
    "mixtral": Case("mixtral", {"sliding_window": None}),
    "mixtral-window": Case("mixtral", {"sliding_window": 12, "head_dim": 32, "tie_word_embeddings": True}),
}
