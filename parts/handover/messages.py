"""Who says what of pages that go from the engine that computed a prompt to the one that decodes it.

    scheduler -> its workers                         OfferKV, WithdrawKV; ReceiveKV, StopReceivingKV
    worker -> its scheduler                          KVReceived
    decode engine's worker -> prefill engine's       FollowKV, UnfollowKV, ReadKV
    prefill engine's worker -> decode engine's       KVPages, KVLayers, KVData

Pages are named by page group, index in the page table of that group, and number in the pool. Rank r reads from rank r
of the other engine. What the engines' schedulers tell each other is in `ipc/messages/handover.py`.
"""

from penstock.ipc.messages import Buffer, KVSource, Message, ShortText
from penstock.ipc.messages.handover import Text


class OfferKV(Message, frozen=True):
    """Pages that will be filled once a step has been computed: sent before that step's plan."""

    handover_id: ShortText
    step_id: int
    pages: Buffer  # int32[pages, 3]: group, index in the page table, page


class WithdrawKV(Message, frozen=True):
    """A handover's pages are reused for something else."""

    handover_id: ShortText


class ReceiveKV(Message, frozen=True):
    """Fill pages from another engine's while steps go on; `KVReceived` answers once.

    Nothing else uses these pages until then. Before they are first written to, all plans sent earlier have been
    computed.
    """

    handover_id: ShortText
    sources: tuple[KVSource, ...]  # of each rank
    pages: Buffer  # int32[pages, 3]


class StopReceivingKV(Message, frozen=True):
    """The pages are no longer wanted."""

    handover_id: ShortText


class KVReceived(Message, frozen=True):
    """All pages of a handover have arrived, or nothing more will be written to them."""

    handover_id: ShortText
    num_bytes: int = 0
    error: Text = ""  # why the pages have not arrived
    failed_transports: tuple[ShortText, ...] = ()  # have failed, each on a link that is open


class FollowKV(Message, frozen=True):
    """Asks to be told which pages of a handover are ready, from its beginning on."""

    handover_id: ShortText


class UnfollowKV(Message, frozen=True):
    """Ends a `FollowKV`."""

    handover_id: ShortText


class KVPages(Message, frozen=True):
    """An offer: its pages are being computed, or ready."""

    handover_id: ShortText
    number: int  # of the offer, among those of its handover
    pages: Buffer  # int32[pages, 3]


class KVLayers(Message, frozen=True):
    """The first layers of an offer can be read."""

    handover_id: ShortText
    number: int
    num_layers: int


class ReadKV(Message, frozen=True):
    """Asks for parts of pages over this connection; `KVData` answers, followed by a frame with the bytes."""

    read_id: int
    first_part: int
    end_part: int
    pages: Buffer  # int32[pages], in the pool


class KVData(Message, frozen=True):
    """The next frame has the requested parts: uint8[parts, pages, bytes of a part]."""

    read_id: int


FromReader = FollowKV | UnfollowKV | ReadKV
ToReader = KVPages | KVLayers | KVData

TO_WORKER = (OfferKV, WithdrawKV, ReceiveKV, StopReceivingKV)
FROM_WORKER = (KVReceived,)
