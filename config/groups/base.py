"""What all groups of options share."""

import msgspec


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the option groups."""


class Shown(msgspec.Struct, frozen=True):
    """How the command line shows an option; stands beside its Meta."""

    value: str = ""
    """What is typed behind it, such as PATH; empty: what the option's name or type says."""
    line: str = ""
    """What `--help` says of it, in one line; empty: few people need the option, and only `--help-all` has it."""
    also: tuple[str, ...] = ()
    """Other engines' names of exactly this option, which may be typed in its place."""
    is_internal: bool = False
    """No flag and no variable: nobody has a reason to change it, but tests and benchmarks do, and programs may."""


INTERNAL = Shown(is_internal=True)
"""Marks a field that is no option."""
