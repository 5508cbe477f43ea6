"""Whose tokens a batch's are: what each decode brings, told in columns."""

from array import array
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from itertools import accumulate
from typing import NamedTuple

from penstock.core.sequences.sequence import Owner, Sequence
from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import TokenColumns


class _Members(NamedTuple):
    """An owner's sequences in a batch."""

    positions: list[int]
    request_ids: tuple[str, ...]
    sequence_idxs: bytes  # int32


class Audience:
    """The owners of a batch's sequences. Made once, for all steps in which the batch stays as it is."""

    __slots__ = ("_members", "_seqs")

    def __init__(self, seqs: list[Sequence]) -> None:
        self._seqs = seqs
        positions: dict[Owner, list[int]] = {}
        for position, seq in enumerate(seqs):
            positions.setdefault(seq.owner, []).append(position)
        self._members = {owner: self._choose(chosen) for owner, chosen in positions.items()}

    def columns(self, token_ids: bytes, apart: AbstractSet[int], counts: list[int]) -> dict[Owner, TokenColumns]:
        """Return what each owner is told.

        Args:
            token_ids: int32[at least as many as the batch brings], in its order.
            apart: positions that are told in another way, or not at all.
            counts: how many tokens each position brings; empty: one each.
        """
        told: dict[Owner, TokenColumns] = {}
        ends = list(accumulate(counts)) if counts else None
        for owner, members in self._members.items():
            if apart and not apart.isdisjoint(members.positions):
                members = self._choose(position for position in members.positions if position not in apart)
            num_tokens = b""
            if ends is not None:
                num_tokens = pack_int32([counts[i] for i in members.positions])
                tokens = b"".join([token_ids[4 * (ends[i] - counts[i]) : 4 * ends[i]] for i in members.positions])
            elif len(members.positions) == len(self._seqs):
                tokens = token_ids[: 4 * len(self._seqs)]
            else:
                numbers = memoryview(token_ids).cast("i")  # as they are: they only change places
                tokens = array("i", [numbers[position] for position in members.positions]).tobytes()
            if members.positions:
                told[owner] = TokenColumns(members.request_ids, members.sequence_idxs, tokens, num_tokens)
        return told

    def _choose(self, positions: Iterable[int]) -> _Members:
        chosen = list(positions)
        seqs = [self._seqs[position] for position in chosen]
        idxs = pack_int32([seq.sequence_idx for seq in seqs])
        return _Members(chosen, tuple([seq.request_id for seq in seqs]), idxs)
