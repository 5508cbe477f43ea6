"""Writes `options.md` from the option structs: every flag and every variable, so that neither can be forgotten.

python docs/options_page.py            # write it
python docs/options_page.py --check    # exit 1 if it is not what would be written
"""

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta

from penstock.config.flags import Flag, default_text, flags_of, group_title
from penstock.config.options import option_groups

PAGE = Path(__file__).parent / "options.md"

_HEAD = """\
<!-- Written by docs/options_page.py from config/groups/ and options.py of parts: change those, then `make docs`. -->
# Options

Every option can be given as a flag or as an environment variable; a flag wins over a variable, a variable over the
default. An empty variable counts as not set. Switches are `--name` and `--no-name`, as variables `true` and `false`;
a list is separated by commas; a flag may also be repeated.

<!-- commands: serve -->
```bash
PENSTOCK_MAX_NUM_SEQS=16 penstock serve --port 8000
```

`penstock serve` takes all of them. The commands that start one process take the groups that concern it: `frontend`
takes the model, parallelism, frontend, addresses and log groups, `scheduler` the scheduler, parallelism, addresses and
log groups, `worker` the model, scheduler, worker, parallelism, addresses and log groups. `penstock serve --help` lists
the options that most people choose from, a line each, and `penstock serve --help-all` all of them. Names are not
abbreviated; `_` in a name is taken for `-`.
"""


def page() -> str:
    """The whole page as Markdown."""
    parts = [_HEAD]
    for group, options in option_groups().items():
        parts.append(f"\n## {group_title(group)}\n\n{(options.__doc__ or '').strip()}\n")
        hints = get_type_hints(options, include_extras=True)
        for flag in flags_of(group):
            parts.append(_entry(flag, hints[flag.field]))
    return "".join(parts)


def _entry(flag: Flag, annotation: Any) -> str:
    default = default_text(flag.default)
    is_word = default == "none" or isinstance(flag.default, bool)
    facts = [f"Variable: `{flag.variable}`", f"Values: {_values(flag, annotation)}"]
    facts.append(f"Default: {default if is_word else f'`{default}`'}")
    if flag.shown.also:
        facts.append(
            f"Other engines' names for it, which work, too: {', '.join(f'`{name}`' for name in flag.shown.also)}"
        )
    return f"\n### `{flag.name}`\n\n{flag.help}\n\n" + "".join(f"- {fact}\n" for fact in facts)


def _values(flag: Flag, annotation: Any) -> str:
    if get_origin(flag.type) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(flag.type))
    if get_origin(flag.type) is tuple:
        return "a list, separated by commas"
    name = {bool: "on or off", int: "a whole number", float: "a number", str: "text"}[flag.type]
    meta = next((m for m in get_args(annotation) if isinstance(m, Meta)), Meta())
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    bounds = [f"{text} {bound:,}" for key, text in words.items() if (bound := getattr(meta, key)) is not None]
    return ", ".join([name, *bounds])


def main(arguments: list[str]) -> int:
    """Write the page, or compare; the exit code."""
    if "--check" not in arguments:
        PAGE.write_text(page())
        return 0
    if PAGE.read_text() == page():
        return 0
    print(f"{PAGE} does not show the options as they are: run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
