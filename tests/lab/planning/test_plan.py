"""Plans: the exact figures of worked examples, and what must hold of all."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.config import ConfigError
from penstock.lab.commands.plan import main
from penstock.lab.planning.costs import BYTES, Costs
from penstock.lab.planning.machines import load_machines
from penstock.lab.planning.plan import Layout, Load, Plan, batch_for, smallest
from penstock.models.description.decoder import Decoder, positions_seen
from penstock.models.families.registry import parse_model_config
from penstock.models.quantization import with_quantization
from tests.lab.planning.published_steps import LLAMAS, MEASURED, beside

GIB = 1 << 30
A100, H100 = (load_machines()[name] for name in ("a100", "h100"))


def described(raw: dict[str, Any]) -> Decoder:
    decoder = parse_model_config(raw)
    assert isinstance(decoder, Decoder)
    return decoder


MODELS = {name: described(raw) for name, raw in LLAMAS.items()}


@pytest.mark.parametrize(
    ("name", "billions", "in_16_bits", "in_8", "in_4", "num_80gb", "kv", "of_4096"),
    [
        ("8B", 8.03, 16.1, 8.0, 4.0, 1, 131_072, 0.5),
        ("70B", 70.6, 141.2, 70.6, 35.3, 2, 327_680, 1.25),
        ("405B", 405.1, 810.2, 405.1, 202.6, 11, 516_096, 1.97),
    ],
)
def test_weights_and_keys_and_values(
    name: str, billions: float, in_16_bits: float, in_8: float, in_4: float, num_80gb: int, kv: int, of_4096: float
) -> None:
    costs = Costs(MODELS[name])
    assert costs.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    for weights, expected in (("fp16", in_16_bits), ("int8", in_8), ("int4", in_4)):
        assert costs._replace(weights=weights).weight_bytes / 1e9 == pytest.approx(expected, rel=0.01)
    assert -(-costs.weight_bytes // A100.memory) == num_80gb
    assert costs.kv_bytes_per_token == kv
    assert costs.kv_bytes(4096) / GIB == pytest.approx(of_4096, rel=0.01)
    assert costs._replace(kv="int8").kv_bytes(4096) == costs.kv_bytes(4096) / 256 * 130  # a scale for 128 numbers
    assert costs._replace(kv="int4").kv_bytes(4096) == costs.kv_bytes(4096) / 256 * 80


def test_batches_of_the_examples() -> None:
    """They divide GB by GiB, and count 4 GB beside the weights on one device, 6 GB on two."""
    for name, weights, memory, others, expected in (
        ("8B", "fp16", 80, 4, 119),
        ("70B", "fp16", 160, 6, 10),
        ("70B", "int8", 160, 6, 66),
    ):
        costs = Costs(MODELS[name], weights)
        left = memory - costs.weight_bytes / 1e9 - others
        assert int(left / (costs.kv_bytes(4096) / GIB)) == expected
    assert not 141.2e9 + 32 * Costs(MODELS["70B"]).kv_bytes(4096) + 8e9 <= 2 * A100.memory
    assert Plan(Costs(MODELS["70B"]), A100, Layout(tp=2)).max_batch(4096) < 32
    assert Plan(Costs(MODELS["70B"], "int8"), A100, Layout(tp=2)).max_batch(4096) >= 32
    assert Plan(Costs(MODELS["8B"]), A100).max_batch(2048) < 256, "64 GiB of KV beside 16.1 GB of weights"
    assert 128 * 1024 * 32 * Costs(MODELS["8B"]).kv_bytes_per_token == 512 * GIB


def test_other_exact_figures() -> None:
    """13B with heads that share nothing; scores without a fused kernel; 7B at 2 TB/s; 189 of 160 GB."""
    of_13b = described(LLAMAS["8B"] | {"num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40,
                                       "hidden_size": 5120})  # fmt: skip
    assert Costs(of_13b).kv_bytes_per_token == pytest.approx(0.82e6, rel=0.01)
    assert GIB == 32 * 4096**2 * 2
    assert A100.bandwidth / (7e9 * BYTES["fp16"]) == pytest.approx(143, rel=0.01)
    costs = Costs(MODELS["70B"])
    needed = costs.weight_bytes / 1e9 + 32 * costs.kv_bytes(4096) / GIB + 4 + 4
    assert needed == pytest.approx(189, rel=0.01)
    assert needed - 160 == pytest.approx(29, rel=0.02)
    of_int8 = costs._replace(weights="int8")
    assert of_int8.weight_bytes / 1e9 + 32 * costs.kv_bytes(4096) / GIB + 8 == pytest.approx(119, rel=0.01)
    assert 32 * costs._replace(kv="int8").kv_bytes(4096) / GIB == pytest.approx(20 * 130 / 128, rel=0.01)
    for batch, of_each in ((32, (16, 40, 62.7)), (128, (64, 160, 250.9)), (256, (128, 320, 501.8))):
        for name, gib in zip(MODELS, of_each, strict=True):
            assert batch * Costs(MODELS[name]).kv_bytes(4096) / GIB == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize(
    ("name", "memory", "bandwidth", "fp16", "of_8_bits", "link"),
    [
        ("a100", 80e9, 2.0e12, 312e12, 624e12, 600e9),
        ("h100", 80e9, 3.35e12, 989e12, 1978e12, 900e9),
        ("h200", 141e9, 4.8e12, 989e12, 1978e12, 900e9),
        ("l40s", 48e9, 864e9, 362e12, None, None),
        ("rtx-4090", 24e9, 1008e9, 165e12, None, None),
    ],
)
def test_machines(
    name: str, memory: float, bandwidth: float, fp16: float, of_8_bits: float | None, link: float | None
) -> None:
    machine = load_machines()[name]
    assert (machine.memory, machine.bandwidth, machine.rate("fp16")) == (memory, bandwidth, fp16)
    assert machine.rate("int8") == of_8_bits or of_8_bits is None
    assert machine.link == link or link is None


def test_what_others_measured() -> None:
    """Which of it cannot be."""
    found = {(measured.name, each.what): each for measured in MEASURED for each in beside(measured)}
    beyond = {key for key, each in found.items() if each.is_beyond}
    for name in ("8B FP16, 1 x A100", "8B FP16, 1 x H100", "70B FP16, 2 x A100, TP 2", "70B FP16, 2 x H100, TP 2",
                 "70B INT8, 4 x A100, TP 4", "70B FP8, 4 x H100, TP 4", "70B FP8, 8 x H100, TP 8",
                 "405B FP8, 8 x H100, TP 8", "405B FP8, 16 x H100, TP 8 x PP 2"):  # fmt: skip
        assert (name, "ITL, ms") in beyond
        assert (name, "tokens/s at 1") in beyond
    for gpu in ("A100", "H100"):
        assert (f"8B FP16, 1 x {gpu}", "tokens/s at 256") in beyond, "64 GiB of KV beside 16.1 GB of weights"
    assert found["8B INT8, 1 x A100", "ITL, ms"].difference > 0
    for each in found.values():
        if each.what != "tokens/s at 256":
            assert each.is_beyond == (each.difference < 0 if each.what.endswith("ms") else each.difference > 0)


@pytest.mark.parametrize(
    ("name", "weights", "machine", "tp", "least_ms", "reported_ms"),
    [
        ("8B", "fp16", A100, 1, 8.05, 7.1),
        ("8B", "fp16", H100, 1, 4.8, 4.2),
        ("70B", "fp16", A100, 2, 35.3, 15),
        ("70B", "fp16", H100, 2, 21.1, 9),
        ("70B", "int8", A100, 4, 8.8, 6.5),
        ("70B", "fp8", H100, 4, 5.3, 3.5),
        ("70B", "fp8", H100, 8, 2.6, 2.2),
        ("405B", "fp8", H100, 8, 15.1, 11),
    ],
)
def test_reported_steps_that_are_faster_than_memory(
    name: str, weights: str, machine: Any, tp: int, least_ms: float, reported_ms: float
) -> None:
    """A step reads all weights, but not the embedding's other rows, which the examples count as read, too."""
    plan = Plan(Costs(MODELS[name], weights), machine, Layout(tp=tp))
    step = plan.decode_step(1, 1)
    assert step.bound_by == "memory"
    everything = plan.costs.weight_bytes / tp / machine.bandwidth
    assert 1e3 * everything == pytest.approx(least_ms, rel=0.01, abs=0.05)
    assert reported_ms / 1e3 < step.seconds <= everything
    assert Plan(plan.costs, machine, Layout(tp=tp, pp=2)).decode_step(1, 1) == step, "stages take turns for one request"


def test_ridge_points_and_what_bounds() -> None:
    assert A100.rate("fp16") / A100.bandwidth == pytest.approx(156)
    assert H100.rate("fp16") / H100.bandwidth == pytest.approx(295, rel=0.01)
    plan = Plan(Costs(MODELS["8B"]), H100)
    assert plan.decode_step(64, 1).bound_by == "memory"
    assert plan.decode_step(512, 1).bound_by == "compute"
    assert plan.prefill(4096).bound_by == "compute"
    assert 32 * plan.costs.kv_bytes(4096) == 16 * GIB


def test_the_batch_at_a_time_per_token() -> None:
    """70B over eight devices: the batch is what memory holds, or what the bandwidth reads in the time."""
    costs = Costs(MODELS["70B"])
    plan = Plan(costs, A100, Layout(tp=8))
    assert costs.kv_bytes_per_token / 8 == 40_960
    for context in (16384, 65536):
        read = int((0.05 * A100.bandwidth - costs.weight_bytes_read(1) / 8) / (40_960 * context))
        assert plan.decode_step(read, context).seconds <= 0.05 < plan.decode_step(read + 1, context).seconds


MIXTURE = LLAMAS["8B"] | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}


def test_experts_are_read_as_tokens_use_them() -> None:
    """Mixtral 8x7B: 46.7 billion weights, of which a token uses 12.9."""
    costs = Costs(described(MIXTURE))
    assert costs.num_parameters / 1e9 == pytest.approx(46.7, rel=0.005)
    embedding = 32000 * 4096
    assert (costs.num_active + embedding) / 1e9 == pytest.approx(12.9, rel=0.005)
    read = [costs.weight_bytes_read(num_tokens) / 2 for num_tokens in (1, 2, 4, 64)]
    assert read[0] == costs.num_active
    assert read == sorted(read)
    assert read[-1] + embedding == pytest.approx(costs.num_parameters, rel=0.001)


WINDOWED = LLAMAS["8B"] | {"architectures": ["MistralForCausalLM"], "sliding_window": 1024}


def test_windows_bound_keys_and_values() -> None:
    costs = Costs(described(WINDOWED))
    assert costs.kv_bytes(512) == 512 * costs.kv_bytes_per_token
    assert costs.kv_bytes(9999) == 1024 * costs.kv_bytes_per_token


@given(st.integers(0, 50), st.integers(1, 50), st.none() | st.integers(1, 60))
def test_positions_seen(first: int, count: int, window: int | None) -> None:
    each = [p + 1 if window is None else min(p + 1, window) for p in range(first, first + count)]
    assert positions_seen(first, count, window) == sum(each)


@settings(deadline=None, max_examples=15)
@given(st.sampled_from(["fp16", "int8"]), st.integers(16, 8192), st.integers(1, 2048), st.floats(0.1, 50))
def test_the_smallest_plan_serves_the_load(weights: str, input_len: int, output_len: int, qps: float) -> None:
    load = Load(input_len, output_len, qps, tpot=0.05)
    plan = smallest(Costs(MODELS["70B"], weights), H100, load)
    if plan is None:
        return
    batch = batch_for(plan, load)
    assert batch is not None
    assert batch <= plan.max_batch(load.context)
    assert plan.decode_step(batch, load.context).seconds <= 0.05
    assert plan.tokens_per_second(batch, load.context) >= qps * output_len
    assert plan.max_context(batch) >= load.context


def test_what_every_rank_holds() -> None:
    """With more ranks than KV heads each has one of them, and each stage what it needs of a tied embedding."""
    costs = Costs(MODELS["8B"])
    norms, hidden = 2 * 32 + 1, 4096
    kv = 32 * 2 * 8 * 128 * hidden  # weights that make keys and values
    for tp, copies in ((2, 1), (8, 1), (16, 2), (32, 4)):
        more = norms * hidden * (tp - 1) + kv * (copies - 1)
        assert Plan(costs, H100, Layout(tp)).ledger.weight_bytes == costs.weight_bytes + 2 * more
    room = H100.memory - H100.runtime
    for tp in (8, 16, 32):
        kept = Plan(costs, H100, Layout(tp)).max_batch(4096) * costs.kv_bytes(4096) / 8
        assert room * 0.8 < kept < room, "of one KV head on each rank"
    tied = Costs(described(LLAMAS["8B"] | {"tie_word_embeddings": True}))
    assert Plan(tied, H100, Layout(pp=2)).ledger.weight_bytes == tied.weight_bytes + 2 * 128256 * hidden
    with pytest.raises(ConfigError, match="only 32 layers"):
        Plan(costs, H100, Layout(pp=33)).max_batch(1)


def test_every_rank_has_the_vision_tower() -> None:
    text = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 160}
    tower = {"image_size": 56, "patch_size": 14, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    said = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    model = described(said | {"vision_config": {**tower, "num_attention_heads": 2}})
    assert model.vision is not None
    num_weights = sum(math.prod(shape) for shape in model.vision.tensors.values())
    for weights, size in (("fp32", 4), ("fp16", 2), ("int4", 2)):
        for layout, num_towers in ((Layout(), 1), (Layout(2), 2), (Layout(pp=2), 0)):  # stages take texts only
            seeing, blind = (
                Plan(Costs(each, weights), H100, layout).ledger.weight_bytes
                for each in (model, replace(model, vision=None))
            )
            assert seeing - blind == num_towers * size * num_weights


def test_redundant_experts_take_memory() -> None:
    costs = Costs(described(MIXTURE))
    split = Plan(costs, H100, Layout(tp=4))
    of_expert = 32 * 3 * 4096 * 14336 * BYTES["fp16"]
    spread = [Plan(costs, H100, Layout(tp=4, ep=True, num_redundant=number)) for number in (0, 4)]
    assert [plan.ledger.weight_bytes - split.ledger.weight_bytes for plan in spread] == [0, 4 * of_expert]
    assert spread[1].max_batch(4096) == split.max_batch(4096) - math.ceil(of_expert / (costs.kv_bytes(4096) / 4))


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMAS["8B"]))
    options = [str(tmp_path), "--gpu", "a100", "--context", "4096", "--batch", "32", "--price-per-hour", "2"]
    code, out, _ = run(capsys, *options, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["weight_bytes"] == pytest.approx(16.06e9, rel=0.001)
    assert found["kv_bytes_per_token"] == 131072
    assert found["kv_bytes_per_sequence"] * 32 == 16 * GIB
    assert found["bound_by"] == "memory"
    assert found["fits"]
    rate = found["tokens_per_second"]
    assert rate == pytest.approx(32e3 / found["decode_step_ms"])
    assert found["cost_per_million_tokens"] == pytest.approx(2 / 3600 / rate * 1e6)
    code, out, _ = run(capsys, *options)
    assert code == 0
    assert f"at most {rate:,.0f} tokens/s" in " ".join(out.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "b1000"], "--gpu b1000 is not known: there are a100, h100"),
        (["--tpot", "0.1"], "a target is missed"),
        (["--machines", "absent.toml"], "absent.toml"),
        (["--input-len", "200000"], "sequences of 200,256 tokens: the model's may have"),
        (["--context", "200000"], "sequences of 200,000 tokens: the model's may have"),
        (["--tp", "2", "--enable-expert-parallel"], "LlamaForCausalLM has no experts"),
        (["--tp", "2", "--num-redundant-experts", "4"], "--num-redundant-experts needs --enable-expert-parallel"),
        (["--tp", "3"], "--tensor-parallel-size 3: LlamaForCausalLM has 32 attention heads"),
    ],
)
def test_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMAS["8B"]))
    code, out, error = run(capsys, str(tmp_path), *options)
    assert (code, out) == (2, "")
    assert said in error


@pytest.mark.parametrize(
    ("quantization", "bits", "head_bits"), [("int8", 8, 8), ("fp8", 8, 8), ("int4", 4 + 24 / 32, 8)]
)
def test_quantized_at_load(quantization: str, bits: float, head_bits: float) -> None:
    """Bits of a weight with their scales; the embedding stays in 16."""
    decoder = with_quantization(MODELS["8B"], quantization)
    assert isinstance(decoder, Decoder)
    vocabulary = 128256 * 4096
    body = Costs(decoder).num_parameters - 2 * vocabulary
    costs = Costs(decoder)
    assert costs.weight_bytes == pytest.approx((body * bits + vocabulary * (16 + head_bits)) / 8, rel=2e-3)
    read = (body * bits + vocabulary * head_bits) / 8
    assert costs.weight_bytes_read(1) == pytest.approx(read, rel=2e-3)


def test_a_model_of_transformers_is_refused_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"architectures": ["PersimmonForCausalLM"], "vocab_size": 64, "num_hidden_layers": 1, "hidden_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, error = run(capsys, str(tmp_path))
    assert code == 2
    assert "PersimmonForCausalLM is computed by transformers' code" in error
    assert "config.json is not enough" in error


def test_quantized_at_load_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMAS["8B"]))
    _, out, _ = run(capsys, str(tmp_path), "--gpu", "a100", "--quantization", "int8")
    assert "in int8, made at load, computed in int8, on" in out
    code, _, error = run(capsys, str(tmp_path), "--quantization", "awq")
    assert code == 2
    assert "--quantization awq" in error


def test_machines_of_one_s_own(tmp_path: Path) -> None:
    file = tmp_path / "machines.toml"
    file.write_text('[desk]\nname = "Desk"\nmemory = 8e9\nbandwidth = 1e11\nlink = 1e9\nflops = { fp16 = 1e12 }\n')
    assert load_machines(file)["desk"].rate("fp8") == 1e12
    file.write_text('[desk]\nname = "Desk"\nmemory = 0\nbandwidth = 1e11\nlink = 1e9\nflops = { fp16 = 1e12 }\n')
    with pytest.raises(ConfigError, match="desk"):
        load_machines(file)


def test_states_take_memory_and_time() -> None:
    """Of Mamba 2, which keeps nothing else, and of layers beside attention."""
    sizes = {"hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 32768}
    alone = Plan(Costs(described({"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", **sizes})), H100)
    channels = 2 * 4096 + 2 * 8 * 128
    assert alone.costs.state_bytes == 64 * 4 * (128 * 64 * 128 + 3 * channels)
    assert alone.costs.kv_bytes(4096) == 0
    assert alone.max_batch(100) == alone.max_batch(100_000) == math.floor(alone.ledger.left / alone.costs.state_bytes)
    assert smallest(alone.costs, H100, Load(500, 100, qps=1.0)) is not None
    faster, slower = (alone.decode_step(batch, 100).seconds for batch in (1, 65))
    assert slower - faster == pytest.approx(2 * 64 * alone.costs.state_bytes / H100.bandwidth)
