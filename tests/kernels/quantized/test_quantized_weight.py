"""What a quantized matrix means, and how matrices of a kind become one."""

import torch

from penstock.kernels.quantized.weight import InputRounding, QuantizedWeight, are_alike, dequantized, joined, stacked

N, K, GROUP = 4, 320, 32


def _weight(seed: int = 0) -> QuantizedWeight:
    """With everything that there can be; the last super-group is shorter."""
    torch.manual_seed(seed)
    groups, supers = K // GROUP, -(-K // 256)
    return QuantizedWeight(
        codes=torch.randint(16, (N, K), dtype=torch.uint8),
        bits=4,
        group=GROUP,
        scales=torch.randint(64, (N, groups), dtype=torch.uint8),
        zeros=torch.randint(16, (N, groups), dtype=torch.uint8),
        minimums=torch.randint(64, (N, groups), dtype=torch.uint8),
        super_scales=torch.rand(N, supers).half(),
        super_minimums=torch.rand(N, supers).half(),
        values=torch.linspace(-1, 1, 16),
        order=torch.arange(K).flip(0),
    )


def test_each_number_is_as_the_formula_says() -> None:
    weight = _weight()
    matrix = dequantized(weight)
    assert weight.values is not None
    assert weight.minimums is not None
    assert weight.super_scales is not None
    assert weight.super_minimums is not None
    assert isinstance(weight.zeros, torch.Tensor)
    for n, k in ((0, 0), (1, 31), (2, 32), (3, 255), (3, 256), (0, 319)):
        j, s = k // GROUP, k // 256
        scale = weight.super_scales[n, s].float() * weight.scales[n, j]
        minimum = weight.super_minimums[n, s].float() * weight.minimums[n, j]
        expected = scale * (weight.values[int(weight.codes[n, k])] - weight.zeros[n, j]) - minimum
        assert matrix[n, K - 1 - k] == expected


def test_outputs_are_chosen_and_joined_again() -> None:
    weight, rounding = _weight(), InputRounding("int8")
    matrix = dequantized(weight)
    chosen = torch.tensor([2, 0])
    assert torch.equal(dequantized(weight.of_outputs(chosen)), matrix[chosen])
    parts = [weight.of_outputs(slice(0, 1)), weight.of_outputs(slice(1, 4))]
    both = joined(parts)
    assert both is not None
    assert torch.equal(dequantized(both), matrix)
    assert joined([parts[0], parts[1]._replace(bits=5)]) is None
    assert joined([parts[0], parts[1]._replace(zeros=8)]) is None
    assert joined([parts[0], parts[1]._replace(inputs=rounding)]) is None
    assert joined([parts[0], parts[1]._replace(order=torch.arange(K))]) is None


def test_experts_are_stacked() -> None:
    experts = [_weight(seed)._replace(order=None) for seed in range(3)]
    all_of_them = stacked(experts)
    assert torch.equal(dequantized(all_of_them), torch.stack([dequantized(expert) for expert in experts]))
    assert torch.equal(dequantized(all_of_them.of_expert(1)), dequantized(experts[1]))
    assert not are_alike(experts[0], experts[1]._replace(values=None))
