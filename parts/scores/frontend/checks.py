"""What the routes of this part share: the model, checks of requests, figures of answers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.frontend.api.run import Run
from penstock.frontend.api.service import Service
from penstock.frontend.embeddings.embeddings import check_stages
from penstock.frontend.embeddings.schema import EmbeddingUsage
from penstock.frontend.embeddings.validate import MAX_INPUTS
from penstock.frontend.errors import InvalidParameter, UnsupportedParameter
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.schema import SamplingRequest
from penstock.frontend.validation.common import (
    Rules,
    ValidRequest,
    check_text_size,
    refuse_unsupported,
    validate_common,
)
from penstock.ipc.messages import Pooling, SamplingParams
from penstock.parts.scores.frontend.model import ScoreModel
from penstock.parts.scores.frontend.part import Scores


def model_of(service: Service) -> ScoreModel:
    """How the served model scores."""
    part = service.parts.get(Scores)
    assert part is not None, "its routes are there only with the part"
    return part.model


def checked(service: Service, request: Any, rules: Rules, field: str) -> ValidRequest:
    """Check the fields that all routes have in common; `field` is the one with the texts.

    Raises:
        InvalidRequest: one of its kinds.
    """
    refuse_unsupported(request)
    check_stages(service)
    longest = min(rules.max_model_len, service.model.embeddings.max_len or rules.max_model_len)
    common = validate_common(
        SamplingRequest(
            model=request.model,
            user=request.user,
            priority=request.priority,
            cache_salt=request.cache_salt,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            truncation_side=request.truncation_side,
            return_bill=request.return_bill,
        ),
        rules,
        max_tokens=1,
        prompt_field=field,
    )
    if request.truncation_side == "left" and field != "input":
        raise UnsupportedParameter("truncation_side: pairs keep their start: 'right'", param="truncation_side")
    return replace(
        common,
        sampling=SamplingParams(temperature=0.0, max_tokens=1, pooling=Pooling("last")),
        max_model_len=longest,
    )


def most_tokens(valid: ValidRequest) -> int:
    """Return how many tokens a prompt may have."""
    kept = valid.num_kept_prompt_tokens
    return valid.max_model_len if kept is None or kept < 0 else min(kept, valid.max_model_len)


def check_texts(field: str, texts: Sequence[str], rules: Rules) -> None:
    """Check the number of texts, and that each may fit.

    Raises:
        InvalidRequest: one of its kinds.
    """
    if len(texts) > MAX_INPUTS:
        raise InvalidParameter(f"{field} may hold at most {MAX_INPUTS} texts, got {len(texts)}", param=field)
    for index, text in enumerate(texts):
        check_text_size(f"{field}[{index}]" if len(texts) > 1 else field, text, rules)


async def usage_of(run: Run) -> EmbeddingUsage:
    """Return the tokens of all prompts."""
    used = await run.final_usage()
    return EmbeddingUsage(used.prompt_tokens, used.prompt_tokens, used.prompt_tokens_details, used.bill)


def id_of(kind: str, record: RequestRecord) -> str:
    """Return an answer's id."""
    return f"{kind}-{record.request_id}"
