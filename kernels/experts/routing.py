"""Which experts of a mixture each token goes to, and with which weights."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Routing(NamedTuple):
    """How experts are chosen.

    1. Scores are the softmax or sigmoid over all logits; for "top_softmax", the logits themselves.
    2. If neighbouring experts form groups, only experts of the `top_groups` best groups remain. A group is judged by
       the sum of its two best scores ("top2", after the correction) or by its best score ("max"; DeepSeek-V2 and V3,
       2024).
    3. The `top_k` experts with the best scores plus correction are chosen; their weights are the scores without the
       correction.
    4. If `renormalize`, weights are divided by their sum plus `renormalize_eps`. For "top_softmax", the softmax of the
       weights is taken. Then weights are multiplied by `scale`.

    Among equals, the lowest number comes first. Unless a correction or "top2" needs scores, experts are chosen by
    logits, which have the same order. So the choice does not depend on how a path rounds an exponential.
    """

    top_k: int
    kind: Literal["softmax", "sigmoid", "top_softmax"] = "softmax"
    renormalize: bool = False
    renormalize_eps: float = 0.0
    num_groups: int = 1
    top_groups: int = 1
    group_judge: Literal["top2", "max"] = "top2"
    scale: float = 1.0

    def goes_by_logits(self, correction: Tensor | None) -> bool:
        """Whether experts are chosen by logits instead of scores."""
        needs_scores = correction is not None or (self.num_groups > 1 and self.group_judge == "top2")
        return self.kind == "top_softmax" or not needs_scores


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias in fp32, on which the choice of experts depends.

    Args:
        x: [T, H], of any float dtype.
        weight: fp32 [E, H], contiguous.
        bias: fp32 [E] or None.

    Returns:
        fp32 [T, E].
    """
    if x.is_cuda:
        from penstock.kernels.triton.experts.logits import MOST_TOKENS, router_logits_triton

        if x.shape[0] <= MOST_TOKENS:
            return router_logits_triton(x, weight, bias)
    return functional.linear(x.float(), weight, bias)


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose each token's experts.

    Args:
        logits: fp32 [T, E].
        routing: how to choose.
        correction: fp32 [E], added to the scores (for "top_softmax", the logits) for the choice only.

    Returns:
        (int32 [T, top_k] different experts, the best first; fp32 [T, top_k] their weights). A token with NaN logits
        gets arbitrary experts, and its weights may be NaN.
    """
    _check(logits, routing, correction)
    if logits.is_cuda:
        from penstock.kernels.triton.experts.routing import route_triton

        return route_triton(logits, routing, correction)
    scores = _scores(logits, routing)
    choice = logits if routing.goes_by_logits(correction) else scores
    if correction is not None:
        choice = choice + correction
    if routing.num_groups > 1:
        groups = choice.unflatten(1, (routing.num_groups, -1))
        judged = groups.amax(-1) if routing.group_judge == "max" else groups.topk(2, dim=-1)[0].sum(-1)
        is_out = torch.ones_like(judged, dtype=torch.bool).scatter_(1, _best(judged, routing.top_groups), False)
        choice = groups.masked_fill(is_out[:, :, None], float("-inf")).flatten(1)
    ids = _best(choice, routing.top_k)
    weights = scores.gather(1, ids)
    if routing.kind == "top_softmax":
        weights = weights.softmax(-1)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.renormalize_eps)
    return ids.int(), weights if routing.scale == 1.0 else weights * routing.scale


def route_reference(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rules, token by token, in double precision."""
    all_ids, all_weights = [], []
    for row in logits.double():
        scores = {"softmax": row.softmax(-1), "sigmoid": row.sigmoid(), "top_softmax": row}[routing.kind]
        choice = dict(enumerate((scores if correction is None else scores + correction.double()).tolist()))
        size = len(choice) // routing.num_groups
        groups = [range(first, first + size) for first in range(0, len(choice), size)]
        num_judged = 2 if routing.group_judge == "top2" else 1
        judged = [sum(sorted(choice[i] for i in group)[-num_judged:]) for group in groups]
        best_groups = sorted(range(len(groups)), key=lambda group: -judged[group])[: routing.top_groups]
        left = sorted(i for group in best_groups for i in groups[group])
        chosen = sorted(left, key=lambda i: -choice[i])[: routing.top_k]
        weights = scores[chosen]
        if routing.kind == "top_softmax":
            weights = weights.softmax(-1)
        if routing.renormalize:
            weights = weights / (weights.sum() + routing.renormalize_eps)
        all_ids.append(chosen)
        all_weights.append(weights * routing.scale)
    shape = (len(logits), routing.top_k)
    ids = torch.tensor(all_ids, dtype=torch.int32, device=logits.device).view(shape)
    return ids, torch.stack(all_weights).float() if all_weights else logits.new_empty(shape)


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    if routing.kind == "top_softmax":
        return logits
    return logits.softmax(-1) if routing.kind == "softmax" else logits.sigmoid()


def _best(values: Tensor, count: int) -> Tensor:
    """int64 [T, count], the columns of the highest values. It sorts stably, because topk takes any of equal values."""
    return values.sort(dim=-1, descending=True, stable=True)[1][:, :count]


def _check(logits: Tensor, routing: Routing, correction: Tensor | None) -> None:
    if logits.ndim != 2 or logits.dtype != torch.float32:
        raise ValueError(f"logits must be fp32 [T, E], got {logits.dtype} {tuple(logits.shape)}")
    num_experts, num_groups = logits.shape[1], routing.num_groups
    if correction is not None and (correction.shape != (num_experts,) or correction.dtype != torch.float32):
        raise ValueError(f"correction must be fp32 [{num_experts}], got {correction.dtype} {tuple(correction.shape)}")
    if num_groups < 1 or num_experts % num_groups or not 1 <= routing.top_groups <= num_groups:
        raise ValueError(f"{num_experts} experts have no {num_groups} groups of which {routing.top_groups} remain")
    size = num_experts // num_groups
    if not 1 <= routing.top_k <= routing.top_groups * size:
        raise ValueError(f"cannot choose {routing.top_k} of {routing.top_groups * size} experts")
    if num_groups > 1 and routing.group_judge == "top2" and size < 2:
        raise ValueError("groups that are judged by their two best experts must have at least two")
