"""Mixtures of experts in Triton against the modules of transformers."""

import pytest
import torch

from tests.gpu_worker.mixtures import CASES, STEP, H, block_of, computed_by, module_of


@pytest.mark.parametrize("name", CASES)
def test_modules_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = module_of(CASES[name])
    block = block_of(CASES[name], module)
    for num_tokens in (1, 7):
        x = torch.randn(num_tokens, H)
        expected = computed_by(module, x)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True)
            got = block(x, STEP)
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=4e-6)
