"""The Messages API, as Anthropic's clients and the agents that use them expect it."""

from functools import partial

from penstock.frontend.exchange.exchange import Dialect, Route
from penstock.frontend.exchange.statuses import GENERATES, LOOKS_UP, READS_BODY
from penstock.parts.anthropic.frontend import messages, models
from penstock.parts.anthropic.frontend import schema as shapes
from penstock.parts.anthropic.frontend.errors import ANTHROPIC

VERSION = "anthropic-version"
"""The header that Anthropic's clients send with every request."""

_OVERLOADED = 529

_ID_HEADERS = ("x-request-id", "request-id")
_Route = partial(Route, error_shape=ANTHROPIC, id_headers=_ID_HEADERS)

ROUTES = (
    _Route(
        "POST", "/v1/messages", messages.create_message, "Answer a conversation, in the Messages API",
        shapes.MessageAnswer, shapes.MessagesRequest, (*GENERATES, _OVERLOADED), streams=True,
        required=("messages", "max_tokens"),
    ),
    _Route(
        "POST", "/v1/messages/count_tokens", messages.count_tokens, "Count the tokens of a message's prompt",
        shapes.MessageTokensCount, shapes.CountTokensRequest, (*READS_BODY, _OVERLOADED), required=("messages",),
    ),
)  # fmt: skip

DIALECT = Dialect(
    VERSION,
    ANTHROPIC,
    _ID_HEADERS,
    (
        _Route("GET", "/v1/models", models.list_models, errors=(400, 500)),
        _Route("GET", "/v1/models/{id}", models.show_model, errors=LOOKS_UP),
    ),
)
"""Requests with `anthropic-version` get these, in place of OpenAI's routes with the same paths."""
