"""Texts to the probabilities of the model's classes."""

from dataclasses import replace

from penstock.frontend.api.run import Run, submit
from penstock.frontend.api.service import Service
from penstock.frontend.embeddings.embeddings import encoded, floats
from penstock.frontend.embeddings.validate import MAX_INPUTS, ValidEmbedding
from penstock.frontend.errors import InvalidParameter, NotGenerated
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.validation.common import Rules
from penstock.frontend.validation.completion import valid_prompts
from penstock.parts.scores.frontend import schema
from penstock.parts.scores.frontend.checks import checked
from penstock.parts.scores.frontend.model import ScoreModel, activated


def check_classes(service: Service) -> None:
    """Make sure that the model has classes.

    Raises:
        NotGenerated: it has none.
    """
    if not service.model.classes:
        raise NotGenerated(f"the served model, {service.model.names[0]}, has no classes to sort texts into")


def classified(
    service: Service, request: schema.ClassifyRequest | schema.PoolingRequest, rules: Rules
) -> ValidEmbedding:
    """Check a request for classes.

    Raises:
        NotGenerated: the model has none.
        InvalidRequest: one of its kinds.
    """
    check_classes(service)
    if request.input is None:
        raise InvalidParameter("input is required", param="input")
    common = checked(service, request, rules, "input")
    keeps_start = common.keeps_prompt_start or request.truncation_side is None
    return ValidEmbedding(
        common=replace(common, keeps_prompt_start=keeps_start),
        inputs=valid_prompts("input", request.input, rules, MAX_INPUTS),
        is_base64=False,
        add_special_tokens=request.add_special_tokens is not False,
    )


async def submit_classified(service: Service, record: RequestRecord, valid: ValidEmbedding, model: ScoreModel) -> Run:
    """Tokenize the texts, and send them to the engine.

    Raises:
        ApiError: a text cannot be tokenized; or as `submit`.
    """
    prompts = await encoded(service, record, valid)
    poolings = [model.pooling] * len(prompts)
    return await submit(service, record, valid.common, prompts, is_prompt_only=True, poolings=poolings)


def probs_of(run: Run, use_activation: bool | None, model: ScoreModel) -> list[list[float]]:
    """Return what each text's logits become: probabilities, or the logits if `use_activation` is False."""
    kind = "identity" if use_activation is False else model.classes
    return [activated(floats(vector), kind) for vector in run.generation.pooled]
