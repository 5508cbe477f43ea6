"""Longest cached prefix first."""

from penstock.core.sequences.sequence import Key, Request
from penstock.core.steps.plan_builder import InFlightStep
from penstock.parts.policies.scheduler.policy import Policy

_DEPTHS = (256, 64, 16, 4, 1)
"""Prompts that share their first pages, this many, are a family."""

_RENEWALS_A_STEP, _LOOKS_A_STEP = 2, 8
"""Renewals look up the prefix. More requests are examined than renewed, because most of them are running."""

_Name = tuple[int, int]  # index of the depth, hash of the beginning; smaller: longer common beginning
_Family = dict[Request, None]
"""Live requests whose prompts begin with the same pages; the one examined longest ago is first."""


class CacheAware(Policy):
    """By the cached tokens at the beginning of the prompt, most first, in classes of powers of two of pages.

    So requests with a common prefix run together, while its pages are there.

    The cache changes while requests wait. When a prompt has been computed, the keys of requests that begin alike are
    renewed, the most alike first and a few in each step. The head of the queue is checked again before it gets a row.

    The bound: a request that has waited for `max_delay` seconds comes before all classes.
    """

    max_delay = 10.0
    checks_head = True

    def __init__(self) -> None:
        self._families: dict[_Name, _Family] = {}
        self._families_of: dict[Request, list[_Name]] = {}
        self._grown: dict[_Name, int] = {}  # families with more pages cached -> members still to examine

    def key(self, request: Request, now: float) -> Key:
        if request not in self._families_of:
            self._join_families(request)
        return (-(self.view.num_cached_tokens(request) // self.view.kv.page_size).bit_length(),)

    def on_step(self, step: InFlightStep) -> None:
        for chunk in step.chunks:
            if chunk.samples:
                for name in self._families_of.get(chunk.seq.request, ()):
                    if len(self._families[name]) > 1:
                        self._grown[name] = len(self._families[name])
        if self._grown:
            self._look_again()

    def on_gone(self, request: Request) -> None:
        for name in self._families_of.pop(request, ()):
            family = self._families[name]
            del family[request]
            if not family:
                del self._families[name]
                self._grown.pop(name, None)

    def _join_families(self, request: Request) -> None:
        page_size, prompt = self.view.kv.page_size, request.prompt_token_ids
        num_pages = (len(prompt) - 1) // page_size  # the last token is always computed
        names = [
            (i, hash((request.namespace, prompt[: depth * page_size].tobytes())))
            for i, depth in enumerate(_DEPTHS)
            if depth <= num_pages
        ]
        self._families_of[request] = names
        for name in names:
            self._families.setdefault(name, {})[request] = None

    def _look_again(self) -> None:
        num_asked = 0
        for _ in range(_LOOKS_A_STEP):
            name = min(self._grown)
            family = self._families[name]
            request = next(iter(family))
            del family[request]
            family[request] = None
            self._grown[name] -= 1
            if not self._grown[name]:
                del self._grown[name]
            if request.waiting:
                self.view.renew(request)
                num_asked += 1
            if num_asked == _RENEWALS_A_STEP or not self._grown:
                return
