"""Options: the scheduler."""

from typing import Annotated

from msgspec import Meta

from penstock.config.groups.base import INTERNAL, Options, Shown


class SchedulerOptions(Options, frozen=True):
    """How steps are filled."""

    max_num_seqs: Annotated[
        int,
        Meta(
            description="Most sequences in one step (rows). 0: what suits the device, from 64 on a CPU to 256 on a GPU "
            "with much memory.",
            ge=0,
            le=4096,
        ),
        Shown(
            line="most sequences in one step (default: by the device)",
            also=("-np", "--parallel", "--max-running-requests"),
        ),
    ] = 0
    max_num_batched_tokens: Annotated[
        int,
        Meta(
            description="Most tokens computed in one step. 0: what suits the device, from 2,048 on a CPU to 8,192 on a "
            "GPU with much memory.",
            ge=0,
            le=1 << 20,
        ),
        Shown(line="most tokens in one step (default: by the device)"),
    ] = 0
    max_prefill_ms: Annotated[
        int,
        Meta(
            description="Longest time for a step that computes prompts while other requests are streaming, in "
            "milliseconds: prompts are cut into smaller chunks to keep to it. 0: no limit.",
            ge=0,
        ),
        Shown(line="longest step with prompts while others stream"),
    ] = 250
    page_size: Annotated[
        int,
        Meta(description="Tokens per KV page, a power of two. 0: what suits the device.", ge=0, le=1024),
        Shown(also=("--block-size",)),
    ] = 0
    pipeline_depth: Annotated[
        int,
        Meta(description="Steps planned ahead of the results. 0 waits for each step, 1 overlaps one.", ge=0, le=4),
        INTERNAL,
    ] = 1
    enable_prefix_caching: Annotated[
        bool,
        Meta(description="Keep the pages of finished sequences and reuse them for equal prefixes."),
        Shown(line="compute equal beginnings of prompts each time anew"),
    ] = True
    max_num_queued_seqs: Annotated[
        int,
        Meta(description="Most sequences in the queue. Further requests are refused with status 429.", ge=1),
        Shown(line="most sequences in the queue, else status 429"),
    ] = 4096
    max_num_queued_tokens: Annotated[
        int,
        Meta(
            description="Most prompt tokens in the queue. Further requests are refused with status 429, unless "
            "the queue is empty.",
            ge=1,
        ),
        INTERNAL,
    ] = 4 << 20
    queue_patience: Annotated[
        float,
        Meta(
            description="A request is refused with status 429 if it would wait longer than this many seconds for a "
            "row, at the rate at which the queue is emptying. At least as many requests as there are rows may always "
            "wait. 0: no limit.",
            ge=0.0,
        ),
        Shown("SECONDS", "longest wait for a row, else status 429"),
    ] = 4.0
    queue_timeout: Annotated[
        float,
        Meta(
            description="Longest wait for a first row, in seconds. After that the request fails with status 504. "
            "0: no limit.",
            ge=0.0,
        ),
    ] = 0.0
    min_prefill_tokens: Annotated[
        int,
        Meta(
            description="With --role: a prompt with fewer uncached tokens than this is computed by the decode engine "
            "itself.",
            ge=1,
        ),
        INTERNAL,
    ] = 64
