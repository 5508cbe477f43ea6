"""The mixture of experts against the modules of transformers, and as it is packed."""

from typing import Any, cast

import pytest
import torch
import triton
from torch import Tensor

from penstock.gpu_worker.models.blocks.experts import routing_of
from penstock.gpu_worker.models.linear import PlainExperts
from penstock.kernels.experts.routing import Routing
from penstock.kernels.native import build
from penstock.kernels.native.library import Library
from penstock.models.description.decoder import Router
from tests.gpu_worker.mixtures import CASES, STEP, H, block_of, computed_by, module_of


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_tokens", [1, 2, 30])
def test_modules_of_transformers(name: str, num_tokens: int) -> None:
    case = CASES[name]
    module = module_of(case)
    x = torch.randn(num_tokens, H)
    before = x.clone()
    got = block_of(case, module)(x, STEP)
    torch.testing.assert_close(got, computed_by(module, x), rtol=2e-5, atol=2e-6)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", CASES)
def test_bf16(name: str) -> None:
    """Within 3 % of the same weights and inputs in fp32, over all outputs."""
    case = CASES[name]
    module = module_of(case)
    for tensor in module.parameters():
        tensor.copy_(tensor.bfloat16())
    x = torch.randn(30, H).bfloat16()
    got = block_of(case, module, torch.bfloat16)(x, STEP)
    expected = computed_by(module, x.float())
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).norm() < 0.03 * expected.norm()


def test_no_tokens() -> None:
    for case in CASES.values():
        assert block_of(case, module_of(case))(torch.zeros(0, H), STEP).shape == (0, H)


def test_a_token_alone_and_in_company() -> None:
    """What a token gets does not depend on the others."""
    for case in CASES.values():
        block, x = block_of(case, module_of(case)), torch.randn(20, H)
        alone = torch.cat([block(row[None], STEP) for row in x])
        torch.testing.assert_close(block(x, STEP), alone, rtol=2e-5, atol=2e-6)


def test_routers_and_routings_agree_on_what_is_usual() -> None:
    assert routing_of(Router(top_k=2)) == Routing(top_k=2)


def test_experts_are_packed_one_by_one() -> None:
    try:
        library = Library(build.build(), 1)
    except build.BuildError as error:
        pytest.skip(str(error))
    experts = PlainExperts(torch.randn(3, 40, 24), torch.randn(3, 40))
    for interleaved in (False, True):
        packed = experts.pack(library, interleaved=interleaved)
        assert len(packed) == 3
        for one, weight, bias in zip(packed, experts.weight, cast(Tensor, experts.bias), strict=True):
            out = torch.empty_like(weight)
            library.unpack(one, out)
            assert torch.equal(out, weight)
            plain = one.plain_bias()
            assert plain is not None
            assert torch.equal(plain, bias)
    assert all(one.bias is None for one in PlainExperts(experts.weight).pack(library))


def test_a_gpu_s_host_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launches depend on the number of tokens alone: a graph can hold them. Here tensors have no numbers."""
    launched: list[str] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launched.append(self.__name__)

    block = on_meta(block_of(CASES["Qwen2-MoE"], module_of(CASES["Qwen2-MoE"])))
    monkeypatch.setattr(triton.runtime.JITFunction, "run", run)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    for num_tokens in (1, 300):
        launched.clear()
        assert block(torch.empty(num_tokens, H, device="meta"), STEP).shape == (num_tokens, H)
        products = ["grouped_linear_kernel", "activation_kernel", "grouped_linear_kernel", "sum_of_experts_kernel"]
        logits = ["router_logits_kernel"] if num_tokens == 1 else []
        assert launched == [*logits, "route_kernel", "group_rows_kernel", *products, "activation_kernel"]


def on_meta(weights: Any) -> Any:
    """The same block without numbers."""
    if isinstance(weights, Tensor):
        return weights.to("meta")
    if isinstance(weights, tuple):
        return type(weights)(*(on_meta(part) for part in weights))
    return weights
