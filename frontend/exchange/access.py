"""Whether a request may be made: decided by the route that was found for it, and denied unless a rule allows it."""

from collections.abc import Sequence

from penstock.core.config.api_keys import ApiKey, find_key, kept_apart
from penstock.frontend.errors import InvalidApiKey, PermissionDenied
from penstock.frontend.exchange.key_limits import KeyUse

OPEN_ROUTES = frozenset({"/", "/health", "/ready"})
"""For probes, and for people who look what this is: they have no key, and are told nothing of what is served."""

_SCOPES = {"/metrics": "metrics", "/reset_prefix_cache": "admin"}
ADMIN_ROUTES = frozenset(_SCOPES)
"""For those who run the server. If there is a listener for them, it alone answers these."""

_BEARER = "bearer "


class Access:
    """The keys of this server; without any, everybody may ask everything."""

    def __init__(self, keys: tuple[ApiKey, ...], *, shares_prefix_cache: bool = False) -> None:
        self._shares_prefix_cache = shares_prefix_cache
        self._keys: tuple[ApiKey, ...] = ()
        self._uses: dict[bytes, KeyUse] = {}
        self.change(keys)

    def change(self, keys: tuple[ApiKey, ...]) -> None:
        """From now on these are the keys. What one that stays has used still counts."""
        if not self._shares_prefix_cache:
            keys = kept_apart(keys)
        uses = {key.digest: self._uses.get(key.digest) or KeyUse(key) for key in keys}
        for key in keys:
            uses[key.digest].change(key)
        self._keys, self._uses = keys, uses

    @property
    def has_keys(self) -> bool:
        """Requests need one."""
        return bool(self._keys)

    def check(self, route: str, authorization: Sequence[str]) -> KeyUse | None:
        """Raise unless the request may go on; whose it is, None if that does not matter.

        Args:
            route: the route's pattern, as registered; any other word for a path that has none.
            authorization: all Authorization headers, or what stands for them (see `app.py`).

        Raises:
            InvalidApiKey: there is no key, more than one, or none of ours.
            PermissionDenied: the key does not have the scope.
        """
        if not self._keys or route in OPEN_ROUTES:
            return None
        if len(authorization) != 1 or authorization[0][: len(_BEARER)].lower() != _BEARER:
            raise InvalidApiKey("this server wants one header `Authorization: Bearer KEY` or `X-Api-Key: KEY`")
        key = find_key(self._keys, authorization[0][len(_BEARER) :].strip())
        if key is None:
            raise InvalidApiKey("the API key is not known here")
        scope = _SCOPES.get(route, "infer")
        if scope not in key.scopes:
            raise PermissionDenied(f"this API key lacks the scope {scope!r}")
        return self._uses[key.digest]
