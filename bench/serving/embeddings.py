"""Short texts through /v1/embeddings beside sentence-transformers, which embeds the same ones in the same run.

    python -m bench.serving.embeddings FOLDER --num-texts 10000 --write FILE

FOLDER is a checkpoint that both can read, such as all-MiniLM-L6-v2. The rounds of both alternate, so that a machine
that becomes slower becomes so for both; each has all threads while it is its turn. What counts is texts per second of
each one's best round, and how far the vectors are apart. What texts cost streams of the same model,
`bench.serving.beside` measures.
"""

import argparse
import asyncio
import base64
import json
import os
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from bench.machine import command, commit, machine
from bench.server_process import free_port, running

_WORDS = Path(__file__).resolve().parents[2] / "README.md"
_SHORTEST, _LONGEST = 4, 24  # words of a text
_START_SECONDS = 120.0


def short_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of a few words each, in a random order of lengths."""
    words = [word for word in _WORDS.read_text().split() if word.isalpha()]
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(_SHORTEST, _LONGEST))) for _ in range(count)]


class Client:
    """A client of one server."""

    def __init__(self, url: str, session: aiohttp.ClientSession, texts_per_request: int, connections: int) -> None:
        self._url = url
        self._session = session
        self._size = texts_per_request
        self._connections = connections

    async def embed(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        """fp32[n, H], the vectors of all texts, some per request, over several connections."""
        found: list[list[array[float]]] = [[] for _ in range(0, len(texts), self._size)]
        waiting = iter(range(len(found)))

        async def work() -> None:
            for number in waiting:
                some = texts[number * self._size : (number + 1) * self._size]
                body = {"input": some, "encoding_format": "base64", "truncate_prompt_tokens": -1}
                async with self._session.post(f"{self._url}/v1/embeddings", json=body) as answer:
                    answer.raise_for_status()
                    data = json.loads(await answer.read())["data"]
                found[number] = [array("f", base64.b64decode(each["embedding"])) for each in data]

        await asyncio.gather(*(work() for _ in range(self._connections)))
        return np.array([vector for part in found for vector in part])


class _Library:
    """sentence-transformers in a process of its own, which answers one line for each round."""

    def __init__(self, folder: Path, texts: Path, threads: int, batch_size: int) -> None:
        self._told = (str(folder), str(texts), str(batch_size))
        self._env = os.environ | {"OMP_NUM_THREADS": str(threads)}

    async def __aenter__(self) -> "_Library":
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PROGRAM, *self._told),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._env,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.kill()
        await self._process.wait()

    async def round(self, vectors: Path) -> float:
        """The seconds of a round; its vectors are in the file."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{vectors}\n".encode())
        answer = await self._process.stdout.readline()
        if not answer:
            raise RuntimeError("sentence-transformers ended before it answered")
        return float(answer)


_PROGRAM = """
import json, sys, time
import numpy as np
from sentence_transformers import SentenceTransformer
folder, texts, batch_size = sys.argv[1:]
model = SentenceTransformer(folder, device="cpu")
texts = json.load(open(texts))
model.encode(texts[:64], batch_size=int(batch_size))
for line in sys.stdin:
    began = time.perf_counter()
    vectors = model.encode(texts, batch_size=int(batch_size), normalize_embeddings=True)
    seconds = time.perf_counter() - began
    np.save(line.strip(), vectors)
    print(seconds, flush=True)
"""


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of both."""
    texts = short_texts(options.num_texts)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    serve = [
        *(sys.executable, "-m", "penstock.cli", "serve", str(options.folder), "--port", str(port)),
        *("--num-threads", str(options.threads), "--device", "cpu", *options.serve.split()),
    ]
    seconds: dict[str, list[float]] = {"penstock": [], "sentence_transformers": []}
    with (
        tempfile.TemporaryDirectory() as room,
        running(serve, f"{url}/ready", dict(os.environ), _START_SECONDS, Path(room, "log")) as start,
    ):
        list_of_texts = Path(room, "texts.json")
        list_of_texts.write_text(json.dumps(texts))  # noqa: ASYNC240
        timeout = aiohttp.ClientTimeout(total=None)
        library = _Library(options.folder, list_of_texts, options.threads, options.batch_size)
        async with aiohttp.ClientSession(timeout=timeout) as session, library:
            client = Client(url, session, options.texts_per_request, options.connections)
            await client.embed(texts[:256])
            for _ in range(options.rounds):
                seconds["sentence_transformers"].append(await library.round(Path(room, "vectors.npy")))
                began = time.perf_counter()
                vectors = await client.embed(texts)
                seconds["penstock"].append(time.perf_counter() - began)
            apart = float(np.abs(vectors - np.load(Path(room, "vectors.npy"))).max())
    best = {name: len(texts) / min(its) for name, its in seconds.items()}
    return {
        "texts_per_second": best,
        "times_sentence_transformers": best["penstock"] / best["sentence_transformers"],
        "seconds": seconds,
        "largest_difference": apart,
        "start_seconds": start,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-texts", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--texts-per-request", type=int, default=250)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="of sentence-transformers, which sorts by length")
    parser.add_argument("--serve", default="", help="more options of `penstock serve`")
    parser.add_argument("--write", type=Path, help="a JSON file for the record")
    options = parser.parse_args(argv)
    told = {"command": command("bench.serving.embeddings", argv), "commit": commit(), "machine": machine()}
    found = asyncio.run(measure(options))
    print(json.dumps(found, indent=2))
    if options.write is not None:
        options.write.write_text(json.dumps(told | found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
