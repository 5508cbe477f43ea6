"""The step trace: one JSON line per step, for finding out why the scheduler did what it did.

    {"step_id": 7, "t_schedule_us": 41.0, "t_sent": 12.3456, "t_result": 12.3511, "forward_us": 5210, "idle_us": 0,
     "num_rows": 3, "num_tokens": 34, "rows": [["chatcmpl-1", 0, 32], ...], "admitted": [...], "preempted": [...],
     "free_pages": 90, "cached_pages": 4, "used_pages": 6, "waiting": [["chatcmpl-9", 0, "no free row"]], ...}

Times are seconds of the monotonic clock; a step's line is written when its result is back. `num_returned`: tokens of
each row that samples, unless each has one. With a drafter, `num_drafts` is how many tokens might be guessed for each
decode, `why_drafts` is why, and `num_guessed` and `num_accepted` are what came of it.
"""

from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import structlog

from penstock.core.steps.drafts import DraftOutcome
from penstock.ipc.codec import unpack_int32
from penstock.ipc.messages import StepResult

log = structlog.get_logger()

_FLUSH_BYTES = 1 << 16


class StepTrace:
    """Joins each plan with its result, and writes the line. Results come in the order of the plans.

    A full disk ends the trace but nothing else.
    """

    def __init__(self, path: str) -> None:
        self._file: BinaryIO | None = Path(path).open("wb", buffering=_FLUSH_BYTES)  # noqa: SIM115 - lives as long as this object
        self._encoder = msgspec.json.Encoder()
        self._planned: deque[tuple[int, float, float, Any]] = deque()

    def planned(self, step_id: int, record: Any, schedule_us: float, sent: float) -> None:
        """A step was scheduled (in `schedule_us`) and sent at `sent` (monotonic seconds)."""
        self._planned.append((step_id, schedule_us, sent, record))

    def returned(self, result: StepResult, received: float, process_us: float, outcome: DraftOutcome | None) -> None:
        """A step's result has arrived: write its line. `outcome`: what came of its drafts, if it had any."""
        planned_id, schedule_us, sent, record = self._planned.popleft()
        assert planned_id == result.step_id
        num_guessed, num_accepted = outcome.sums if outcome else (0, 0)
        times = {
            "step_id": planned_id,
            "t_schedule_us": round(schedule_us, 1),
            "t_process_us": round(process_us, 1),
            "t_sent": sent,
            "t_result": received,
            "forward_us": result.num_forward_us,
            "idle_us": result.num_idle_us,
            "num_guessed": num_guessed,
            "num_accepted": num_accepted,
            "draft_us": result.num_draft_us,
            "num_returned": unpack_int32(result.num_tokens).tolist(),
        }
        line = self._encoder.encode(times | msgspec.to_builtins(record)) + b"\n"
        if self._file is not None:
            try:
                self._file.write(line)
            except OSError as error:
                self._give_up(error)

    def forget_planned(self) -> None:
        """The worker is gone; the results of its steps will not come."""
        self._planned.clear()

    def flush(self) -> None:
        """Write buffered lines to the file."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        if self._file is not None:
            self._file.close()

    def _give_up(self, error: OSError) -> None:
        log.error("step trace ended", reason=error.strerror)
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # closing writes the rest, and fails again
                file.close()
