"""The `signature` of a thinking block.

For thinking that is shown, the signature is a digest. For thinking that is left out (`display: omitted`), it is the
text itself, so that a client that sends the block back returns the model's thoughts. Signatures are not checked: a
template takes any reasoning, and blocks may come from other servers.
"""

import base64
import hashlib

_HIDDEN = "penstock:"


def signature_of(thinking: str, *, is_hidden: bool) -> str:
    """The signature of this thinking."""
    written = thinking.encode(errors="replace")
    if is_hidden:
        return _HIDDEN + base64.b64encode(written).decode()
    return base64.b64encode(hashlib.sha256(written).digest()).decode()


def hidden_thinking(signature: object) -> str:
    """The thinking that a signature holds; empty if it holds none."""
    if not isinstance(signature, str) or not signature.startswith(_HIDDEN):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_HIDDEN), validate=True).decode()
    except ValueError:
        return ""
