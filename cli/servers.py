"""Commands that start servers: `serve`, and `frontend`, `scheduler` and `worker` for one process alone."""

import argparse
import os
import sys
from collections.abc import Sequence

from penstock.cli.commands import COMMANDS, complain
from penstock.config import Config, ConfigError
from penstock.config.addresses import require_addresses
from penstock.config.engines import with_own_files
from penstock.config.flags import config_from
from penstock.config.foreign_flags import unknown_variables, without_foreign_flags
from penstock.config.listening import check_listening
from penstock.config.options import check_engines
from penstock.config.parser import Parser
from penstock.config.ranks import of_group
from penstock.core.launch.output_files import check_output_files
from penstock.core.scheduling.part import check_options
from penstock.ipc import process
from penstock.ipc.addresses import private_dir
from penstock.ipc.logs import flush_logs, setup_logging
from penstock.models.check import check_checkpoint
from penstock.models.embeddings import embeddings_of
from penstock.models.families.registry import parse_model_config
from penstock.models.finding.located import located
from penstock.models.finding.registry import open_model
from penstock.models.part import check_further
from penstock.models.state_limits import check_states

_MODEL_HELP = (
    "checkpoint folder; ORG/NAME[:FILE][@REVISION] of the Hugging Face hub, in the local cache or downloaded; or a "
    "GGUF file"
)


def run(name: str, arguments: Sequence[str]) -> int:
    """Run a server until it ends; return its exit code.

    Raises:
        ConfigError: the options or the model cannot work.
    """
    namespace = _parser(name).parse_args(without_foreign_flags(arguments))
    for sentence in unknown_variables():
        complain(sentence)
    if getattr(namespace, "connect", None):
        namespace.worker_address = namespace.connect
    return _run_server(name, config_from(namespace, os.environ), getattr(namespace, "rank", 0))


def _parser(name: str) -> Parser:
    command = COMMANDS[name]
    parser = Parser(f"penstock {name}", f"{command.about[0].upper()}{command.about[1:]}.")
    if command.takes_model:
        parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=_MODEL_HELP)
    if name == "worker":
        parser.add_argument("--connect", metavar="ADDRESS", help="the same as --worker-address")
        parser.add_argument(
            "--rank", type=int, default=0, metavar="N", help="which of its engine's workers (default: 0)"
        )
    parser.add_flags(command.groups)
    return parser


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
        check_further(config, with_weights=with_weights, with_tokenizer=with_tokenizer)
    if command in ("serve", "scheduler"):
        check_options(config)  # fail here, with a clear message, rather than in a child
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
