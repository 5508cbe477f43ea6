"""The sizes that bound plans: what the worker offers and the options allow."""

from collections.abc import Hashable
from dataclasses import dataclass

from penstock.config.options import SchedulerOptions
from penstock.config.step_limits import bounded
from penstock.core.kv.snapshots import Snapshots, SnapshotTotals
from penstock.ipc.messages import WindowGroup, WorkerHello
from penstock.ipc.page_keys import namespace_of
from penstock.models.page_limits import longest_sequence

PART_BESIDE_PROMPTS = 16
"""In a step that may compute prompts, one token in this many may be a guess."""


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
    longest_usual_prompt: int = 0
    is_each_length_special: bool = False
    num_host_pages: int = 0
    page_bytes: int = 0
    host_copy_speed: int = 0  # bytes per second; 0: unknown
    num_disk_places: int = 0
    failed_tiers: tuple[str, ...] = ()
    num_stages: int = 1
    hands_over: bool = False  # whether pages are handed over to or from other engines
    max_drafts: int = 0  # positions that a decode computes beyond its own
    drafter: str = ""  # what guesses tokens for them, even if it could not be set up
    draft_page_bytes: int = 0  # that it keeps beside each page
    has_states: bool = False  # whether some layers keep a state of each row: pages alone are not enough to start
    num_snapshots: int = 0  # most snapshots of these states at a time
    max_embedding_bytes: int = 0  # of all images at a time; 0: the model takes no images
    embedding_bytes: int = 0  # of one position of an image
    images_are_whole: bool = False  # whether each image is computed in one chunk
    texts_are_whole: bool = False  # whether each text is: then nothing of a text can be cached

    @classmethod
    def of(cls, options: SchedulerOptions, hello: WorkerHello) -> "WorkerLimits":
        return cls(
            num_pages=hello.num_pages,
            page_size=hello.page_size,
            max_num_seqs=bounded(options.max_num_seqs, hello.max_num_seqs),
            max_num_batched_tokens=bounded(options.max_num_batched_tokens, hello.max_num_batched_tokens),
            max_model_len=hello.max_model_len,
            vocab_size=hello.vocab_size,
            window_groups=hello.window_groups,
            longest_usual_prompt=hello.longest_usual_prompt,
            is_each_length_special=hello.is_each_length_special,
            num_host_pages=hello.num_host_pages,
            page_bytes=hello.page_bytes,
            host_copy_speed=hello.host_copy_speed,
            num_disk_places=hello.num_disk_places,
            failed_tiers=hello.failed_tiers,
            num_stages=hello.num_stages,
            hands_over=bool(hello.kv_sources),
            max_drafts=hello.max_drafts,
            drafter=hello.drafter,
            draft_page_bytes=hello.draft_page_bytes,
            has_states=bool(hello.state_bytes),
            num_snapshots=hello.num_snapshots,
            max_embedding_bytes=hello.max_embedding_bytes,
            embedding_bytes=hello.embedding_bytes,
            images_are_whole=hello.images_are_whole,
            texts_are_whole=hello.texts_are_whole,
        )

    @property
    def longest_chunk(self) -> int:
        """Most prompt tokens of a step in which every row has a token of its own, and drafts have all they may get."""
        num_tokens = self.max_num_batched_tokens - self.max_num_seqs
        num_tokens -= self.max_num_batched_tokens // PART_BESIDE_PROMPTS if self.max_drafts else 0
        return max(0, num_tokens)

    @property
    def max_sequence_len(self) -> int:
        """Longest sequence that the model allows and the pool can hold."""
        return longest_sequence(self.num_pages, self.page_size, self.window_groups, self.max_model_len)

    def snapshots(self, totals: SnapshotTotals) -> Snapshots | None:
        """Return the bookkeeping for snapshots, if the worker has places for them."""
        return Snapshots(self.num_snapshots, self.page_size, totals) if self.num_snapshots else None

    def namespace(self, salt: str, num_prompt_tokens: int, adapter: str = "") -> Hashable:
        """Return the cache's namespace: pages are shared only by prompts that interpret positions in the same way."""
        longest, is_special = self.longest_usual_prompt, self.is_each_length_special
        if not longest and not adapter:  # as in most models
            return salt
        return namespace_of(salt, num_prompt_tokens, longest, is_each_length_special=is_special, adapter=adapter)
