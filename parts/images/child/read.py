"""The process that reads images: `python -m penstock.parts.images.child.read MODEL MAX_FILE_BYTES PARENT`.

Images come from clients, and decoders are written in C: reading an image may crash, take for ever, or need more memory
than there is. Hence this process, whose memory and time are limited (see `child_pool.py`).
[file, its size, target, max_pixels, is_low, max_bytes] is answered with [kind of error, error, image]: `file` has the
image as it was sent, and its pixel values are written to `target`, both in shared memory. The image is described as
[key in hex, placeholder, number of bytes, tensors: [name, dtype, shape, offset] each].
"""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import ConfigError
from penstock.frontend.text.child_pool import answer, limit_resources
from penstock.ipc import process, shared_files
from penstock.models.finding.registry import open_checkpoint

_PRIORITY = 5
"""The process's niceness: text comes first."""

ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes."""


def main(argv: list[str]) -> int:
    """Answer until stdin ends; the exit code."""
    path, max_file_bytes, parent = argv
    process.end_with_parent(int(parent))
    process.begin("penstock-images", "warning")
    limit_resources(int(max_file_bytes))
    os.nice(_PRIORITY)
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if there were none: 80 MB instead of 400, and sooner
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would warn that there is no torch
    try:
        try:
            from penstock.parts.images.child.decode import ImageRefusedError, decode
            from penstock.parts.images.child.processor import ImageProcessor
            from penstock.parts.images.families import image_family_of
        except ModuleNotFoundError as missing:
            raise ConfigError(
                f"images need the Python package {missing.name}: pip install 'penstock-llm[images]'"
            ) from None
        family = image_family_of(open_checkpoint(Path(path)))
        if family is None:
            raise ConfigError("this model takes no images")
        processor = ImageProcessor(family)
    except ConfigError as error:
        answer(["", str(error)])
        return process.EXIT_CONFIG
    answer([])
    for line in sys.stdin.buffer:
        file, size, target, max_pixels, is_low, max_bytes = msgspec.json.decode(line)
        try:
            made = processor.process(decode(bytes(shared_files.read(file, size)), max_pixels=max_pixels, is_low=is_low))
            offsets, num_bytes = _layout([values.nbytes for values in made.tensors.values()])
            if num_bytes > max_bytes:
                answer(["refused", f"its pixel values take {num_bytes >> 20} MiB; {max_bytes >> 20} MiB are allowed"])
                continue
            tensors: list[Any] = []
            buffers: list[Any] = []
            end = 0
            for (name, values), offset in zip(made.tensors.items(), offsets, strict=True):
                tensors.append([name, str(values.dtype), values.shape, offset])
                buffers += (bytes(offset - end), values.data)
                end = offset + values.nbytes
            shared_files.write(target, buffers)
            answer(["", "", [made.key.hex(), made.placeholder, num_bytes, tensors]])
        except ImageRefusedError as error:
            answer(["refused", str(error)])
        except MemoryError:
            answer(["refused", "reading it takes too much memory"])
        except shared_files.NoRoomError:
            answer(["full", "the shared memory has no room for the pixel values of an image"])
    return 0


def _layout(sizes: list[int]) -> tuple[list[int], int]:
    """Where each tensor begins, and where the last one ends."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = offsets[-1] + size
    return offsets, end


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
