"""Checks API keys and enforces their limits: requests and tokens per minute, and concurrent requests.

The limits are those of this process.

Each sequence of a request (its prompts times `n`) counts as a request: a hundred answers cost the same whether they are
requested at once or one by one.

Limits per minute are leaky buckets. Usage drains evenly, a sixtieth of the limit each second, so a whole minute's worth
may come at once, but the limit holds over any longer time. Tokens are counted when they occur: a prompt when it is
submitted, outputs when they are sampled. A request that begins below the limit may therefore end above it. It is
served, and the next one waits until the excess has drained too.
"""

from collections.abc import Callable, Sequence
from math import ceil
from time import monotonic

from penstock.config.api_keys import ApiKey, find_key, kept_apart
from penstock.frontend.errors import InvalidApiKey, InvalidParameter, PermissionDenied, RateLimitExceeded

_BEARER = "bearer "
_ROUNDING = 1e-6  # rounding error of many small drains added up

CONCURRENT_RETRY_SECONDS = 1
"""The shortest useful wait before a retry: only the client knows when one of its key's requests will end."""


class _PerMinute:
    """One leaky bucket; a limit of 0 means none."""

    def __init__(self, name: str, limit: int, clock: Callable[[], float]) -> None:
        self._name = name
        self.limit = limit
        self._clock = clock
        self._used = 0.0
        self._used_at = clock()

    def check(self, amount: int = 1) -> None:
        """Raise RateLimitExceeded unless `amount` more fits."""
        excess = self._drained() + amount - self.limit
        if self.limit and excess > _ROUNDING:
            used, seconds = ceil(self._used - _ROUNDING), ceil(excess * 60 / self.limit)
            what = self._name.replace("_", " ")
            raise RateLimitExceeded(
                f"rate limit reached: {used} of {self.limit} {what}; retry in {seconds} s", retry_after=seconds
            )

    def use(self, amount: int) -> None:
        """Count what was used, whether or not it fits."""
        self._used = self._drained() + amount

    @property
    def is_half_free(self) -> bool:
        """Whether less than half of the limit is used."""
        return not self.limit or self._drained() * 2 < self.limit

    def change(self, limit: int) -> None:
        """Change the limit, after draining usage at the old rate up to now."""
        self._drained()
        self.limit = limit

    def _drained(self) -> float:
        now = self._clock()
        drained = (now - self._used_at) * self.limit / 60
        self._used = max(0.0, self._used - drained) if self.limit else 0.0
        self._used_at = now
        return self._used


class KeyUse:
    """The current usage of one key."""

    def __init__(self, key: ApiKey, clock: Callable[[], float] = monotonic) -> None:
        self.key = key
        self._num_running = 0
        self._requests = _PerMinute("requests_per_minute", key.requests_per_minute, clock)
        self._tokens = _PerMinute("tokens_per_minute", key.tokens_per_minute, clock)

    def change(self, key: ApiKey) -> None:
        """Take over new limits for the same key; its usage still counts."""
        self.key = key
        self._requests.change(key.requests_per_minute)
        self._tokens.change(key.tokens_per_minute)

    def enter(self) -> None:
        """A request begins; `leave` must follow.

        Raises:
            RateLimitExceeded: if a limit is reached; the request is then not counted.
        """
        most = self.key.max_concurrent
        if most and self._num_running >= most:
            raise RateLimitExceeded(
                f"this API key has max_concurrent = {most}, and {self._num_running} sequences run",
                retry_after=CONCURRENT_RETRY_SECONDS,
            )
        self._requests.check()
        self._tokens.check()
        self._requests.use(1)
        self._num_running += 1

    def add_sequences(self, count: int) -> None:
        """Count a request's sequences besides its first one; `leave` must count them too.

        Raises:
            InvalidParameter: the request has more sequences than the key may ever have at once, or in a minute.
            RateLimitExceeded: it has more than the key may have now. In both cases they are not counted.
        """
        limits = {"max_concurrent": self.key.max_concurrent, "requests_per_minute": self.key.requests_per_minute}
        for name, limit in limits.items():
            if limit and count + 1 > limit:
                raise InvalidParameter(
                    f"this API key has {name} = {limit}, and the request has {count + 1} sequences", param="n"
                )
        most = self.key.max_concurrent
        if most and self._num_running + count > most:
            raise RateLimitExceeded(
                f"this API key has max_concurrent = {most}, and {self._num_running - 1} sequences run beside the "
                f"{count + 1} of this request",
                retry_after=CONCURRENT_RETRY_SECONDS,
            )
        self._requests.check(count)
        self._requests.use(count)
        self._num_running += count

    def leave(self, num_seqs: int) -> None:
        """A request with `num_seqs` sequences has ended."""
        self._num_running -= num_seqs

    @property
    def has_spare(self) -> bool:
        """Whether background work may begin: half of each limit is reserved for requests that a client waits for."""
        most = self.key.max_concurrent
        is_free = not most or self._num_running < max(1, most // 2)
        return is_free and self._requests.is_half_free and self._tokens.is_half_free

    def use_prompt(self, num_tokens: int) -> None:
        """A request is about to be submitted.

        Raises:
            RateLimitExceeded: other requests of this key have used up the tokens since this one began.
        """
        self._tokens.check()
        self._tokens.use(num_tokens)

    def use_outputs(self, num_tokens: int) -> None:
        """Tokens have been sampled."""
        self._tokens.use(num_tokens)

    def salted(self, cache_salt: str) -> str:
        """Return a salt that keeps namespaces apart: no client can forge the salt of another key's namespace."""
        return f"{self.key.namespace}\n{cache_salt}" if self.key.namespace else cache_salt


class Access:
    """The keys of this server. Without keys, every request is allowed."""

    def __init__(self, keys: tuple[ApiKey, ...]) -> None:
        self._keys: tuple[ApiKey, ...] = ()
        self.has_keys = False  # requests need one
        self._uses: dict[bytes, KeyUse] = {}
        self.change(keys)

    def change(self, keys: tuple[ApiKey, ...]) -> None:
        """Replace the keys. Keys that remain keep their usage."""
        keys = kept_apart(keys)
        uses = {key.digest: self._uses.get(key.digest) or KeyUse(key) for key in keys}
        for key in keys:
            uses[key.digest].change(key)
        self._keys, self._uses, self.has_keys = keys, uses, bool(keys)

    def check(self, scope: str, authorization: Sequence[str]) -> KeyUse:
        """Check a request's key; return the key's usage. Only for servers with keys.

        Args:
            scope: the scope that a key needs for the route.
            authorization: all Authorization headers, or the headers used in their place (see `exchange.py`).

        Raises:
            InvalidApiKey: there is no key, more than one, or an unknown one.
            PermissionDenied: the key does not have the scope.
        """
        if len(authorization) != 1 or authorization[0][: len(_BEARER)].lower() != _BEARER:
            raise InvalidApiKey("this server needs one header `Authorization: Bearer KEY` or `X-Api-Key: KEY`")
        key = find_key(self._keys, authorization[0][len(_BEARER) :].strip())
        if key is None:
            raise InvalidApiKey("the API key is unknown")
        if scope not in key.scopes:
            raise PermissionDenied(f"this API key lacks the scope {scope!r}")
        return self._uses[key.digest]

    def of(self, key_id: str, scope: str) -> KeyUse:
        """The usage of a key by its id, for work that its owner has left to run in the background.

        Raises:
            InvalidApiKey: the key is gone.
            PermissionDenied: the key does not have the scope (any more).
        """
        for key in self._keys:
            if key.id == key_id:
                if scope not in key.scopes:
                    raise PermissionDenied(f"this API key lacks the scope {scope!r}")
                return self._uses[key.digest]
        raise InvalidApiKey("the API key is gone")
