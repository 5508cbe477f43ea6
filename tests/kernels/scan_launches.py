"""Launches of what models with recurrent layers compute, as real ones make them, on tensors without storage."""

import torch

from penstock.kernels.scan.causal_conv1d import ConvWeights
from penstock.kernels.scan.gated_norm import GatedNorm
from penstock.kernels.scan.rows import StateRows
from penstock.kernels.triton.latents.write import latent_write_triton
from penstock.kernels.triton.scan.causal_conv1d import causal_conv1d_triton
from penstock.kernels.triton.scan.gated_delta import gated_delta_scan_triton
from penstock.kernels.triton.scan.gated_norm import gated_norm_triton
from penstock.kernels.triton.scan.mamba1 import mamba1_scan_triton
from penstock.kernels.triton.scan.mamba2 import mamba2_scan_triton


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_scans() -> None:
    """As Jamba, Granite 4, Falcon-H1 (states of 256), Qwen3-Next, Kimi Linear and LFM 2 launch them."""
    for num_rows, length in ((1, 1), (4, 1024)):
        starts = meta(num_rows + 1, dtype=torch.int32)
        rows, tokens = StateRows(starts[:num_rows], starts, length), num_rows * length
        values, z = meta(tokens, 2 * 8192).chunk(2, 1)
        _, b, c = meta(tokens, 256 + 2 * 16).split((256, 16, 16), 1)
        floats = meta(8192, dtype=torch.float32)
        mamba1_scan_triton(
            values, meta(tokens, 8192), b, c, meta(16, 8192, dtype=torch.float32),
            meta(9, 16, 8192, dtype=torch.float32), rows, d=floats, dt_bias=floats,
        )  # fmt: skip
        gated_norm_triton(values, z, GatedNorm())
        for heads, state_size in ((128, 128), (32, 256)):
            inner = heads * 64
            z, mixed, dt = meta(tokens, 2 * inner + 2 * state_size + heads).split(
                (inner, inner + 2 * state_size, heads), 1
            )
            conv = ConvWeights(meta(inner + 2 * state_size, 4), meta(inner + 2 * state_size))
            causal_conv1d_triton(mixed, conv, meta(9, 3, inner + 2 * state_size), rows)
            x, b, c = mixed.split((inner, state_size, state_size), 1)
            numbers = meta(heads, dtype=torch.float32)
            mamba2_scan_triton(
                x.unflatten(1, (heads, 64)), dt, b[:, None], c[:, None], numbers,
                meta(9, heads, state_size, 64, dtype=torch.float32), rows, d=numbers, dt_bias=numbers,
            )  # fmt: skip
            gated_norm_triton(x, z, GatedNorm(meta(inner)))
        mixed, z = meta(tokens, 8192 + 4096).split((8192, 4096), 1)
        q, k, v = mixed.split((2048, 2048, 4096), 1)
        dt, b = meta(tokens, 64).chunk(2, 1)
        numbers = meta(32, dtype=torch.float32)
        gated_delta_scan_triton(
            q.unflatten(1, (16, 128)), k.unflatten(1, (16, 128)), v.unflatten(1, (32, 128)), dt, b, numbers, numbers,
            meta(9, 32, 128, 128, dtype=torch.float32), rows, 1e-6,
        )  # fmt: skip
        gated_norm_triton(v, z, GatedNorm(meta(128), group_size=128, norms_first=True))
        q, k, v = (each.unflatten(1, (32, 128)) for each in meta(tokens, 3 * 4096).chunk(3, 1))
        gated_delta_scan_triton(
            q, k, v, meta(tokens, 32, 128), meta(tokens, 288)[:, 256:], numbers, meta(32, 128, dtype=torch.float32),
            meta(9, 32, 128, 128, dtype=torch.float32), rows, 1e-6,
        )  # fmt: skip
        gated_norm_triton(
            v.flatten(1), meta(tokens, 4096), GatedNorm(meta(128), group_size=128, norms_first=True, is_sigmoid=True)
        )
        slots = meta(tokens, dtype=torch.int64)
        latent_write_triton(
            meta(tokens, 576), meta(tokens, 32, 192), None, None, meta(512), 1e-6, meta(4096, 1, 16, 576), slots
        )
        before, after, x = meta(tokens, 3 * 2048).chunk(3, 1)
        short = ConvWeights(meta(2048, 3), has_silu=False)
        causal_conv1d_triton(x, short, meta(9, 2, 2048), rows, before, after)
