"""The properties of a KV pool on which workers of different engines must agree, and a layer's parts of a page."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.gpu_worker.state.kv_pool import KVPool, PageGroup, kv_name
from penstock.ipc.messages import WorkerHello
from penstock.models.description.decoder import Decoder
from penstock.models.description.model_config import ModelConfig

Columns = npt.NDArray[np.int32]
"""int32[pages, 3]: page group, index in the page table of that group, page in the pool."""


def described(hello: WorkerHello, kv: KVPool) -> tuple[tuple[str, str], ...]:
    """Return the properties that must be equal on both sides, as (name, value)."""
    groups = "; ".join(
        f"layers {','.join(map(str, group.layers))}: {group.page_size} tokens, {group.num_kv_heads} heads of "
        f"{group.head_dim}, window {group.window}, {'keys and values' if group.has_values else 'keys'}"
        for group in kv.groups
    )
    return (
        ("the model", hello.model_fingerprint),
        ("the checksum of the weights", hello.weights),
        ("the type of KV", kv_name(kv.kv)),
        ("the page size", str(kv.page_size)),
        ("the content of a page", groups[:4096]),
    )


def columns(buffer: bytes) -> Columns:
    """View a message's buffer."""
    return np.frombuffer(buffer, dtype="<i4").reshape(-1, 3)


def kv_layers_done(config: ModelConfig) -> list[int]:
    """Return how many layers of the pool are complete when 0, 1, ... layers of the model have been computed."""
    index: Sequence[int] = tuple(config.kv_index.values()) if isinstance(config, Decoder) else range(len(config.kv))
    done = [0]
    for layer in index:
        done.append(max(done[-1], layer + 1))
    return done


def parts_of(group: PageGroup, first: int, end: int) -> slice:
    """The parts of a page that belong to layers `first` .. `end - 1` of the pool; a group's parts are consecutive."""
    step = 1 + group.has_values
    before = sum(layer < first for layer in group.layers)
    up_to = sum(layer < end for layer in group.layers)
    return slice(before * step, up_to * step)
