"""How the served model scores a pair of texts, and what it sorts texts into."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.config import Config, ConfigError
from penstock.frontend.api.service import Service
from penstock.ipc.messages import Pooling, PoolingKind
from penstock.models.classes import ClassActivation, class_activation, score_activation
from penstock.models.description.encoder import Encoder
from penstock.models.embeddings import logit_tokens
from penstock.models.files.source import Checkpoint
from penstock.models.finding.registry import open_model
from penstock.parts.scores.frontend.templates import PairTemplate, template_of
from penstock.parts.scores.options import ScoresOptions

ScoreKind = Literal["class", "tokens", "cosine", "none"]
"""By the only class of the model's head; by the logits of two tokens; by two embeddings; not at all."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A template, as token ids."""

    template: PairTemplate
    before: tuple[int, ...]
    behind: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScoreModel:
    """What scores and classes are made of."""

    kind: ScoreKind
    asking: Asking | None  # None: pairs are put together by the tokenizer, if at all
    pooling: Pooling  # of a text or a pair, but for cosines
    score: ClassActivation  # of the only class
    classes: ClassActivation

    @classmethod
    def of(cls, service: Service) -> "ScoreModel":
        """Read what the checkpoint says.

        Raises:
            ConfigError: the template is not known, or its answers are no tokens of the model.
        """
        config, model = service.config, service.model
        checkpoint = open_model(config)
        asking = _asking(config, checkpoint, service)
        num_classes = len(model.classes)
        kind: ScoreKind = "class" if num_classes == 1 else "none" if num_classes else "cosine"
        pooling = Pooling(_pooled_by(config, checkpoint) if num_classes else "last", returns="classes")
        if asking is not None and not num_classes:
            answers = logit_tokens(checkpoint) or _answers(asking.template, service)
            kind, pooling = "tokens", Pooling("last", returns="tokens", token_ids=answers)
        return cls(kind, asking, pooling, score_activation(checkpoint), class_activation(checkpoint, num_classes))


def _pooled_by(config: Config, checkpoint: Checkpoint) -> PoolingKind:
    """The position whose state is classified."""
    from penstock.models.described import model_config_of  # imports all families, and only classifiers need it

    described = model_config_of(checkpoint, config.model.model_impl, with_weights=False)
    if not isinstance(described, Encoder):
        return "last"
    return "mean" if described.head is not None and described.head.is_of_mean else "cls"


def _asking(config: Config, checkpoint: Checkpoint, service: Service) -> Asking | None:
    architectures = checkpoint.config.get("architectures") or [""]
    names = " ".join((str(checkpoint.path), *service.model.names))
    template = template_of(config.of(ScoresOptions).score_template, architectures[0], names)
    if template is None:
        if logit_tokens(checkpoint) is not None and config.of(ScoresOptions).score_template == "auto":
            raise ConfigError(
                "modules.json: LogitScore scores the answers to a template, and which one does not follow from the "
                "model's name: name it with --score-template; with 'none', embeddings are compared"
            )
        return None
    encode = service.model.tokenizer.encode
    ids = (tuple(encode(text, add_special_tokens=False)) for text in (template.before, template.behind))
    return Asking(template, *ids)


def _answers(template: PairTemplate, service: Service) -> tuple[int, int]:
    no, yes = (service.model.tokenizer.token_id(text) for text in (template.no, template.yes))
    if no is None or yes is None:
        raise ConfigError(
            f"--score-template: {template.no!r} and {template.yes!r} must be tokens of the model, which its template "
            "wants as answers"
        )
    return no, yes


def activated(logits: Sequence[float], kind: ClassActivation) -> list[float]:
    """What is answered, of the logits of all classes."""
    if kind == "identity":
        return [*logits]
    if kind == "sigmoid":
        return [_sigmoid(logit) for logit in logits]
    most = max(logits)
    shares = [math.exp(logit - most) for logit in logits]
    total = sum(shares)
    return [share / total for share in shares]


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit > 0 else math.exp(logit) / (1 + math.exp(logit))
