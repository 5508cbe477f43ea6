"""The counters of an engine, as frontends get them: the scheduler's, and those of the rest of the process."""

from msgspec.structs import replace

from penstock.core.engine.frontends import Frontends
from penstock.core.engine.part import EngineParts
from penstock.core.engine.worker_group import WorkerGroup
from penstock.core.scheduling.scheduler import Scheduler
from penstock.ipc.logs import num_dropped_log_lines
from penstock.ipc.messages import EngineStats


def stats_of(
    scheduler: Scheduler,
    workers: WorkerGroup,
    frontends: Frontends,
    parts: EngineParts,
    *,
    is_draining: bool,
) -> EngineStats:
    """Return all counters."""
    says, drain = workers.says(), scheduler.queue_bound.drain
    return replace(
        scheduler.stats(is_ready=workers.is_ready),
        is_draining=is_draining,
        num_dropped_from_frontends=frontends.channel.num_dropped,
        num_dropped_from_workers=workers.channel.num_dropped,
        num_dropped_by_worker=says.num_dropped,
        num_log_lines_dropped=num_dropped_log_lines(),
        num_log_lines_dropped_by_worker=says.num_log_lines_dropped,
        device_memory_used=says.device_memory_used,
        device_memory_total=says.device_memory_total,
        drained_seqs_per_second=drain.seqs_per_second,
        drained_tokens_per_second=drain.tokens_per_second,
        **parts.stats(),
    )
