"""A worker made of memory alone: a sampled token is a hash of the tokens it reads back through the page table.

Behind the placeholders of an image it keeps what the image shows there.

So a token that was lost, doubled, or comes from somebody else's page changes everything after it. Of drafts that are
right it accepts a random number, and sometimes it brings nothing for such a row.
"""

import struct
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import NamedTuple

from penstock.core.sequences.limits import WorkerLimits
from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.ipc.messages import (
    FROM_HOST,
    ON_DEVICE,
    TO_HOST,
    ImageRef,
    Message,
    RowImage,
    SamplingParams,
    StepPlan,
    StepResult,
)
from penstock.parts.grammars.messages import DropGrammar, GrammarPrepared, PrepareGrammar
from penstock.parts.images.messages import DropEmbedding, EncodeImage, ImageEncoded

EMPTY = -1
State = tuple[int, int]
"""How many tokens it has seen, and a hash of them."""
NO_STATE: State = (0, 0)


class Row:
    """Device state of one row."""

    def __init__(
        self, token_ids: list[int], page_ids: list[int], num_prompt_tokens: int, sampling: SamplingParams
    ) -> None:
        self.token_ids = token_ids
        self.page_ids = page_ids
        self.tables: dict[int, dict[int, int]] = {}  # page group >= 1 -> place -> page
        self.num_prompt_tokens = num_prompt_tokens
        self.sampling = sampling
        self.shown: dict[int, tuple[RowImage, int]] = {}  # position of an image -> what is there
        self.next_position = -1  # that it computes, once it has sampled
        self.state = NO_STATE  # of layers that keep one


Guess = Callable[[Row, int, int], list[int]]
"""A drafter: guesses of a row's tokens from a position on, at most so many."""


class Scores(NamedTuple):
    """Made-up log-probabilities of one token: ids and values with its own first, and its rank."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class Memory:
    """Pages of the device, or of the host: the tokens of the first page group, and of the others."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.memory = array("i", [EMPTY]) * (num_pages * page_size)
        self.window_memory: dict[tuple[int, int], tuple[int, int]] = {}  # page, offset -> page group, token


class FakeWorker(Memory):
    """Executes plans in order; checks all that a plan promises."""

    def __init__(self, limits: WorkerLimits, guess: Guess | None = None) -> None:
        super().__init__(limits.num_pages, limits.page_size)
        self.host = Memory(limits.num_host_pages, limits.page_size)
        self.limits = limits
        self.rng = Random(limits.num_pages)
        self.guess = guess
        self.num_accepted = 0  # drafts
        self.starts: dict[int, list[int]] = {}  # step -> where its rows began indeed
        self.accepts_all = False  # that are right
        self.page_size = limits.page_size
        self.max_page_size = max((group.page_size for group in limits.window_groups), default=0)
        self.num_window_reads = 0
        self.rows: dict[int, Row] = {}
        self.snapshots: dict[int, State] = {}
        self.num_computed = 0
        self.num_copies = 0  # on the device
        self.num_to_host = 0
        self.num_from_host = 0
        self.asked: deque[PrepareGrammar] = deque()  # grammars that are not ready
        self.grammars: dict[int, str] = {}  # those that are not dropped
        self.ready: set[int] = set()
        self.num_prepared = 0
        self.to_encode: deque[EncodeImage] = deque()
        self.embeddings: dict[int, EncodeImage] = {}  # those that are not dropped
        self.encoded: set[int] = set()
        self.num_encoded = 0

    def take_orders(self, orders: Iterable[Message]) -> None:
        """What the scheduler says of grammars and images. What is dropped may have waited for its trial."""
        for order in orders:
            match order:
                case PrepareGrammar():
                    assert order.grammar_id not in self.grammars
                    assert order.grammar not in self.grammars.values(), "asked once per text"
                    self.grammars[order.grammar_id] = order.grammar
                    self.asked.append(order)
                case DropGrammar():
                    self.grammars.pop(order.grammar_id, None)
                case EncodeImage():
                    assert order.key not in {each.key for each in self.embeddings.values()}, "encoded once"
                    self.embeddings[order.embedding_id] = order
                    self.to_encode.append(order)
                    num_bytes = sum(each.num_embeddings for each in self.embeddings.values())
                    assert num_bytes * self.limits.embedding_bytes <= self.limits.max_embedding_bytes
                case DropEmbedding():
                    self.embeddings.pop(order.embedding_id, None)
                    self.encoded.discard(order.embedding_id)
                    kept = (each for each in self.to_encode if each.embedding_id != order.embedding_id)
                    self.to_encode = deque(kept)

    def prepare(self) -> GrammarPrepared:
        """Make the oldest grammar that was asked for ready; one that says so fails."""
        message = self.asked.popleft()
        self.num_prepared += 1
        if message.grammar.startswith("bad"):
            return GrammarPrepared(message.grammar_id, f"{message.grammar} cannot be used")
        self.ready.add(message.grammar_id)
        return GrammarPrepared(message.grammar_id)

    def encode(self) -> ImageEncoded:
        """Embed the oldest image that was asked for; one that says so fails."""
        message = self.to_encode.popleft()
        self.num_encoded += 1
        if message.key.startswith(b"bad"):  # and is dropped: other ranks may have it
            return ImageEncoded(message.embedding_id, error="the image cannot be used")
        self.encoded.add(message.embedding_id)
        return ImageEncoded(message.embedding_id, num_us=1)

    def _check_images(self, row: Row, first: int, count: int) -> None:
        """Those that are computed are embedded, and are not cut where they must not be."""
        for image in {row.shown[position][0] for position in range(first, first + count) if position in row.shown}:
            assert image.embedding_id in self.encoded
            assert self.embeddings[image.embedding_id].key == image.key
            assert not self.limits.images_are_whole or image.start + image.length <= first + count

    def execute(self, plan: StepPlan) -> StepResult:
        self._apply(plan)
        rows, start, num_new = (list(unpack_int32(b)) for b in (plan.rows, plan.start, plan.num_new))
        assert len(set(rows)) == len(rows) == len(start) == len(num_new) == len(plan.samples)
        assert rows or plan.copy_src, "a plan computes something, or copies pages"
        assert sum(num_new) <= self.limits.max_num_batched_tokens
        assert len(rows) <= self.limits.max_num_seqs
        num_drafts = list(unpack_int32(plan.num_drafts)) or [0] * len(rows)
        start_bounds = plan.start_bounds or bytes(len(rows))
        assert len(num_drafts) == len(start_bounds) == len(rows)
        batch = []
        guessed = []  # of each sampling row
        for row_id, first, count, samples, k, is_bound in zip(
            rows, start, num_new, plan.samples, num_drafts, start_bounds, strict=True
        ):
            row = self.rows[row_id]
            assert count >= 1
            if is_bound:
                assert row.next_position <= first, "a start is at most its bound"
                first = row.next_position
            assert row.next_position in (-1, first), "an exact start is the row's own"
            if k:
                assert samples
                assert count == 1 + k
                guesses = [] if self.guess is None else self.guess(row, first + 1, k)
                row.token_ids[first + 1 :] = guesses
                count, k = 1 + len(guesses), len(guesses)
            if samples:
                guessed.append(k)
            batch.append((row, first, count, samples, k))
        self.starts[plan.step_id] = [first for _, first, _, _, _ in batch]
        for row, first, count, _, _ in batch:
            self._check_images(row, first, count)
            self._write(row, first, count)
            if self.limits.has_states:
                seen = [self.memory[self._slot(row, position)] for position in range(first, first + count)]
                row.state = next_state(row.state, first, seen)
        self.num_computed += sum(count for _, _, count, _, _ in batch)
        prompts = [
            (row, position, row.sampling.prompt_logprobs)
            for row, first, count, _, _ in batch
            if row.sampling.prompt_logprobs >= 0
            for position in range(first, min(first + count, row.num_prompt_tokens - 1))
        ]
        tokens: list[int] = []
        counts = []
        sampled = []
        for row, first, count, samples, k in batch:
            if samples:
                drawn = self._verify(row, first + count - k, k)
                row.next_position = first + count - 1 - k + len(drawn)
                if row.sampling.num_logprobs >= 0:
                    sampled += [(row, first + count - 1 - k + i, row.sampling.num_logprobs) for i in range(len(drawn))]
                tokens += drawn
                counts.append(len(drawn))
        columns = (*self._columns(sampled), *self._columns(prompts))
        num_tokens = pack_int32(counts) if set(counts) - {1} else b""
        num_drafted = pack_int32(guessed) if any(guessed) else b""
        return StepResult(
            plan.step_id, pack_int32(tokens), 0, 0, *columns, num_tokens=num_tokens, num_drafted=num_drafted
        )

    def _verify(self, row: Row, position: int, num_drafts: int) -> list[int]:
        """Draw the token at this position and after each draft that is right; sometimes fewer."""
        most = num_drafts + 1
        if num_drafts and not self.accepts_all:
            most = self.rng.choice([0, most, most, most, self.rng.randint(0, most)])
        drafts = row.token_ids[position : position + num_drafts]
        drawn: list[int] = []
        while len(drawn) < most and drawn == drafts[: len(drawn)]:
            drawn.append(self._sample(row, position + len(drawn)))
            row.token_ids += drafts[len(drawn) :]  # what it has not come to yet
        del row.token_ids[position + len(drawn) :]
        self.num_accepted += max(0, len(drawn) - 1)
        return drawn

    def _columns(self, wanted: list[tuple[Row, int, int]]) -> tuple[bytes, bytes, bytes]:
        """For (row, position, number of best ones): ids, values and ranks, all as wide as the widest."""
        width = max((num_best for _, _, num_best in wanted), default=0)
        scores = [self._score(row, position, width) for row, position, _ in wanted]
        values = [value for score in scores for value in score.logprobs]
        ids = pack_int32(token_id for score in scores for token_id in score.token_ids)
        return ids, struct.pack(f"<{len(values)}f", *values), pack_int32(score.rank for score in scores)

    def _score(self, row: Row, position: int, num_best: int) -> Scores:
        seen = array("i", [self.memory[self._slot(row, i)] for i in range(position + 1)])
        return score_of(seen, row.token_ids[position + 1], num_best)

    def _apply(self, plan: StepPlan) -> None:
        for row, place in _pairs(plan.state_saves):
            assert 0 <= place < self.limits.num_snapshots
            self.snapshots[place] = self.rows[row].state  # also of a row that is given to another one in this plan
        for freed in unpack_int32(plan.freed_rows):
            del self.rows[freed]
        new = {new_row.row for new_row in plan.new_rows}
        for new_row in plan.new_rows:
            assert new_row.row not in self.rows
            assert not new_row.sampling.grammar, "it has been told"
            assert not new_row.grammar_id or new_row.grammar_id in self.ready
            self.rows[new_row.row] = Row(
                list(unpack_int32(new_row.token_ids)),
                list(unpack_int32(new_row.page_ids)),
                new_row.num_prompt_tokens,
                new_row.sampling,
            )
            self.rows[new_row.row].shown = {
                image.start + offset: (image, shown_at(image.key, offset))
                for image in new_row.images
                for offset in range(image.length)
            }
        for row, place in _pairs(plan.state_loads):
            assert row in new
            self.rows[row].state = self.snapshots[place]
        page_ids = iter(unpack_int32(plan.page_ids))
        assert len(set(unpack_int32(plan.page_rows))) == len(unpack_int32(plan.page_rows)), "each row once"
        for row, count in zip(unpack_int32(plan.page_rows), unpack_int32(plan.page_counts), strict=True):
            assert row not in new
            self.rows[row].page_ids += [next(page_ids) for _ in range(count)]
        assert next(page_ids, None) is None
        numbers = unpack_int32(plan.window_pages)
        for i in range(0, len(numbers), 4):
            group, row, place, page_id = numbers[i : i + 4]
            table = self.rows[row].tables.setdefault(group, {})
            assert place not in table, "each place of a page table is filled once"
            table[place] = page_id
        self._copy(plan)

    def _copy(self, plan: StepPlan) -> None:
        """One page after the other, as a plan has them."""
        sources, targets = unpack_int32(plan.copy_src), unpack_int32(plan.copy_dst)
        tiers = plan.copy_tiers or bytes(len(sources))
        assert len(sources) == len(targets) == len(tiers)
        size = self.page_size
        for src, dst, tier in zip(sources, targets, tiers, strict=True):
            source, target = (self.host if tier == FROM_HOST else self), (self.host if tier == TO_HOST else self)
            assert tier in (ON_DEVICE, TO_HOST, FROM_HOST)
            assert 0 <= src < len(source.memory) // size
            assert 0 <= dst < len(target.memory) // size
            target.memory[dst * size : (dst + 1) * size] = source.memory[src * size : (src + 1) * size]
            for offset in range(self.max_page_size):
                target.window_memory.pop((dst, offset), None)
                if (src, offset) in source.window_memory:
                    target.window_memory[dst, offset] = source.window_memory[src, offset]
        self.num_copies += tiers.count(ON_DEVICE)
        self.num_to_host += tiers.count(TO_HOST)
        self.num_from_host += tiers.count(FROM_HOST)

    def host_content(self, page: int) -> tuple["array[int]", dict[int, tuple[int, int]]]:
        """What a page of the host holds, of the first page group and of the others."""
        size, host = self.page_size, self.host
        windows = {i: host.window_memory[page, i] for i in range(self.max_page_size) if (page, i) in host.window_memory}
        return host.memory[page * size : (page + 1) * size], windows

    def set_host_content(self, page: int, content: tuple["array[int]", dict[int, tuple[int, int]]]) -> None:
        """The other way round."""
        self.host.memory[page * self.page_size : (page + 1) * self.page_size] = content[0]
        for i in range(self.max_page_size):
            self.host.window_memory.pop((page, i), None)
        self.host.window_memory.update(((page, i), value) for i, value in content[1].items())

    def _slot(self, row: Row, position: int) -> int:
        return row.page_ids[position // self.page_size] * self.page_size + position % self.page_size

    def _write(self, row: Row, start: int, count: int) -> None:
        for position in range(start, start + count):
            slot, token = self._slot(row, position), row.token_ids[position]
            if position in row.shown:
                token = row.shown[position][1]
            self.memory[slot] = token
            for offset in range(self.max_page_size):
                self.window_memory.pop((slot // self.page_size, offset), None)  # the page is of the first group now
            for number, group in enumerate(self.limits.window_groups, 1):
                place, offset = divmod(position, group.page_size)
                page_id = row.tables[number][place]
                self.window_memory[page_id, offset] = number, token
                size = self.page_size  # whatever the first group had there is lost
                self.memory[page_id * size : (page_id + 1) * size] = array("i", [EMPTY]) * size
        for position in range(start, start + count):
            self._read_windows(row, position)

    def _read_windows(self, row: Row, position: int) -> None:
        """What each group's window shows of a position is what the first group has there."""
        for number, group in enumerate(self.limits.window_groups, 1):
            for seen in range(max(0, position - group.window + 1), position + 1):
                place, offset = divmod(seen, group.page_size)
                found = self.window_memory[row.tables[number][place], offset]
                assert found == (number, self.memory[self._slot(row, seen)]), (row.token_ids, position, seen)
                self.num_window_reads += 1

    def _sample(self, row: Row, length: int) -> int:
        """Draw the token at position `length` from all positions before it, as the pool has them."""
        seen = array("i", [self.memory[self._slot(row, position)] for position in range(length)])
        token = next_token(seen, row.sampling, length - row.num_prompt_tokens, self.limits.vocab_size)
        assert row.state == next_state(NO_STATE, 0, seen) or not self.limits.has_states
        assert length <= len(row.token_ids)
        del row.token_ids[length:]  # a real row overwrites
        row.token_ids.append(token)
        return token


def _pairs(packed: bytes) -> list[tuple[int, int]]:
    numbers = list(unpack_int32(packed))
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def next_state(state: State, start: int, token_ids: Iterable[int]) -> State:
    """A state that has seen these tokens, too, of which the first is at `start`."""
    seen = array("i", token_ids)
    assert state[0] == start, "a state has seen what comes before"
    return start + len(seen), zlib.crc32(seen.tobytes(), state[1])


def shown_at(key: bytes, offset: int) -> int:
    """What an image has at a position of its own, as the model sees it."""
    return zlib.crc32(key, offset) & 0x3FFFFFFF


def shown_prompt(prompt: list[int], images: Iterable[ImageRef]) -> list[int]:
    """A prompt as the model sees it."""
    seen = prompt[:]
    for image in images:
        seen[image.start : image.start + image.length] = [shown_at(image.key, i) for i in range(image.length)]
    return seen


def next_token(seen: "array[int]", sampling: SamplingParams, num_outputs: int, vocab_size: int) -> int:
    """The "model" and its sampler, min_tokens mask included."""
    digest = zlib.crc32(seen.tobytes(), sampling.seed & 0xFFFFFFFF)
    token = digest % vocab_size
    while num_outputs < sampling.min_tokens and token in sampling.stop_token_ids:
        token = (token + 1) % vocab_size
    return token


def score_of(seen: Iterable[int], token_id: int, num_best: int) -> Scores:
    """What the "model" thinks of a token after these."""
    digest = zlib.crc32(array("i", seen).tobytes())
    own = zlib.crc32(token_id.to_bytes(4, "little"), digest) % 4096
    return Scores(
        [token_id, *((digest + i) % 997 for i in range(num_best))],
        [-own / 64, *(-(i + 1) / 8 for i in range(num_best))],
        1 + own,
    )


def solo_run(prompt: list[int], sampling: SamplingParams, sequence_idx: int, limits: WorkerLimits) -> list[int]:
    """The output of a sequence without any scheduler: what every trace must give."""
    seed = (sampling.seed + sequence_idx) % 2**63
    own = SamplingParams(
        max_tokens=sampling.max_tokens,
        seed=seed,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
    )
    tokens = array("i", prompt)
    max_len = min(len(prompt) + sampling.max_tokens, limits.max_sequence_len)
    while len(tokens) < max_len:
        token = next_token(tokens, own, len(tokens) - len(prompt), limits.vocab_size)
        tokens.append(token)
        if token in own.stop_token_ids and len(tokens) - len(prompt) > own.min_tokens:
            break
    return list(tokens[len(prompt) :])
