"""A family of models, a weight format, an adapter and an attention backend, each defined here alone."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from penstock.config import ConfigError
from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.models.attention import UNROTATED, Rotation
from penstock.gpu_worker.models.blocks.mlp import MLPBlock
from penstock.gpu_worker.models.decoder import DecoderModel, DecoderWeights
from penstock.gpu_worker.models.linear import Linear, PlainLinear
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.gpu_worker.models.native_decoder import NativeDecoderModel
from penstock.gpu_worker.state.kv_pool import LayerPages, PageGroup
from penstock.ipc.messages import SamplingParams
from penstock.kernels.activation import Activation
from penstock.kernels.attention.kv_quantization import KVScales
from penstock.kernels.attention.paged_attention import paged_attention_reference
from penstock.kernels.attention.qk_norm_rope_write import QKNorms, qk_norm_rope_write_reference
from penstock.kernels.native.build import BuildError
from penstock.kernels.native.build import build as build_library
from penstock.kernels.native.library import Library, PackedLinear
from penstock.models.check import check_checkpoint
from penstock.models.description.decoder import Attention, Decoder, DenseMLP, Layer, LearnedPositions, Norm
from penstock.models.description.names import Names
from penstock.models.families import registry
from penstock.models.files.source import LoadError
from penstock.models.finding.registry import open_checkpoint
from penstock.models.parsing.decoders import decoder_family
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.weights.decoder import decoder_tensors
from tests.gpu_worker.checkpoints import VOCAB_SIZE, attention_of, prompts
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.kernels.native.test_native import _TINY, World, dense_config, weights, whole

# A family: learned positions in place of rotation, attention and MLP side by side, no norms of their own, squared ReLU.

HIDDEN, HEADS, LAYERS, MAX_LEN = 48, 4, 2, 128
HEAD_DIM = HIDDEN // HEADS


def parse(architecture: str, fields: JsonFields) -> Decoder:
    hidden, heads = fields.whole("width"), fields.whole("heads")
    norm = Norm(eps=1e-6, has_weight=False)
    mixer = Attention(
        num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads, scale=(hidden // heads) ** -0.5, o_bias=True
    )
    mlp = DenseMLP(size=3 * hidden, activation="relu2", is_gated=False)
    return Decoder(
        architecture=architecture,
        vocab_size=fields.whole("vocab_size"),
        max_model_len=fields.whole("positions"),
        checkpoint_dtype="float32",
        hidden_size=hidden,
        layers=(Layer(mixer_norm=norm, mixer=mixer, mlp=mlp, is_parallel=True),) * fields.whole("depth"),
        final_norm=norm,
        tied_embeddings=True,
        positions=LearnedPositions(count=fields.whole("positions")),
        names=Names(
            embedding="wte",
            positions="wpe",
            layer="blocks.{}.",
            qkv=("q", "k", "v"),
            o="out",
            gate_up=("up",),
            down="down",
        ),
    )


TINKER = decoder_family(("TinkerForCausalLM",), parse)


def normed_rows(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), eps=1e-6)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random checkpoint, of a family that is known in this test alone."""
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    registry.register(TINKER)
    raw = {"vocab_size": VOCAB_SIZE, "width": HIDDEN, "heads": HEADS, "depth": LAYERS, "positions": MAX_LEN}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["TinkerForCausalLM"]}))
    generator = torch.Generator().manual_seed(5)
    shapes = decoder_tensors(parse("TinkerForCausalLM", JsonFields("config.json", raw)))
    stored = {name: torch.empty(shape).normal_(0, 0.3, generator=generator) for name, shape in shapes.items()}
    save_file(stored, tmp_path / "model.safetensors")
    return tmp_path


def plain_greedy(stored: dict[str, Tensor], prompt: list[int], num_tokens: int) -> list[int]:
    """The reference: dense attention over the whole text for each token."""
    ids = list(prompt)
    for _ in range(num_tokens):
        x = stored["wte.weight"][ids] + stored["wpe.weight"][: len(ids)]
        for i in range(LAYERS):

            def times(y: Tensor, name: str, block: str = f"blocks.{i}") -> Tensor:
                return y @ stored[f"{block}.{name}.weight"].T

            normed = normed_rows(x)
            q, k, v = (times(normed, name).view(len(ids), HEADS, HEAD_DIM).transpose(0, 1) for name in "qkv")
            scores = (q @ k.transpose(1, 2)) / math.sqrt(HEAD_DIM)
            masked = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
            attended = (masked.softmax(-1) @ v).transpose(0, 1).flatten(1)
            x = (
                x
                + times(attended, "out")
                + stored[f"blocks.{i}.out.bias"]
                + times(times(normed, "up").relu() ** 2, "down")
            )
        ids.append(int((normed_rows(x)[-1] @ stored["wte.weight"].T).argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@torch.inference_mode()
def test_a_family_is_one_file(folder: Path, kernels: str) -> None:
    """Chunked prompts beside decodes in a pool that preempts; with the sampler for what the model returns."""
    check_checkpoint(open_checkpoint(folder), with_tokenizer=False)
    engine = Engine(folder, cpu_kernels=kernels, **schedule(24, 16, 1, num_tokens=112, cached=True))
    texts = prompts((30, 14, 15, 1), seed=2)
    outputs = engine.run(texts, SamplingParams(max_tokens=12, temperature=0.0))
    reader = open_checkpoint(folder).tensors()
    stored = {
        name: torch.frombuffer(found.read(), dtype=torch.float32).view(found.shape) for name, found in reader.items()
    }
    assert [output for (output,) in outputs] == [plain_greedy(stored, text, 12) for text in texts]
    assert engine.scheduler.stats().num_preemptions > 0


def test_a_family_s_checkpoints_are_checked_before_torch_is_needed(folder: Path) -> None:
    save_file({"wpe.weight": torch.zeros(MAX_LEN, HIDDEN)}, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"lacks wte\.weight"):
        check_checkpoint(open_checkpoint(folder), with_tokenizer=False)


def test_elsewhere_the_family_is_unknown() -> None:
    with pytest.raises(ConfigError, match="TinkerForCausalLM is not supported"):
        registry.parse_model_config({"architectures": ["TinkerForCausalLM"]})


# A weight format: 8 bits and a scale for each output.


class Coded(NamedTuple):
    codes: Tensor  # int8[out, in]
    scales: Tensor  # fp32[out, 1]

    @classmethod
    def of(cls, linear: Linear) -> "Coded":
        assert isinstance(linear, PlainLinear)
        scales = linear.weight.abs().amax(1, keepdim=True) / 127
        return cls((linear.weight / scales).round().to(torch.int8), scales)

    def weight(self) -> Tensor:
        return self.codes * self.scales

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        return functional.linear(x, self.codes.float()) * self.scales.T

    def of_activation(self, x: Tensor, activation: Activation, step: ForwardInputs) -> Tensor:
        return self(activation(x), step)

    def pack(self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        return library.pack(self.weight(), interleaved=interleaved, rounds_inputs=rounds_inputs)


def with_products(stored: DecoderWeights, change: type[Coded] | None = None) -> DecoderWeights:
    """The same model with coded weights, or with plain ones of the same values."""

    def changed(linear: Linear) -> Linear:
        return Coded.of(linear) if change else PlainLinear(Coded.of(linear).weight())

    def changed_mlp(mlp: object) -> MLPBlock:
        assert isinstance(mlp, MLPBlock)
        return mlp._replace(gate_up=changed(mlp.gate_up), down=changed(mlp.down))

    layers = tuple(
        layer._replace(
            mixer=attention_of(layer)._replace(qkv=changed(attention_of(layer).qkv), o=changed(attention_of(layer).o)),
            mlp=changed_mlp(layer.mlp),
        )
        for layer in stored.layers
    )
    return stored._replace(layers=layers)


@torch.inference_mode()
def test_a_weight_format_enters_at_the_products() -> None:
    config = dense_config(_TINY)
    stored = weights(config, torch.float32)
    world = World(config, 16)
    expected = world.run(DecoderModel(config, with_products(stored)), whole(world))
    models: list[DecoderModel | NativeDecoderModel] = [DecoderModel(config, with_products(stored, Coded))]
    with suppress(BuildError):  # then torch's kernels alone
        models.append(NativeDecoderModel(config, with_products(stored, Coded), Library(build_library(), 1)))
    for model in models:
        for one, other in zip(world.run(model, whole(world)), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# An adapter: a product of low rank beside a weight, for the tokens of some rows.


class Adapted(NamedTuple):
    base: PlainLinear
    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]
    rows: frozenset[int]

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        assert step is not None
        is_adapted = torch.tensor([row in self.rows for row in step.rows.tolist()])
        chosen = is_adapted.repeat_interleave(step.query_start_loc.diff())[:, None]
        return self.base(x, step) + chosen * (x @ self.down.T @ self.up.T)

    def of_activation(self, x: Tensor, activation: Activation, step: ForwardInputs) -> Tensor:
        return self(activation(x), step)

    def pack(self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        raise NotImplementedError


@torch.inference_mode()
def test_an_adapter_sees_the_rows_of_the_step() -> None:
    """Its rows' tokens are those of a model with the product added to the weight; the others are untouched."""
    config = dense_config(_TINY)
    stored = weights(config, torch.float32)
    down, up = 0.1 * torch.randn(3, config.hidden_size), torch.randn(stored_qkv(stored).weight.shape[0], 3)
    world = World(config, 16)

    def run(qkv: Linear) -> list[Tensor]:
        first, *others = stored.layers
        layers = (first._replace(mixer=attention_of(first)._replace(qkv=qkv)), *others)
        return world.run(DecoderModel(config, stored._replace(layers=layers)), whole(world))

    base = stored_qkv(stored)
    plain, merged = run(base), run(PlainLinear(base.weight + up @ down))
    found = run(Adapted(base, down, up, frozenset({1, 3})))
    for row, logits in enumerate(found):
        torch.testing.assert_close(logits, merged[row] if row in (1, 3) else plain[row], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(plain[row], merged[row], rtol=1e-2, atol=1e-2)


def stored_qkv(stored: DecoderWeights) -> PlainLinear:
    qkv = attention_of(next(iter(stored.layers))).qkv
    assert isinstance(qkv, PlainLinear)
    return qkv


# An attention backend: the operations' plain references.


class PlainAttention:
    num_steps = 0

    def __init__(self, inputs: ForwardInputs, group: PageGroup) -> None:
        type(self).num_steps += 1
        self._inputs = inputs

    def write(
        self,
        qkv: Tensor,
        norms: QKNorms,
        rotation: Rotation | None,
        pages: LayerPages,
        q_scale: Tensor | None = None,
        *,
        writes: bool = True,
        kv_scales: KVScales | None = None,
    ) -> Tensor:
        positions, cos_sin = rotation or UNROTATED
        return qk_norm_rope_write_reference(
            qkv,
            positions,
            cos_sin,
            norms,
            pages.keys,
            pages.values,
            self._inputs.slot_mapping,
            q_scale,
            writes=writes,
        )

    def attend(
        self,
        q: Tensor,
        pages: LayerPages,
        *,
        scale: float,
        window: int | None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        inputs = self._inputs
        lengths = (inputs.query_start_loc, inputs.seq_lens)
        return paged_attention_reference(
            q, pages.keys, pages.values, inputs.page_table, *lengths, scale=scale, window=window
        )


@torch.inference_mode()
def test_an_attention_backend_is_begun_once_a_step() -> None:
    config: Decoder = dense_config(_TINY)
    stored = weights(config, torch.float32)
    world = World(config, 16)
    expected = world.run(DecoderModel(config, stored), whole(world))
    model = DecoderModel(config, stored, PlainAttention)
    model.prepare(CpuDevice(1), 4, 512)
    for one, other in zip(world.run(model, whole(world)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert PlainAttention.num_steps == 1
