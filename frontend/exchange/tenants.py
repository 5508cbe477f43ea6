"""Names of those who share the engine, as they are on the wire."""

from hashlib import sha256

MAX_TENANT = 200
"""Characters of a name."""


def user_of(tenant: str, user: str) -> str:
    """Return the name of a user of a tenant, which is a key's owner or an address: another one for each, however long.

    Those of one tenant cannot be taken for another's: the separator is in no name that has one line.
    """
    name = f"{tenant}\n{user}"
    return name if len(name) <= MAX_TENANT else f"{tenant[:100]}\n{sha256(name.encode()).hexdigest()}"
