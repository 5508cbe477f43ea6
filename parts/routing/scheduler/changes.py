"""Records what a prefix cache and the host tier below it gain and lose.

When a page comes or goes, it is only noted; its content key is computed when the changes are taken. Pages of further
page groups have keys of their own. Those on the device are never looked up by frontends, so they are left out.
"""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from penstock.core.kv.content_keys import node_key
from penstock.core.kv.kv_pages import KVPages
from penstock.core.kv.page_pool import CacheNode
from penstock.ipc.messages import TierChanges
from penstock.ipc.page_keys import SHORT_BYTES

MAX_NOTED = 1 << 16
"""If more changes than this pile up, they are dropped: a snapshot of the whole costs less."""


class Tiered(NamedTuple):
    """Changes of the device's pages, and of the host's."""

    device: TierChanges
    host: TierChanges


class CacheChanges:
    """Listens to one `KVPages` from its creation on."""

    def __init__(self, kv: KVPages) -> None:
        self._cache = kv.cache
        self._host = None if kv.tiers is None else kv.tiers.host
        self._nodes: dict[CacheNode, bool] = {}  # last change of each: came to the device (True) or left it
        self._keys: dict[bytes, bool] = {}  # the same for the host
        self.has_overflown = False
        """Whether there were more than `MAX_NOTED` changes: nothing is noted until `restart`."""
        if kv.cache is not None:
            kv.cache.extended = self._on_extended
            self._given_up = kv.cache.given_up
            kv.cache.given_up = self._on_given_up
        if self._host is not None:
            self._host.changed = self._on_host

    @property
    def num_noted(self) -> int:
        """Changes that `take` can return."""
        return len(self._nodes) + len(self._keys)

    def restart(self) -> None:
        """Forget the noted changes, and note those from now on; the caller reads `contents` meanwhile."""
        self._nodes.clear()
        self._keys.clear()
        self.has_overflown = False

    def take(self, most: int) -> Tiered:
        """Return and forget up to `most` noted changes of each tier, the oldest first."""
        nodes = list(islice(self._nodes.items(), most))
        keys = list(islice(self._keys.items(), most))
        for node, _ in nodes:
            del self._nodes[node]
        for key, _ in keys:
            del self._keys[key]
        named = {node_key(node)[:SHORT_BYTES]: is_there for node, is_there in nodes}  # one content may be two nodes
        return Tiered(_columns(named), _columns({key[:SHORT_BYTES]: is_there for key, is_there in keys}))

    def contents(self, most: int) -> Iterator[Tiered]:
        """Yield all cached pages, up to `most` at a time.

        The cache may change between two parts; each part is right when it is made. Pages that come or go meanwhile may
        or may not be included; `take` returns those changes.
        """
        yield from (Tiered(TierChanges(part), TierChanges()) for part in self._device_parts(most))
        yield from (Tiered(TierChanges(), TierChanges(part)) for part in self._host_parts(most))

    def _device_parts(self, most: int) -> Iterator[bytes]:
        if self._cache is None:
            return
        part: list[bytes] = []
        stack = self._cache.roots()
        while stack:
            node = stack.pop()
            if node.parent is not None:
                assert isinstance(node.key, bytes)
                if node.parent.children.get(node.key) is not node:
                    continue  # evicted since its parent was visited, and all nodes below it before
                part.append(node_key(node)[:SHORT_BYTES])
            stack.extend(node.children.values())
            if len(part) >= most:
                yield b"".join(part)
                part.clear()
        yield b"".join(part)

    def _host_parts(self, most: int) -> Iterator[bytes]:
        host = self._host
        for start in range(0, 0 if host is None else host.num_pages, most):
            assert host is not None
            keys = map(host.key_of, range(start, min(start + most, host.num_pages)))
            yield b"".join(key[:SHORT_BYTES] for key in keys)

    def _on_extended(self, node: CacheNode) -> None:
        self._nodes[node] = True
        self._bound()

    def _on_given_up(self, node: CacheNode) -> None:
        if self._given_up is not None:
            self._given_up(node)
        self._nodes[node] = False
        self._bound()

    def _on_host(self, key: bytes, is_there: bool) -> None:
        # A key that was noted already keeps its place: keys are independent, so the order does not matter.
        self._keys[key] = is_there
        self._bound()

    def _bound(self) -> None:
        if self.has_overflown or self.num_noted > MAX_NOTED:
            self.restart()
            self.has_overflown = True


def _columns(named: dict[bytes, bool]) -> TierChanges:
    gained = b"".join(key for key, is_there in named.items() if is_there)
    return TierChanges(gained, b"".join(key for key, is_there in named.items() if not is_there))
