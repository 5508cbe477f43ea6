"""API keys: who may ask for what. Only digests of keys are kept and compared."""

import hmac
import os
import re
import tomllib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from penstock.config.options import ConfigError

KEY_VARIABLE = "PENSTOCK_API_KEY"
"""One key for everything. A variable and not an option, because everyone on the machine can read a command line."""

CLIENT_KEY_HELP = (
    f"for tries alone: everyone on this machine can read a command line; better set the variable {KEY_VARIABLE} (or "
    "OPENAI_API_KEY)"
)
"""What commands say of an option with a key."""

SCOPES = ("infer", "metrics", "admin")
LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent")
TENANTS = ("key", "user")
_FIELDS = ("id", "sha256", "scopes", *LIMITS, "namespace", "weight", "tenant_by")
MAX_WEIGHT = 1000.0
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def client_key(environment: Mapping[str, str] = os.environ) -> str:
    """The key that commands send to a server; empty: none."""
    return environment.get(KEY_VARIABLE) or environment.get("OPENAI_API_KEY") or ""


class ApiKey(NamedTuple):
    """One key's owner."""

    id: str
    digest: bytes  # SHA-256 of the key
    scopes: frozenset[str]
    requests_per_minute: int = 0  # 0: unlimited; the same for the other limits
    tokens_per_minute: int = 0
    max_concurrent: int = 0
    namespace: str = ""  # cached prompts are shared with keys of the same namespace; empty: with all that have none
    weight: float = 1.0  # share of the engine under the fair policy, relative to other keys
    tenant_by: str = "key"  # who takes turns with others: the key, or each `user` that its requests name

    @property
    def own_namespace(self) -> str:
        """A namespace for this key only. No file can contain it, because it has a colon."""
        return f"key:{self.digest.hex()[:32]}"


def digest(key: str) -> bytes:
    """What is kept of a key."""
    return sha256(key.encode(errors="surrogateescape")).digest()


def find_key(keys: tuple[ApiKey, ...], given: str) -> ApiKey | None:
    """Find the key's owner. All keys are compared, each in constant time, so the duration reveals nothing."""
    found, asked = None, digest(given)
    for key in keys:
        if hmac.compare_digest(key.digest, asked):
            found = key
    return found


def kept_apart(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
    """Give each key without a namespace its own, if there are other keys that may use the model."""
    if sum("infer" in key.scopes for key in keys) < 2:
        return keys
    return tuple(key if key.namespace else key._replace(namespace=key.own_namespace) for key in keys)


def load_api_keys(path: str, environment: Mapping[str, str] = os.environ) -> tuple[ApiKey, ...]:
    """The keys of a file and of the environment; if there are none, anyone can use the server.

    Raises:
        ConfigError: in one sentence, if the file cannot be used.
    """
    keys = _read_file(Path(path)) if path else ()
    if single := environment.get(KEY_VARIABLE):
        keys += (ApiKey("environment", digest(single), frozenset(SCOPES)),)
    return keys


def _read_file(path: Path) -> tuple[ApiKey, ...]:
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--api-keys-file {str(path)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys-file {str(path)!r} is not valid TOML: {error}") from None
    entries = raw.get("keys")
    if not isinstance(entries, list) or not entries or set(raw) != {"keys"}:
        raise ConfigError(f"--api-keys-file {str(path)!r} must hold [[keys]] tables, and nothing else")
    keys = tuple(
        checked_key(f"--api-keys-file {str(path)!r}, key {i}", entry) for i, entry in enumerate(entries, start=1)
    )
    if len({key.id for key in keys}) < len(keys):
        raise ConfigError(f"--api-keys-file {str(path)!r} has two keys with the same id")
    return keys


def checked_key(where: str, entry: Any) -> ApiKey:
    """The owner that an entry describes.

    Raises:
        ConfigError: in one sentence that begins with `where`, if it describes none.
    """
    if not isinstance(entry, dict) or set(entry) - set(_FIELDS):
        raise ConfigError(f"{where}: only {', '.join(_FIELDS)} are allowed")
    key_id, hexadecimal, scopes = entry.get("id"), entry.get("sha256"), entry.get("scopes", ["infer"])
    if not isinstance(key_id, str) or not key_id:
        raise ConfigError(f"{where}: id must be a string, and not empty")
    if not isinstance(hexadecimal, str) or not _SHA256.fullmatch(hexadecimal):
        raise ConfigError(f"{where}: sha256 must be 64 hexadecimal digits (`penstock keys` prints them)")
    if not isinstance(scopes, list) or not scopes or any(scope not in SCOPES for scope in scopes):
        raise ConfigError(f"{where}: scopes must be some of {', '.join(SCOPES)}")
    limits = {name: entry[name] for name in LIMITS if name in entry}
    for name, limit in limits.items():
        if type(limit) is not int or limit < 1:
            raise ConfigError(f"{where}: {name} must be a whole number of at least 1, got {limit!r}")
    namespace = entry.get("namespace", "")
    if "namespace" in entry and (not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace)):
        raise ConfigError(f"{where}: namespace must be 1 to 64 letters, digits, dots, hyphens or underscores")
    weight = entry.get("weight", 1.0)
    if type(weight) not in (int, float) or not 1 / MAX_WEIGHT <= weight <= MAX_WEIGHT:
        raise ConfigError(f"{where}: weight must be a number from {1 / MAX_WEIGHT:g} to {MAX_WEIGHT:g}, got {weight!r}")
    tenant_by = entry.get("tenant_by", "key")
    if tenant_by not in TENANTS:
        raise ConfigError(f"{where}: tenant_by must be {' or '.join(TENANTS)}, got {tenant_by!r}")
    return ApiKey(
        key_id, bytes.fromhex(hexadecimal), frozenset(scopes), **limits, namespace=namespace, weight=float(weight),
        tenant_by=tenant_by,
    )  # fmt: skip
