"""Conversations, as OpenAI's clients expect them."""

from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.statuses import LOOKS_UP, READS_BODY
from penstock.parts.responses.frontend import conversations
from penstock.parts.responses.frontend.schema import InputItems

_BODY = (*READS_BODY, 503, 507)
_FOUND = (*LOOKS_UP, 503, 507)
_ONE = "/v1/conversations/{id}"
_ITEMS = "/v1/conversations/{id}/items"

ROUTES = (
    Route(
        "POST", "/v1/conversations", conversations.create_conversation, "Make a conversation",
        conversations.ConversationAnswer, conversations.ConversationRequest, _BODY,
    ),
    Route(
        "GET", _ONE, conversations.show_conversation, "A conversation",
        conversations.ConversationAnswer, errors=_FOUND,
    ),
    Route(
        "POST", _ONE, conversations.update_conversation, "Replace a conversation's metadata",
        conversations.ConversationAnswer, conversations.MetadataRequest, _BODY,
    ),
    Route(
        "DELETE", _ONE, conversations.delete_conversation, "Forget a conversation",
        conversations.DeletedConversation, errors=_FOUND,
    ),
    Route(
        "POST", _ITEMS, conversations.add_items, "Add items to a conversation",
        InputItems, conversations.ItemsRequest, _BODY, query=(("include", "string"),),
    ),
    Route(
        "GET", _ITEMS, conversations.list_items, "The items of a conversation",
        InputItems, errors=(400, *_FOUND),
        query=(("limit", "integer"), ("order", "string"), ("after", "string"), ("include", "string")),
    ),
    Route(
        "GET", f"{_ITEMS}/{{item}}", conversations.show_item, "One item of a conversation",
        errors=_FOUND, query=(("include", "string"),),
    ),
    Route(
        "DELETE", f"{_ITEMS}/{{item}}", conversations.delete_item, "Delete an item of a conversation",
        conversations.ConversationAnswer, errors=_FOUND,
    ),
)  # fmt: skip
