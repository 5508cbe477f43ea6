"""A worker made of memory alone: a sampled token is a hash of the tokens it reads back through the page table.

So a token that was lost, doubled, or comes from somebody else's page changes everything after it.
"""

import struct
import zlib
from array import array
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from penstock.core.sequences.worker_limits import WorkerLimits
from penstock.ipc.int32_buffer import pack_int32, unpack_int32
from penstock.ipc.messages import DropGrammar, GrammarPrepared, PrepareGrammar, SamplingParams, StepPlan, StepResult

EMPTY = -1


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


class Scores(NamedTuple):
    """Made-up log-probabilities of one token: ids and values with its own first, and its rank."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class FakeWorker:
    """Executes plans in order; checks all that a plan promises."""

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits = limits
        self.page_size = limits.page_size
        self.max_page_size = max((group.page_size for group in limits.window_groups), default=0)
        self.memory = array("i", [EMPTY]) * (limits.num_pages * limits.page_size)
        self.window_memory: dict[tuple[int, int], tuple[int, int]] = {}  # page, offset -> page group, token
        self.num_window_reads = 0
        self.rows: dict[int, Row] = {}
        self.num_computed = 0
        self.num_copies = 0
        self.asked: deque[PrepareGrammar] = deque()  # grammars that are not ready
        self.grammars: dict[int, str] = {}  # those that are not dropped
        self.ready: set[int] = set()
        self.num_prepared = 0

    def take(self, messages: Iterable[PrepareGrammar | DropGrammar]) -> None:
        """What the scheduler says of grammars."""
        for message in messages:
            if isinstance(message, PrepareGrammar):
                assert message.grammar_id not in self.grammars
                assert message.grammar not in self.grammars.values(), "asked once per text"
                self.grammars[message.grammar_id] = message.grammar
                self.asked.append(message)
            else:
                del self.grammars[message.grammar_id]

    def prepare(self) -> GrammarPrepared:
        """Make the oldest grammar that was asked for ready; one that says so fails."""
        message = self.asked.popleft()
        self.num_prepared += 1
        if message.grammar.startswith("bad"):
            return GrammarPrepared(message.grammar_id, f"{message.grammar} cannot be used")
        self.ready.add(message.grammar_id)
        return GrammarPrepared(message.grammar_id)

    def execute(self, plan: StepPlan) -> StepResult:
        self._apply(plan)
        rows, start, num_new = (list(unpack_int32(b)) for b in (plan.rows, plan.start, plan.num_new))
        assert len(set(rows)) == len(rows) == len(start) == len(num_new) == len(plan.samples) > 0
        assert sum(num_new) <= self.limits.max_num_batched_tokens
        assert len(rows) <= self.limits.max_num_seqs
        for row, first, count in zip(rows, start, num_new, strict=True):
            assert count >= 1
            self._write(self.rows[row], first, count)
        tokens = [
            self._sample(self.rows[row], first + count)
            for row, first, count, samples in zip(rows, start, num_new, plan.samples, strict=True)
            if samples
        ]
        self.num_computed += sum(num_new)
        batch = list(zip(rows, start, num_new, plan.samples, strict=True))
        sampled = [
            (self.rows[row], first + count - 1, self.rows[row].sampling.num_logprobs)
            for row, first, count, samples in batch
            if samples and self.rows[row].sampling.num_logprobs >= 0
        ]
        prompts = [
            (self.rows[row], position, self.rows[row].sampling.prompt_logprobs)
            for row, first, count, _ in batch
            if self.rows[row].sampling.prompt_logprobs >= 0
            for position in range(first, min(first + count, self.rows[row].num_prompt_tokens - 1))
        ]
        return StepResult(plan.step_id, pack_int32(tokens), 0, 0, *self._columns(sampled), *self._columns(prompts))

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
        page_ids = iter(unpack_int32(plan.page_ids))
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
        sources, targets = unpack_int32(plan.copy_src), unpack_int32(plan.copy_dst)
        assert len(sources) == len(targets) == len(set(targets))
        assert not set(sources) & set(targets)
        for src, dst in zip(sources, targets, strict=True):
            size = self.page_size
            self.memory[dst * size : (dst + 1) * size] = self.memory[src * size : (src + 1) * size]
        self.num_copies += len(sources)

    def _slot(self, row: Row, position: int) -> int:
        return row.page_ids[position // self.page_size] * self.page_size + position % self.page_size

    def _write(self, row: Row, start: int, count: int) -> None:
        for position in range(start, start + count):
            slot, token = self._slot(row, position), row.token_ids[position]
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
        assert length <= len(row.token_ids)
        del row.token_ids[length:]  # a real row overwrites
        row.token_ids.append(token)
        return token


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
