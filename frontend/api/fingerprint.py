"""The `system_fingerprint`: a digest of all that a seeded answer depends on besides the request."""

import hashlib

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from penstock.frontend import schema
from penstock.ipc.messages import EngineReady
from penstock.ipc.version import VERSION


def fingerprint_of(facts: EngineReady, text: str, adapter: str | UnsetType) -> tuple[str, schema.SystemParts]:
    """The fingerprint, and what it is made from: the engine's facts, the digest of texts, the key of an adapter."""
    parts = schema.SystemParts(
        program=VERSION,
        architecture=facts.model_fingerprint,
        weights=facts.weights,
        text=text,
        kernels=facts.kernels,
        arithmetic=facts.arithmetic,
        dtype=facts.dtype,
        ranks=facts.num_ranks,
        batch_invariant=facts.is_batch_invariant,
        adapter=adapter,
    )
    digested = {name: value for name, value in asdict(parts).items() if value is not UNSET}
    del digested["batch_invariant"]
    digest = hashlib.sha256(msgspec.json.encode(digested, order="sorted")).hexdigest()
    return f"fp_{digest[:16]}", parts
