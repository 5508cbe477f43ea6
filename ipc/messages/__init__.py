"""Every message that crosses a socket, and nothing else.

Structs are tagged, array-like and frozen; they are validated against these types on receipt.
Arrays travel as raw little-endian buffers (`bytes`); the comment beside each field gives dtype and shape.
New fields are only ever added at the end and with a default; any other change increments `PROTOCOL_VERSION`.

Directions (`frontend.py` and `worker.py`; `base.py` is what both share):

    frontend  -> scheduler   FrontendHello, AddRequest, AbortRequest, PauseRequest, ResumeRequest,
                             Heartbeat, Goodbye, ResetPrefixCache
    scheduler -> frontend    EngineReady, EngineNotReady, TokenBatch, EngineStats, SayHello, Refused, Heartbeat
    worker    -> scheduler   WorkerHello, StepResult, GrammarPrepared, WorkerFailed, Heartbeat
    scheduler -> worker      Welcome, StepPlan, PrepareGrammar, DropGrammar, SayHello, Refused, Heartbeat
"""

from penstock.ipc.messages.base import (
    PROTOCOL_VERSION,
    Buffer,
    ErrorCode,
    FinishReason,
    Heartbeat,
    Message,
    Refused,
    Sampling,
    SamplingParams,
    SayHello,
    ShortText,
    TokenLogprobs,
)
from penstock.ipc.messages.frontend import (
    AbortRequest,
    AddRequest,
    EngineNotReady,
    EngineReady,
    EngineStats,
    FrontendHello,
    Goodbye,
    PauseRequest,
    Probe,
    ResetPrefixCache,
    ResumeRequest,
    SequenceDelta,
    SequenceProgress,
    TokenBatch,
    TokenColumns,
    WaitingTenant,
)
from penstock.ipc.messages.worker import (
    DropGrammar,
    GrammarPrepared,
    NewRow,
    PrepareGrammar,
    RowError,
    StepPlan,
    StepResult,
    Welcome,
    WindowGroup,
    WorkerFailed,
    WorkerHello,
)

__all__ = [
    "PROTOCOL_VERSION",
    "AbortRequest",
    "AddRequest",
    "Buffer",
    "DropGrammar",
    "EngineNotReady",
    "EngineReady",
    "EngineStats",
    "ErrorCode",
    "FinishReason",
    "FromFrontend",
    "FromWorker",
    "FrontendHello",
    "Goodbye",
    "GrammarPrepared",
    "Heartbeat",
    "Message",
    "NewRow",
    "PauseRequest",
    "PrepareGrammar",
    "Probe",
    "Refused",
    "ResetPrefixCache",
    "ResumeRequest",
    "RowError",
    "Sampling",
    "SamplingParams",
    "SayHello",
    "SequenceDelta",
    "SequenceProgress",
    "ShortText",
    "StepPlan",
    "StepResult",
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
    | Probe
)
ToFrontend = EngineReady | EngineNotReady | TokenBatch | EngineStats | SayHello | Refused | Heartbeat
FromWorker = WorkerHello | StepResult | GrammarPrepared | WorkerFailed | Heartbeat
ToWorker = Welcome | StepPlan | PrepareGrammar | DropGrammar | SayHello | Refused | Heartbeat
