"""POST /v1/embeddings

Each input is a separate request to the engine, with `Pooling` in place of sampling. It takes the same path as every
other request (`api/run.py`): limits, truncation, deadlines, the bill.
"""

import base64
from array import array
from math import isfinite

import msgspec

from penstock.frontend.api.body import read
from penstock.frontend.api.run import Run, submit
from penstock.frontend.api.service import Service
from penstock.frontend.embeddings.prompts import as_tokenized
from penstock.frontend.embeddings.schema import (
    EMBEDDINGS,
    Embedding,
    EmbeddingRequest,
    Embeddings,
    EmbeddingUsage,
)
from penstock.frontend.embeddings.validate import ValidEmbedding, validate_embedding
from penstock.frontend.errors import InvalidLogits, NotGenerated, UnsupportedParameter
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.validation.common import Rules

_MAX_FLOATS = 1 << 16
"""An answer with more numbers than this is written off the event loop."""

Vectors = list[bytes]
"""One vector per input: fp32[k], little-endian."""


async def embeddings(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """The handler.

    Raises:
        ApiError: if the request fails.
    """
    request, num_bytes = await read(EMBEDDINGS, record, body), len(body)
    service = await service.serving(request.model)
    with await service.admit(record, num_bytes, draws=False) as admission:
        valid = read_embedding(service, admission.rules, request)
        admission.hold(valid.common, len(valid.inputs), num_added=valid.num_added)
        del body, request  # they may be large
        run = await submit_inputs(service, record, valid)
    with run:
        await run.answers()
        return Reply(await _written(run, valid, run.generation.pooled))


def read_embedding(service: Service, rules: Rules, request: EmbeddingRequest) -> ValidEmbedding:
    """Check a request against what this server can do.

    Raises:
        InvalidRequest: one of its kinds.
    """
    check_stages(service)
    if service.model.classes:
        raise NotGenerated(
            f"the served model, {service.model.names[0]}, sorts texts into classes: POST /classify does it"
        )
    return validate_embedding(request, rules, service.model.embeddings, keeps_start=not service.model.draws_tokens)


def check_stages(service: Service) -> None:
    """Make sure that the workers can return vectors.

    Raises:
        UnsupportedParameter: they are stages of a pipeline.
    """
    if service.config.parallel.pipeline_parallel_size > 1:
        raise UnsupportedParameter(
            "the stages of a pipeline make no embeddings, scores and classes: start the server without "
            "--pipeline-parallel-size; --tensor-parallel-size works",
            param="input",
        )


async def submit_inputs(service: Service, record: RequestRecord, valid: ValidEmbedding) -> Run:
    """Tokenize a request's inputs, and send them to the engine.

    Raises:
        ApiError: an input cannot be tokenized; or as `submit`.
    """
    return await submit(service, record, valid.common, await encoded(service, record, valid), is_prompt_only=True)


async def encoded(service: Service, record: RequestRecord, valid: ValidEmbedding) -> list[list[int]]:
    """The token ids of a request's inputs, with the prompt before texts, and cut if the client wants that.

    Raises:
        ApiError: an input cannot be tokenized.
    """
    inputs, added = valid.inputs, (0, 0)
    if inputs and isinstance(inputs[0], str):
        inputs = [as_tokenized(str(text), valid.prompt, service.model.embeddings) for text in inputs]
        if valid.add_special_tokens:
            added = service.model.tokenizer.added
    prompts = await service.prompts.encode_inputs(
        inputs, record.tenant, field="input", add_special_tokens=valid.add_special_tokens
    )
    return [valid.common.truncated(prompt, added) for prompt in prompts]


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


async def _written(run: Run, valid: ValidEmbedding, vectors: Vectors) -> bytes:
    """The body of the answer."""
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
