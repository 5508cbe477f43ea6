"""How large the KV pool is, how long a sequence may be, and which dtype and device are chosen."""

from pathlib import Path

import pytest
import torch

from penstock.config import ConfigError
from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.devices.open import choose_dtype, open_device
from penstock.gpu_worker.state.kv_pool import (
    KVPool,
    PageGroup,
    PoolSize,
    cpu_budget,
    page_bytes,
    page_groups,
    plan_pool,
)
from penstock.models.description.model_config import KVShape, ModelConfig
from penstock.models.families.registry import parse_model_config
from tests.gpu_worker.engine_in_process import make_config

GIB = 1 << 30


class Memory(CpuDevice):
    """A CPU with a given amount of free memory."""

    def __init__(self, free: int) -> None:
        super().__init__(num_threads=1)
        self._free = free

    def free_memory(self) -> int:
        return self._free


@pytest.fixture
def model() -> ModelConfig:
    return parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 100,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1000,
        }
    )


def test_a_page_s_bytes(model: ModelConfig) -> None:
    groups = page_groups(model, 8)
    kv = KVPool(groups, 3, torch.float32, torch.device("cpu"))
    assert kv.of_group(groups[0]).shape == (4, 3, 2, 8, 16)
    assert kv.blocks.nbytes == 3 * page_bytes(groups, torch.float32)
    assert KVPool(groups, 3, torch.float32, torch.device("cpu"), has_dummy_page=True).layers[1].keys.shape[0] == 4


def test_two_groups_share_one_memory() -> None:
    """Layers 0 and 2 keep all tokens, in heads of 16; layers 1, 3 and 4 a window, in heads of 8."""
    every, recent = PageGroup((0, 2), 4, 2, 16), PageGroup((1, 3, 4), 8, 2, 8, window=5)
    kv = KVPool((every, recent), 6, torch.float32, torch.device("cpu"))
    assert [layer.keys.shape for layer in kv.layers] == [
        (6, 2, 4, 16) if i in (0, 2) else (6, 2, 8, 8) for i in range(5)
    ]
    assert [layer.group for layer in kv.layers] == [0, 1, 0, 1, 1]
    assert kv.page_size == 4
    assert kv.blocks.nbytes == 6 * page_bytes((every, recent), torch.float32)
    for i, layer in enumerate(kv.layers):  # pages 0 and 1 are of the first group, 3 and 4 of the second
        for page in (0, 1) if i in every.layers else (3, 4):
            layer.keys[page], layer.values[page] = 10 * i + page, -10 * i - page
    kv.copy_pages(torch.tensor([1, 4]), torch.tensor([2, 5]))
    for i, layer in enumerate(kv.layers):
        pages = (0, 1, 1) if i in every.layers else (3, 4, 4)
        for page, source in zip((0, 1, 2) if i in every.layers else (3, 4, 5), pages, strict=True):
            assert (layer.keys[page] == 10 * i + source).all()
            assert (layer.values[page] == -10 * i - source).all()
    with pytest.raises(ValueError, match="the same size"):
        KVPool((every, recent._replace(page_size=4)), 6, torch.float32, torch.device("cpu"))


class Keeping(ModelConfig, frozen=True, kw_only=True):
    """A model of which only the pages matter."""

    shapes: tuple[KVShape, ...]

    @property
    def kv(self) -> tuple[KVShape, ...]:
        return self.shapes


def keeping(*shapes: KVShape) -> Keeping:
    return Keeping(architecture="", vocab_size=1, max_model_len=100, checkpoint_dtype="float32", shapes=shapes)


LATENT, FULL, RECENT = KVShape(1, 48, 0, None), KVShape(2, 24, 24, None), KVShape(4, 24, 24, 32)


def test_pages_of_latents_have_no_values() -> None:
    groups = page_groups(keeping(LATENT, LATENT, LATENT), 4)
    assert groups == (PageGroup((0, 1, 2), 4, 1, 48, has_values=False),)
    kv = KVPool(groups, 5, torch.float32, torch.device("cpu"))
    assert kv.blocks.nbytes == 5 * page_bytes(groups, torch.float32) == 5 * 3 * 4 * 48 * 4
    assert groups[0].bytes_per_token(torch.bfloat16) == 3 * 48 * 2
    for i, layer in enumerate(kv.layers):
        assert layer.values is layer.keys
        assert layer.keys.shape == (5, 1, 4, 48)
        layer.keys[1] = i + 1
    kv.copy_pages(torch.tensor([1]), torch.tensor([4]))
    assert [float(layer.keys[4].mean()) for layer in kv.layers] == [1, 2, 3]


def test_a_page_of_latents_is_as_large_as_one_of_keys_and_values() -> None:
    """Two full layers beside windows of twice as many heads; latents fit a part each."""
    narrow = KVShape(1, 24, 0, 16)
    groups = page_groups(keeping(RECENT, FULL, narrow, FULL, RECENT, narrow, narrow, narrow, narrow), 4)
    assert groups == (
        PageGroup((1, 3), 4, 2, 24),
        PageGroup((2, 5, 6, 7), 8, 1, 24, 16, has_values=False),
        PageGroup((8,), 8, 1, 24, 16, has_values=False),
        PageGroup((0, 4), 2, 4, 24, 32),
    )
    kv = KVPool(groups, 4, torch.float32, torch.device("cpu"))
    for layer in kv.layers:
        layer.keys[layer.group], layer.values[layer.group] = 1, 1
    assert (kv.blocks == 1).all(dim=2).sum(dim=0).tolist() == [4, 4, 1, 4]
    assert page_bytes(groups, torch.float32) == 4 * 4 * 48 * 4


def test_shapes_that_no_page_can_hold_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers that keep all positions"):
        page_groups(keeping(FULL, LATENT), 4)
    with pytest.raises(ConfigError, match="--page-size 1 does not suit"):
        page_groups(keeping(FULL, RECENT), 1)


@pytest.mark.parametrize(
    ("free", "asked_gib", "budget"),
    [(20 * GIB, 0.0, 2 * GIB), (100 * GIB, 0.0, 4 * GIB), (20 * GIB, 7.5, int(7.5 * GIB))],
)
def test_cpu_budget(tmp_path: Path, free: int, asked_gib: float, budget: int) -> None:
    assert cpu_budget(make_config(tmp_path, cpu_kv_cache_gib=asked_gib), Memory(free)) == budget


def test_the_pool_s_size(tmp_path: Path, model: ModelConfig) -> None:
    groups = page_groups(model, 16)
    one = page_bytes(groups, torch.float32)
    config = make_config(tmp_path, num_pages=0)
    assert plan_pool(config, model, groups, torch.float32, 100 * one + 5) == PoolSize(100, 1000)
    assert plan_pool(config, model, groups, torch.float32, 10 * one) == PoolSize(10, 160)  # the length follows the pool
    assert plan_pool(make_config(tmp_path, num_pages=7), model, groups, torch.float32, 0) == PoolSize(7, 112)
    asked = make_config(tmp_path, num_pages=10, max_model_len=100)
    assert plan_pool(asked, model, groups, torch.float32, 0) == PoolSize(10, 100)


def test_what_does_not_fit_names_the_flags(tmp_path: Path, model: ModelConfig) -> None:
    groups = page_groups(model, 16)
    with pytest.raises(ConfigError, match=r"no KV page .* --cpu-kv-cache-gib"):
        plan_pool(make_config(tmp_path, num_pages=0), model, groups, torch.float32, 100)
    with pytest.raises(ConfigError, match=r"--max-model-len 200 .* hold sequences of 160 tokens.*--num-pages"):
        plan_pool(make_config(tmp_path, num_pages=10, max_model_len=200), model, groups, torch.float32, 0)
    with pytest.raises(ConfigError, match=r"--max-model-len 2000 exceeds the model's 1000 positions"):
        plan_pool(make_config(tmp_path, max_model_len=2000), model, groups, torch.float32, GIB)


@pytest.mark.parametrize(
    ("wanted", "checkpoint", "device", "flags", "chosen"),
    [
        ("auto", "bfloat16", "cpu", "avx512f", torch.float32),
        ("auto", "bfloat16", "cpu", "avx512_bf16", torch.bfloat16),
        ("auto", "bfloat16", "cpu", "amx_bf16 amx_tile", torch.bfloat16),
        ("auto", "float16", "cpu", "amx_bf16", torch.float32),
        ("auto", "float32", "cpu", "amx_bf16", torch.float32),
        ("bfloat16", "float32", "cpu", "", torch.bfloat16),
        ("float32", "bfloat16", "cuda", "", torch.float32),
        ("auto", "bfloat16", "cuda", "", torch.bfloat16),
        ("auto", "float16", "cuda", "", torch.float16),
    ],
)
def test_dtype(wanted: str, checkpoint: str, device: str, flags: str, chosen: torch.dtype) -> None:
    assert choose_dtype(wanted, checkpoint, torch.device(device), flags) == chosen  # type: ignore[arg-type]


def test_dtype_of_quantized_weights() -> None:
    """Floats beside them are float16 in many checkpoints; and with float32 no product would be of integers."""
    for checkpoint in ("bfloat16", "float16", "float32"):
        assert choose_dtype("auto", checkpoint, torch.device("cpu"), "", is_quantized=True) == torch.bfloat16
    assert choose_dtype("float32", "bfloat16", torch.device("cpu"), "", is_quantized=True) == torch.float32
    assert choose_dtype("auto", "float16", torch.device("cuda"), "", is_quantized=True) == torch.float16


def test_dtypes_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="--dtype float16"):
        choose_dtype("float16", "float16", torch.device("cpu"), "")
    with pytest.raises(ConfigError, match="int8"):
        choose_dtype("auto", "int8", torch.device("cpu"), "")


@pytest.mark.parametrize("wanted", ["tpu", "mps", "cuda:99", "nonsense:"])
def test_devices_that_are_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"--device.*{wanted}"):
        open_device(wanted, 1)


def test_free_memory_is_plausible() -> None:
    assert 1 << 20 < CpuDevice(1).free_memory() < 1 << 50
