"""POST /api/embed and /api/embeddings: the served model's embeddings, as Ollama's clients ask for them."""

from functools import partial

import msgspec

from penstock.frontend.api.run import Job, Run, read, run
from penstock.frontend.api.service import Service
from penstock.frontend.embeddings.handlers import Vectors, embedding_job, floats
from penstock.frontend.embeddings.schema import EmbeddingRequest
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.ollama.answers import figures
from penstock.frontend.ollama.options import context_length, read_options, served_name
from penstock.frontend.ollama.schema import (
    EMBED,
    EMBEDDINGS,
    ModelRequest,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
)
from penstock.frontend.validation.common import Rules


async def embed(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """One vector of length 1 for each text; none without texts."""
    request = await read(EMBED, record, body)
    if not request.input:
        name = served_name(request.model, service.model.names)
        return Reply(msgspec.json.encode(OllamaEmbedAnswer(request.model or name, [])))
    return await run(EMBED, _embed_job, service, record, body)


async def embeddings(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """The vector of one text, not normalized; the older route."""
    request = await read(EMBEDDINGS, record, body)
    if not request.prompt:
        served_name(request.model, service.model.names)
        return Reply(msgspec.json.encode(OllamaEmbeddingsAnswer([])))
    return await run(EMBEDDINGS, _embeddings_job, service, record, body)


async def _embed_job(
    service: Service, record: RequestRecord, request: OllamaEmbedRequest, rules: Rules, num_bytes: int
) -> Job:
    assert request.input is not None
    inputs: list[str | int | list[int]] = [request.input] if isinstance(request.input, str) else [*request.input]
    wanted = _wanted(request, inputs, rules, is_cut=request.truncate is not False)
    wanted.dimensions, wanted.normalize = request.dimensions or None, True
    shown = request.model or rules.model_names[0]
    length = _context_length(request, record, rules)
    return await embedding_job(
        service, record, rules, wanted, lambda valid: partial(_write_all, shown), max_model_len=length
    )


async def _embeddings_job(
    service: Service, record: RequestRecord, request: OllamaEmbeddingsRequest, rules: Rules, num_bytes: int
) -> Job:
    wanted = _wanted(request, [request.prompt or ""], rules, is_cut=True)
    wanted.normalize = False
    length = _context_length(request, record, rules)
    return await embedding_job(service, record, rules, wanted, lambda valid: _write_one, max_model_len=length)


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


def _context_length(request: ModelRequest, record: RequestRecord, rules: Rules) -> int:
    options, warnings = read_options(request.options)
    length = context_length(options, warnings, rules)
    record.warnings += warnings
    return length


async def _write_all(model: str, run: Run, vectors: Vectors) -> bytes:
    def write() -> bytes:
        told = figures(run)
        answer = OllamaEmbedAnswer(
            model,
            [floats(vector) for vector in vectors],
            told.total_duration,
            told.load_duration,
            told.prompt_eval_count,
        )
        return msgspec.json.encode(answer)

    return await run.service.model.tokenizer.off_loop(write)


async def _write_one(run: Run, vectors: Vectors) -> bytes:
    return msgspec.json.encode(OllamaEmbeddingsAnswer(floats(vectors[0])))
