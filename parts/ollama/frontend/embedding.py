"""POST /api/embed and /api/embeddings: the served model's embeddings, as Ollama's clients ask for them."""

from dataclasses import replace

import msgspec

from penstock.frontend.api.body import read
from penstock.frontend.api.service import Service
from penstock.frontend.embeddings.embeddings import Vectors, floats, read_embedding, submit_inputs
from penstock.frontend.embeddings.schema import EmbeddingRequest
from penstock.frontend.embeddings.validate import ValidEmbedding
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.validation.common import Rules
from penstock.parts.ollama.frontend.answers import figures
from penstock.parts.ollama.frontend.options import context_length, read_options, served_name, serving
from penstock.parts.ollama.frontend.schema import (
    EMBED,
    EMBEDDINGS,
    ModelRequest,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaFigures,
)


async def embed(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """One vector of length 1 for each text; none without texts.

    Raises:
        ApiError: if the request fails.
    """
    request, num_bytes = await read(EMBED, record, body), len(body)
    service = await serving(service, request.model)
    if not request.input:
        name = served_name(request.model, service.model.names)
        return Reply(msgspec.json.encode(OllamaEmbedAnswer(request.model or name, [])))
    with await service.admit(record, num_bytes, draws=False) as admission:
        inputs: list[str | int | list[int]] = [request.input] if isinstance(request.input, str) else [*request.input]
        wanted = _wanted(request, inputs, admission.rules, is_cut=request.truncate is not False)
        wanted.dimensions, wanted.normalize = request.dimensions or None, True
        shown = request.model or admission.rules.model_names[0]
        valid = _valid(service, record, request, wanted, admission.rules)
        admission.hold(valid.common, len(valid.inputs), num_added=valid.num_added)
        del body, request, inputs, wanted  # they may be large
        run = await submit_inputs(service, record, valid)
    with run:
        await run.answers()
        vectors = run.generation.pooled
        told = figures(run)
        return Reply(await service.model.tokenizer.off_loop(lambda: _written(shown, vectors, told)))


async def embeddings(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """The vector of one text, not normalized; the older route.

    Raises:
        ApiError: if the request fails.
    """
    request, num_bytes = await read(EMBEDDINGS, record, body), len(body)
    service = await serving(service, request.model)
    if not request.prompt:
        served_name(request.model, service.model.names)
        return Reply(msgspec.json.encode(OllamaEmbeddingsAnswer([])))
    with await service.admit(record, num_bytes, draws=False) as admission:
        wanted = _wanted(request, [request.prompt], admission.rules, is_cut=True)
        wanted.normalize = False
        valid = _valid(service, record, request, wanted, admission.rules)
        admission.hold(valid.common)
        run = await submit_inputs(service, record, valid)
    with run:
        await run.answers()
        [vector] = run.generation.pooled
        return Reply(msgspec.json.encode(OllamaEmbeddingsAnswer(floats(vector))))


def _wanted(
    request: ModelRequest, inputs: list[str | int | list[int]], rules: Rules, *, is_cut: bool
) -> EmbeddingRequest:
    """The request in our own schema; texts that exceed the context are cut off, or refused."""
    return EmbeddingRequest(
        model=served_name(request.model, rules.model_names),
        input=inputs,
        truncate_prompt_tokens=-1 if is_cut else None,
        truncation_side="right",
    )


def _valid(
    service: Service, record: RequestRecord, request: ModelRequest, wanted: EmbeddingRequest, rules: Rules
) -> ValidEmbedding:
    """Check the request, with the context's length from its options."""
    options, warnings = read_options(request.options)
    length = context_length(options, warnings, rules)
    record.warnings += warnings
    valid = read_embedding(service, rules, wanted)
    return replace(valid, common=replace(valid.common, max_model_len=min(length, valid.common.max_model_len)))


def _written(model: str, vectors: Vectors, told: OllamaFigures) -> bytes:
    """The body of the answer."""
    embeddings = [floats(vector) for vector in vectors]
    answer = OllamaEmbedAnswer(model, embeddings, told.total_duration, told.load_duration, told.prompt_eval_count)
    return msgspec.json.encode(answer)
