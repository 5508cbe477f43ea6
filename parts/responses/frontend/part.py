"""What a frontend stores of responses; the handlers find it by `stored_by`."""

from typing import Self

from penstock.frontend.api.service import Service
from penstock.frontend.part import FrontendPart
from penstock.parts.responses.frontend.storage.conversations import ConversationStore
from penstock.parts.responses.frontend.storage.own_file import OwnFile, Tables
from penstock.parts.responses.frontend.storage.responses import MAX_STORED, ResponseStore, store_path
from penstock.parts.responses.options import ResponseOptions


class StoredResponses(FrontendPart):
    """Responses and conversations: in the database of --data-dir, or else in a file that ends with the launch."""

    def __init__(self, tables: Tables, max_bytes: int) -> None:
        self._own_file = tables if isinstance(tables, OwnFile) else None
        self.responses = ResponseStore(tables, MAX_STORED, max_bytes)
        self.conversations = ConversationStore(tables, MAX_STORED, max_bytes)

    @classmethod
    def of(cls, service: Service) -> Self:
        config = service.config
        tables: Tables = service.database or OwnFile(store_path(config))
        return cls(tables, config.of(ResponseOptions).max_stored_response_bytes)

    def share_stored(self, other: Self) -> None:
        self._close_file()
        self.responses, self.conversations = other.responses, other.conversations

    async def close(self) -> None:
        self._close_file()

    def _close_file(self) -> None:
        if self._own_file is not None:
            self._own_file.close()
            self._own_file = None


def stored_by(service: Service) -> StoredResponses:
    """What a service stores."""
    stored = service.parts.get(StoredResponses)
    assert stored is not None, "no option switches it off"
    return stored
