"""Command lines: no names are abbreviated, errors are one sentence, and help is short unless all is asked for."""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, get_origin

from penstock.config.argument_types import not_negative, not_negative_float, positive, positive_float, share
from penstock.config.flags import Flag, default_text, flags, group_title, spelled_out
from penstock.config.removed import why_gone

_WIDTH = 100
_NAMES = 36
"""Columns for options and what is typed behind them; their help stands to the right."""

_VALUES: dict[object, str] = dict.fromkeys((int, positive, not_negative), "N") | dict.fromkeys(
    (float, positive_float, not_negative_float, share), "NUMBER"
)
"""What is typed behind an option of such a type, unless the option says it."""


class _Formatter(argparse.HelpFormatter):
    """An option in one line where it fits: both names, then what is typed behind them."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_NAMES, width=_width())

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(action.option_strings)
        if isinstance(action, argparse.BooleanOptionalAction):
            names = f"--[no-]{action.option_strings[0][2:]}"
        value = "" if action.nargs == 0 else self._format_args(action, _value(action))
        return f"{names} {value}".rstrip()

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return _value(action)

    def _get_default_metavar_for_positional(self, action: argparse.Action) -> str:
        return action.dest.upper()


def _value(action: argparse.Action) -> str:
    """What is typed behind an option."""
    return str(action.metavar or _VALUES.get(action.type) or action.dest.rpartition("_")[2].upper())


class Parser(argparse.ArgumentParser):
    """The parser of one command."""

    def __init__(self, prog: str, description: str, **others: Any) -> None:
        """
        Args:
            prog: the command, with its `penstock`.
            description: for its help.
            others: as argparse takes them.
        """
        self._flags: list[Flag] = []
        self._has_variables = True
        self._shows_all = False
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=_Formatter,
            **others,
        )

    def add_flags(
        self,
        groups: Iterable[str],
        is_wanted: Callable[[Flag], bool] = lambda flag: True,
        *,
        has_variables: bool = True,
    ) -> None:
        """Add options of `penstock serve`. Absent ones stay absent in the namespace: defaults live in one place.

        Args:
            groups: the options' groups.
            is_wanted: which of their options.
            has_variables: whether the command reads the options' variables, too, as the help then says.
        """
        self._has_variables = has_variables
        for flag in filter(is_wanted, flags(groups)):
            self._flags.append(flag)
            common: dict[str, Any] = {"dest": flag.field, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            if flag.type is bool:
                self.add_argument(flag.name, action=argparse.BooleanOptionalAction, **common)
            elif get_origin(flag.type) is tuple:
                # One word with commas, repeatable: `nargs="+"` would take the MODEL that follows for another value.
                self.add_argument(flag.name, action="append", **common)
            else:
                of_type = str if flag.choices else flag.type
                self.add_argument(flag.name, type=of_type, choices=flag.choices or None, **common)
        self.add_argument("--help-all", action=_HelpAll, help="show all options, and what each means")

    # --- what is typed ------------------------------------------------------------------------

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """As argparse does, except for what is said of an option that does not exist."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self.surplus(unknown))
        return found

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does, with other engines' names for the options that it shares with `penstock serve`."""
        return super().parse_known_args(
            spelled_out(list(sys.argv[1:] if args is None else args), self._flags), namespace
        )

    def surplus(self, unknown: Sequence[str]) -> str:
        """What to say about words that mean nothing."""
        for word in unknown:
            if word.startswith("-"):
                return unknown_flag(word, (name for action in self._actions for name in action.option_strings))
        return f"unexpected word {unknown[0]!r}" + "; an option with several values takes them as A,B" * bool(
            self._flags
        )

    def error(self, message: str) -> NoReturn:
        """End with one sentence."""
        hint = "; see --help" if message.startswith("the following arguments are required") else ""
        self.exit(2, f"{self.prog}: {message}{hint}\n")

    def given(self, namespace: argparse.Namespace) -> list[str]:
        """The options of `penstock serve` that were typed, as words for another command line."""
        words = []
        for flag in self._flags:
            if not hasattr(namespace, flag.field):
                continue
            value = getattr(namespace, flag.field)
            if flag.type is bool:
                words.append(flag.name if value else f"--no-{flag.name[2:]}")
            else:
                words += [f"{flag.name}={each}" for each in (value if isinstance(value, list) else [value])]
        return words

    # --- help ---------------------------------------------------------------------------------

    def format_usage(self) -> str:
        """One line: the arguments that must be given, and that there are options."""
        needed = [
            f"{action.option_strings[-1]} {_value(action)}"
            for action in self._actions
            if action.option_strings and action.required
        ]
        places = []
        for action in self._actions:
            if not action.option_strings:
                name = str(action.metavar or action.dest.upper())
                places.append(f"[{name}]" if action.nargs in ("?", "*") else name)
        return " ".join(["usage:", self.prog, *places, *needed, "[OPTIONS]"]) + "\n"

    def format_help(self) -> str:
        """The help: options of `penstock serve` by groups, at first only those that many people need."""
        usage, self.usage = self.usage, argparse.SUPPRESS  # argparse's names every option
        try:
            text = f"{self.format_usage()}\n{super().format_help().strip()}\n"
        finally:
            self.usage = usage
        show = self._entry if self._shows_all else _line
        for title, told in self._sections().items():
            text += f"\n{title}:\n" + "".join(map(show, told))
        notes = []
        if self._flags and self._has_variables:
            notes.append("Each option is also an environment variable: --max-num-seqs is PENSTOCK_MAX_NUM_SEQS.\n")
        if self._flags and not self._shows_all:
            notes.append("`--help-all` shows the others.\n")
        return "\n".join([text, "".join(notes)]) if notes else text

    def _sections(self) -> dict[str, list[Flag]]:
        """The options that are shown, by what stands above them."""
        groups: dict[str, list[Flag]] = {}
        for flag in self._flags:
            if self._shows_all or flag.shown.line:
                groups.setdefault(group_title(flag.group), []).append(flag)
        lone = [title for title, told in groups.items() if len(told) == 1]
        if not self._shows_all and len(lone) > 1:  # a title for each would take more lines than they do
            groups["More"] = [flag for title in lone for flag in groups.pop(title)]
        return groups

    def _entry(self, flag: Flag) -> str:
        """All about an option."""
        name = f"--[no-]{flag.name[2:]}" if flag.type is bool else flag.name
        facts = [f"default: {default_text(flag.default)}"]
        if flag.choices and flag.value != "|".join(flag.choices):
            facts.insert(0, f"one of {', '.join(flag.choices)}")
        if self._has_variables:
            facts.append(flag.variable)
        if flag.shown.also:
            facts.append(f"also {', '.join(flag.shown.also)}")
        return _columns(f"{name} {flag.value}".rstrip(), f"{flag.help} ({'; '.join(facts)})")

    def print_all(self) -> None:
        """Print the help with all options."""
        self._shows_all = True
        self.print_help()


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        parser.print_all()
        parser.exit()


def _line(flag: Flag) -> str:
    """An option in one line."""
    short = [name for name in flag.shown.also if not name.startswith("--")]
    name = f"--no-{flag.name[2:]}" if flag.default is True else flag.name
    names = f"{name} {flag.value}".rstrip()
    with_short = ", ".join([*short[:1], names])
    text = flag.shown.line
    if flag.default not in ("", (), "auto", 0, 1):  # the line says what these mean, or nobody asks; True is 1
        text += f" (default: {default_text(flag.default)})"
    return _columns(with_short if len(with_short) <= _NAMES - 4 else names, text)


def _columns(names: str, text: str) -> str:
    begin, indent = f"  {names}", " " * _NAMES
    lines = textwrap.wrap(text, max(_width() - _NAMES, 20))
    if len(begin) > _NAMES - 2:
        return "\n".join([begin, *(indent + line for line in lines)]) + "\n"
    return "\n".join([begin.ljust(_NAMES) + lines[0], *(indent + line for line in lines[1:])]) + "\n"


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, 60), _WIDTH)


def unknown_flag(name: str, known: Iterable[str]) -> str:
    """What to say about an option that does not exist."""
    if gone := why_gone(name):
        return gone
    near = get_close_matches(name.partition("=")[0].replace("_", "-"), list(known), n=1, cutoff=0.7)
    return f"there is no option {name}" + (f"; did you mean {near[0]}?" if near else "; see --help")
