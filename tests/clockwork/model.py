"""A model for tests: its next token is a hash of all tokens before it, read back from the KV pool.

It has no weights. It stores each token's id as the key in the slot that the plan gives. Then it reads the whole
sequence through the row's page table. So a token that was lost, doubled or left by another sequence, in any page,
changes all later tokens, and `next_token` says what they should have been.

A step can be made to take time. The model sleeps for that time, so a thousand streams at twenty tokens a second cost
little.
"""

import time
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.config import ConfigError
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.gpu_worker.models.model import NO_EXPERTS, ForwardInputs, Model, WholeStep
from penstock.gpu_worker.state.kv_pool import KVPool
from tests.clockwork.family import ClockworkConfig

FIRST, LAST = 3, 96
"""Only these ids get high scores. In a byte-level vocabulary after three special tokens they are "!" to "~"."""

_BITS = 15  # a score is a hash of this many bits, times the vocabulary, plus the id: exact in fp32 up to 512 ids
_MAX_VOCAB_SIZE = 1 << (24 - _BITS)


def build(config: ClockworkConfig, reader: WeightReader) -> Model:
    """As `Family.build`.

    Raises:
        ConfigError: the device is no CPU, the dtype not fp32, or the vocabulary too large.
    """
    if reader.device.type != "cpu" or reader.dtype != torch.float32 or config.vocab_size > _MAX_VOCAB_SIZE:
        raise ConfigError(f"the clockwork model is for tests: on cpu, float32, at most {_MAX_VOCAB_SIZE} token ids")
    return ClockworkModel(config)


class ClockworkModel:
    """See `Model`. It depends on tokens alone. It works only on the CPU, in fp32, where token ids are exact."""

    kernels = "torch"
    held_experts = NO_EXPERTS
    is_batch_invariant = True
    can_be_captured = False

    def __init__(self, config: ClockworkConfig) -> None:
        self.config = config

    def prepare(self, device: Device, num_rows: int, max_model_len: int) -> None:
        pass

    @property
    def enters_rows(self) -> bool:
        return False

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        pass

    def whole_step(self, token_ids: Tensor, page_tables: Sequence[Tensor], kv: KVPool) -> WholeStep | None:
        return None

    def forward(self, inputs: ForwardInputs, kv: KVPool) -> Tensor:
        """Store the batch's tokens in their slots; return [T, 1], the hash of each sequence up to its last token."""
        ends_at = time.monotonic() + self.config.step_seconds + self.config.token_seconds * inputs.input_ids.shape[0]
        page_size = kv.page_size
        kept = kv.layers[0].keys[:, 0, :, 0]  # [pages, page_size]
        kept[inputs.slot_mapping // page_size, inputs.slot_mapping % page_size] = inputs.input_ids.float()
        pages = kept.numpy()
        hidden = torch.zeros(inputs.input_ids.shape[0], 1)
        ends = (inputs.query_start_loc[1:] - 1).tolist()
        for end, num_tokens, table in zip(ends, inputs.seq_lens.tolist(), inputs.page_table.numpy(), strict=True):
            tokens = pages[table[: -(-num_tokens // page_size)]].reshape(-1)[:num_tokens]
            hidden[end, 0] = self.summary(tokens.astype("<i4"))
        time.sleep(max(0.0, ends_at - time.monotonic()))
        return hidden

    def summary(self, tokens: npt.NDArray[np.int32]) -> int:
        """One number for a row's tokens, exact in fp32, which `logits` takes."""
        return _digest(tokens.tobytes())

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, 1] of the rows that sample -> [S, V]."""
        return torch.from_numpy(_scores(hidden[:, 0].numpy().astype(np.int64), self.config.vocab_size))


def next_token(token_ids: Iterable[int]) -> int:
    """The greedy token after these tokens: the oracle for tests."""
    digest = _digest(np.fromiter(token_ids, dtype="<i4").tobytes())
    return int(_scores(np.array([digest]), LAST + 1)[0].argmax())


def _digest(tokens: bytes) -> int:
    return zlib.crc32(tokens) >> 8  # exact in fp32


def _scores(digests: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.float32]:
    """fp32[S, V], all different: a hash of each id, higher for the ids in the freely sampled range."""
    ids = np.arange(vocab_size)
    hashes = (digests[:, None] * (2 * ids + 1) * 0x9E37 >> 8) & ((1 << _BITS) - 1)
    scores = (hashes * _MAX_VOCAB_SIZE + ids).astype(np.float32)
    scores[:, (ids < FIRST) | (ids > LAST)] -= 1 << 24
    return scores
