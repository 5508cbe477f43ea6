"""Routes of other servers that this one does not have, and what to use instead.

They are answered like every unknown path, with a sentence that says more.
"""

import re

_WITHOUT_PREFIX = re.compile(r"(?:/openai)?(?:/v[12])?/(.*?)/?")

_ABSENT: tuple[tuple[str, str, str], ...] = (
    ("*", "moderations", "there is no moderation model here; ask the served model in a chat, with a response_format"),
    ("GET", "chat/completions", "chat completions are not stored; POST /v1/responses stores its answers"),
    ("*", "chat/completions/[^/]+(?:/messages)?", "chat completions are not stored; POST /v1/responses stores answers"),
    ("*", "audio/.+", "models that speak or listen are not served here"),
    ("*", "images/.+", "models that make images are not served here"),
    ("*", "(?:assistants|threads)(?:/.+)?", "there are no assistants here; use POST /v1/responses and conversations"),
    ("*", "fine_tuning/.+", "models are not trained here"),
    ("*", "embed_(?:all|sparse)", "texts have one dense vector here; POST /embed makes it"),
    ("*", "vector_stores(?:/.+)?", "there is no store of vectors here; POST /v1/embeddings makes vectors"),
)
"""(method, or * for any; path without its prefix; sentence)"""


def why_absent(method: str, path: str) -> str:
    """What to tell about a route that others have; empty if it is none that is known."""
    found = _WITHOUT_PREFIX.fullmatch(path)
    if found is None:
        return ""
    return next(
        (why for known, pattern, why in _ABSENT if known in ("*", method) and re.fullmatch(pattern, found[1])), ""
    )
