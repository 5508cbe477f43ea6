"""The flags, made from the option structs: every field is an option; its Meta gives help and bounds."""

import argparse
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from penstock.config.groups.base import Shown
from penstock.config.options import Config, ConfigError, option_groups, validate
from penstock.config.part_options import part_options

ENVIRONMENT_PREFIX = "PENSTOCK_"


_UNITS = {
    "gib": "GIB", "mib": "MIB", "bytes": "BYTES", "ms": "MS", "seconds": "SECONDS", "timeout": "SECONDS",
    "interval": "SECONDS", "port": "PORT", "host": "HOST", "address": "ADDRESS",
}  # fmt: skip
"""The last word of an option's name -> what is typed behind the option."""

_MAX_CHOICES = 24
"""Characters; more choices are too long to stand behind an option's name."""

_TITLES = {
    "model": "Model",
    "scheduler": "Scheduler",
    "worker": "Worker",
    "parallel": "Parallelism",
    "frontend": "Frontend",
    "ipc": "Addresses between the processes",
    "log": "Log",
}


class Flag(msgspec.Struct, frozen=True):
    """One option as users meet it."""

    group: str  # the field of Config that holds it, or the part that brings it
    field: str
    type: Any
    default: Any
    help: str
    shown: Shown

    @property
    def is_internal(self) -> bool:
        """Whether it is a field that programs can set, but no option."""
        return self.shown.is_internal

    @property
    def name(self) -> str:
        """As typed: `--max-num-seqs`."""
        return "--" + self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that is used where the option is not given."""
        return ENVIRONMENT_PREFIX + self.field.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values that there are; empty: others, too."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def value(self) -> str:
        """What is typed behind it, as the help shows it: `PATH`, `N`, `auto|on|off`; empty for a switch."""
        if self.type is bool:
            return ""
        choices = "|".join(self.choices)
        number = "N" if self.type is int else "NUMBER"
        unit = _UNITS.get(self.field.rpartition("_")[2]) or (choices if len(choices) <= _MAX_CHOICES else "") or number
        value = self.shown.value or unit
        return f"{value}[,...]" if get_origin(self.type) is tuple else value


def group_title(group: str) -> str:
    """What stands above a group's options."""
    return _TITLES[group] if group in _TITLES else part_options()[group].title


def flags(groups: Iterable[str] | None = None) -> list[Flag]:
    """All flags of the given groups of Config (default: of all) and of the parts that stand beside them."""
    return [flag for flag in fields(groups) if not flag.is_internal]


def fields(groups: Iterable[str] | None = None) -> list[Flag]:
    """The flags, and the internal fields of the groups, which only programs set."""
    own = list(_TITLES if groups is None else groups)
    of_parts = [name for name, options in part_options().items() if options.beside in own]
    return list(chain.from_iterable(map(fields_of, (*own, *of_parts))))


def flags_of(group: str) -> list[Flag]:
    """The flags of one group alone, in the order of their definition."""
    return [flag for flag in fields_of(group) if not flag.is_internal]


def fields_of(group: str) -> list[Flag]:
    """The flags of one group alone, and its internal fields."""
    options = option_groups()[group]
    hints = get_type_hints(options, include_extras=True)
    found = []
    for field, default in zip(options.__struct_fields__, options.__struct_defaults__, strict=True):
        of_type, *notes = get_args(hints[field])
        meta = next((note for note in notes if isinstance(note, Meta)), Meta())
        shown = next((note for note in notes if isinstance(note, Shown)), Shown())
        found.append(Flag(group, field, of_type, default, meta.description or "", shown))
    return found


def spelled_out(arguments: Sequence[str], known: Collection[Flag]) -> list[str]:
    """Replace other engines' names of these options by their own, and `_` in their names by `-`."""
    names = {other: flag.name for flag in known for other in (*flag.shown.also, flag.name)}
    names |= {f"--no-{flag.name[2:]}": f"--no-{flag.name[2:]}" for flag in known if flag.type is bool}
    found: list[str] = []
    for at, word in enumerate(arguments):
        if word == "--":
            return [*found, *arguments[at:]]
        name, equals, value = word.partition("=")
        own = names.get(name.replace("_", "-") if name.startswith("--") else name)
        found.append(word if own is None else f"{own}{equals}{value}")
    return found


def config_from(namespace: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """Options first, then `PENSTOCK_*` variables, then defaults. Internal fields may be in the namespace, too.

    Raises:
        ConfigError: naming the option or the variable, the value and the bound that it violates.
    """
    given = vars(namespace)
    groups = option_groups()
    values: dict[str, dict[str, Any]] = {}
    for flag in fields():
        if flag.field in given:
            value, source = given[flag.field], flag.field if flag.is_internal else flag.name
        elif not flag.is_internal and environment.get(flag.variable):  # empty as in files for Compose: unset
            value, source = environment[flag.variable], flag.variable
        else:
            continue
        if get_origin(flag.type) is tuple:
            words = [value] if isinstance(value, str) else value
            value = [part.strip() for word in words for part in word.split(",") if part.strip()]
        annotation = get_type_hints(groups[flag.group], include_extras=True)[flag.field]
        try:  # lax: the environment has only strings
            values.setdefault(flag.group, {})[flag.field] = msgspec.convert(value, annotation, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{source} {value!r}: {error}") from None
        if isinstance(values[flag.group][flag.field], float) and not isfinite(values[flag.group][flag.field]):
            raise ConfigError(f"{source} must be a finite number, got {value!r}")
    parts = part_options()
    config = msgspec.convert({name: given for name, given in values.items() if name not in parts}, Config)
    return validate(config.with_options(*(parts[name](**given) for name, given in values.items() if name in parts)))


def default_text(default: Any) -> str:
    """A default as users read it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if default in ("", ()) or isinstance(default, types.NoneType):
        return "none"
    return f"{default:g}" if isinstance(default, float) else str(default)
