"""Requests that ended workers, remembered for a while: whoever repeats one gets the same answer, without the deaths.

The seed is not looked at: a request without one gets another each time, and what ends a worker is hardly the noise.
"""

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from penstock.ipc.int32_buffer import pack_int32
from penstock.ipc.messages import SamplingParams

_SECONDS = 600.0
_MAX_REMEMBERED = 256

_Fingerprint = bytes


class Culprits:
    """What is remembered: no tokens, but hashes of them."""

    def __init__(self) -> None:
        self._until: dict[_Fingerprint, float] = {}  # in the order of the times

    def note(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, now: float) -> None:
        """A request with this prompt and these parameters has ended workers."""
        fingerprint = _fingerprint(pack_int32(prompt_token_ids), sampling)
        self._until.pop(fingerprint, None)
        self._until[fingerprint] = now + _SECONDS
        while len(self._until) > _MAX_REMEMBERED:
            del self._until[next(iter(self._until))]

    def knows(self, prompt_token_ids: bytes, sampling: SamplingParams, now: float) -> bool:
        """Whether one like this did, not long ago."""
        while self._until and next(iter(self._until.values())) <= now:
            del self._until[next(iter(self._until))]
        return bool(self._until) and _fingerprint(prompt_token_ids, sampling) in self._until


def _fingerprint(prompt_token_ids: bytes, sampling: SamplingParams) -> _Fingerprint:
    digest = hashlib.blake2b(prompt_token_ids, digest_size=16)
    digest.update(msgspec.msgpack.encode(replace(sampling, seed=0)))
    return digest.digest()
