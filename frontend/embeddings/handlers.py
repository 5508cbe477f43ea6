"""POST /v1/embeddings

Each input is a separate request to the engine, with `Pooling` in place of sampling. It takes the same path as every
other request (`api/run.py`): limits, truncation, deadlines, the bill.
"""

import base64
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from math import isfinite

import msgspec

from penstock.frontend.api.run import Chunks, Job, Prepared, Run, run
from penstock.frontend.api.service import Service
from penstock.frontend.embeddings.schema import (
    EMBEDDINGS,
    Embedding,
    EmbeddingRequest,
    Embeddings,
    EmbeddingUsage,
)
from penstock.frontend.embeddings.validate import ValidEmbedding, validate_embedding
from penstock.frontend.errors import InvalidLogits, UnsupportedParameter
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.validation.common import Rules

_MAX_FLOATS = 1 << 16
"""An answer with more numbers than this is written off the event loop."""

Vectors = list[bytes]
"""One vector per input: fp32[k], little-endian."""

Write = Callable[[Run, Vectors], Awaitable[bytes]]
"""Makes an answer's body from the vectors."""


async def embedding_job(
    service: Service,
    record: RequestRecord,
    rules: Rules,
    request: EmbeddingRequest,
    write: Callable[[ValidEmbedding], Write],
    *,
    max_model_len: int | None = None,
) -> Job:
    """Return the job of a request of any API, given as an `EmbeddingRequest`; `write` makes the API's answer.

    `max_model_len` is a smaller context that the client asks for, in tokens.

    Raises:
        InvalidRequest: one of its kinds.
    """
    valid = read_embedding(service, rules, request)
    if max_model_len is not None:
        valid = replace(valid, common=replace(valid.common, max_model_len=max_model_len))

    async def prepare() -> Prepared:
        prompts = await service.prompts.encode_inputs(
            valid.inputs, record.tenant, field="input", add_special_tokens=valid.add_special_tokens
        )
        return Prepared(
            [valid.common.truncated(prompt) for prompt in prompts],
            None,
            _no_stream,
            partial(_whole, write(valid)),
            is_prompt_only=True,
        )

    return Job(valid.common, prepare, len(valid.inputs))


def read_embedding(service: Service, rules: Rules, request: EmbeddingRequest) -> ValidEmbedding:
    """Check a request against what this server can do.

    Raises:
        InvalidRequest: one of its kinds.
    """
    if service.config.parallel.pipeline_parallel_size > 1:
        raise UnsupportedParameter(
            "embeddings are not made by the stages of a pipeline: start the server without "
            "--pipeline-parallel-size; --tensor-parallel-size works",
            param="input",
        )
    return validate_embedding(request, rules, service.model.embeddings)


def _no_stream(run: Run) -> Chunks:
    raise AssertionError("embeddings are not streamed")


async def _whole(write: Write, run: Run) -> bytes:
    await run.answers()
    vectors = run.generation.pooled
    return await write(run, vectors)


def floats(vector: bytes) -> list[float]:
    """A vector's numbers.

    Raises:
        InvalidLogits: some are not finite.
    """
    values = array("f", vector).tolist()
    if not all(map(isfinite, values)):
        raise InvalidLogits(
            "the model's hidden states are not finite numbers: its weights are damaged, or --dtype is too narrow for it"
        )
    return values


async def _validated(
    service: Service, record: RequestRecord, request: EmbeddingRequest, rules: Rules, num_bytes: int
) -> Job:
    return await embedding_job(service, record, rules, request, lambda valid: partial(_write, valid))


async def _write(valid: ValidEmbedding, run: Run, vectors: Vectors) -> bytes:
    usage = await run.final_usage()

    def write() -> bytes:
        data = []
        for index, vector in enumerate(vectors):
            numbers = floats(vector)
            data.append(Embedding(index, base64.b64encode(vector).decode() if valid.is_base64 else numbers))
        answer = Embeddings(
            data=data,
            model=valid.common.model,
            usage=EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens, usage.prompt_tokens_details, usage.bill),
        )
        return msgspec.json.encode(answer)

    if sum(map(len, vectors)) > 4 * _MAX_FLOATS:
        return await run.service.model.tokenizer.off_loop(write)
    return write()


async def embeddings(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """The handler."""
    return await run(EMBEDDINGS, _validated, service, record, body)
