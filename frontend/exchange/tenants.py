"""Names of tenants, which share the engine, as they are on the wire."""

from hashlib import sha256

MAX_TENANT = 200
"""The longest name, in characters."""


def user_of(tenant: str, user: str) -> str:
    """Return the name of a tenant's user, unique however long; the tenant is a key's owner or a client's address.

    One tenant's users cannot pass for another's: the separator is a line break, which no tenant's name contains.
    """
    name = f"{tenant}\n{user}"
    return name if len(name) <= MAX_TENANT else f"{tenant[:100]}\n{sha256(name.encode()).hexdigest()}"
