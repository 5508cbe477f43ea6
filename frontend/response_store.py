"""Responses kept for `previous_response_id`, GET and DELETE: in memory, bounded in number and in bytes."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.frontend.errors import ResponseNotFound

_items = msgspec.json.Decoder(list[dict[str, Any]])


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response, and the items of its whole conversation, both as JSON."""

    response: bytes
    items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)


class ResponseStore:
    """The most recently used responses. One per frontend process: another process does not know them.

    They are their owners' (`RequestRecord.owner`): for anybody else they are not there.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()  # by owner and id
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, owner: str, response_id: str, response: bytes, items: list[dict[str, Any]]) -> None:
        """Keep a response; the least recently used ones make room. One that is too large is not kept."""
        stored = StoredResponse(response, msgspec.json.encode(items))
        if stored.num_bytes > self._max_bytes or self._max_count == 0:
            return
        self._stored[owner, response_id] = stored
        self.num_bytes += stored.num_bytes
        while len(self._stored) > self._max_count or self.num_bytes > self._max_bytes:
            _, dropped = self._stored.popitem(last=False)
            self.num_bytes -= dropped.num_bytes

    def get(self, owner: str, response_id: str) -> bytes:
        """The response as JSON.

        Raises:
            ResponseNotFound: if it is not here (any more).
        """
        return self._find(owner, response_id).response

    def items(self, owner: str, response_id: str) -> list[dict[str, Any]]:
        """The items of the conversation up to and including this response.

        Raises:
            ResponseNotFound: if it is not here (any more).
        """
        return _items.decode(self._find(owner, response_id, "previous_response_id").items)

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a response.

        Raises:
            ResponseNotFound: if it is not here (any more).
        """
        self.num_bytes -= self._find(owner, response_id).num_bytes
        del self._stored[owner, response_id]

    def _find(self, owner: str, response_id: str, param: str = "response_id") -> StoredResponse:
        stored = self._stored.get((owner, response_id))
        if stored is None:
            raise ResponseNotFound(f"there is no response {response_id[:128]!r} here (any more)", param=param)
        self._stored.move_to_end((owner, response_id))
        return stored
