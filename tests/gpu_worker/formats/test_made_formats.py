"""Float matrices that are quantized as they are read: errors of rounding, and models that compute with the result."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config.options import ConfigError
from penstock.gpu_worker.formats.group_rounding import Correlation
from penstock.gpu_worker.formats.made import made
from penstock.gpu_worker.models.loading.loader import load_model_config
from penstock.kernels.quantized.weight import QuantizedWeight, dequantized
from penstock.models.formats.made import GROUP_SIZES, MADE_FORMATS, MadeFormat, Recipe
from penstock.models.quantization import products_of, recipes_of, with_quantization
from tests.gpu_worker.families.checkpoints import make_model
from tests.gpu_worker.families.run import Scored
from tests.gpu_worker.families.table import CASES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrix(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(*shape[:-1], 1, generator=generator) + 0.1
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def spread(per_group: Tensor, weight: QuantizedWeight) -> Tensor:
    return per_group.float().repeat_interleave(weight.group, dim=-1)[..., : weight.num_inputs]


def squared_error(weight: QuantizedWeight, exact: Tensor) -> float:
    return float((dequantized(weight) - exact.float()).square().sum())


def plainly_rounded(exact: Tensor, group: int) -> Tensor:
    """Four bits, each group's range from its smallest to its largest weight: what most tools do."""
    columns = exact.float().reshape(-1, group)
    low, high = columns.amin(-1, keepdim=True).clamp(max=0), columns.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    return (((columns / scale).round() + zero).clamp(0, 15) - zero).mul(scale).view_as(exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(48, 100), (3, 16, 64)], ids=str)
def test_int8_is_within_half_a_step(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    exact = matrix(*shape, dtype=dtype)
    weight = made(exact, Recipe("int8"))
    assert weight.scales.dtype == dtype
    assert weight.codes.shape == exact.shape
    # A scale that was rounded down puts the largest weight up to 2^-9 of itself beyond the last code.
    bound = spread(weight.scales, weight) * 0.5 + exact.float().abs().amax(-1, keepdim=True) * 2**-8
    assert bool(((dequantized(weight) - exact.float()).abs() <= bound).all())
    assert weight.inputs is not None
    assert made(exact, Recipe("int8_weight_only")).inputs is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_is_what_torch_rounds_to(dtype: torch.dtype) -> None:
    exact = matrix(48, 100, dtype=dtype)
    weight = made(exact, Recipe("fp8"))
    scale = weight.scales.float()
    rounded = (exact.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(dequantized(weight), rounded)
    assert bool(((weight.codes & 127) < 127).all())  # no NaN


@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int4_has_less_error_than_plain_rounding(dtype: torch.dtype, group: int) -> None:
    exact = matrix(64, 512, dtype=dtype)
    weight = made(exact, Recipe("int4", group))
    plain = float((plainly_rounded(exact, group) - exact.float()).square().sum())
    assert squared_error(weight, exact) < 0.96 * plain
    assert int(weight.codes.max()) <= 15
    without_zeros = made(exact, Recipe("int4", group, has_zeros=False))
    assert without_zeros.zeros == 8
    assert squared_error(without_zeros, exact) < 1.1 * plain


@pytest.mark.parametrize("has_zeros", [True, False])
def test_int4_is_near_the_least_error_that_there_is(has_zeros: bool) -> None:
    """Against all scales of a fine grid, of both signs, each with all zeros."""
    exact = matrix(16, 32)
    weight = made(exact, Recipe("int4", has_zeros=has_zeros))
    least = torch.full((16,), float("inf"))
    for scale in torch.cat([torch.linspace(0.01, 1.0, 400), torch.linspace(-1.0, -0.01, 400)]):
        for zero in range(16) if has_zeros else (8,):
            codes = (exact / scale + zero).round().clamp(0, 15) - zero
            best = (exact * codes).sum(-1) / codes.square().sum(-1).clamp(min=1e-9)
            least = torch.minimum(least, (exact - best[:, None] * codes).square().sum(-1))
    assert squared_error(weight, exact) < 1.12 * float(least.sum())


def test_the_last_group_may_be_shorter() -> None:
    exact = matrix(8, 72)
    weight = made(exact, Recipe("int4"))
    assert weight.scales.shape == (8, 3)
    alone = made(exact[:, 64:].contiguous(), Recipe("int4"))
    assert torch.equal(dequantized(weight)[:, 64:], dequantized(alone))


@pytest.mark.parametrize("format", MADE_FORMATS)
def test_zeros_stay_zeros(format: MadeFormat) -> None:
    exact = matrix(4, 64)
    exact[1] = 0.0
    exact[2, :32] = 0.0
    found = dequantized(made(exact, Recipe(format)))
    assert bool((found[exact == 0] == 0).all())
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("format", MADE_FORMATS)
def test_parts_are_rounded_as_the_whole(format: MadeFormat) -> None:
    """However many weights are rounded at a time."""
    exact = matrix(5000, 256)
    whole, part = made(exact, Recipe(format)), made(exact[3000:3100], Recipe(format))
    assert torch.equal(dequantized(whole)[3000:3100], dequantized(part))


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_measured_inputs_make_better_products(block: int, has_zeros: bool) -> None:
    """Inputs that are alike make up for one another's errors; one that is always zero costs nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 16, generator=generator) @ torch.randn(16, 200, generator=generator)
    x += 0.1 * torch.randn(1000, 200, generator=generator)
    x[:, 7] = 0.0
    padded = torch.nn.functional.pad(x, (0, -200 % block))
    sums = torch.stack([part.T @ part for part in padded.split(block, dim=1)])
    exact = matrix(40, 200)
    errors = [
        float(
            (x @ (dequantized(made(exact, Recipe("int4", has_zeros=has_zeros), correlation)) - exact).T).square().sum()
        )
        for correlation in (None, Correlation(sums))
    ]
    assert errors[1] < 0.5 * errors[0]


FAMILIES = ["llama-biases", "gpt2", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe"]


@pytest.mark.parametrize("format", ["int8_weight_only", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_made_at_load_is_that_of_its_dequantized_weights(name: str, format: MadeFormat, tmp_path: Path) -> None:
    """Whatever the layout: transposed, experts one by one or in one tensor, a head that is the embedding."""
    folder, plain = tmp_path / "made", tmp_path / "plain"
    make_model(CASES[name]).save_pretrained(folder)
    shutil.copytree(folder, plain)
    config = with_quantization(load_model_config(folder), format)
    stored, recipes, products = load_file(plain / "model.safetensors"), recipes_of(config), products_of(config)
    base = "" if next(iter(recipes)) in stored else next(iter(stored)).partition(".")[0] + "."
    head = [name for name in recipes if products[name].is_head]
    assert len(head) == 1
    for key, recipe in recipes.items():
        key = key if key in stored else key.removeprefix(base)
        of = products.get(key) or products[base + key]
        turned = stored[key].mT.contiguous() if of.is_transposed else stored[key]
        found = dequantized(made(turned, recipe))
        stored[key] = (found.mT if of.is_transposed else found).contiguous()
    save_file(stored, plain / "model.safetensors")
    texts = [[5, 17, 3, 90, 41], [7] * 20]
    for kernels in ("torch", "native"):
        answers = [
            Scored(path, quantization=quantization, cpu_kernels=kernels, num_pages=200).answers(texts)
            for path, quantization in ((folder, format), (plain, ""))
        ]
        for one, other in zip(*answers, strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-3)


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    make_model(CASES["llama"]).save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert with_quantization(config, "none") is config
    for wanted in ("awq", "gptq_marlin", "int3"):
        with pytest.raises(ConfigError, match=f"--quantization {wanted}: .*floats.* int8, int8_weight_only, int4, fp8"):
            with_quantization(config, wanted)
