"""Random checkpoints in the published layout, whose every weight matters, and what transformers makes of a text."""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from tests.gpu_worker.families.case import SIZES, Case

_STD = 0.15
"""Of matrices. Wide enough that the two best logits are well apart, and that layers change what the embedding says."""
_IN_LAYER = re.compile(r"\.\d+\.")
_SAFE_GAP = 2e-5
"""Two logits closer than this could change places by rounding alone: then the case needs other weights."""
_TOLERANCE = 2e-3
"""Of log-probabilities in fp32."""
_NORMS_OF_GROUPS = ("MambaRMSNormGated", "BambaRMSNormGated", "GraniteMoeHybridRMSNormGated")


def config_of(case: Case) -> transformers.PretrainedConfig:
    """The case's configuration, as its own class completes it."""
    made = transformers.CONFIG_MAPPING[case.model_type]
    usual = made()
    usual.allow_global_per_layer_attribute_access = True  # some differ by layer
    computed = {name for name in SIZES if isinstance(getattr(made, name, None), property)}
    sizes = {
        name: value for name, value in SIZES.items() if name not in computed and getattr(usual, name, None) is not None
    }
    return made(**{**sizes, **case.changes})


def make_model(case: Case) -> transformers.PreTrainedModel:
    """A random model with transformers' own attention, in fp32."""
    config = config_of(case)
    torch.manual_seed(case.seed + sum(map(ord, case.model_type + repr(sorted(case.changes.items())))))
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model: transformers.PreTrainedModel = made.float().eval()
    spread(model, case.wider)
    norm_in_groups(model)
    return model


def norm_in_groups(model: nn.Module) -> None:
    """Let mixers of Mamba 2 norm each group by itself, as its authors' code does, and transformers from 5.23 on.

    Earlier releases norm all groups as one.
    """
    for module in model.modules():
        norm: Any = getattr(module, "norm", None)
        groups = getattr(module, "n_groups", 1)
        if type(norm).__name__ in _NORMS_OF_GROUPS and not hasattr(norm, "group_size"):
            norm.forward = partial(_normed_in_groups, norm, groups)


def _normed_in_groups(norm: Any, groups: int, x: Tensor, gate: Tensor) -> Tensor:
    opened: Tensor = (x.float() * functional.silu(gate.float())).unflatten(-1, (groups, -1))
    normed = opened * torch.rsqrt(opened.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    weighted: Tensor = norm.weight * normed.flatten(-2)
    return weighted


@torch.no_grad()
def spread(model: nn.Module, wider: Mapping[str, float]) -> None:
    """Draw every weight anew: no norm is neutral, no bias zero, no expert out of reach."""
    for name, tensor in [*model.named_parameters(), *((key, model.get_buffer(key)) for key in _saved_buffers(model))]:
        usual = 1.0 - tensor.mean().round() if tensor.dim() <= 1 else 0.0  # what the model adds to a norm's weight
        factor = next((by for part, by in wider.items() if part in name), 1.0)
        if "sinks" in name:
            tensor.normal_(0.0, 2.0)
        elif "correction_bias" in name:
            tensor.normal_(0.0, 0.3)
        elif name.endswith("bias"):
            tensor.normal_(0.0, 0.2)
        elif tensor.dim() <= 1:  # a norm's, around one or zero, or a scale
            tensor.add_(torch.empty_like(tensor).uniform_(-0.5, 0.5))
            if not _IN_LAYER.search(name):
                # Signs keep the last norm's output from looking like its input: with tied weights, that repeats tokens.
                tensor.sub_(2 * (tensor + usual) * (torch.rand_like(tensor) < 0.5))
        else:
            tensor.normal_(0.0, _STD)
        tensor.mul_(factor)


def _saved_buffers(model: nn.Module) -> list[str]:
    buffers = dict(model.named_buffers())
    return [name for name in model.state_dict() if name in buffers and buffers[name].is_floating_point()]


class Answer(NamedTuple):
    """What was generated after a prompt."""

    tokens: list[int]
    logprobs: list[float]


class Reference:
    """A case's checkpoint, and transformers' greedy continuations and log-probabilities."""

    def __init__(self, folder: Path, case: Case, model: transformers.PreTrainedModel | None = None) -> None:
        """`model` is made for the case, unless it is given."""
        self.folder, self.case, self.model = folder, case, make_model(case) if model is None else model
        self.model.save_pretrained(folder)
        self._known: dict[tuple[int, ...], Answer] = {}

    def errors(self, prompt: list[int], answer: Answer) -> str:
        """How an answer differs from the greedy one; empty if it does not."""
        known = self._known.get(tuple(prompt))
        if known is None or len(known.tokens) != len(answer.tokens):
            known = self._greedy(prompt, answer.tokens)
        pairs = zip(answer.tokens, known.tokens, strict=True)
        if wrong := [i for i, (one, other) in enumerate(pairs) if one != other]:
            return f"prompt of {len(prompt)}: other tokens at {wrong}"
        worst = max(abs(one - other) for one, other in zip(answer.logprobs, known.logprobs, strict=True))
        self._known[tuple(prompt)] = known
        return f"prompt of {len(prompt)}: log-probabilities are {worst:.2g} off" if worst > _TOLERANCE else ""

    def _greedy(self, prompt: list[int], tokens: list[int]) -> Answer:
        """The best token at each place after these; if they are the best ones, `generate` gives them, by induction."""
        scores = self.logits(prompt + tokens[:-1])[len(prompt) - 1 :].log_softmax(-1)
        best = scores.topk(2)
        gap = float((best.values[:, 0] - best.values[:, 1]).min())
        assert gap > _SAFE_GAP, f"the two best logits are {gap:.2g} apart: rounding alone could swap them"
        return Answer(best.indices[:, 0].tolist(), best.values[:, 0].tolist())

    @torch.inference_mode()
    def logits(self, text: list[int]) -> Tensor:
        """fp32 [tokens, vocabulary]."""
        logits: Tensor = self.model(torch.tensor([text])).logits[0]
        return logits
