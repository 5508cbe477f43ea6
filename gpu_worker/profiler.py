"""`--profile DIR`: trace files of what some steps of this worker do on CPU and GPU.

The first steps are skipped, because they are not typical. Then a fixed number of steps is recorded and
written at once: a trace grows by a megabyte every few steps, and the file must be complete however the
process ends. Later, a message can ask for more. Open a file in https://ui.perfetto.dev or chrome://tracing.
"""

import os
from pathlib import Path

import structlog
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from penstock.config import ConfigError

log = structlog.get_logger()

NUM_SKIPPED = 20
NUM_RECORDED = 60


class StepProfiler:
    """Records windows of steps, one after the other, each in a file of its own."""

    def __init__(
        self, folder: str, rank: int = 0, num_skipped: int = NUM_SKIPPED, num_recorded: int = NUM_RECORDED
    ) -> None:
        """Start counting the steps of the first window.

        Args:
            folder: where the traces go; created if needed.
            rank: the rank of this worker.
            num_skipped: steps before the recording, at least 1.
            num_recorded: steps in the recording.

        Raises:
            ConfigError: if the folder cannot be written to.
        """
        self._stem = Path(folder) / f"worker-{rank}-{os.getpid()}"
        self._num_windows = 0
        self._profile: profile | None = None
        self.file = self._stem.with_name(f"{self._stem.name}.trace.json")
        """Of the latest window."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.touch()
        except OSError as error:
            raise ConfigError(f"--profile {folder}: {error.strerror}") from None
        self._begin(num_skipped, num_recorded)

    def record(self, num_steps: int) -> None:
        """Record the next steps in a new file; 0 writes what has been recorded so far. A window that runs goes on."""
        if num_steps == 0:
            self.close()
        elif self._profile is not None:
            log.info("profile already being recorded", file=str(self.file))
        else:
            self._num_windows += 1
            self.file = self._stem.with_name(f"{self._stem.name}-{self._num_windows}.trace.json")
            try:
                self.file.touch()
            except OSError as error:
                log.error("profile not written", file=str(self.file), reason=str(error))
            else:
                self._begin(1, num_steps)  # the tracer itself starts during a step that is not recorded

    def step(self) -> None:
        """Count a launched step."""
        if self._profile is None:
            return
        self._num_left -= 1
        if self._num_left:
            self._profile.step()
        else:
            self.close()

    def close(self) -> None:
        """Write what has been recorded, unless it has been written already."""
        running, self._profile = self._profile, None
        if running is None:
            return
        try:
            running.stop()
            if not self.file.stat().st_size:  # it ends before the recording began
                self.file.unlink()
        except (OSError, RuntimeError) as error:  # a full disk, a deleted folder: serving continues
            log.error("profile not written", file=str(self.file), reason=str(error))

    def _begin(self, num_skipped: int, num_recorded: int) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._num_left = num_skipped + num_recorded
        self._profile = profile(
            activities=activities,
            # The tracer itself starts during the last of the skipped steps.
            schedule=schedule(wait=num_skipped - 1, warmup=1, active=num_recorded, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,
        )
        self._profile.start()

    def _write(self, recorded: profile) -> None:
        recorded.export_chrome_trace(str(self.file))
        log.info("profile written", file=str(self.file))
