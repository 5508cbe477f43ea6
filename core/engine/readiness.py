"""The message that tells frontends that an engine can take requests."""

from penstock.config import SchedulerOptions
from penstock.ipc.messages import PROTOCOL_VERSION, EngineReady, WorkerHello


def engine_ready(hello: WorkerHello, options: SchedulerOptions) -> EngineReady:
    """Return the message about an engine whose workers sent this hello."""
    return EngineReady(
        PROTOCOL_VERSION,
        hello.model_fingerprint,
        hello.max_model_len,
        hello.vocab_size,
        hello.page_size,
        hello.num_pages,
        hello.max_num_seqs,
        hello.device,
        hello.dtype,
        options.max_num_queued_seqs,
        options.max_num_queued_tokens,
        hello.kernels,
        hello.weights,
        hello.arithmetic,
        hello.is_batch_invariant,
        hello.num_ranks,
        hello.num_host_pages,
        hello.failed_tiers,
        max_drafts=hello.max_drafts,
        takes_images=hello.max_embedding_bytes > 0 and hello.num_stages == 1,
    )
