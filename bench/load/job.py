"""What a load generator process is asked to do, and what it reports. Plain data, also between processes."""

from typing import Literal

from msgspec import Struct

Endpoint = Literal["chat", "completions"]


class PlannedRequest(Struct, frozen=True, array_like=True):
    """One request of the workload, drawn beforehand so that drawing costs nothing while measuring."""

    arrival: float  # seconds after the start; 0 for all in a closed loop
    prompt: str | list[int]
    max_tokens: int
    more: dict[str, int | float | str] = {}  # further fields of the body
    api_key: str = ""  # in place of the job's


class Job(Struct, frozen=True):
    """All that one process needs to put its share of the load on the server."""

    base_url: str  # without a trailing slash, with /v1
    model: str
    endpoint: Endpoint
    requests: list[PlannedRequest]
    concurrency: int  # most requests in flight; 0 for no limit
    start_at: float  # time.time() at which arrivals are counted from
    api_key: str = ""
    ignore_eos: bool = True
    temperature: float = 0.0
    token_ids: bool = False  # ask for return_token_ids, to count the tokens of each chunk
    timeout: float = 600.0  # seconds for one request
    reuses_connections: bool = True


class Outcome(Struct, frozen=True, array_like=True):
    """One request as its client saw it. Times are seconds; `start` counts from the job's `start_at`."""

    start: float
    ttft: float = 0.0
    e2e: float = 0.0  # until the last token, or the failure
    gaps: list[float] = []  # between two arrivals that brought tokens
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    is_counted_by_chunks: bool = False  # the server sent neither usage nor ids, so each chunk counts as one token
    finish_reason: str = ""
    error: str = ""
