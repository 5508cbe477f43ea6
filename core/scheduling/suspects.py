"""Finds the request that crashes workers: those in flight at a death are replayed in halves until one is left.

    a death     requests in flight become suspects, in groups: the first is on trial, and nothing else is admitted
    passed      the group on trial has recomputed all that was in flight: the next group joins
    a death     during a trial: the group is split in two, and the first half tried alone
    guilty      a suspect that was alone in flight at a death, while the worker made nothing beside its steps

A request that was in flight when another engine's worker died may run beside others at once, because most deaths are no
request's fault. At the next death it is blamed before requests that were never in flight at one.

Since not every death is caused by a request, a first death costs its suspects only a few steps of waiting. If one
request among n crashes every worker, it is found after about log2(n) + 1 deaths.
"""

import hashlib
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListOf

import msgspec
from msgspec.structs import replace

from penstock.core.scheduling.part import Parts
from penstock.core.scheduling.trials import Trials
from penstock.core.sequences.sequence import Request, Sequence
from penstock.core.steps.plan_builder import InFlightStep
from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import SamplingParams

_TOKENS_LOST = 4
"""Tokens of a sequence that may have been in flight at a death, and were never reported; at least that many."""

_SECONDS = 600.0
_MAX_REMEMBERED = 256


class Suspects:
    """All groups, the one on trial first. Pure bookkeeping: the scheduler asks `may_run`."""

    __slots__ = ("_brought", "_marks", "groups")

    def __init__(self) -> None:
        self.groups: list[list[Request]] = []
        """Usually empty; then `may_run` need not be asked."""
        self._marks: dict[Request, dict[Sequence, int]] = {}  # positions launched when the worker died
        self._brought: dict[Request, dict[Sequence, int]] = {}  # suspected at another engine, up to these positions

    def __len__(self) -> int:
        return len(self._marks)

    @property
    def requests(self) -> list[Request]:
        """All suspects."""
        return list(self._marks)

    def bring(self, request: Request) -> None:
        """A request has arrived that may have killed a worker of another engine."""
        self._forget_innocent()
        self._brought[request] = {seq: seq.num_tokens + _TOKENS_LOST for seq in request.waiting}

    def may_run(self, request: Request) -> bool:
        """Whether the request may be admitted now."""
        return not self.groups or request in self.groups[0]

    def blame(self, in_flight: Iterable[InFlightStep], *, is_making: bool) -> Request | None:
        """A worker died with these steps in flight, and all sequences will be recomputed; return a certain culprit.

        `is_making`: whether it also made something beside its steps, which may be guilty instead (`trials.py`).

        Call this before the sequences leave their rows.
        """
        launched = _launched(in_flight)
        on_trial = [request for request in self.groups[0] if request in launched] if self.groups else []
        self._forget_innocent()
        brought = [request for request in self._brought if request in launched]
        if (on_trial or brought) and len(launched) == 1 and not is_making:
            self._release(on_trial)
            return next(iter(launched))
        suspects = on_trial or brought or list(launched)
        if not suspects:
            return None
        if on_trial:
            self.groups[0] = [request for request in self.groups[0] if request not in launched]
        half = (len(suspects) + 1) // 2
        self.groups = [group for group in (suspects[:half], suspects[half:], *self.groups) if group]
        for request in suspects:
            self._marks[request] = launched[request]
            self._brought.pop(request, None)
        return None

    def advance(self) -> None:
        """Release suspects that have passed or ended; when the first group is empty, the next group's turn comes."""
        while self.groups:
            # A paused request would keep all others waiting: it is released, and suspected again if it was the cause.
            passed = [
                request
                for request in self.groups[0]
                if request.is_paused or self._has_passed(request, self._marks[request])
            ]
            self._release(passed)
            if self.groups[0]:
                return
            del self.groups[0]

    def _forget_innocent(self) -> None:
        innocent = [request for request, marks in self._brought.items() if self._has_passed(request, marks)]
        for request in innocent:
            del self._brought[request]

    @staticmethod
    def _has_passed(request: Request, marks: Mapping[Sequence, int]) -> bool:
        return all(seq.num_settled_tokens >= marks.get(seq, 0) for seq in (*request.running, *request.waiting))

    def _release(self, requests: list[Request]) -> None:
        """Remove requests from the group on trial."""
        for request in requests:
            self.groups[0].remove(request)
            del self._marks[request]


def bring(request: Request, suspects: Suspects, trials: Trials, parts: Parts) -> None:
    """A request has come that may have killed a worker of another engine: by its steps, or by what is made for it."""
    suspects.bring(request)
    for makes_for in parts.makes_for:
        for key in makes_for(request):
            trials.suspect(key)


def suspect_ids(suspects: Suspects, requests: Iterable[Request], trials: Trials, parts: Parts) -> tuple[str, ...]:
    """The ids of those requests that may have killed a worker, by themselves or by what was made for them."""
    found = {request.request_id for request in suspects.requests}
    for makes_for in parts.makes_for:
        found.update(each.request_id for each in requests if any(map(trials.is_suspected, makes_for(each))))
    return tuple(found)


def _launched(in_flight: Iterable[InFlightStep]) -> dict[Request, dict[Sequence, int]]:
    """The live sequences of these steps, by request, each with its number of launched positions."""
    found: dict[Request, dict[Sequence, int]] = {}
    for step in in_flight:
        members = [*zip(step.decodes.seqs, step.decodes.epochs, strict=True), *((c.seq, c.epoch) for c in step.chunks)]
        for seq, epoch in members:
            if seq.running_epoch == epoch:
                found.setdefault(seq.request, {})[seq] = seq.num_computed_tokens
    return found


class Culprits:
    """Requests that crashed workers, remembered for a while, so that a repeat is refused without another death.

    Only hashes are kept. They leave out the seed: a request without one gets a new seed each time, and sampling
    noise hardly crashes a worker.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, float] = {}
        """Hash -> expiry time, in order of expiry. Usually empty; then `knows` need not be asked."""

    def note(self, prompt_token_ids: ListOf[int], sampling: SamplingParams, now: float) -> None:
        """Record that a request with this prompt and these parameters crashed workers."""
        fingerprint = _fingerprint(pack_int32(prompt_token_ids), sampling)
        self.known.pop(fingerprint, None)
        self.known[fingerprint] = now + _SECONDS
        while len(self.known) > _MAX_REMEMBERED:
            del self.known[next(iter(self.known))]

    def knows(self, prompt_token_ids: bytes, sampling: SamplingParams, now: float) -> bool:
        """Whether a request like this one crashed workers recently."""
        while self.known and next(iter(self.known.values())) <= now:
            del self.known[next(iter(self.known))]
        return bool(self.known) and _fingerprint(prompt_token_ids, sampling) in self.known


def _fingerprint(prompt_token_ids: bytes, sampling: SamplingParams) -> bytes:
    digest = hashlib.blake2b(prompt_token_ids, digest_size=16)
    digest.update(msgspec.msgpack.encode(replace(sampling, seed=0)))
    return digest.digest()
