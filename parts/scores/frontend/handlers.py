"""The routes. Each reads like the others: see `frontend/api/run.py`."""

import base64
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from penstock.frontend.api.body import read
from penstock.frontend.api.run import submit
from penstock.frontend.api.service import Service
from penstock.frontend.embeddings.embeddings import encoded, floats, read_embedding
from penstock.frontend.embeddings.schema import EmbeddingRequest
from penstock.frontend.errors import InvalidParameter, UnsupportedParameter
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.validation.common import (
    MAX_BYTES_PER_TOKEN,
    Rules,
    ValidRequest,
    integer,
    refuse_unsupported,
)
from penstock.parts.scores.frontend import schema, tei
from penstock.parts.scores.frontend.checks import check_texts, checked, id_of, model_of, most_tokens, usage_of
from penstock.parts.scores.frontend.classes import classified, probs_of, submit_classified
from penstock.parts.scores.frontend.model import ScoreModel
from penstock.parts.scores.frontend.pairs import Pairs, num_added, num_prompts, scores_of, submit_pairs

_TASKS = ("embed", "classify")


async def rerank(service: Service, record: RequestRecord, body: bytes, *, shows_documents: bool = True) -> Reply:
    """POST /v1/rerank: documents by their relevance for a query.

    Raises:
        ApiError: if the request fails.
    """
    request, num_bytes = await read(schema.RERANK, record, body), len(body)
    service = await service.serving(request.model)
    model = model_of(service)
    with await service.admit(record, num_bytes, draws=False) as admission:
        is_list = tei.as_rerank(request)
        valid = _with_instruction(checked(service, request, admission.rules, "documents"), request, model)
        pairs = _ranked_pairs(request, admission.rules, valid)
        admission.hold(valid, num_prompts(pairs, model), num_added=num_added(service, pairs, model))
        top = integer("top_n", request.top_n, 0, 0, 1 << 31) or len(pairs)
        shows = shows_documents if request.return_documents is None else request.return_documents
        given = [each if isinstance(each, str) else each.text for each in request.documents or ()] if shows else []
        run = await submit_pairs(service, record, valid, pairs, model)
    with run:
        await run.answers()
        scores = await service.model.tokenizer.off_loop(partial(scores_of, run, pairs, model))
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[:top]
        results = [schema.Ranked(i, scores[i], schema.Document(given[i]) if shows else msgspec.UNSET) for i in order]
        if is_list:
            return Reply(tei.ranked(results))
        answer = schema.Ranking(id_of("rerank", record), valid.model, await usage_of(run), results)
        return Reply(msgspec.json.encode(answer))


async def rerank_as_cohere(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """POST /v2/rerank: as `rerank`, but answers repeat documents only if that is asked for."""
    return await rerank(service, record, body, shows_documents=False)


async def score(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """POST /v1/score: how well the texts of each pair fit each other.

    Raises:
        ApiError: if the request fails.
    """
    request, num_bytes = await read(schema.SCORE, record, body), len(body)
    service = await service.serving(request.model)
    model = model_of(service)
    with await service.admit(record, num_bytes, draws=False) as admission:
        if request.encoding_format not in (None, "float"):
            raise InvalidParameter("encoding_format: scores are numbers: 'float'", param="encoding_format")
        valid = _with_instruction(checked(service, request, admission.rules, "text_2"), request, model)
        pairs = _scored_pairs(request, admission.rules, valid)
        admission.hold(valid, num_prompts(pairs, model), num_added=num_added(service, pairs, model))
        run = await submit_pairs(service, record, valid, pairs, model)
    with run:
        await run.answers()
        scores = await service.model.tokenizer.off_loop(partial(scores_of, run, pairs, model))
        data = [schema.Scored(i, each) for i, each in enumerate(scores)]
        answer = schema.Scores(id_of("score", record), int(time.time()), valid.model, data, await usage_of(run))
        return Reply(msgspec.json.encode(answer))


async def classify(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """POST /v1/classify: the probability of each class, for each text.

    Raises:
        ApiError: if the request fails.
    """
    request, num_bytes = await read(schema.CLASSIFY, record, body), len(body)
    service = await service.serving(request.model)
    model = model_of(service)
    with await service.admit(record, num_bytes, draws=False) as admission:
        valid = classified(service, request, admission.rules)
        admission.hold(valid.common, len(valid.inputs), num_added=valid.num_added)
        run = await submit_classified(service, record, valid, model)
    with run:
        await run.answers()
        names = service.model.classes
        data = []
        for i, probs in enumerate(probs_of(run, request.use_activation, model)):
            best = max(range(len(probs)), key=probs.__getitem__)
            data.append(schema.Classified(i, names[best], probs, len(names)))
        answer = schema.Classes(
            id_of("classify", record), int(time.time()), valid.common.model, data, await usage_of(run)
        )
        return Reply(msgspec.json.encode(answer))


async def pooling(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """POST /pooling: what the model pools of each text: its classes if it has some, otherwise an embedding.

    Raises:
        ApiError: if the request fails.
    """
    request, num_bytes = await read(schema.POOLING, record, body), len(body)
    service = await service.serving(request.model)
    model = model_of(service)
    task = request.task or ("classify" if service.model.classes else "embed")
    if task not in _TASKS:
        raise UnsupportedParameter(f"task must be one of {', '.join(_TASKS)}, got {task[:64]!r}", param="task")
    if request.encoding_format not in (None, "float", "base64"):
        raise InvalidParameter("encoding_format must be 'float' or 'base64'", param="encoding_format")
    with await service.admit(record, num_bytes, draws=False) as admission:
        if task == "embed":
            valid = read_embedding(service, admission.rules, _as_embedding(request))
        else:
            refuse_unsupported(request)
            for name in ("dimensions", "normalize"):
                if getattr(request, name) is not None:
                    raise InvalidParameter(f"{name} is for embeddings, and not for classes", param=name)
            valid = classified(service, request, admission.rules)
        admission.hold(valid.common, len(valid.inputs), num_added=valid.num_added)
        if task == "embed":
            run = await submit(
                service, record, valid.common, await encoded(service, record, valid), is_prompt_only=True
            )
        else:
            run = await submit_classified(service, record, valid, model)
    with run:
        await run.answers()
        found: Sequence[list[float]]
        if task == "embed":
            found = [floats(vector) for vector in run.generation.pooled]
        else:
            found = probs_of(run, request.use_activation, model)
        data = [schema.Pooled(i, _shown(each, request.encoding_format)) for i, each in enumerate(found)]
        made = int(time.time())
        answer = schema.PooledTexts(id_of("pool", record), made, valid.common.model, data, await usage_of(run))
        return Reply(await service.model.tokenizer.off_loop(lambda: msgspec.json.encode(answer)))


def _with_instruction(
    valid: ValidRequest, request: schema.RerankRequest | schema.ScoreRequest, model: ScoreModel
) -> ValidRequest:
    """Warn of an instruction that no template takes."""
    if request.instruction is None or model.asking is not None:
        return valid
    return replace(valid, warnings=(*valid.warnings, "instruction: no effect, the model has no template"))


def _ranked_pairs(request: schema.RerankRequest, rules: Rules, valid: ValidRequest) -> Pairs:
    if request.query is None or not request.query:
        raise InvalidParameter("query is required", param="query")
    if not request.documents:
        raise InvalidParameter("documents is required, and must not be empty", param="documents")
    longest = MAX_BYTES_PER_TOKEN * rules.max_model_len  # of what is behind, no token is ever kept
    documents = [_start(each if isinstance(each, str) else each.text, longest) for each in request.documents]
    check_texts("query", [request.query], rules)
    check_texts("documents", documents, rules)
    most_of_second = integer("max_tokens_per_doc", request.max_tokens_per_doc, 0, 0, 1 << 31)
    return Pairs(
        [request.query],
        documents,
        ("query", "documents"),
        most_tokens(valid),
        is_cut=request.truncate is not False,  # as the APIs of this shape say
        most_of_second=most_of_second,
        instruction=request.instruction,
        are_searched=True,
        is_activated=request.use_activation is not False,
    )


def _scored_pairs(request: schema.ScoreRequest, rules: Rules, valid: ValidRequest) -> Pairs:
    sides, fields = [], []
    for names in (("text_1", "queries", "data_1"), ("text_2", "documents", "data_2")):
        given = [name for name in names if getattr(request, name) is not None]
        if len(given) != 1:
            which = " or ".join(names) if not given else f"only one of {', '.join(given)}"
            raise InvalidParameter(f"{which} is required", param=names[0])
        value = getattr(request, given[0])
        texts = [value] if isinstance(value, str) else value
        if not texts:
            raise InvalidParameter(f"{given[0]} is empty", param=given[0])
        check_texts(given[0], texts, rules)
        sides.append(texts)
        fields.append(given[0])
    firsts, seconds = sides
    if len(firsts) not in (1, len(seconds)):
        raise InvalidParameter(
            f"there are {len(firsts)} first texts and {len(seconds)} second ones: one for all, or equally many",
            param="text_1",
        )
    return Pairs(
        firsts,
        seconds,
        (fields[0], fields[1]),
        most_tokens(valid),
        is_cut=valid.num_kept_prompt_tokens is not None,
        instruction=request.instruction,
        is_activated=request.use_activation is not False,
    )


def _start(text: str, num_bytes: int) -> str:
    """What the first bytes of a text hold in UTF-8."""
    text = text[:num_bytes]
    if len(text) * 4 <= num_bytes:
        return text
    return text.encode(errors="replace")[:num_bytes].decode(errors="ignore")


def _as_embedding(request: schema.PoolingRequest) -> EmbeddingRequest:
    """The fields that a request for an embedding has, too; what activates an embedding is its normalization."""
    if None not in (request.use_activation, request.normalize):
        raise InvalidParameter("use_activation and normalize are the same for embeddings: set one", param="normalize")
    names = set(EmbeddingRequest.__struct_fields__) - {"task"}
    fields = {name: getattr(request, name) for name in request.__struct_fields__ if name in names}
    if request.use_activation is not None:
        fields["normalize"] = request.use_activation
    return EmbeddingRequest(**fields)


def _shown(numbers: list[float], encoding: str | None) -> list[float] | str:
    if encoding != "base64":
        return numbers
    return base64.b64encode(array("f", numbers).tobytes()).decode()
