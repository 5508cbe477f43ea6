"""The digest of weights changes with every byte of them, and with nothing else."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.models.files import weights_digest as module
from penstock.models.files.source import StoredTensor
from penstock.models.files.weights_digest import weights_digest
from penstock.models.finding.registry import open_checkpoint


def stored(data: bytes, shape: tuple[int, ...] = (), dtype: str = "U8") -> StoredTensor:
    return StoredTensor(shape or (len(data),), dtype, len(data), lambda: memoryview(data))


def test_every_byte_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 64)
    monkeypatch.setattr(module, "_TASK", 256)
    data = bytes(np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8))
    seen = {weights_digest({"w": stored(data)})}
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << (position % 8)
        seen.add(weights_digest({"w": stored(bytes(changed))}))
    swapped = data[64:128] + data[:64] + data[128:]
    seen.add(weights_digest({"w": stored(swapped)}))
    assert len(seen) == len(data) + 2


def test_names_types_and_shapes_count_and_threads_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TASK", 16)
    tensors = {"a": stored(bytes(range(64))), "b": stored(b"123")}
    digest = weights_digest(tensors)
    assert len(digest) == 16
    assert weights_digest(dict(reversed(tensors.items())), num_threads=3) == digest
    others = [
        {"a": tensors["a"], "c": tensors["b"]},
        {"a": stored(bytes(range(64)), (8, 8)), "b": tensors["b"]},
        {"a": stored(bytes(range(64)), dtype="I8"), "b": tensors["b"]},
        {"a": tensors["a"]},
    ]
    assert len({digest, *map(weights_digest, others)}) == 5


def test_files_do_not_count(tmp_path: Path) -> None:
    tensors = {name: np.arange(10, dtype=np.float32) + i for i, name in enumerate("abc")}
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    save_file(tensors, one / "model.safetensors")
    save_file({"a": tensors["a"]}, two / "model-1.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, two / "model-2.safetensors")
    where = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (two / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    digests = [weights_digest(open_checkpoint(folder).tensors()) for folder in (one, two)]
    assert digests[0] == digests[1]
    tensors["b"][3] = np.nextafter(tensors["b"][3], np.float32(9))  # one bit of one weight
    save_file(tensors, one / "model.safetensors")
    assert weights_digest(open_checkpoint(one).tensors()) != digests[0]
