"""Summaries of conversations, in `encrypted_content`, which clients keep and send back as it is.

The text is encoded, not encrypted: it comes from the client's own conversation.
"""

import base64
import binascii

_OURS = "penstock:"

_HEADING = "A summary of the conversation so far:"


def sealed(summary: str) -> str:
    """A summary as `encrypted_content`."""
    return _OURS + base64.b64encode(summary.encode(errors="replace")).decode()


def opened(content: object) -> str:
    """The summary in `encrypted_content`; empty if another server has written it."""
    if not isinstance(content, str) or not content.startswith(_OURS):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_OURS), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def as_message(summary: str) -> dict[str, str]:
    """The message in which the model reads a summary: the user's, because an answer follows it."""
    return {"role": "user", "content": f"{_HEADING}\n\n{summary}"}
