"""What streams feel of a flood of large images beside them, and what memory it takes.

    python -m bench.images.flood --out images_flood.json

Some clients stream one chat after another. First they are alone, then other clients send chats with images, none of
them twice, as fast as these are answered; and so on in turns. Memory is that of all of the server's processes (PSS) and
of the segments in shared memory. It is read every two seconds only: while the kernel counts a process's pages, the
process can map no memory, so readings four times a second were most of the longest 1 % of the pauses between tokens.
The model is a Qwen2.5-VL of random weights.
"""

import argparse
import asyncio
import base64
import io
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from PIL import Image

from bench.machine import commit, machine
from bench.server_process import free_port, running
from bench.serving.batches import START_SECONDS, percentiles, phase

_MODEL = Path(__file__).parents[2] / "demo" / "model"
_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_NUMBER_BITS = 16
_READ_SECONDS, _EACH_SECONDS = 2.0, 5.0
_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def write_checkpoint(folder: Path) -> None:
    """A small text part, so that steps are short, and a tower that takes a while."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_MARKS)})
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    make: Any = transformers.CONFIG_MAPPING["qwen2_5_vl"]
    config = make(
        text_config={
            "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 2, "max_position_embeddings": 8192, "vocab_size": len(tokenizer),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
        },
        vision_config={
            "depth": 16, "num_heads": 8, "hidden_size": 640, "intermediate_size": 1728, "out_hidden_size": 512,
            "fullatt_block_indexes": [7, 15],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).bfloat16().save_pretrained(folder)
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 768 * 28 * 28}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))


def pictures(size: int) -> Iterator[str]:
    """Data URLs of images that are all different, with little for this side to compute."""
    noise = np.random.default_rng(0).integers(0, 255, (size, size, 3), dtype=np.uint8)
    for number in itertools.count():
        # A bit for each of JPEG's blocks, black or white: less than that is rounded away, and the images are the same.
        for bit in range(_NUMBER_BITS):
            noise[:16, 16 * bit : 16 * bit + 16] = 255 * (number >> bit & 1)
        out = io.BytesIO()
        Image.fromarray(noise).save(out, "JPEG", quality=60)
        yield f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"


class Flood:
    """Clients that send images until they are stopped."""

    def __init__(self, http: aiohttp.ClientSession, url: str, urls: Iterator[str], clients: int) -> None:
        self.statuses: dict[int, int] = {}
        self._http, self._url, self._urls = http, url, urls
        self._tasks = [asyncio.create_task(self._client()) for _ in range(clients)]

    async def _client(self) -> None:
        while True:
            parts = [{"type": "image_url", "image_url": {"url": next(self._urls)}} for _ in range(2)]
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "ignore_eos": True}
            async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as answer:
                await answer.read()
                self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def num_segment_bytes() -> int:
    """Of all files in shared memory."""
    total = 0
    for file in Path("/dev/shm").rglob("*"):
        with suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total


class Memory:
    """The most that was seen, in bytes."""

    def __init__(self) -> None:
        self.most = 0
        self.most_segments = 0
        self.over_time: list[tuple[float, float, float]] = []  # seconds, MiB of processes, MiB of segments
        self._began = time.monotonic()
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            own = [psutil.Process(), *psutil.Process().children(recursive=True)]
            total = 0
            for process in own[1:]:
                with suppress(psutil.Error):
                    total += process.memory_full_info().pss
            self.most = max(self.most, total)
            segments = num_segment_bytes()
            self.most_segments = max(self.most_segments, segments)
            seconds = time.monotonic() - self._began
            if not self.over_time or seconds - self.over_time[-1][0] >= _EACH_SECONDS:
                self.over_time.append((round(seconds, 1), round(total / 2**20, 1), round(segments / 2**20, 1)))
            await asyncio.sleep(_READ_SECONDS)

    def take(self) -> dict[str, float]:
        """What was most since the last call, in MiB."""
        told = {"processes": round(self.most / 2**20, 1), "segments": round(self.most_segments / 2**20, 1)}
        self.most = self.most_segments = 0
        return told

    def stop(self) -> None:
        self._task.cancel()


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[float]] = {"alone": [], "with_images": []}
    memory_of: list[dict[str, dict[str, float]]] = []
    statuses: dict[int, int] = {}
    urls, memory = pictures(options.size), Memory()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as http:
        await phase(http, url, options.clients, options.tokens, options.seconds / 2)  # step times are learned
        memory.take()
        for _ in range(options.rounds):
            found["alone"] += await phase(http, url, options.clients, options.tokens, options.seconds)
            alone = memory.take()
            flood = Flood(http, url, urls, options.flood)
            found["with_images"] += await phase(http, url, options.clients, options.tokens, options.seconds)
            await flood.stop()
            for status, count in flood.statuses.items():
                statuses[status] = statuses.get(status, 0) + count
            memory_of.append({"alone": alone, "with_images": memory.take()})
    memory.stop()
    result: dict[str, Any] = {name: percentiles(gaps) | {"tokens": len(gaps)} for name, gaps in found.items()}
    result["p99_ratio"] = round(result["with_images"]["p99"] / result["alone"]["p99"], 3)
    return result | {"answers_by_status": statuses, "MiB": memory_of, "MiB_over_time": memory.over_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4, help="that stream texts")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--flood", type=int, default=4, help="clients that send images, two in each chat")
    parser.add_argument("--size", type=int, default=1024, help="pixels of an image's side")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flags", default="", help="of the server")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        write_checkpoint(folder)
        command = [
            sys.executable,
            "-m",
            "penstock.cli",
            "serve",
            name,
            "--port",
            str(port),
            *options.flags.split(),
        ]
        url, facts = f"http://127.0.0.1:{port}", machine()  # its load is that before this one
        with running(command, f"{url}/ready", dict(os.environ), START_SECONDS):
            result = asyncio.run(measure(url, options))
    result = {"commit": commit(), **facts, "options": vars(options) | {"out": str(options.out)}, **result}
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
