"""The command line, made from the option structs: every field is an option, its Meta gives help and bounds."""

import argparse
import types
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from penstock.core.config.options import Config, ConfigError, Options, validate

ENVIRONMENT_PREFIX = "PENSTOCK_"


class Flag(msgspec.Struct, frozen=True):
    """One option as users meet it."""

    group: str  # the field of Config that holds it
    field: str
    type: Any
    default: Any
    help: str

    @property
    def name(self) -> str:
        """As typed: `--max-num-seqs`."""
        return "--" + self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that is used where the option is not given."""
        return ENVIRONMENT_PREFIX + self.field.upper()


def flags(groups: Iterable[str] | None = None) -> list[Flag]:
    """All flags of the given groups of Config (default: of all), in the order of their definition."""
    found = []
    for group in Config.__struct_fields__ if groups is None else groups:
        options: type[Options] = get_type_hints(Config)[group]
        hints = get_type_hints(options, include_extras=True)
        for field, default in zip(options.__struct_fields__, options.__struct_defaults__, strict=True):
            annotation = hints[field]
            meta = next((m for m in get_args(annotation) if isinstance(m, Meta)), Meta())
            found.append(Flag(group, field, get_args(annotation)[0], default, meta.description or ""))
    return found


def add_flags(
    parser: argparse.ArgumentParser, groups: Iterable[str], is_wanted: Callable[[Flag], bool] = lambda flag: True
) -> None:
    """Add the options of these groups. Absent ones stay absent in the namespace, so that defaults live in one place."""
    sections = {group: parser.add_argument_group(group) for group in groups}
    for flag in filter(is_wanted, flags(groups)):
        section = sections[flag.group]
        text = f"{flag.help} (default: {_shown(flag.default)}; {flag.variable})".replace("%", "%%")
        common: dict[str, Any] = {"dest": flag.field, "default": argparse.SUPPRESS, "help": text}
        if flag.field == "model":  # the one positional of `penstock serve MODEL`
            section.add_argument("--model", metavar="FOLDER", **common)
        elif flag.type is bool:
            section.add_argument(flag.name, action=argparse.BooleanOptionalAction, **common)
        elif get_origin(flag.type) is Literal:
            section.add_argument(flag.name, choices=get_args(flag.type), **common)
        elif get_origin(flag.type) is tuple:
            # One word with commas, repeatable: `nargs="+"` would take the MODEL that follows for another value.
            section.add_argument(flag.name, action="append", metavar="NAME[,NAME...]", **common)
        else:
            section.add_argument(flag.name, type=flag.type, metavar=flag.type.__name__.upper(), **common)


def config_from(namespace: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """Options first, then `PENSTOCK_*` variables, then defaults.

    Raises:
        ConfigError: naming the option or the variable, the value and the bound that it violates.
    """
    given = vars(namespace)
    values: dict[str, dict[str, Any]] = {}
    for flag in flags():
        if flag.field in given:
            value, source = given[flag.field], flag.name
        elif environment.get(flag.variable):  # an empty variable counts as unset; compose files write it so
            value, source = environment[flag.variable], flag.variable
        else:
            continue
        if get_origin(flag.type) is tuple:
            words = [value] if isinstance(value, str) else value
            value = [part.strip() for word in words for part in word.split(",") if part.strip()]
        options: type[Options] = get_type_hints(Config)[flag.group]
        annotation = get_type_hints(options, include_extras=True)[flag.field]
        try:  # lax: the environment has only strings
            values.setdefault(flag.group, {})[flag.field] = msgspec.convert(value, annotation, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{source} {value!r}: {error}") from None
        if isinstance(values[flag.group][flag.field], float) and not isfinite(values[flag.group][flag.field]):
            raise ConfigError(f"{source} must be a finite number, got {value!r}")
    return validate(msgspec.convert(values, Config))


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if default in ("", ()) or isinstance(default, types.NoneType):
        return "none"
    return str(default)
