"""Options of scores."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from penstock.config.part_options import PartOptions


class ScoresOptions(PartOptions, frozen=True):
    """How pairs of texts are scored ([rerankers](rerank.md))."""

    part: ClassVar[str] = "scores"
    title: ClassVar[str] = "Scores"
    beside: ClassVar[str] = "frontend"

    score_template: Annotated[
        Literal["auto", "none", "qwen3-reranker"],
        Meta(
            description="What a reranker is asked about a query and a document (docs/rerank.md). 'auto': the template "
            "that belongs to the model's name, if one does; 'none': pairs are put together by the tokenizer, or scored "
            "by their embeddings."
        ),
    ] = "auto"


PARTS = (ScoresOptions,)
