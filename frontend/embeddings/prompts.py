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
    if name in kind.prompts:
        return kind.prompts[name], ()
    if (found := same_prompt(name, kind)) is not None:
        return found, ()
    if kind.prompts or field == "prompt_name":
        has = f"its prompts are {', '.join(kind.prompts)}" if kind.prompts else "it has no prompts"
        raise InvalidParameter(f"{field}: the model has no prompt {name[:64]!r}; {has}", param=field)
    return "", (f"{field}: no effect, the model has no prompts",)


def as_tokenized(text: str, prompt: str, kind: Embeddings) -> str:
    """Return what is tokenized of a text."""
    return f"{prompt}{text}".lower() if kind.is_lower else f"{prompt}{text}"


def same_prompt(name: str, kind: Embeddings) -> str | None:
    """Return the text of a prompt that the model may have under other names, too; None if it has none of these.

    sentence-transformers writes empty prompts into files for names that a model does not use.
    """
    same = next((same for same in _SAME if name in same), ())
    found = [kind.prompts[each] for each in same if each in kind.prompts]
    return next(filter(None, found), "") if found else None
