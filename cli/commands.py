"""The commands of `penstock`, as its help lists them."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from typing import NamedTuple

_NEAR = 0.75
"""Likeness from which a command may be a typing error of another: `frobnicate` is none of `frontend`."""


class Command(NamedTuple):
    """One command: a module that runs it, with a parser of its own, or the groups of options that it takes."""

    about: str
    module: str = ""
    groups: tuple[str, ...] = ()
    takes_model: bool = False


SERVE_GROUPS = ("model", "frontend", "scheduler", "worker", "parallel", "ipc", "log")

SECTIONS: dict[str, dict[str, Command]] = {
    "Serve a model": {
        "serve": Command("serve a model (default: the demo model): all processes on this machine",
                         groups=SERVE_GROUPS, takes_model=True),
        "run": Command("talk to a model, with a server that is started for it if none runs", "penstock.cli.run"),
        "chat": Command("talk to a server in the terminal", "penstock.cli.chat"),
        "run-batch": Command("answer the requests of a file, without a server", "penstock.run_batch"),
    },
    "Models": {
        "pull": Command("download a model", "penstock.cli.pull"),
        "list": Command("list the models on this machine (also: models)", "penstock.cli.models"),
        "models": Command("list models, those of a folder, or describe one", "penstock.cli.models"),
        "quantize": Command("write a checkpoint with fewer bits", "penstock.quantize"),
    },
    "Running servers": {
        "ps": Command("list the servers that run here: model, address, memory, uptime", "penstock.cli.ps"),
        "top": Command("watch a server: rows, queue, rates, latencies, pages", "penstock.cli.top"),
        "drain": Command("take engines out of service without losing a stream; restart them",
                         "penstock.cli.drain"),
        "role": Command("make an engine prefill, decode, or both, while it serves", "penstock.cli.role"),
        "keys": Command("make an API key, or the keys of tcp:// channels", "penstock.cli.make_key"),
        "probe": Command("ask a scheduler whether it answers (a health check)", "penstock.core.launch.probe"),
    },
    "Find out": {
        "doctor": Command("look at this machine, and say what is misconfigured", "penstock.cli.doctor"),
        "plan": Command("say what a model needs of a GPU, and how fast it can be there", "penstock.lab.commands.plan"),
        "simulate": Command("say what users would feel under other options", "penstock.lab.commands.simulate"),
        "replay": Command("compute what a server recorded again, and compare", "penstock.replay"),
        "bench serve": Command("put load on an OpenAI endpoint and measure it", "penstock.bench.load.serve"),
    },
    "One process alone": {
        "frontend": Command("one HTTP frontend", groups=("model", "frontend", "parallel", "ipc", "log"),
                            takes_model=True),
        "scheduler": Command("the scheduler", groups=("scheduler", "parallel", "ipc", "log")),
        "worker": Command("one worker", groups=("model", "scheduler", "worker", "parallel", "ipc", "log"),
                          takes_model=True),
    },
}  # fmt: skip

COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}

SAME = {"ls": "list"}
"""Other names of commands."""

_OTHER_COMMANDS = {
    "launch": "`penstock serve MODEL` serves a model",
    "start": "`penstock serve MODEL` serves a model",
    "complete": "`penstock run MODEL PROMPT` answers a prompt",
    "show": "`penstock models MODEL` describes a model",
    "info": "`penstock models MODEL` describes a model",
    "download": "`penstock pull ORG/NAME` downloads a model",
    "rm": "`hf cache delete` removes downloads from the cache of the Hugging Face hub",
    "stop": "Ctrl-C or SIGTERM stops a server; `penstock ps` lists them, with their process ids",
}
"""Another engine's command -> what to use here."""


def listing() -> str:
    """All commands, by what they are for."""
    lines = []
    for title, commands in SECTIONS.items():
        lines += [f"{title}:", *(f"  {name:<13}{command.about}" for name, command in commands.items()), ""]
    return "\n".join([*lines, "`penstock COMMAND --help` tells about one; `penstock --version` prints the version."])


def unknown_command(name: str) -> str:
    """What to say about a command that does not exist."""
    near = next(_near(name), None)
    hint = _OTHER_COMMANDS.get(name) or (f"did you mean {near}?" if near else "see `penstock --help`")
    return f"there is no command {name!r}; {hint}"


def _near(name: str) -> Iterator[str]:
    yield from get_close_matches(name, COMMANDS, n=1, cutoff=_NEAR)
    if len(name) > 2:
        yield from (command for command in COMMANDS if command.startswith(name))


def complain(sentence: str) -> None:
    """Tell the user why a command does not do what was asked."""
    with suppress(OSError):  # for example a full disk
        print(f"penstock: {sentence}", file=sys.stderr, flush=True)
