"""What others published of Llama 3 on GPUs of 2024, beside which tests put the planner's bounds.

Rounded figures of several systems. Some of them cannot be: a step is no faster than its weights can be read.
"""

from typing import NamedTuple

from penstock.lab.planning.costs import Costs
from penstock.lab.planning.machines import load_machines
from penstock.lab.planning.plan import Layout, Plan
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config


def llama(num_layers: int, hidden: int, inner: int, num_heads: int) -> dict[str, object]:
    """A config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }


LLAMAS = {"8B": llama(32, 4096, 14336, 32), "70B": llama(80, 8192, 28672, 64), "405B": llama(126, 16384, 53248, 128)}


class Measured(NamedTuple):
    """A configuration, and what was measured of it; times in ms."""

    model: str
    weights: str  # and keys and values
    machine: str
    layout: Layout
    input_len: int
    ttft: float
    itl: float
    tokens_per_second: dict[int, float]  # by batch
    max_batch: int | None  # of 4,096 tokens each

    @property
    def name(self) -> str:
        tp, pp, *_ = self.layout
        stages = f", TP {tp} x PP {pp}" if pp > 1 else f", TP {tp}" if tp > 1 else ""
        return f"{self.model} {self.weights.upper()}, {self.layout.num_devices} x {self.machine.upper()}{stages}"

    @property
    def plan(self) -> Plan:
        decoder = parse_model_config(LLAMAS[self.model])
        assert isinstance(decoder, Decoder)
        return Plan(Costs(decoder, self.weights, self.weights), load_machines()[self.machine], self.layout)


_ONE = Layout()
_SWEEP = (1, 4, 8, 16, 32, 64, 128, 256)
MEASURED = (
    Measured(
        *("8B", "fp16", "a100", _ONE, 2048, 45, 7.1),
        dict(zip(_SWEEP, (140, 530, 980, 1850, 3600, 5800, 7200, 7800), strict=True)),
        120,
    ),
    Measured("8B", "int8", "a100", _ONE, 2048, 35, 5.8, {1: 172, 32: 4200, 64: 7000}, 200),
    Measured(
        *("8B", "fp16", "h100", _ONE, 2048, 18, 4.2),
        dict(zip(_SWEEP, (238, 900, 1700, 3200, 6100, 9800, 14200, 16500), strict=True)),
        120,
    ),
    Measured("8B", "fp8", "h100", _ONE, 2048, 12, 3.5, {1: 286, 32: 7800, 64: 13500}, 240),
    Measured("70B", "fp16", "a100", Layout(2), 4096, 320, 15, {1: 67, 32: 1400}, 10),
    Measured("70B", "int8", "a100", Layout(4), 4096, 95, 6.5, {1: 154, 32: 3800}, 100),
    Measured("70B", "fp16", "h100", Layout(2), 4096, 130, 9, {1: 111, 32: 2400}, 10),
    Measured("70B", "fp8", "h100", Layout(4), 4096, 35, 3.5, {1: 286, 32: 7200}, 120),
    Measured("70B", "fp8", "h100", Layout(8), 4096, 20, 2.2, {1: 455, 32: 12000}, 280),
    Measured("405B", "int8", "a100", Layout(8, 2), 2048, 380, 22, {1: 45, 16: 600}, None),
    Measured("405B", "fp8", "h100", Layout(8), 2048, 120, 11, {1: 91, 16: 1200}, None),
    Measured("405B", "fp8", "h100", Layout(8, 2), 2048, 75, 7, {1: 143, 16: 2000}, None),
)


class Beside(NamedTuple):
    """One figure and its bound."""

    what: str  # "TTFT, ms", "ITL, ms", "tokens/s at N", "batch of 4,096"
    published: float
    bound: float
    is_beyond: bool  # the bound: no machine with these rates and this memory can do it

    @property
    def difference(self) -> float:
        return self.published / self.bound - 1


def beside(measured: Measured) -> list[Beside]:
    """Each figure of a configuration beside its bound."""
    plan, context = measured.plan, measured.input_len
    found = []
    for what, published, least in (
        ("TTFT, ms", measured.ttft, 1e3 * plan.prefill(context).seconds),
        ("ITL, ms", measured.itl, 1e3 * plan.decode_step(1, context).seconds),
    ):
        found.append(Beside(what, published, least, published < least))
    for batch, published in measured.tokens_per_second.items():
        most, fits = plan.tokens_per_second(batch, context), batch <= plan.max_batch(context)
        found.append(Beside(f"tokens/s at {batch}", published, most, published > most or not fits))
    if measured.max_batch is not None:
        most = plan.max_batch(4096)
        found.append(Beside("batch of 4,096", measured.max_batch, most, measured.max_batch > most))
    return found
