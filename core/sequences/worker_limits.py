"""What the scheduler must know about the current worker."""

from dataclasses import dataclass

from penstock.core.config.options import SchedulerOptions
from penstock.ipc.messages import WindowGroup, WorkerHello


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Sizes that bound plans: the worker's, or the options' where those are smaller."""

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # prompt + output tokens of one sequence
    vocab_size: int
    window_groups: tuple[WindowGroup, ...] = ()

    @classmethod
    def of(cls, options: SchedulerOptions, hello: WorkerHello) -> "WorkerLimits":
        return cls(
            num_pages=hello.num_pages,
            page_size=hello.page_size,
            max_num_seqs=min(options.max_num_seqs, hello.max_num_seqs),
            max_num_batched_tokens=min(options.max_num_batched_tokens, hello.max_num_batched_tokens),
            max_model_len=hello.max_model_len,
            vocab_size=hello.vocab_size,
            window_groups=hello.window_groups,
        )

    @property
    def max_sequence_len(self) -> int:
        """Longest sequence that the model allows and the pool can hold."""
        # A window may begin and end inside a page, and pages behind it are freed one page of the first group later.
        num_window_pages = sum(
            2 + -(-(group.window + self.page_size) // group.page_size) for group in self.window_groups
        )
        return min(self.max_model_len, max(0, self.num_pages - num_window_pages) * self.page_size)
