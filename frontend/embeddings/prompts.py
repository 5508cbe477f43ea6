"""The prompts of an embedding model: what is put before a text, by what the text is."""

from penstock.frontend.embeddings.schema import EmbeddingRequest
from penstock.frontend.errors import InvalidParameter
from penstock.models.embeddings import Embeddings

_FIELDS = ("prompt_name", "input_type", "task")
_SAME = (
    ("query", "search_query", "retrieval.query", "s2p_query"),
    ("document", "passage", "search_document", "retrieval.passage", "corpus"),
    ("classification", "classification_task"),
    ("clustering", "separation"),
    ("text-matching", "s2s_query", "sts"),
)
"""Names of the same prompt in different models and APIs."""


def asked_prompt(request: EmbeddingRequest, kind: Embeddings) -> tuple[str, tuple[str, ...]]:
    """Return the text of the prompt that a request names, or the default one; and warnings for the client.

    Raises:
        InvalidParameter: several fields name one, or the model does not have the one that is named.
    """
    named = {field: name for field in _FIELDS if (name := getattr(request, field)) is not None}
    if not named:
        return kind.prompts.get(kind.default_prompt, ""), ()
    if len(named) > 1:
        raise InvalidParameter(f"only one of {', '.join(named)} can name the prompt", param=next(iter(named)))
    [(field, name)] = named.items()
    known = next((each for each in (name, *_others(name)) if each in kind.prompts), None)
    if known is not None:
        return kind.prompts[known], ()
    if kind.prompts or field == "prompt_name":
        has = f"its prompts are {', '.join(kind.prompts)}" if kind.prompts else "it has no prompts"
        raise InvalidParameter(f"{field}: the model has no prompt {name[:64]!r}; {has}", param=field)
    return "", (f"{field}: no effect, the model has no prompts",)


def _others(name: str) -> tuple[str, ...]:
    return next((same for same in _SAME if name in same), ())
