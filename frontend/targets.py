"""Targets of a request: how soon its first token is wanted, and how soon each one after it (TTFT and TPOT)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from penstock.frontend.errors import InvalidParameter

TTFT_HEADER, TPOT_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms"
"""Header names used by inference gateways, such as those of the Gateway API Inference Extension."""

MAX_MS = 1e9

_MILLISECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclass(frozen=True, slots=True)
class Targets:
    """Milliseconds; inf: no target. With 0 ms the first token is due at once: its time was used up elsewhere."""

    ttft_ms: float = inf
    tpot_ms: float = inf

    def nearer(self, other: "Targets") -> "Targets":
        """The stricter target of each kind."""
        return Targets(min(self.ttft_ms, other.ttft_ms), min(self.tpot_ms, other.tpot_ms))

    def are_met(self, ttft_ms: float, tpot_ms: float) -> bool:
        """Whether these times are within the targets."""
        return ttft_ms <= self.ttft_ms and tpot_ms <= self.tpot_ms


NONE = Targets()


def targets_in(headers: Mapping[str, Sequence[str]]) -> Targets:
    """The targets in a request's headers.

    Raises:
        InvalidParameter: naming the header, if one is not a number of milliseconds.
    """
    return Targets(_in_header(headers, TTFT_HEADER, least=0.0), _in_header(headers, TPOT_HEADER, least=1e-3))


def _in_header(headers: Mapping[str, Sequence[str]], name: str, least: float) -> float:
    if name not in headers:
        return inf
    given = headers[name][0]
    value = float(given) if _MILLISECONDS.fullmatch(given) else -1.0
    if not least <= value <= MAX_MS:
        what = "a positive number" if least else "a number"
        raise InvalidParameter(f"{name} must be {what} of milliseconds, got {given[:64]!r}", param=name)
    return value
