"""Turns the engine loop's events into the lines of a recording, and hands them to the writing thread.

There is one call per event, which costs the encoding of its line. Only the live sequences are kept; their tokens are
the scheduler's own buffers.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as ListOf
from time import monotonic, time
from typing import Any

import msgspec
from msgspec import Struct

from penstock.config import Config
from penstock.config.groups.base import Options
from penstock.core.scheduling.scheduler import Scheduler
from penstock.core.sequences.intake import Refusal
from penstock.core.sequences.sequence import Owner, Sequence
from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import (
    AbortRequest,
    AddRequest,
    ImageRef,
    PauseRequest,
    ResumeRequest,
    SequenceDelta,
    SequenceProgress,
    StepPlan,
    StepResult,
    TokenBatch,
    WorkerHello,
)
from penstock.ipc.page_keys import image_marks
from penstock.ipc.version import VERSION as PROGRAM
from penstock.parts.recording.lines import (
    PAGE_DIGEST_BYTES,
    VERSION,
    AnyLine,
    Arrival,
    Begun,
    Encoded,
    End,
    Header,
    Lost,
    NewSequence,
    Order,
    Plan,
    RecordedImage,
    Result,
    Worker,
    encoded,
    told,
)
from penstock.parts.recording.options import RecordingOptions
from penstock.parts.recording.writer import NUM_PARTS, RecordingWriter

_PROMPT_DIGEST_BYTES = 16
_TELLING = ("grammar", "grammar_bytes", "bad_words", "logit_bias", "allowed_token_ids")
"""Fields of sampling parameters that could reveal content."""
_NAMED = ("request_id", "prompt_token_ids", "sampling", "n", "priority", "seconds_left", "tenant", "group")
_NOT_MORE = (*_NAMED, "cache_salt", "images", "progress")
_BATCH = ("rows", "start", "num_new", "samples")
_OTHER_COLUMNS = tuple(name for name in StepPlan.__struct_fields__ if name not in ("step_id", "new_rows", *_BATCH))


class _Live(Struct):
    """A sequence that has not ended."""

    seq: Sequence
    first_token_at: float = 0.0


class Recorder:
    """Records one run. Lives in the scheduler's process as long as its engine."""

    def __init__(self, config: Config) -> None:
        """Begin a run at the end of the file that the options name."""
        options = config.of(RecordingOptions)
        assert options.file is not None, "somebody wants a recording"
        path, mib = options.file
        self._has_tokens = options.record_prompts
        self._max_part_bytes = (mib << 20) // NUM_PARTS
        self._writer = RecordingWriter(path)
        self._encoder = msgspec.json.Encoder()
        self._key = os.urandom(32)
        self._began = monotonic()
        self._live: dict[tuple[str, int], _Live] = {}
        self._batch: bytes | None = None  # rows of the last plan, if the next plan may repeat it
        self._num_preemptions = 0
        self._num_lost = 0  # as recorded in the file
        self._worker: Worker | None = None
        groups: dict[str, Options] = {"model": config.model, "scheduler": config.scheduler, "worker": config.worker}
        groups |= {each.part: each for each in config.of_parts() if each.beside in groups}
        self._header = Header(
            version=VERSION,
            run=os.urandom(8).hex(),
            part=0,
            unix_time=round(time(), 6),
            program=PROGRAM,
            options={name: msgspec.structs.asdict(group) for name, group in groups.items()},
            has_tokens=self._has_tokens,
        )
        if self._writer.part_bytes >= self._max_part_bytes:
            self._writer.begin_part()
        self._put(self._header)

    @property
    def num_lost(self) -> int:
        """Lines that could not be written."""
        return self._writer.num_lost

    def close(self) -> None:
        """Write what is pending."""
        self._writer.close()

    # --- workers ------------------------------------------------------------------------------

    def on_workers(self, hello: WorkerHello) -> None:
        """Workers are ready, with empty rows."""
        self._batch = None
        self._worker = Worker(at=self._now(), hello=told(hello))
        self._put(self._worker)

    # --- requests -----------------------------------------------------------------------------

    def on_request(self, message: AddRequest, scheduler: Scheduler | None, refusal: Refusal | None) -> None:
        """A request has arrived, and was accepted or refused."""
        self._begin_part_if_full()
        request = None if scheduler is None or refusal is not None else scheduler.requests[message.request_id]
        if request is not None:
            for seq in request.waiting:
                self._live[seq.request_id, seq.sequence_idx] = _Live(seq)
        page_size, namespace = 0, None
        if scheduler is not None:
            page_size = scheduler.limits.page_size
            namespace = scheduler.limits.namespace(message.cache_salt, len(message.prompt_token_ids) // 4)
        withheld = () if self._has_tokens else _TELLING
        self._put(
            Arrival(
                at=self._now(),
                id=message.request_id,
                num_tokens=len(message.prompt_token_ids) // 4,
                digest=self._digest(message.prompt_token_ids, _PROMPT_DIGEST_BYTES),
                pages=self._page_digests(message.prompt_token_ids, page_size, namespace, message.images),
                token_ids=message.prompt_token_ids if self._has_tokens else b"",
                sampling=told(message.sampling, *withheld),
                withheld=tuple(name for name in withheld if getattr(message.sampling, name)),
                begun=tuple(map(self._begun, message.progress)),
                n=message.n,
                priority=message.priority,
                seconds_left=round(message.seconds_left, 6),
                tenant=self._name(message.tenant),
                group=self._name(message.group),
                salt=self._name(message.cache_salt),
                more=told(message, *_NOT_MORE),
                images=tuple(map(self._image, message.images)),
                refused="" if refusal is None else refusal.code,
            )
        )

    def _image(self, image: ImageRef) -> RecordedImage:
        key = image.key.hex() if self._has_tokens else self._digest(image.key)
        return RecordedImage(key, image.start, image.length, image.num_embeddings, image.grid, image.pixels.num_bytes)

    def _begun(self, progress: SequenceProgress) -> Begun:
        token_ids = progress.token_ids
        return Begun(progress.sequence_idx, len(token_ids) // 4, token_ids if self._has_tokens else b"")

    def on_steer(self, order: AbortRequest | PauseRequest | ResumeRequest) -> None:
        """A live request is about to be steered by its frontend."""
        if isinstance(order, AbortRequest):
            chosen = [name for name in self._live if name[0] == order.request_id]
            for name in [name for name in chosen if order.sequence_idx in (-1, name[1])]:
                self._end(name, "abort")
        else:
            is_pause = isinstance(order, PauseRequest)
            self._put(Order(at=self._now(), order="pause" if is_pause else "resume", id=order.request_id))

    def on_reset(self) -> None:
        """The prefix cache is about to be dropped."""
        self._put(Order(at=self._now(), order="reset_prefix_cache"))

    def on_owner_gone(self, owner: Owner) -> None:
        """All requests of an owner are about to be aborted."""
        for name in [name for name, live in self._live.items() if live.seq.owner == owner]:
            self._end(name, "abort")

    def on_deltas(self, deltas: Iterable[SequenceDelta]) -> None:
        """Deltas are sent to a frontend, beside columns of tokens; first and last tokens of sequences are deltas."""
        for delta in deltas:
            name = (delta.request_id, delta.sequence_idx)
            live = self._live.get(name)
            if live is None:
                continue
            if delta.token_ids and not live.first_token_at:
                live.first_token_at = self._now()
            if delta.finish_reason is not None:
                self._end(name, delta.finish_reason, delta.stop_token_id, delta.error_code or "")

    def _end(self, name: tuple[str, int], reason: str, stop_token_id: int | None = None, error: str = "") -> None:
        live = self._live.pop(name)
        seq = live.seq
        outputs = pack_int32(seq.token_ids[seq.request.num_prompt_tokens :])
        self._put(
            End(
                at=self._now(),
                id=seq.request_id,
                seq=seq.sequence_idx,
                reason=reason,
                num_tokens=len(outputs) // 4,
                digest=self._digest(outputs) if outputs else "",
                token_ids=outputs if self._has_tokens else b"",
                stop_token_id=stop_token_id,
                error=error,
                first_token_at=live.first_token_at,
                queued_us=seq.queued_us,
                num_cached_tokens=max(0, seq.num_cached_tokens),
            )
        )

    # --- steps --------------------------------------------------------------------------------

    def on_plan(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """A step was planned a moment ago."""
        self._begin_part_if_full()
        # A batch of decodes is the same object while it does not change; then every row advances by one position.
        is_plain = not (plan.num_drafts or plan.start_bounds)
        is_same = is_plain and plan.rows is self._batch and self.num_lost == self._num_lost
        self._batch = plan.rows if is_plain else None
        names = _OTHER_COLUMNS if is_same else (*_BATCH, *_OTHER_COLUMNS)
        num_preemptions = scheduler.totals.num_preemptions - self._num_preemptions
        self._num_preemptions += num_preemptions
        self._put(
            Plan(
                at=self._now(),
                step=plan.step_id,
                num_rows=len(plan.rows) // 4,
                is_same=is_same,
                columns={name: column for name in names if (column := getattr(plan, name))},
                new=tuple(_new_sequences(plan, scheduler)) if plan.new_rows else (),
                num_preempted=num_preemptions,
            )
        )

    def on_result(self, result: StepResult, told_batches: Iterable[TokenBatch]) -> None:
        """A step's result was applied, and these batches were sent to the frontends."""
        self._put(
            Result(
                at=self._now(),
                step=result.step_id,
                forward_us=result.num_forward_us,
                idle_us=result.num_idle_us,
                digest=self._digest(result.token_ids) if result.token_ids else "",
                token_ids=result.token_ids if self._has_tokens else b"",
                num_tokens=result.num_tokens,
                failed=tuple((error.sample_idx, error.code) for error in result.row_errors),
            )
        )
        for batch in told_batches:
            if batch.deltas:
                self.on_deltas(batch.deltas)

    def on_made(self, what: Mapping[str, Any]) -> None:
        """Workers have embedded an image, or could not: the fields of `Encoded` but its time."""
        self._put(Encoded(at=self._now(), **what))

    # --- lines --------------------------------------------------------------------------------

    def _now(self) -> float:
        return round(monotonic() - self._began, 6)

    def _put(self, line: AnyLine) -> None:
        num_lost = self._writer.num_lost
        is_told = num_lost == self._num_lost
        before = b"" if is_told else encoded(Lost(at=self._now(), num_lines=num_lost), self._encoder)
        if self._writer.offer(before + encoded(line, self._encoder)):
            self._num_lost = num_lost

    def _begin_part_if_full(self) -> None:
        """If the file is full, begin a new one, with the lines that hold for all that follow."""
        if self._writer.part_bytes < self._max_part_bytes:
            return
        self._writer.begin_part()
        self._header = msgspec.structs.replace(self._header, part=self._header.part + 1)
        self._put(self._header)
        if self._worker is not None:
            self._put(msgspec.structs.replace(self._worker, is_repeated=True))
        self._batch = None

    def _digest(self, content: bytes, num_bytes: int = 8) -> str:
        return hashlib.blake2b(content, digest_size=num_bytes, key=self._key).hexdigest()

    def _name(self, name: str) -> str:
        return self._digest(name.encode()) if name else ""

    def _page_digests(self, token_ids: bytes, page_size: int, namespace: Any, images: ListOf[ImageRef]) -> bytes:
        """Digests of the prompt's full pages, each over the page, all before it, and the images in them."""
        if not page_size:
            return b""
        size = 4 * page_size
        chain = hashlib.blake2b(repr(namespace).encode(), digest_size=PAGE_DIGEST_BYTES, key=self._key)
        return b"".join(_chained(chain, token_ids, size, image_marks(images, page_size)))


def _chained(chain: "hashlib.blake2b", content: bytes, size: int, marks: Mapping[int, bytes]) -> Iterator[bytes]:
    for begin in range(0, len(content) - size + 1, size):
        chain.update(content[begin : begin + size] + marks.get(begin // size, b""))
        yield chain.digest()


def _new_sequences(plan: StepPlan, scheduler: Scheduler) -> Iterator[NewSequence]:
    by_row = {seq.row: seq for seq in scheduler.running}
    for new in plan.new_rows:
        seq = by_row[new.row]
        yield NewSequence(
            row=new.row,
            id=seq.request_id,
            seq=seq.sequence_idx,
            num_tokens=len(new.token_ids) // 4,
            pages=new.page_ids,
            grammar_id=new.grammar_id,
        )
