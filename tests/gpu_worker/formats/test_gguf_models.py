"""Models of GGUF files whose matrices are quantized in unlike ways, against the same weights as floats."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from numpy.typing import NDArray

from penstock import LLM, SamplingParams
from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.models.loading import loader
from penstock.lab.planning.quantized_bytes import quantized_bytes
from penstock.models.check import check_checkpoint
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config
from penstock.models.finding.registry import open_checkpoint
from penstock.models.gguf.block_types import BLOCK_TYPES
from tests.models.gguf.written import HIDDEN as SMALL
from tests.models.gguf.written import add_llama, add_tokens, write

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY = 256, 4, 2, 64, 512, 300
PROMPTS = [[5, 17, 200, 3], [9] * 20, list(range(40, 75))]
SCHEDULES = [{}, {"max_num_batched_tokens": 16, "page_size": 16}, {"enable_prefix_caching": False, "max_num_seqs": 1}]


_HALVES: Mapping[str, Mapping[int, float]] = {
    "Q8_0": {0: 1}, "Q4_0": {0: 1}, "Q4_1": {0: 1, 2: -7.5}, "Q5_0": {0: 1}, "Q5_1": {0: 1, 2: -15.5},
    "Q2_K": {80: 1, 82: 1.5}, "Q3_K": {108: 1}, "Q4_K": {0: 1, 2: 7.5}, "Q5_K": {0: 1, 2: 15.5}, "Q6_K": {208: 1},
    "IQ4_NL": {0: 1}, "IQ4_XS": {0: 1},
}  # fmt: skip
"""Where a block has fp16 numbers, and their ratio if the mean of its numbers is 0."""


def blocks(kind: str, shape: tuple[int, ...], seed: int) -> NDArray[np.uint8]:
    """Random blocks whose numbers are of a usual size."""
    its, generator = BLOCK_TYPES[kind], np.random.default_rng(seed)
    data = generator.integers(0, 256, (*shape[:-1], shape[-1] // its.num_elements, its.num_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        data[..., 0] = 122
        return data.reshape(*shape[:-1], -1)

    def scaled(by: float) -> NDArray[np.uint8]:
        for begin, ratio in _HALVES[kind].items():
            data[..., begin : begin + 2] = np.full(1, by * ratio, np.float16).view(np.uint8)
        return data.reshape(*shape[:-1], -1)

    return scaled(0.08 / float(np.std(dequantize(scaled(1), gguf.GGMLQuantizationType[kind]))))


def write_pair(folder: Path, kinds: Mapping[str, str], *, num_experts: int = 0) -> tuple[Path, Path]:
    """A file with matrices of these types (by the last part of their names), and one with the same numbers in F32."""
    shapes = {"attn_q": (HEADS * HEAD_DIM, HIDDEN), "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN)}
    shapes |= {"attn_v": (KV_HEADS * HEAD_DIM, HIDDEN), "attn_output": (HIDDEN, HEADS * HEAD_DIM)}
    many, ending = ((num_experts,), "_exps") if num_experts else ((), "")
    mlp: dict[str, tuple[int, ...]] = {
        f"ffn_gate{ending}": (*many, MLP, HIDDEN),
        f"ffn_up{ending}": (*many, MLP, HIDDEN),
        f"ffn_down{ending}": (*many, HIDDEN, MLP),
    }
    tensors = {f"blk.{i}.{name}": shape for i in range(2) for name, shape in (shapes | mlp).items()}
    tensors |= {"token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN)}
    paths = []
    for is_plain in (False, True):

        def fill(writer: gguf.GGUFWriter, is_plain: bool = is_plain) -> None:
            writer.add_context_length(512)
            writer.add_embedding_length(HIDDEN)
            writer.add_block_count(2)
            writer.add_feed_forward_length(MLP)
            writer.add_head_count(HEADS)
            writer.add_head_count_kv(KV_HEADS)
            writer.add_layer_norm_rms_eps(1e-5)
            if num_experts:
                writer.add_expert_count(num_experts)
                writer.add_expert_used_count(2)
            add_tokens(writer)
            ones = [f"blk.{i}.{name}" for i in range(2) for name in ("attn_norm", "ffn_norm")]
            for name in (*ones, "output_norm"):
                writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
            for i in range(2 if num_experts else 0):
                router = np.random.default_rng(i).normal(0, 0.3, (num_experts, HIDDEN)).astype(np.float32)
                writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
            for seed, (name, shape) in enumerate(tensors.items()):
                kind = kinds[name.rpartition(".")[2]]
                data = blocks(kind, shape, seed)
                number = gguf.GGMLQuantizationType[kind]
                if is_plain:
                    writer.add_tensor(f"{name}.weight", dequantize(data, number))
                else:
                    writer.add_tensor(f"{name}.weight", data, raw_dtype=number)

        paths.append(write(folder / ("plain.gguf" if is_plain else "quantized.gguf"), fill))
    return paths[0], paths[1]


def greedy(path: Path, **options: Any) -> list[list[int]]:
    """Tokens of all prompts at once."""
    with LLM(str(path), dtype="float32", **options) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    return [list(output.outputs[0].token_ids) for output in outputs]


_Q4_K_M = dict.fromkeys(("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up", "token_embd"), "Q4_K") | {
    "attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K",
}  # fmt: skip
_ALL_UNLIKE = {
    "attn_q": "Q8_0", "attn_k": "Q5_0", "attn_v": "Q5_1", "attn_output": "IQ4_NL", "ffn_gate": "Q2_K", "ffn_up": "Q3_K",
    "ffn_down": "Q5_K", "token_embd": "Q4_1", "output": "IQ4_XS",
}  # fmt: skip
_EXPERTS = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "token_embd", "output"), "Q8_0") | {
    "ffn_gate_exps": "MXFP4", "ffn_up_exps": "MXFP4", "ffn_down_exps": "Q4_0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "num_experts"), [(_Q4_K_M, 0), (_ALL_UNLIKE, 0), (_EXPERTS, 4)], ids=["Q4_K_M", "unlike", "experts"]
)
def test_tokens_are_those_of_the_same_weights_as_floats(
    kinds: Mapping[str, str], num_experts: int, tmp_path: Path
) -> None:
    """In fp32 a weight stands for its floats exactly; and no schedule changes a token."""
    quantized, plain = write_pair(tmp_path, kinds, num_experts=num_experts)
    check_checkpoint(open_checkpoint(quantized))
    expected = greedy(plain)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    for schedule in SCHEDULES if kinds is not _ALL_UNLIKE else SCHEDULES[:1]:
        assert greedy(quantized, **schedule) == expected


@pytest.mark.parametrize(("odd", "expected"), [(0.0, True), (2**-20, False)])
def test_bf16_weights_stay_bf16_beside_vectors_of_fp32(
    odd: float, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read directly, whatever the dtype: unless a vector has numbers that bf16 does not hold."""

    def fill(writer: gguf.GGUFWriter) -> None:
        add_tokens(writer)
        add_llama(writer, without=[*ones, *matrices])
        for name in ones:
            writer.add_tensor(f"{name}.weight", np.full(SMALL, 1 + odd, np.float32))
        for name, rows in matrices.items():
            data = np.zeros((rows, 2 * SMALL), np.uint8)
            writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType.BF16)

    ones = ["output_norm", *(f"blk.{i}.{name}" for i in range(2) for name in ("attn_norm", "ffn_norm"))]
    square = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    matrices = {"token_embd": VOCABULARY} | {f"blk.{i}.{name}": SMALL for i in range(2) for name in square}
    matrices |= {f"blk.{i}.{name}": SMALL // 2 for i in range(2) for name in ("attn_k", "attn_v")}
    checkpoint = open_checkpoint(write(tmp_path / "model.gguf", fill))
    monkeypatch.setattr(loader, "_build", lambda config, reader: reader)
    reader: Any = loader.load_model(checkpoint, parse_model_config(checkpoint.config), torch.float32, CpuDevice())
    assert reader.is_bf16 == expected


def test_opening_a_file_needs_no_torch(tmp_path: Path) -> None:
    """Frontend and scheduler open it, too."""
    path, _ = write_pair(tmp_path, _Q4_K_M)
    code = (
        "import sys; from pathlib import Path; from penstock.models.check import check_checkpoint; "
        "from penstock.models.finding.registry import open_checkpoint; "
        f"check_checkpoint(open_checkpoint(Path({str(path)!r}))); "
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_planner_counts_the_bytes_of_the_file(tmp_path: Path) -> None:
    """It takes 16 bits for a number of vectors and of a separate embedding."""
    kinds = dict.fromkeys(("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "token_embd"), "Q4_K")
    path, _ = write_pair(tmp_path, kinds | {"attn_v": "Q6_K", "output": "Q8_0"})
    checkpoint = open_checkpoint(path)
    decoder = parse_model_config(checkpoint.config)
    assert isinstance(decoder, Decoder)
    expected = 0
    for name, its in checkpoint.tensors().items():
        is_float = its.dtype == "F32" or name == "model.embed_tokens.weight"
        expected += its.num_elements * 2 if is_float else its.num_bytes
    assert quantized_bytes(decoder).total == expected
