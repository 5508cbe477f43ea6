"""How large a checkpoint is, read from the headers of its weight files alone: no tensor is touched, no torch needed."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_FLOATS = {"F64", "F32", "F16", "BF16"}


class CheckpointSize(NamedTuple):
    """All weight files together."""

    num_parameters: int
    num_bytes: int


def checkpoint_size(folder: Path) -> CheckpointSize | None:
    """Count the parameters; None if there are no weights or their headers cannot be read.

    A header is 8 bytes with its length (little-endian) and a JSON object: tensor name -> dtype, shape, offsets
    (https://huggingface.co/docs/safetensors).
    """
    num_parameters = num_bytes = 0
    try:
        for path in sorted(folder.glob("*.safetensors")):
            for entry in _header(path):
                if entry["dtype"] in _FLOATS:
                    num_parameters += math.prod(entry["shape"])
            num_bytes += path.stat().st_size
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return CheckpointSize(num_parameters, num_bytes) if num_parameters else None


def _header(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > _MAX_HEADER_BYTES:
            raise ValueError("not a safetensors header")
        tensors = msgspec.json.decode(file.read(num_bytes), type=dict[str, dict[str, Any]])
    return [entry for name, entry in tensors.items() if name != "__metadata__"]
