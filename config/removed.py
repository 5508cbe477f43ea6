"""Options that there were once, and what to do instead. CHANGELOG.md has the same table."""

from collections.abc import Mapping

_IN_PYTHON = "in Python, `AsyncLLM` still takes it"

REMOVED: Mapping[str, str] = {
    # Another option says it, too.
    "--access-log-format": "use --access-log FILE.jsonl for JSON objects",
    "--admin-host": "use --admin-port HOST:PORT",
    "--batch-size": "use --max-num-seqs, for batches, too; the limit for a step's tokens, which llama.cpp calls so, is "
    "--max-num-batched-tokens",
    "--disk-kv-gib": "use --disk-kv FOLDER:GIB",
    "--embedding-normalize": "modules.json in the checkpoint says it with a Normalize module; without the file, "
    "embeddings have the length 1",
    "--heartbeat-interval": "use --heartbeat-timeout: the interval is a tenth of it, and at most a second",
    "--late-requests": "use --scheduling-policy deadline-refuse in place of refuse, and deadline in place of demote",
    "--max-policy-delay": "use --scheduling-policy MODULE:CLASS, with a class that derives from the policy's and has "
    "another max_delay",
    "--max-stored-responses": "use --max-stored-response-bytes, where 0 stores none; a key has at most 1,000 responses",
    "--preemption": "use --host-kv-gib; what costs less is then chosen each time",
    "--record-mib": "use --record FILE:MIB",
    "--response-store": "use --data-dir FOLDER, which keeps responses, too",
    "--share-prefix-cache": "give the keys in the file of --api-keys-file one `namespace`",
    "--tenant-by": 'write tenant_by = "user" at the gateway\'s key in the file of --api-keys-file',
    "--tool-prompt": "use --tool-call-parser none to refuse tools",
    # Another option bounds the same.
    "--max-connections": "use the limit of open files (ulimit -n), if 8,192 connections are too many for a frontend",
    "--max-file-bytes": "use --max-files-bytes for all files of a key; one may have 512 MiB",
    "--max-files": "use --max-files-bytes for all files of a key; there may be 1,000",
    "--max-image-bytes": "use --max-body-bytes for what requests bring, and --image-memory-gib for memory; an image "
    "may have 20 MiB",
    "--max-image-pixels": "use --image-memory-gib for memory; an image may have 64 Mi pixels",
    "--max-n": "use --max-request-seqs for a request's sequences; `n` may be 64 (in Python, `LLM` still takes max_n)",
    "--max-num-queued-tokens": "use --max-num-queued-seqs and --queue-patience; 4 Mi tokens may wait",
    "--max-resumable-stream-bytes": "use --max-resumable-bytes for all streams; of one, 1 MiB is kept",
    "--overload-order": "use --queue-patience, with which no request waits long",
    # It is as most people had it.
    "--batch-wait-ms": "a batch that is not full waits for 0.1 seconds",
    "--body-timeout": "a body may pause for 30 seconds",
    "--check-ranks": _IN_PYTHON,
    "--expert-exchange": "what sends fewer bytes is chosen",
    "--head-timeout": "a request's head must arrive in 10 seconds",
    "--health-timeout": "/health answers 503 after 900 seconds without a step",
    "--image-timeout": "an image must have been fetched in 10 seconds",
    "--kv-transport": "the best that both engines have is chosen",
    "--max-batch-requests": "256 lines of batches for each engine are under way",
    "--min-prefill-tokens": "a decode engine computes up to 63 tokens itself",
    "--pipeline-depth": _IN_PYTHON,
    "--pipeline-layers": f"stages are balanced by the estimated time; {_IN_PYTHON}",
    "--resumable-seconds": "a stream is kept for 120 seconds after its client has left",
    "--slow-reader-timeout": "a client that does not read is disconnected after 60 seconds",
    "--strict-requests": "look for the header x-penstock-warning (in Python, `LLM` still takes strict_requests)",
}
"""Flag -> what to do, or what holds now."""


def why_gone(name: str) -> str:
    """The sentence about an option that there was once, as it was typed; empty if there never was."""
    flag = name.partition("=")[0].replace("_", "-")
    instead = REMOVED.get(flag) or REMOVED.get(flag.replace("--no-", "--", 1))
    return f"{flag} is gone; {instead}" if instead else ""
