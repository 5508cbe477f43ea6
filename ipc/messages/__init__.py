"""Every message that crosses a socket, and nothing else.

Structs are tagged, array-like and frozen; they are validated against these types on receipt.
Arrays travel as raw little-endian buffers (`bytes`); the comment beside each field gives dtype and shape.
New fields are only ever added at the end and with a default; any other change increments `PROTOCOL_VERSION`.

Directions (in `frontend.py` and `worker.py`; `base.py` has what both share, `images.py` what concerns images, and
`handover.py` the messages between engines):

    frontend  -> scheduler   FrontendHello, AddRequest, AbortRequest, PauseRequest, ResumeRequest,
                             Heartbeat, Goodbye, ResetPrefixCache, ListRequests, ListCache, DrainEngine,
                             NoteCulprit; WatchSteps, ListPages, ListPrefixes, ShowLife (`watching.py`)
    scheduler -> frontend    EngineReady, EngineNotReady, TokenBatch, EngineStats, ExpertLoad,
                             CacheEvents, RequestList, SayHello, Refused, Heartbeat
    worker    -> scheduler   WorkerHello, StepResult, GrammarPrepared, ImageEncoded, KVStored, KVLoaded,
                             DiskContents, ExpertTokens, WorkerFailed, Heartbeat
    scheduler -> worker      Welcome, StepPlan, PrepareGrammar, DropGrammar, EncodeImage, DropEmbedding, StoreKV,
                             LoadKV, DropStoredKV, SayHello, Refused, Heartbeat
"""

from penstock.ipc.messages.base import (
    PROTOCOL_VERSION,
    Buffer,
    ErrorCode,
    FinishReason,
    Heartbeat,
    Message,
    Pooling,
    PoolingKind,
    Refused,
    SamplingParams,
    SayHello,
    ShortText,
    TokenLogprobs,
)
from penstock.ipc.messages.frontend import (
    AbortRequest,
    AddRequest,
    CacheEvents,
    CacheMiss,
    DiskStats,
    DraftStats,
    DrainEngine,
    EngineNotReady,
    EngineReady,
    EngineStats,
    ExpertLoad,
    FrontendHello,
    Goodbye,
    HandoverStats,
    HostTierStats,
    ImageStats,
    LayerLoad,
    ListCache,
    ListRequests,
    NoteCulprit,
    PauseRequest,
    Probe,
    ProfileSteps,
    RequestList,
    RequestState,
    ResetPrefixCache,
    ResumeRequest,
    SequenceBill,
    SequenceDelta,
    SequenceProgress,
    SequenceStatus,
    SnapshotStats,
    TierChanges,
    TokenBatch,
    TokenColumns,
    WaitingTenant,
)
from penstock.ipc.messages.handover import (
    FollowKV,
    HandoverReleased,
    HandoverTaken,
    KVData,
    KVLayers,
    KVPages,
    KVReceived,
    KVSource,
    OfferKV,
    ReadKV,
    ReceiveKV,
    Role,
    SetRole,
    StopReceivingKV,
    UnfollowKV,
    WithdrawKV,
)
from penstock.ipc.messages.images import (
    IMAGE_KEY_BYTES,
    DropEmbedding,
    EncodeImage,
    ImageEncoded,
    ImageKey,
    ImageRef,
    PixelRef,
    PixelTensor,
    PixelType,
    RowImage,
)
from penstock.ipc.messages.watching import (
    CACHED,
    FREE,
    HELD,
    OWNED,
    SHARED,
    EventKind,
    InRow,
    ListPages,
    ListPrefixes,
    PageMap,
    PageRuns,
    Picture,
    PrefixNode,
    PrefixTree,
    RequestLife,
    SequenceEvent,
    ShowLife,
    Waiting,
    WatchedStep,
    WatchedSteps,
    WatchSteps,
)
from penstock.ipc.messages.worker import (
    FROM_HOST,
    ON_DEVICE,
    TO_HOST,
    DiskContents,
    DropGrammar,
    DropStoredKV,
    ExpertTokens,
    GrammarPrepared,
    KVLoaded,
    KVStored,
    LayerTokens,
    LoadKV,
    NewRow,
    PrepareGrammar,
    RowError,
    StepPlan,
    StepResult,
    StoreKV,
    Welcome,
    WindowGroup,
    WorkerFailed,
    WorkerHello,
)

__all__ = [
    "CACHED",
    "FREE",
    "FROM_HOST",
    "HELD",
    "IMAGE_KEY_BYTES",
    "ON_DEVICE",
    "OWNED",
    "PROTOCOL_VERSION",
    "SHARED",
    "TO_HOST",
    "AbortRequest",
    "AddRequest",
    "Buffer",
    "CacheEvents",
    "CacheMiss",
    "DiskContents",
    "DiskStats",
    "DraftStats",
    "DrainEngine",
    "DropEmbedding",
    "DropGrammar",
    "DropStoredKV",
    "EncodeImage",
    "EngineNotReady",
    "EngineReady",
    "EngineStats",
    "ErrorCode",
    "EventKind",
    "ExpertLoad",
    "ExpertTokens",
    "FinishReason",
    "FollowKV",
    "FromFrontend",
    "FromWorker",
    "FrontendHello",
    "Goodbye",
    "GrammarPrepared",
    "HandoverReleased",
    "HandoverStats",
    "HandoverTaken",
    "Heartbeat",
    "HostTierStats",
    "ImageEncoded",
    "ImageKey",
    "ImageRef",
    "ImageStats",
    "InRow",
    "KVData",
    "KVLayers",
    "KVLoaded",
    "KVPages",
    "KVReceived",
    "KVSource",
    "KVStored",
    "LayerLoad",
    "LayerTokens",
    "ListCache",
    "ListPages",
    "ListPrefixes",
    "ListRequests",
    "LoadKV",
    "Message",
    "NewRow",
    "NoteCulprit",
    "OfferKV",
    "PageMap",
    "PageRuns",
    "PauseRequest",
    "Picture",
    "PixelRef",
    "PixelTensor",
    "PixelType",
    "Pooling",
    "PoolingKind",
    "PrefixNode",
    "PrefixTree",
    "PrepareGrammar",
    "Probe",
    "ProfileSteps",
    "ReadKV",
    "ReceiveKV",
    "Refused",
    "RequestLife",
    "RequestList",
    "RequestState",
    "ResetPrefixCache",
    "ResumeRequest",
    "Role",
    "RowError",
    "RowImage",
    "SamplingParams",
    "SayHello",
    "SequenceBill",
    "SequenceDelta",
    "SequenceEvent",
    "SequenceProgress",
    "SequenceStatus",
    "SetRole",
    "ShortText",
    "ShowLife",
    "SnapshotStats",
    "StepPlan",
    "StepResult",
    "StopReceivingKV",
    "StoreKV",
    "TierChanges",
    "ToFrontend",
    "ToWorker",
    "TokenBatch",
    "TokenColumns",
    "TokenLogprobs",
    "UnfollowKV",
    "Waiting",
    "WaitingTenant",
    "WatchSteps",
    "WatchedStep",
    "WatchedSteps",
    "Welcome",
    "WindowGroup",
    "WithdrawKV",
    "WorkerFailed",
    "WorkerHello",
]  # fmt: skip

FromFrontend = (
    FrontendHello
    | AddRequest
    | AbortRequest
    | PauseRequest
    | ResumeRequest
    | Heartbeat
    | Goodbye
    | ResetPrefixCache
    | ProfileSteps
    | ListRequests
    | ListCache
    | DrainEngine
    | NoteCulprit
    | Probe
    | HandoverTaken
    | SetRole
    | WatchSteps
    | ListPages
    | ListPrefixes
    | ShowLife
)
ToFrontend = (
    EngineReady
    | EngineNotReady
    | TokenBatch
    | EngineStats
    | ExpertLoad
    | CacheEvents
    | RequestList
    | SayHello
    | Refused
    | Heartbeat
    | HandoverReleased
    | WatchedSteps
    | PageMap
    | PrefixTree
    | RequestLife
)
FromWorker = (
    WorkerHello
    | StepResult
    | GrammarPrepared
    | ImageEncoded
    | KVStored
    | KVLoaded
    | DiskContents
    | ExpertTokens
    | KVReceived
    | WorkerFailed
    | Heartbeat
)
ToWorker = (
    Welcome
    | StepPlan
    | PrepareGrammar
    | DropGrammar
    | EncodeImage
    | DropEmbedding
    | StoreKV
    | LoadKV
    | DropStoredKV
    | OfferKV
    | WithdrawKV
    | ReceiveKV
    | StopReceivingKV
    | SayHello
    | Refused
    | Heartbeat
    | ProfileSteps
)
FromReader = FollowKV | UnfollowKV | ReadKV
ToReader = KVPages | KVLayers | KVData
