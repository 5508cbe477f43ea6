"""Content keys of the prefix cache's nodes, built on the keys of pages (`ipc/page_keys.py`).

    others   blake2b(key of a node, page group and index): pages of further page groups that belong to the node

Computed only if there is a lower tier, or if frontends are told what is cached.
"""

from hashlib import blake2b

from penstock.core.kv.holder import Holder
from penstock.core.kv.page_pool import CacheNode
from penstock.ipc.page_keys import KEY_BYTES, page_key, root_key


def page_content(seq: Holder, index: int, page_size: int) -> bytes:
    """Return the content by which a page of a sequence is found: its tokens, and the marks of images in it."""
    tokens = seq.token_ids[index * page_size : (index + 1) * page_size].tobytes()
    marks = seq.request.marks
    return tokens if marks is None else tokens + marks.get(index, b"")


def window_key(node: bytes, group: int, index: int) -> bytes:
    """Return the key of page `index` of a further page group (1, 2, ...), which belongs to a node."""
    return blake2b(b"%d %d" % (group, index), digest_size=KEY_BYTES, key=node).digest()


def node_key(node: CacheNode) -> bytes:
    """Return the key of a node of the prefix cache; compute and store its ancestors' keys with it."""
    path: list[CacheNode] = []
    walk = node
    while not walk.content_key:
        path.append(walk)
        if walk.parent is None:
            break
        walk = walk.parent
    key = walk.content_key
    for each in reversed(path):
        if each.parent is None:
            key = root_key(each.key)
        else:
            assert isinstance(each.key, bytes)
            key = page_key(key, each.key)
        each.content_key = key
    return key
