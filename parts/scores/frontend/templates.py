"""What rerankers that were trained as language models are asked, by name. A new one is an entry of the table below."""

from typing import NamedTuple


class PairTemplate(NamedTuple):
    """A question about a query and a document, which a token answers."""

    architectures: tuple[str, ...]
    words: tuple[str, ...]  # a model of these architectures has it if its name has one of these, in lower case
    before: str  # these two may spell special tokens
    behind: str
    pair: str  # with places for instruction, query and document; the document is last
    instruction: str  # unless the client gives another one
    no: str  # the tokens that answer
    yes: str


TEMPLATES: dict[str, PairTemplate] = {
    "qwen3-reranker": PairTemplate(
        architectures=("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
        words=("qwen3-reranker",),
        before="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        behind="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        pair="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        instruction="Given a web search query, retrieve relevant passages that answer the query",
        no="no",
        yes="yes",
    ),
}


def template_of(name: str, architecture: str, model: str) -> PairTemplate | None:
    """Return the template that an option names, or for "auto" the one that belongs to a model's name."""
    if name != "auto":
        return TEMPLATES.get(name)
    fitting = (each for each in TEMPLATES.values() if architecture in each.architectures)
    return next((each for each in fitting if any(word in model.lower() for word in each.words)), None)
