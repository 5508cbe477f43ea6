"""The worker process: `python -m penstock.gpu_worker --config-fd N`."""

import os
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

import structlog
import zmq

from penstock.config import Config, ConfigError, channel_keys
from penstock.config.parts import with_parts
from penstock.config.ranks import Rank
from penstock.gpu_worker.devices.out_of_memory import failure_reason, is_out_of_memory
from penstock.gpu_worker.faults import with_faults
from penstock.gpu_worker.profiler import StepProfiler
from penstock.gpu_worker.startup.replacement import StillNoMemoryError
from penstock.gpu_worker.startup.start import Started, start, start_replacement
from penstock.gpu_worker.worker_loop import EXIT_FAILED, EXIT_REFUSED, Channel, Runner, WorkerLoop
from penstock.ipc import faults, process
from penstock.ipc.channel import SyncDealer
from penstock.ipc.codec import Codec
from penstock.ipc.logs import flush_logs, refuse
from penstock.ipc.messages import ToWorker
from penstock.ipc.parent import Parent, Word

log = structlog.get_logger()

_ENDING = (signal.SIGTERM, signal.SIGINT)  # a terminal's Ctrl-C reaches a worker only if it was started on its own
_LAST_WORDS = 0.2  # seconds that the socket's thread gets to send queued messages


def main(argv: list[str]) -> int:
    """Run the worker; return the exit code (0: asked to stop, 1: failed, 2: the configuration cannot work)."""
    config = process.inherited_config(argv, Config)
    return run(config, Parent.of(argv), Rank.of(argv), is_replacement="--replaces" in argv)


def run(config: Config, parent: Parent, rank: Rank, *, is_replacement: bool) -> int:
    """As `main`, with parsed arguments. A replacement may have to wait for the memory of the worker before it."""
    process.begin(rank.name, config.log.log_level, config.log.log_format)
    parent.keep_telling_in_a_thread(config.ipc.heartbeat_interval)
    for number in _ENDING:
        signal.signal(number, _on_signal)
    process.ignore_hangup()
    profiler = None
    try:
        faults.point("worker.load")()
        keys = channel_keys(config)
        started = start_replacement(config, rank) if is_replacement else start(config, rank)
        if config.worker.profile:
            profiler = StepProfiler(config.worker.profile, rank.number)
    except ConfigError as error:
        refuse(str(error))
        return EXIT_REFUSED
    except StillNoMemoryError as error:  # its predecessor had enough, so the next attempt may succeed
        log.error("cannot start", reason=str(error))
        return EXIT_FAILED
    except Exception as error:
        log.error("cannot start", reason=failure_reason(error), exc_info=not is_out_of_memory(error))
        return EXIT_FAILED
    code: int | str | None = EXIT_FAILED
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    codec: Codec[ToWorker] = Codec(with_parts(ToWorker, "TO_WORKER"))
    channel: SyncDealer[ToWorker] = SyncDealer(context, config.ipc.worker_address, rank.name, codec, keys)
    try:
        parent.tell(Word.READY)
        runner, plans = with_faults(*_staged(started, channel))
        loop = WorkerLoop(
            runner,
            plans,
            started.hello,
            int(config.ipc.heartbeat_interval * 1000),
            max_silence_ms=int(config.ipc.heartbeat_timeout * 1000),
            profiler=profiler,
            memory_use=started.runner.memory_use,
            parts=started.parts,
        )
        code = loop.run()
        if code == EXIT_FAILED:
            time.sleep(_LAST_WORDS)
        return code
    except SystemExit as stop:
        code = stop.code
        raise
    finally:  # even after SIGTERM: an open socket would keep the context, and so the process, alive for ever
        channel.close()
        context.term()
        if started.stage is not None:
            started.stage.close()
        started.runner.drop_graphs()
        has_left = started.ranks.close()
        for part in started.parts:
            part.close()
        if profiler is not None:
            profiler.close()
        if not has_left:
            _end_at_once(code)


def _end_at_once(code: int | str | None) -> NoReturn:
    """End the process although a thread is stuck in a library, which an ordinary exit would wait for."""
    error = sys.exception()
    is_failure = error is not None and not isinstance(error, SystemExit)
    log.warning("rank group not left in time", exc_info=error if is_failure else None)
    flush_logs()
    os._exit(code if isinstance(code, int) else EXIT_FAILED if code else 0)


def _staged(started: Started, channel: SyncDealer[ToWorker]) -> tuple[Runner, Channel]:
    """What the loop drives, and where its plans come from. A stage of a pipeline also waits for other stages."""
    if started.stage is None:
        return started.runner, channel
    from penstock.gpu_worker.staged_channel import StagedChannel

    return started.stage, StagedChannel(channel, started.stage)


def _on_signal(_signal: int, _frame: FrameType | None) -> None:
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
