"""Every message of the spine that crosses a socket, and nothing else.

Structs are tagged, array-like and frozen; they are validated against these types on receipt.
Arrays travel as raw little-endian buffers (`bytes`); the comment beside each field gives dtype and shape.
New fields are only ever added at the end and with a default; any other change increments `PROTOCOL_VERSION`.

Directions (in `frontend.py` and `worker.py`; `base.py` has what both share, `images.py` what concerns images, and
`handover.py` the messages between engines):

    frontend  -> scheduler   FrontendHello, AddRequest, AbortRequest, PauseRequest, ResumeRequest,
                             Heartbeat, Goodbye, ResetPrefixCache, ListRequests, ListCache, DrainEngine,
                             NoteCulprit
    scheduler -> frontend    EngineReady, EngineNotReady, TokenBatch, EngineStats, ExpertLoad,
                             CacheEvents, RequestList, SayHello, Refused, Heartbeat
    worker    -> scheduler   WorkerHello, StepResult, WorkerFailed, Heartbeat
    scheduler -> worker      Welcome, StepPlan, ProfileSteps, SayHello, Refused, Heartbeat

Parts have messages of their own (`messages.py` in a folder of `parts/`), which `with_parts` of `config/parts.py` adds.
"""

from penstock.ipc.messages.base import (
    PROTOCOL_VERSION,
    AnyAnswer,
    AnyQuestion,
    Buffer,
    ErrorCode,
    FinishReason,
    Heartbeat,
    Message,
    Pooling,
    PoolingKind,
    Refused,
    SamplerUse,
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
    HandoverReleased,
    HandoverTaken,
    KVSource,
    Role,
    SetRole,
)
from penstock.ipc.messages.images import (
    IMAGE_KEY_BYTES,
    ImageKey,
    ImageRef,
    PixelRef,
    PixelTensor,
    PixelType,
    RowImage,
)
from penstock.ipc.messages.worker import (
    FROM_HOST,
    ON_DEVICE,
    TO_HOST,
    NewRow,
    RowError,
    StepPlan,
    StepResult,
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
    "AnyAnswer",
    "AnyQuestion",
    "Buffer",
    "CacheEvents",
    "CacheMiss",
    "DiskStats",
    "DraftStats",
    "DrainEngine",
    "EngineNotReady",
    "EngineReady",
    "EngineStats",
    "ErrorCode",
    "EventKind",
    "ExpertLoad",
    "FinishReason",
    "FromFrontend",
    "FromWorker",
    "FrontendHello",
    "Goodbye",
    "HandoverReleased",
    "HandoverStats",
    "HandoverTaken",
    "Heartbeat",
    "HostTierStats",
    "ImageKey",
    "ImageRef",
    "ImageStats",
    "KVSource",
    "LayerLoad",
    "ListCache",
    "ListRequests",
    "Message",
    "NewRow",
    "NoteCulprit",
    "PauseRequest",
    "PixelRef",
    "PixelTensor",
    "PixelType",
    "Pooling",
    "PoolingKind",
    "Probe",
    "ProfileSteps",
    "Refused",
    "RequestList",
    "RequestState",
    "ResetPrefixCache",
    "ResumeRequest",
    "Role",
    "RowError",
    "RowImage",
    "SamplerUse",
    "SamplingParams",
    "SayHello",
    "SequenceBill",
    "SequenceDelta",
    "SequenceProgress",
    "SequenceStatus",
    "SetRole",
    "ShortText",
    "SnapshotStats",
    "StepPlan",
    "StepResult",
    "TierChanges",
    "ToFrontend",
    "ToWorker",
    "TokenBatch",
    "TokenColumns",
    "TokenLogprobs",
    "WaitingTenant",
    "Welcome",
    "WindowGroup",
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
)
FromWorker = WorkerHello | StepResult | WorkerFailed | Heartbeat
ToWorker = Welcome | StepPlan | SayHello | Refused | Heartbeat | ProfileSteps
