"""Lets a waiting request with images enter a row only once the worker has their embeddings.

    head of the queue ── admits? ──▶ all images that it still has to compute are embedded: it enters
                             │ not yet: the request is held beside the queue, in its tenant's line
                             ▼
    lines, in turns ── room? ──▶ EncodeImage ──▶ worker, beside its steps ──▶ ImageEncoded: it is queued again

Embeddings are found by their image's key, so an image is encoded once for all requests that show it. It stays until
its room is needed: the longest unused ones go first, and one that a request still has to compute with never goes. The
bytes are bounded, and so are the images under way at a time, so a tenant that sends many images delays only itself.
Pure bookkeeping, like the scheduler.

A worker may die of the image that it is encoding. So that image is encoded alone the next time: see `trials.py`.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

from penstock.core.kv.kv_pages import Start
from penstock.core.scheduling.answers import FromAll
from penstock.core.scheduling.part import Ending, Gate, SchedulerPart
from penstock.core.scheduling.step_record import IMAGE
from penstock.core.scheduling.trials import ENDS_WORKERS, Trials
from penstock.core.sequences.intake import Refusal
from penstock.core.sequences.limits import WorkerLimits
from penstock.core.sequences.sequence import Request, Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.ipc.messages import ImageRef, ImageStats
from penstock.ipc.page_keys import image_marks
from penstock.parts.images.messages import DropEmbedding, EncodeImage, ImageEncoded

if TYPE_CHECKING:
    from penstock.core.scheduling.scheduler import Scheduler

MAX_UNDER_WAY = 4
"""Most images that the worker is asked for at a time, unless a single request has more."""

NO_IMAGES = Refusal("internal", "the request has images; this engine computes none")


class _Live:
    """An image that the worker has embedded, or is to embed."""

    __slots__ = ("embedding_id", "is_ready", "key", "num_bytes", "users")

    def __init__(self, embedding_id: int, key: bytes, num_bytes: int) -> None:
        self.embedding_id = embedding_id
        self.key = key
        self.num_bytes = num_bytes
        self.users: dict[Request, int] = {}  # request -> the position behind which it no longer needs the image
        self.is_ready = False


class ImageGate(Gate):
    """The live embeddings of one scheduler. Requests that are paused or have ended must `leave`."""

    __slots__ = (
        "_asking", "_ids", "_last_left", "_limits", "_lines", "_live", "_num_encoded", "_num_found", "_num_made",
        "_num_us", "num_bytes", "num_under_way",
    )  # fmt: skip

    stats_field = "images"
    answers = ((ImageEncoded, lambda: FromAll(attrgetter("embedding_id"), is_in_order=True)),)

    @classmethod
    def of(cls, scheduler: "Scheduler", before: Self | None) -> Self | None:
        limits = scheduler.limits
        if not limits.max_embedding_bytes:
            return None
        if before is None:
            return cls(scheduler.waiting, limits, scheduler.trials)
        return before

    @staticmethod
    def missed(request: Request) -> Refusal | None:
        return NO_IMAGES if request.images else None

    def __init__(self, waiting: WaitingQueue, limits: WorkerLimits, trials: Trials) -> None:
        super().__init__(waiting, trials)
        self._limits = limits
        self._live: OrderedDict[bytes, _Live] = OrderedDict()  # by key, longest unused first
        self._ids: dict[int, _Live] = {}
        self._num_made = 0  # ids are never reused
        self._last_left = 0  # id of the last image that was dropped while the worker may have embedded it
        self._asking: dict[Request, list[ImageRef]] = {}  # held request -> the images it needs
        self._lines: dict[str, deque[Request]] = {}  # held for lack of room: by tenant, the next one first
        self._num_encoded = self._num_found = self._num_us = 0
        self.num_bytes = 0
        self.num_under_way = 0

    def __len__(self) -> int:
        return len(self._live)

    def admits(self, seq: Sequence, start: Start) -> bool:
        request = seq.request
        needed = [image for image in request.images if image.start + image.length > start.num_tokens]
        found = [live for image in needed if (live := self._live.get(image.key)) is not None and live.is_ready]
        if len(found) < len(needed):
            self._waiting.hold(request, IMAGE)
            self._asking[request] = needed
            self._lines.setdefault(request.tenant, deque()).append(request)
            self._order_more()
            return False
        for image, live in zip(needed, found, strict=True):
            self._num_found += request not in live.users
            self._use(request, image, live)
        # A sibling that runs may still need images that this sequence has found cached.
        request.embedding_ids |= {live.key: live.embedding_id for live in found}
        return True

    def advance(self, *, is_idle: bool) -> tuple[()]:
        self._order_more()
        return ()

    def _order_more(self) -> None:
        """Order images of the requests in line, as far as there is room."""
        lines = self._lines
        while lines and self.trials.current is None:
            tenant, line = next(iter(lines.items()))
            if line[0] in self._asking:
                if not self._begin(line[0], self._asking[line[0]]):
                    return
                del lines[tenant]
                lines[tenant] = line  # behind the other tenants
            line.popleft()
            if not line:
                del lines[tenant]

    def accepts(self, request: Request) -> Refusal | None:
        """Set what tells apart its pages with images on this worker; return a refusal if it cannot compute them."""
        if not request.images:
            return None
        request.marks = image_marks(request.images, self._limits.page_size)
        return check_images(request.images, request.num_prompt_tokens, self._limits)

    def makes_for(self, request: Request) -> list[bytes]:
        return [image.key for image in request.images]

    def answered(self, message: ImageEncoded) -> list[Ending]:
        """Queue the requests held for an image that is now embedded; those end for which it cannot be."""
        live = self._ids.get(message.embedding_id)
        if message.embedding_id >= self._last_left:  # the worker embeds them in order
            self.trials.is_unsure = False
        if live is None or live.is_ready:
            return []  # no request needs it any more
        self.num_under_way -= 1
        self.trials.settled(live.key)
        self._num_us += message.num_us
        if message.error:
            self._drop(live)  # other ranks may have it
            for user in live.users:  # they end: their other images are not asked for
                self._asking.pop(user, None)
            self._order_more()
            return [Ending(request, message.error, "internal") for request in live.users]
        live.is_ready = True
        self._num_encoded += 1
        for request in reversed(live.users):  # each goes to the head of its line
            if request in self._asking and all(self._is_ready(image) for image in self._asking[request]):
                del self._asking[request]
                self._waiting.release(request)
        self._order_more()
        return []

    def recorded(self, message: ImageEncoded) -> dict[str, Any]:
        live = self._ids.get(message.embedding_id)  # None: no request needs it any more
        num_embeddings = 0 if live is None else live.num_bytes // self._limits.embedding_bytes
        return {"num_embeddings": num_embeddings, "us": message.num_us, "failed": bool(message.error)}

    def leave(self, request: Request) -> None:
        """A request has ended or is paused: it no longer needs its images."""
        if request in self._asking:
            del self._asking[request]
            line = self._lines.get(request.tenant)
            if line is not None and request in line:
                line.remove(request)
                if not line:
                    del self._lines[request.tenant]
        request.embedding_ids = {}
        for image in request.images:
            live = self._live.get(image.key)
            if live is None or request not in live.users:
                continue
            del live.users[request]
            if not live.users and not live.is_ready:
                self.num_under_way -= 1
                if not self.trials.num_untold or self.trials.current != live.key:
                    self._last_left, self.trials.is_unsure = live.embedding_id, True
                self.trials.abandoned(live.key)
                self._drop(live)
        self._order_more()

    def let_go(self, request: Request) -> None:
        if request.images:
            self.leave(request)

    def drop_unused(self) -> None:
        """Forget the embeddings that no request has to compute with."""
        for live in [live for live in self._live.values() if live.is_ready and not self._is_needed(live)]:
            self._drop(live)

    def reset(self, limits: WorkerLimits, *, has_died: bool) -> list[Ending]:
        """Forget the old worker's embeddings: those still needed are encoded again when their requests' turn comes.

        Args:
            limits: of the new worker.
            has_died: whether the old one died, for whatever reason.

        Returns:
            The requests with the image that killed it.
        """
        self._limits = limits
        culprits: list[Request] = []
        unready = [live for live in self._ids.values() if not live.is_ready]
        if has_died and (guilty := self.trials.blame(live.key for live in unready)) is not None:
            others = (user for user in self._asking if any(image.key == guilty for image in user.images))
            culprits = [*dict.fromkeys([*unready[0].users, *others])]
        for request in (*self._asking, *(user for live in self._live.values() for user in live.users)):
            request.embedding_ids = {}
        for each in (self._live, self._ids, self._asking, self._lines, self.messages):
            each.clear()
        self.num_bytes = self.num_under_way = 0
        return [Ending(request, ENDS_WORKERS, "ends_workers") for request in culprits]

    @property
    def num_in_making(self) -> int:
        return self.num_under_way

    def asking(self) -> dict[Request, list[ImageRef]]:
        """Return the requests that are held, and the images that they need."""
        return dict(self._asking)

    def embeddings(self) -> dict[int, tuple[int, bool, bool]]:
        """Return for each embedding its bytes, whether it is ready, and whether it is needed; for checks."""
        return {
            live.embedding_id: (live.num_bytes, live.is_ready, self._is_needed(live)) for live in self._ids.values()
        }

    def check(self, scheduler: "Scheduler") -> Iterator[tuple[bool, str]]:
        embeddings = self.embeddings()
        yield self.num_bytes == sum(size for size, _, _ in embeddings.values()), "the bytes of all embeddings"
        yield self.num_bytes <= self._limits.max_embedding_bytes, "the limit on the bytes of embeddings"
        yield self.num_under_way == sum(not ready for _, ready, _ in embeddings.values()), "images under way"
        for request in self.asking():
            yield scheduler.waiting.is_held(request), f"{request.request_id}: is held for its images"
        for seq in scheduler.running:
            request = seq.request
            for image in request.images:
                if image.start + image.length > seq.num_settled_tokens:
                    _, is_ready, is_needed = embeddings[request.embedding_ids[image.key]]
                    what = f"{request.request_id}: a row has the embeddings that it computes with"
                    yield is_ready and is_needed, what

    def stats(self) -> ImageStats:
        return ImageStats(
            num_embeddings=len(self._live),
            num_bytes=self.num_bytes,
            max_bytes=self._limits.max_embedding_bytes,
            num_under_way=self.num_under_way,
            num_waiting=len(self._asking),
            num_encoded=self._num_encoded,
            num_found=self._num_found,
            num_encode_us=self._num_us,
        )

    def _begin(self, request: Request, needed: list[ImageRef]) -> bool:
        """Ask for the missing images; False if this was not possible now, or not for all of them.

        A suspected one is asked for alone, and the others after it.
        """
        missing = {image.key: image for image in needed if image.key not in self._live}
        suspect = next((key for key in missing if self.trials.is_suspected(key)), None)
        if suspect is not None:
            missing = {suspect: missing[suspect]}
        num_under_way = self.num_under_way
        if missing and num_under_way and (suspect is not None or num_under_way + len(missing) > MAX_UNDER_WAY):
            return False
        num_bytes = sum(image.num_embeddings for image in missing.values()) * self._limits.embedding_bytes
        if not self._make_room(num_bytes, {image.key for image in needed}):
            return False
        if suspect is not None:
            self._use(request, missing[suspect], self._add(missing[suspect]))
            self.trials.begin(suspect, self.messages.pop())
            return False
        for image in needed:
            live = self._live.get(image.key)
            if live is None:
                live = self._add(image)
            else:
                self._num_found += request not in live.users
            self._use(request, image, live)
        if all(map(self._is_ready, needed)):
            del self._asking[request]
            self._waiting.release(request)
        return True

    def _make_room(self, num_bytes: int, kept: set[bytes]) -> bool:
        lacking = self.num_bytes + num_bytes - self._limits.max_embedding_bytes
        if lacking <= 0:
            return True
        unused: list[_Live] = []
        for live in self._live.values():
            if live.is_ready and live.key not in kept and not self._is_needed(live):
                unused.append(live)
                lacking -= live.num_bytes
                if lacking <= 0:
                    break
        if lacking > 0:
            return False
        for live in unused:
            self._drop(live)
        return True

    def _is_needed(self, live: _Live) -> bool:
        """Whether a request has yet to compute positions of this image. A request preempted later asks again."""
        for request, end in list(live.users.items()):
            if request.running and all(seq.num_settled_tokens >= end for seq in request.running):
                del live.users[request]
        return bool(live.users)

    def _is_ready(self, image: ImageRef) -> bool:
        live = self._live.get(image.key)
        return live is not None and live.is_ready

    def _use(self, request: Request, image: ImageRef, live: _Live) -> None:
        live.users[request] = max(image.start + image.length, live.users.get(request, 0))
        self._live.move_to_end(live.key)

    def _add(self, image: ImageRef) -> _Live:
        self._num_made += 1
        live = _Live(self._num_made, image.key, image.num_embeddings * self._limits.embedding_bytes)
        self._live[live.key] = self._ids[live.embedding_id] = live
        self.num_bytes += live.num_bytes
        self.num_under_way += 1
        self.messages.append(EncodeImage(live.embedding_id, image.key, image.grid, image.num_embeddings, image.pixels))
        return live

    def _drop(self, live: _Live) -> None:
        del self._live[live.key], self._ids[live.embedding_id]
        self.num_bytes -= live.num_bytes
        self.messages.append(DropEmbedding(live.embedding_id))


class WholeImages(SchedulerPart):
    """For models in which the positions of an image attend to each other: chunks end before an image, or behind it."""

    __slots__ = ()

    @classmethod
    def of(cls, scheduler: "Scheduler", before: Self | None) -> Self | None:
        return cls() if scheduler.limits.images_are_whole else None

    def chunk_end(self, seq: Sequence, start: int, end: int, most: int) -> int:
        for image in seq.request.images:
            behind = image.start + image.length
            if image.start < end < behind:
                if image.start > start:
                    return image.start
                return behind if behind <= most else start
        return end


def check_images(images: ListOf[ImageRef], num_prompt_tokens: int, limits: WorkerLimits) -> Refusal | None:
    """Return why the images of a request cannot be computed."""
    if limits.num_stages > 1:
        return NO_IMAGES
    end = 0
    for image in images:
        if image.start < end or image.num_embeddings > image.length:
            return Refusal("internal", f"an image at position {image.start} overlaps the one before, or itself")
        end = image.start + image.length
        if limits.images_are_whole and image.length > limits.longest_chunk:
            return Refusal(
                "too_long",
                f"an image takes {image.length} positions, which this model computes at once; "
                f"at most {limits.longest_chunk} fit a step",
            )
    longest = max(image.length for image in images) if limits.images_are_whole else 0
    num_pages = -(-(num_prompt_tokens + 1) // limits.page_size)
    num_pages += sum(2 + -(-(longest + each.window) // each.page_size) for each in limits.window_groups)
    if longest and num_pages > limits.num_pages:
        return Refusal("too_long", f"the request needs {num_pages} pages of KV at once; there are {limits.num_pages}")
    if end > num_prompt_tokens:
        return Refusal("internal", f"an image ends at position {end} of a prompt of {num_prompt_tokens}")
    num_embeddings = sum({image.key: image.num_embeddings for image in images}.values())
    if num_embeddings * limits.embedding_bytes > limits.max_embedding_bytes:
        most = limits.max_embedding_bytes // limits.embedding_bytes
        return Refusal("too_long", f"the images have {num_embeddings} embeddings; at most {most} fit at a time")
    return None


PARTS = (ImageGate, WholeImages)
