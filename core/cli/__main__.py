"""The `penstock` command. It starts the other packages by module name, and imports none of them."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches

from penstock.core.checkpoint.check import check_checkpoint
from penstock.core.checkpoint.embeddings import embeddings_of
from penstock.core.checkpoint.families.registry import parse_model_config
from penstock.core.checkpoint.finding.located import located
from penstock.core.checkpoint.finding.registry import open_model
from penstock.core.checkpoint.state_limits import check_states
from penstock.core.config import Config, ConfigError
from penstock.core.config.addresses import require_addresses
from penstock.core.config.engines import with_own_files
from penstock.core.config.flags import add_flags, config_from, flags
from penstock.core.config.foreign_flags import unknown_flag, unknown_variables, without_foreign_flags
from penstock.core.config.listening import check_listening
from penstock.core.config.options import check_engines, check_tiers
from penstock.core.config.ranks import of_group
from penstock.core.launch.output_files import check_output_files
from penstock.core.policies.registry import make_policy
from penstock.ipc import process
from penstock.ipc.addresses import AddressError, private_dir
from penstock.ipc.logs import flush_logs, setup_logging
from penstock.ipc.version import VERSION

_MODEL_HELP = "checkpoint folder, or ORG/NAME[@REVISION] of the Hugging Face hub: in the local cache, else downloaded"

# command -> (help, option groups, takes MODEL)
_SERVERS: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "serve": (
        "serve a checkpoint (default: the demo model): all processes on this machine",
        ("model", "scheduler", "worker", "parallel", "frontend", "ipc", "log"),
        True,
    ),
    "frontend": ("one HTTP frontend", ("model", "parallel", "frontend", "ipc", "log"), True),
    "scheduler": ("the scheduler", ("scheduler", "parallel", "ipc", "log"), False),
    "worker": ("one worker", ("model", "scheduler", "worker", "parallel", "ipc", "log"), True),
}
# command -> (help, module that runs it); these parse their own flags
_TOOLS = {
    "keys": ("make an API key, or the keys of tcp:// channels", "penstock.core.cli.make_key"),
    "probe": ("ask a scheduler whether it answers (a health check)", "penstock.core.launch.probe"),
    "drain": ("take engines out of service without losing a stream; restart them", "penstock.core.cli.drain"),
    "role": ("make an engine prefill, decode, or both, while it serves", "penstock.core.cli.role"),
    "models": ("list the checkpoints on this machine, and what each needs", "penstock.frontend.cli.models"),
    "plan": ("say what a model needs of a GPU, and how fast it can be there", "penstock.core.cli.plan"),
    "simulate": ("say what users would feel under other options", "penstock.core.cli.simulate"),
    "replay": ("compute what a server recorded again, and compare", "penstock.replay"),
    "quantize": ("write a checkpoint with fewer bits", "penstock.quantize"),
    "chat": ("talk to a server in the terminal", "penstock.core.cli.chat"),
    "top": ("watch a server in the terminal: rows, queue, rates, latencies, pages", "penstock.core.cli.top"),
    "doctor": ("look at this machine, and say what is misconfigured", "penstock.core.cli.doctor"),
    "run-batch": ("answer the requests of a file, without a server", "penstock.run_batch"),
    "bench serve": ("put load on an OpenAI endpoint and measure it", "penstock.bench.load.serve"),
}


_TOOL = "penstock.core.cli.tool"

# another engine's command -> what to use here
_OTHER_COMMANDS = {
    "pull": "`penstock serve ORG/NAME` downloads a checkpoint and serves it; `penstock models --download ORG/NAME` "
    "downloads it alone",
    "run": "`penstock serve MODEL` serves a checkpoint; `penstock chat` talks to it",
    "list": "`penstock models` lists the checkpoints on this machine",
    "launch": "`penstock serve MODEL` serves a checkpoint",
    "complete": "`penstock serve MODEL` serves a checkpoint; `penstock chat` talks to it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (2: the options cannot work)."""
    process.open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    for command, (_, module) in _TOOLS.items():
        words = command.split()
        if arguments[: len(words)] == words:
            os.execv(sys.executable, [sys.executable, "-m", _TOOL, module, *arguments[len(words) :]])
    try:
        return _run(arguments)
    except (ConfigError, AddressError) as error:
        _complain(str(error))
        return process.EXIT_CONFIG
    except KeyboardInterrupt:  # during a download; the server handles signals itself
        _complain("stopped; the same command goes on with the download")
        flush_logs()
        os._exit(128 + signal.SIGINT)  # do not wait for the library's threads


def _run(arguments: list[str]) -> int:
    parser, commands = _parsers()
    name = arguments[0] if arguments else ""
    if name in ("--version", "-V", "version"):
        print(f"penstock {VERSION}")
        return 0
    if name == "bench":  # its commands have two words
        print(_bench_help())
        return 0 if arguments[1:] in (["-h"], ["--help"]) else process.EXIT_CONFIG
    if not arguments:
        parser.print_help()
        return process.EXIT_CONFIG
    if not name.startswith("-") and name not in commands:
        near = get_close_matches(name, commands, n=1)
        hint = _OTHER_COMMANDS.get(name) or (f"did you mean {near[0]}?" if near else "see `penstock --help`")
        raise ConfigError(f"there is no command {name!r}; {hint}")
    namespace, unknown = parser.parse_known_args(without_foreign_flags(arguments))
    if unknown:
        raise ConfigError(_surplus(unknown, [flag.name for flag in flags(_SERVERS[namespace.command][1])]))
    for sentence in unknown_variables():
        _complain(sentence)
    if getattr(namespace, "connect", None):
        namespace.worker_address = namespace.connect
    return _run_server(namespace.command, config_from(namespace, os.environ), getattr(namespace, "rank", 0))


def _surplus(unknown: list[str], known: list[str]) -> str:
    for word in unknown:
        if word.startswith("-"):
            return unknown_flag(word, known)
    return f"unexpected word {unknown[0]!r}; an option with several values takes them as A,B"


def _complain(sentence: str) -> None:
    with suppress(OSError):  # for example a full disk
        print(f"penstock: {sentence}", file=sys.stderr, flush=True)


def _bench_help() -> str:
    lines = ["usage: penstock bench COMMAND", ""]
    lines += [f"  {name}  {text}" for name, (text, _) in _TOOLS.items() if name.startswith("bench ")]
    return "\n".join([*lines, "", "`penstock bench serve --help` lists its options."])


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the main parser, and those of the commands."""
    parser = argparse.ArgumentParser(prog="penstock", description="An LLM inference engine.")
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    made: dict[str, argparse.ArgumentParser] = {}
    for name, (text, groups, takes_model) in _SERVERS.items():
        command = made[name] = commands.add_parser(name, help=text, description=text)
        if takes_model:
            command.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=_MODEL_HELP)
        add_flags(command, groups)
        if name == "worker":
            command.add_argument("--connect", metavar="ADDRESS", help="the same as --worker-address")
            command.add_argument("--rank", type=int, default=0, help="which of its engine's workers it is (default: 0)")
    for name, (text, _) in _TOOLS.items():
        made[name] = commands.add_parser(name, help=text, add_help=False)
    made["version"] = commands.add_parser("version", help="print the version")
    return parser, made


def _run_server(command: str, config: Config, rank: int) -> int:
    if sys.platform != "linux":
        raise ConfigError(f"`penstock {command}` needs Linux; `penstock chat --url URL` can talk to a server from here")
    if command != "scheduler":
        with_weights = command != "frontend" and config.worker.load_format != "dummy"
        with_tokenizer = command != "worker"
        config = located(
            config,
            with_weights=with_weights,
            with_tokenizer=with_tokenizer,
            before_download=lambda: setup_logging("penstock", config.log.log_level, config.log.log_format),
        )
        check_checkpoint(
            open_model(config),
            config.model.model_impl,
            config.worker.quantization,
            config.worker.kv_cache_dtype,
            config.parallel,
            with_weights=with_weights,
            with_tokenizer=with_tokenizer,
        )
        check_states(parse_model_config(open_model(config).config, config.model.model_impl), config)
        if command != "worker":
            embeddings_of(open_model(config), config.frontend)
        if config.worker.speculative_config:
            from penstock.core.checkpoint.drafts.check import check_drafter  # rarely needed

            check_drafter(config, with_weights=with_weights, with_tokenizer=with_tokenizer)
    if command in ("serve", "scheduler"):
        make_policy(config.scheduler.scheduling_policy)  # fail here, with a clear message, rather than in a child
    num_engines = config.parallel.data_parallel_size
    if command in ("scheduler", "worker") and num_engines > 1:
        raise ConfigError(
            f"--data-parallel-size {num_engines}: `penstock {command}` is a part of one engine; start one for each, "
            "and give frontends the addresses of all"
        )
    if command != "serve" and config.parallel.launcher != "local":
        raise ConfigError(f"--launcher {config.parallel.launcher} is for `penstock serve`, not `penstock {command}`")
    for number in range(num_engines):
        check_output_files(with_own_files(config, number))
    if command in ("serve", "frontend"):
        check_listening(config.frontend)
    if command == "serve":
        check_tiers(config)
        check_engines(config)
        from penstock.core.launch.supervisor import serve  # imports asyncio and zmq, which `version` does not need

        return serve(config)
    if config.ipc.runtime_dir:
        with private_dir(config.ipc.runtime_dir):
            pass  # create it before any process needs it
    if command == "scheduler":
        return _become("penstock.core", require_addresses(config, frontend=True, worker=True))
    if command == "worker":
        config = require_addresses(config, worker=True)
        return _become("penstock.gpu_worker", config, *of_group(rank, config).arguments)
    return _become("penstock.frontend", require_addresses(config, frontend=True))


def _become(module: str, config: Config, *arguments: str) -> int:
    """Replace this process by one that runs `module`, so that `module` gets signals and sets the exit code directly."""
    descriptor = process.pass_config(config)
    os.set_inheritable(descriptor, True)
    flush_logs()  # of a download
    os.execv(sys.executable, [sys.executable, "-m", module, "--config-fd", str(descriptor), *arguments])


if __name__ == "__main__":
    sys.exit(main())
