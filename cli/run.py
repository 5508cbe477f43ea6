"""`penstock run`: talk to a model, with a server that runs here already, or one that is started for it."""

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.markup import escape

from penstock.cli.chat import INTERRUPTED, Conversation, ask, talk
from penstock.cli.engines import RefusedError, Server
from penstock.cli.running import running
from penstock.config import Config, ConfigError
from penstock.config.api_keys import KEY_VARIABLE, client_key
from penstock.config.flags import config_from, flags
from penstock.config.foreign_flags import without_foreign_flags
from penstock.config.parser import Parser
from penstock.ipc.logs import flush_logs, setup_logging
from penstock.ipc.process import EXIT_CONFIG
from penstock.models.finding.located import find_local, located
from penstock.models.finding.registry import served_model_names

_GROUPS = ("model", "scheduler", "worker", "parallel", "log")
_NOT_INHERITED = ("frontend", "ipc")
"""Groups whose variables are meant for a server that others use."""

_LOOK_SECONDS = 0.1
_PATIENCE_SECONDS = 2.0
_END_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Talk; return the exit code (2: the model or the options cannot work)."""
    parser = _parser()
    try:
        namespace, more = parser.parse_known_args(without_foreign_flags(sys.argv[1:] if argv is None else list(argv)))
        if any(word.startswith("-") for word in more):
            parser.error(parser.surplus(more))
        said = namespace.words + more  # argparse takes no words behind an option for the same argument
        if said and not hasattr(namespace, "model"):
            namespace.model = said.pop(0)
        config = config_from(namespace, os.environ)
        options = [word for word in parser.given(namespace) if not word.startswith("--model=")]
        talk_to = partial(_talk, system=namespace.system, prompt=" ".join(said))
        if not options and (found := _running(config)) is not None:
            return talk_to(*found, client_key())
        with _server(config, options) as place:
            return talk_to(*place)
    except ConfigError as error:
        print(f"penstock run: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except _EndedError as error:
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        flush_logs()


def _parser() -> Parser:
    parser = Parser(
        "penstock run",
        "Talk to a model in the terminal, or have one prompt answered. If a server with this model runs here already, "
        "it answers; otherwise one is started, which nobody else can use and which ends when you leave. With options, "
        "one is always started.",
    )
    parser.add_argument(
        "words", nargs="*", metavar="MODEL [PROMPT]",
        help="model, as of `penstock serve` (default: the demo model); with a PROMPT, print the answer to it, and end",
    )  # fmt: skip
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_flags(_GROUPS)
    return parser


def _talk(url: str, model: str, key: str, *, system: str, prompt: str) -> int:
    conversation, console = Conversation(url, model, key, system), Console(highlight=False)
    return ask(conversation, console, prompt) if prompt else talk(conversation, console)


def _running(config: Config) -> tuple[str, str] | None:
    """The URL of a server with this model, and its name there."""
    name = find_local(config.model.model)[1] if config.model.model else ""
    names = {name or served_model_names(config)[0]}
    for server in running():
        answers = server.asked(client_key())
        if found := next((each for each in answers.models if each in names), None):
            return answers.url, found
    return None


@contextmanager
def _server(config: Config, options: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """A server for this talk alone: its URL, the model's name there, and the key that it wants.

    Raises:
        ConfigError: there is no such model.
        _EndedError: the server ended before it was ready; it has said why.
    """
    log = config.log
    found = located(config, before_download=lambda: setup_logging("penstock", log.log_level, log.log_format))
    name, key, port = served_model_names(found)[0], f"pk-{secrets.token_urlsafe(32)}", _free_port()
    unset = {flag.variable for flag in flags(_NOT_INHERITED)}
    environment = {name: value for name, value in os.environ.items() if name not in unset} | {KEY_VARIABLE: key}
    level = ["--log-level=warning"] if config.log.log_level == "auto" else []
    model = [config.model.model] if config.model.model else []
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "serve", *model, *options, *level, f"--port={port}"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C stops an answer, and not the server
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        with Console(stderr=True).status(f"starting {escape(name)} ..."):
            _wait_until_ready(process, Server(url, key, _PATIENCE_SECONDS))
        yield url, name, key
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", server: Server) -> None:
    while True:
        if process.poll() is not None:
            raise _EndedError(process.returncode)
        try:
            server.text("/ready")
            return
        except RefusedError:
            time.sleep(_LOOK_SECONDS)


class _EndedError(Exception):
    """The server has ended before it was ready."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code if code > 0 else 1


def _end_with_parent() -> None:
    """Let the system end the server if this process is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
