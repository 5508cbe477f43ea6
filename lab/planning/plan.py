"""A plan: what fits a machine, how long its steps take at best, and the fewest devices that serve a load.

Times follow the roofline model (Williams, Waterman and Patterson, 2009): a step takes as long as the slowest of reading
memory, computing, and communicating with other devices. They are lower bounds that no implementation quite reaches. On
a machine that was measured with the engine itself, times are the expected ones (`step_costs.py`).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from penstock.config.groups.parallel import ParallelOptions
from penstock.config.options import ConfigError
from penstock.config.step_limits import USUAL_LEN, StepLimits
from penstock.lab.planning.costs import BYTES, Chunk, Chunks, Costs, widest
from penstock.lab.planning.machines import Machine
from penstock.lab.planning.rank_parts import RankPart, rank_parts
from penstock.models.shards.stages import stage_shares

Bound = Literal["memory", "compute", "link", "host"]
"""`host`: most of the step is overhead per step, layer and sequence, which does not depend on the model's size."""
_CPU_ACTIVATION = 4.0  # bytes per activation on a measured machine, which is a CPU
_MOST = 1 << 14  # most sequences at once
_STAGES = (1, 2, 3, 4, 6, 8)
_TENSOR_PARALLEL = (1, 2, 4, 8)


class Load(NamedTuple):
    """The load to serve; a target of None is not checked."""

    input_len: int = 1024
    output_len: int = 256
    qps: float | None = None
    ttft: float | None = None  # seconds
    tpot: float | None = None

    @property
    def context(self) -> int:
        """The longest context of a sequence."""
        return self.input_len + self.output_len


class Layout(NamedTuple):
    """How many devices hold one copy of the model, and how many copies there are."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False  # whole experts on each of the `tp` devices
    num_redundant: int = 0  # redundant experts

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def options(self) -> ParallelOptions:
        """The parallel options of a server with one copy."""
        return ParallelOptions(
            tensor_parallel_size=self.tp,
            pipeline_parallel_size=self.pp,
            enable_expert_parallel=self.ep,
            num_redundant_experts=self.num_redundant,
        )


class StepTime(NamedTuple):
    """The time of a step, and what bounds it."""

    seconds: float
    bound_by: Bound


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one copy of the model, over all its devices, in bytes."""

    memory: float
    weight_bytes: float
    activation_bytes: float
    runtime_bytes: float

    @property
    def left(self) -> float:
        """Bytes left for keys and values; negative if the model does not fit."""
        return self.memory - self.weight_bytes - self.activation_bytes - self.runtime_bytes


class Plan(NamedTuple):
    """A model on devices of one kind."""

    costs: Costs
    machine: Machine
    layout: Layout = Layout()

    @property
    def is_measured(self) -> bool:
        """Whether step times are expected values from measurements, not rooflines."""
        is_usual = (self.costs.weights, self.layout) == (self.machine.weights, Layout())
        return self.machine.steps is not None and is_usual and self.costs.decoder.quantization is None

    @property
    def ledger(self) -> Ledger:
        """The ledger with room for the activations of the largest step."""
        return self.ledger_of(StepLimits.for_device(self.machine.gpu_memory).max_num_batched_tokens)

    @property
    def limits(self) -> StepLimits:
        """The sizes of steps, if the options leave them to the device."""
        return StepLimits.for_device(self.machine.gpu_memory, self.max_batch(USUAL_LEN))

    def ledger_of(self, step_tokens: int) -> Ledger:
        """Return the ledger with room for the activations of a step of `step_tokens`."""
        num_devices = self.layout.tp * self.layout.pp
        decoder = self.costs.decoder
        numbers = step_tokens * (4 * decoder.hidden_size + widest(decoder) / self.layout.tp)
        return Ledger(
            memory=self.machine.memory * num_devices,
            weight_bytes=self.layout.tp * sum(part.weight_bytes for part in self.rank_parts),
            activation_bytes=numbers * (_CPU_ACTIVATION if self.machine.steps else BYTES["fp16"]) * num_devices,
            runtime_bytes=self.machine.runtime * num_devices,
        )

    @property
    def rank_parts(self) -> tuple[RankPart, ...]:
        """The fullest rank of each stage."""
        return rank_parts(self.costs, self.layout.options)

    @property
    def can_be_split(self) -> bool:
        """Whether workers can split the model in this layout."""
        try:
            return bool(self.rank_parts)
        except ConfigError:
            return False

    def max_batch(self, context: int) -> int:
        """Return how many sequences of this length fit on every rank, with their keys, values and states."""
        ledger = self.ledger
        room = (ledger.left + ledger.weight_bytes) / (self.layout.tp * self.layout.pp)
        kept = [(its.weight_bytes, its.costs.kv_bytes(context) + its.costs.state_bytes) for its in self.rank_parts]
        of_each = [(room - weight_bytes) / of_sequence for weight_bytes, of_sequence in kept]
        return max(0, math.floor(min(of_each)))

    def max_context(self, batch: int) -> int:
        """Return the longest sequence of which `batch` fit, within the model's positions."""
        least, most = 0, self.costs.decoder.max_model_len
        while least < most:
            middle = (least + most + 1) // 2
            if self.max_batch(middle) >= batch:
                least = middle
            else:
                most = middle - 1
        return least

    @property
    def stage_shares(self) -> tuple[float, ...]:
        """The part of a step's time that each stage of the pipeline takes."""
        return stage_shares(self.costs.decoder, self.layout.pp)

    def decode_step(self, batch: int, context: int) -> StepTime:
        """Return the time until each sequence has another token. A pipeline splits the sequences into a part per stage.

        While one stage computes a part, the others compute the other parts, and all wait for the slowest stage.
        """
        num_stages = self.layout.pp
        seconds, bound_by = self._step_of({(context - 1, 1): -(-batch // num_stages)})
        return StepTime(seconds * (num_stages * max(self.stage_shares) if batch > 1 else 1.0), bound_by)

    def prefill(self, num_tokens: int) -> StepTime:
        """Return the time of a whole prompt in one step."""
        return self._step_of({(0, num_tokens): 1})

    def tokens_per_second(self, batch: int, context: int) -> float:
        """Return the output tokens per second of all copies."""
        return batch / self.decode_step(batch, context).seconds * self.layout.dp

    def step_of(self, chunks: Sequence[Chunk]) -> StepTime:
        """Return the time of a step of these chunks."""
        return self._step_of(Counter(chunks))

    def _step_of(self, chunks: Chunks) -> StepTime:
        costs, steps = self.costs, self.machine.steps
        num_tokens = sum(count * times for (_, count), times in chunks.items())
        kept = sum(times * costs.kv_bytes(first + count) for (first, count), times in chunks.items())
        kept += 2 * sum(chunks.values()) * costs.state_bytes  # read, and written
        bound = self.step(num_tokens, costs.weight_bytes_read(num_tokens) + kept, costs.operations(chunks))
        if steps is None or not self.is_measured:
            return bound
        seconds, of_host = steps.of_step(costs.decoder, chunks)
        return StepTime(seconds, "host" if of_host > seconds / 2 else bound.bound_by)

    def step(self, num_tokens: int, bytes_read: float, operations: float) -> StepTime:
        """Return a step's roofline. Pipeline stages take turns, so it is as long as if each device had them all."""
        tp, decoder, machine = self.layout.tp, self.costs.decoder, self.machine
        # Two all-reduces in each layer send (tp - 1) / tp of the activations twice.
        sent = 2 * len(decoder.layers) * num_tokens * decoder.hidden_size * BYTES["fp16"] * 2 * (tp - 1) / tp
        times: dict[Bound, float] = {
            "memory": bytes_read / tp / machine.bandwidth,
            "compute": operations / tp / machine.rate(self.costs.weights),
            "link": sent / machine.link,
        }
        longest = max(times, key=times.__getitem__)
        return StepTime(times[longest], longest)


def batch_for(plan: Plan, load: Load) -> int | None:
    """Return the smallest batch with which a copy serves its part of the load; None: it cannot."""
    prefill = plan.prefill(load.input_len).seconds
    if load.ttft is not None and prefill > load.ttft:
        return None
    most = min(plan.max_batch(load.context), _MOST)
    if most < 1:
        return None
    batches = sorted({min(most, round(2 ** (i / 4))) for i in range(4 * _MOST.bit_length())})
    for batch in batches if load.qps is not None else batches[:1]:
        step = plan.decode_step(batch, load.context).seconds
        if load.tpot is not None and step > load.tpot:
            return None
        if load.qps is None:
            return batch
        qps = load.qps / plan.layout.dp
        left_for_decodes = 1 - qps * prefill / plan.layout.pp
        if left_for_decodes * plan.tokens_per_second(batch, load.context) / plan.layout.dp >= qps * load.output_len:
            return batch
    return None


def layouts(num_kv_heads: int, most: int) -> Iterator[Layout]:
    """Yield the layouts in order of devices, then of devices that must communicate."""
    copies = [(tp, pp) for tp in _TENSOR_PARALLEL for pp in _STAGES if tp <= num_kv_heads or num_kv_heads == 1]
    all_of_them = [Layout(tp, pp, dp) for tp, pp in copies for dp in range(1, most // (tp * pp) + 1)]
    yield from sorted(all_of_them, key=lambda layout: (layout.num_devices, layout.pp, layout.tp))


def smallest(costs: Costs, machine: Machine, load: Load) -> Plan | None:
    """Return the plan with the fewest devices, up to the machine's `most`, that fits and meets the targets."""
    num_kv_heads = max((shape.num_heads for shape in costs.decoder.kv), default=1)
    for layout in layouts(num_kv_heads, machine.most):
        plan = Plan(costs, machine, layout)
        # Splitting a model of many experts takes a while, so skip layouts that it does not fit as a whole.
        has_room = costs.weight_bytes < machine.memory * layout.tp * layout.pp
        if has_room and plan.can_be_split and batch_for(plan, load) is not None:
            return plan
    return None
