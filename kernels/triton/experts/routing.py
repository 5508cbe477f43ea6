"""The choice of experts: one program for each token, whose logits form a tile [groups, experts of a group]."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.experts.routing import Routing
from penstock.kernels.triton.device import next_power_of_two

NONE: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def _best_of(values, numbers, is_left):
    """The highest value that is left, and its number; among equals, the lowest. One must be left, if only -inf."""
    best = tl.max(tl.where(is_left, values, float("-inf")), 0)
    return best, tl.min(tl.where(is_left & (values == best), numbers, NONE), 0)


@triton.jit
def route_kernel(
    logits_ptr,
    correction_ptr,
    ids_ptr,
    weights_ptr,
    group_size,
    stride_logits,
    renormalize_eps,
    scale,
    KIND: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BY_TOP2: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (T,). KIND: 0 softmax, 1 sigmoid, 2 softmax of the chosen logits."""
    token = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, BLOCK_G)
    places = tl.arange(0, BLOCK_S)
    ids = groups[:, None] * group_size + places[None, :]
    is_there = (groups < NUM_GROUPS)[:, None] & (places < group_size)[None, :]
    z = tl.load(logits_ptr + token * stride_logits + ids, mask=is_there, other=float("-inf"))
    if KIND == 0:
        exps = tl.exp(z - tl.max(tl.max(z, 1), 0))
        scores = exps / tl.sum(tl.sum(exps, 1), 0)
    elif KIND == 1:
        scores = 1.0 / (1.0 + tl.exp(-z))
    else:
        scores = z
    choice = z if BY_LOGITS else scores
    if HAS_CORRECTION:
        choice += tl.load(correction_ptr + ids, mask=is_there, other=0.0)
    choice = tl.where(is_there & (choice == choice), choice, float("-inf"))  # NaN loses, too
    is_left = is_there
    if NUM_GROUPS > 1:
        judged = tl.max(choice, 1)
        if BY_TOP2:
            first = tl.min(tl.where(is_there & (choice == judged[:, None]), ids, NONE), 1)
            judged += tl.max(tl.where(ids == first[:, None], float("-inf"), choice), 1)
            judged = tl.where(judged == judged, judged, float("-inf"))
        is_group_left = groups < NUM_GROUPS
        for _ in tl.range(0, TOP_GROUPS):
            _, group = _best_of(judged, groups, is_group_left)
            is_group_left = is_group_left & (groups != group)
        is_left = is_there & ~is_group_left[:, None]
    ranks = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    values = tl.full([BLOCK_K], float("-inf"), tl.float32)
    for rank in tl.range(0, TOP_K):
        best = tl.max(tl.max(tl.where(is_left, choice, float("-inf")), 1), 0)
        best_id = tl.min(tl.min(tl.where(is_left & (choice == best), ids, NONE), 1), 0)
        is_best = ids == best_id
        is_left = is_left & ~is_best
        chosen = tl.where(ranks == rank, best_id, chosen)
        values = tl.where(ranks == rank, tl.sum(tl.sum(tl.where(is_best & is_there, scores, 0.0), 1), 0), values)
    is_chosen = ranks < TOP_K
    if KIND == 2:
        exps = tl.exp(values - tl.max(values, 0))
        values = exps / tl.sum(exps, 0)
    if RENORMALIZE:
        values /= tl.sum(tl.where(is_chosen, values, 0.0), 0) + renormalize_eps
    tl.store(ids_ptr + token * TOP_K + ranks, chosen, mask=is_chosen)
    tl.store(weights_ptr + token * TOP_K + ranks, values * scale, mask=is_chosen)


def route_triton(logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Arguments and results as `penstock.kernels.experts.routing.route`."""
    num_tokens, num_experts = logits.shape
    ids = torch.empty((num_tokens, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    if not num_tokens:
        return ids, weights
    group_size = num_experts // routing.num_groups
    block_g, block_s = next_power_of_two(routing.num_groups), next_power_of_two(group_size)
    route_kernel[(num_tokens,)](
        logits, logits if correction is None else correction, ids, weights, group_size, logits.stride(0),
        float(routing.renormalize_eps), float(routing.scale),
        KIND=("softmax", "sigmoid", "top_softmax").index(routing.kind),
        BY_LOGITS=routing.goes_by_logits(correction), HAS_CORRECTION=correction is not None,
        RENORMALIZE=routing.renormalize, TOP_K=routing.top_k, NUM_GROUPS=routing.num_groups,
        TOP_GROUPS=routing.top_groups, BY_TOP2=routing.group_judge == "top2",
        BLOCK_G=block_g, BLOCK_S=block_s, BLOCK_K=next_power_of_two(routing.top_k),
        num_warps=1 if block_g * block_s <= 128 else 4,
    )  # fmt: skip
    return ids, weights
