"""The requests of a load and their times: drawn from distributions, or read from a file.

A file has one JSON object a line:

    {"time": 0.31, "input_len": 512, "output_len": 80, "prefix_id": "manual", "prefix_len": 384, "key": "alice"}

`time` is in seconds. Prompts with the same `prefix_id` share their first `prefix_len` tokens; without `prefix_len` they
share all tokens of the shorter prompt (the turns of a conversation). All fields but the first three may be missing.
"""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from penstock.config import ConfigError

Length = Annotated[int, Meta(ge=1, le=1 << 24)]
PAGE_NAME_BYTES = 8

Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]


class ShownImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image of a prompt."""

    name: str  # equal images have equal names
    start: Annotated[int, Meta(ge=0)]
    length: Length  # positions from its first placeholder to its last
    num_embeddings: Length  # placeholders among these


class Arrival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request of a load."""

    time: Annotated[float, Meta(ge=0, le=1e9)]  # seconds, when its client sends it
    input_len: Length
    output_len: Length
    prefix_id: str = ""
    prefix_len: Annotated[int, Meta(ge=0)] = 0  # 0 with a prefix id: the whole prompt
    pages: bytes = b""  # in place of a prefix id: 8 bytes for each full page, which identify it and all before it
    key: str = ""  # the API key that it comes from
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0  # the key's share under the fair policy
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    max_tokens: Annotated[int, Meta(ge=0)] = 0  # its limit, if it stops earlier by itself; 0: its output length
    ttft_ms: Milliseconds = 0.0  # targets; 0: those of the whole load
    tpot_ms: Milliseconds = 0.0
    images: tuple[ShownImage, ...] = ()


class Targets(NamedTuple):
    """The times that an answer must keep to count as good, in milliseconds; 0: no target."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0

    def of(self, arrival: Arrival) -> "Targets":
        """The targets of a request: its own, or else these."""
        return Targets(arrival.ttft_ms or self.ttft_ms, arrival.tpot_ms or self.tpot_ms)


NO_TARGETS = Targets()


class Bursts(msgspec.Struct, frozen=True, kw_only=True):
    """How arrivals are spread in time. The mean rate does not depend on the other fields."""

    rate: float  # requests per second; inf: all at once
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps: 1 is a Poisson process, less is burstier, more is more even."""
    on_off: tuple[float, float] | None = None
    """Alternating seconds with arrivals, and seconds without."""

    def times(self, count: int, rng: random.Random) -> Iterator[float]:
        """Yield `count` arrival times, in order; the first is 0."""
        if math.isinf(self.rate):
            yield from [0.0] * count
            return
        on, off = self.on_off or (1.0, 0.0)
        scale = on / (on + off) / self.rate / self.burstiness  # of the time with arrivals
        at = 0.0
        for _ in range(count):
            yield at + off * (at // on)
            at += rng.gammavariate(self.burstiness, scale)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the requests of a drawn load. Ranges are uniform, both ends included."""

    input_len: tuple[int, int] = (1024, 1024)
    output_len: tuple[int, int] = (128, 128)
    prefix_len: int = 0  # number of first tokens that prompts share
    num_prefixes: int = 1  # prompts have one of this many prefixes, each equally often
    num_keys: int = 1


def draw(count: int, bursts: Bursts, shape: Shape, seed: int) -> list[Arrival]:
    """Draw a load of `count` requests. The same seed gives the same load."""
    rng = random.Random(seed)
    times = list(bursts.times(count, random.Random(rng.random())))
    found = []
    for at in times:
        prefix = rng.randrange(shape.num_prefixes) if shape.prefix_len else 0
        key = rng.randrange(shape.num_keys) if shape.num_keys > 1 else 0
        found.append(
            Arrival(
                time=at,
                input_len=max(rng.randint(*shape.input_len), shape.prefix_len),
                output_len=rng.randint(*shape.output_len),
                prefix_id=f"prefix-{prefix}" if shape.prefix_len else "",
                prefix_len=shape.prefix_len,
                key=f"key-{key}" if shape.num_keys > 1 else "",
            )
        )
    return found


def read(path: Path) -> list[Arrival]:
    """Read the load of a file, in order of time.

    Raises:
        ConfigError: the file cannot be read, or a line is invalid; the message has its number.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(msgspec.json.decode(line, type=Arrival))
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ConfigError(f"{path} has no requests")
    return sorted(found, key=lambda each: each.time)


def write(path: Path, arrivals: Sequence[Arrival]) -> None:
    """Write a load in the form that `read` takes."""
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in arrivals))


def described(arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Summarise a load: requests, tokens, seconds, and how bursty it is (1: like a Poisson process)."""
    gaps = [b.time - a.time for a, b in pairwise(arrivals)]
    mean = math.fsum(gaps) / len(gaps) if gaps else 0.0
    variance = math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps) if gaps else 0.0
    return {
        "num_requests": len(arrivals),
        "num_prompt_tokens": sum(each.input_len for each in arrivals),
        "num_output_tokens": sum(each.output_len for each in arrivals),
        "seconds": arrivals[-1].time - arrivals[0].time if arrivals else 0.0,
        "variation_of_gaps": math.sqrt(variance) / mean if mean else 0.0,
    }
