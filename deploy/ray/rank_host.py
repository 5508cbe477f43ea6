"""The actor of one rank: it runs the rank's process on the node where Ray has put the actor."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import ray

from penstock.config import Config
from penstock.config.listening import bind
from penstock.ipc import process
from penstock.ipc.curve import write_key_file
from penstock.ipc.key_file import ChannelKeys
from penstock.models.finding.located import located


class RankHost:
    """Starts one process of `penstock.gpu_worker`, which ends with the actor, and passes on its messages.

    Its calls run in several threads, because `next_words` and `wait` block.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-rank-")
        self._words, self._said = os.pipe()
        self._started = threading.Event()
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def free_address(self) -> str:
        """An address of this node at which ranks can meet."""
        host = str(ray.util.get_node_ip_address())
        with bind(host, 0, is_shared=False) as free:
            return f"tcp://{host}:{free.getsockname()[1]}"

    def start(self, config: bytes, arguments: list[str], keys: ChannelKeys) -> int:
        """Start the process; return its id.

        Args:
            config: a Config in JSON; its files for keys and model must be on this node.
            arguments: of the process.
            keys: of the engine's channels.
        """
        given = msgspec.json.decode(config, type=Config)
        path = Path(self._folder.name) / "channel"
        write_key_file(path, keys)
        given = _here(
            msgspec.structs.replace(given, ipc=msgspec.structs.replace(given.ipc, channel_key_file=str(path)))
        )
        # The kernel ends the process when the thread that started it ends. So that thread waits for the process.
        threading.Thread(target=self._run, args=(given, arguments), daemon=True).start()
        self._started.wait()
        if self._process is None:
            raise RuntimeError("the process could not be started")
        return self._process.pid

    def _run(self, config: Config, arguments: list[str]) -> None:
        config_fd = process.pass_config(config)
        told = ["--config-fd", str(config_fd), "--parent-fd", str(self._said), "--parent", str(os.getpid())]
        command = [sys.executable, "-m", "penstock.gpu_worker", *told, *arguments]
        try:
            self._process = subprocess.Popen(command, pass_fds=(config_fd, self._said))
        finally:
            os.close(config_fd)
            os.close(self._said)
            self._started.set()
        self._process.wait()
        self._ended.set()

    def next_words(self) -> bytes:
        """The bytes that the process has written since the last call; waits for some. Empty when the process ends."""
        return os.read(self._words, 4096)

    def wait(self) -> int:
        """Wait for the end of the process; return its exit code."""
        self._ended.wait()
        assert self._process is not None
        return self._process.wait()

    def signal(self, number: int) -> None:
        """Send the process a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(signal.Signals(number))


def _here(config: Config) -> Config:
    """The configuration with a model on this node: at the same path, or else by its name on the hub."""
    if not config.model.model or Path(config.model.model).exists():
        return config
    [name] = config.model.served_model_name[:1] or (config.model.model,)
    model = msgspec.structs.replace(config.model, model=name)
    return located(msgspec.structs.replace(config, model=model), with_tokenizer=False)
