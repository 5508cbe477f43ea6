"""A plan: what fits a machine, how long its steps take at best, and the smallest number of devices that serves a load.

Times follow the roofline model (Williams, Waterman and Patterson, 2009): a step takes as long as the slowest of reading
memory, computing, and talking to the other devices. They are bounds: no implementation is faster, and all are slower.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from penstock.core.planning.costs import BYTES, Costs, widest
from penstock.core.planning.machines import Machine

Bound = Literal["memory", "compute", "link"]
_RUNTIME = 2e9  # bytes of the driver, the libraries' workspaces and the captured graphs on each device
_STEP_TOKENS = 8192  # whose activations have room
_MOST = 1 << 14  # sequences at once
_STAGES = (1, 2, 3, 4, 6, 8)
_TENSOR_PARALLEL = (1, 2, 4, 8)


class Load(NamedTuple):
    """What is asked for; targets of None are none."""

    input_len: int = 1024
    output_len: int = 256
    qps: float | None = None
    ttft: float | None = None  # seconds
    tpot: float | None = None

    @property
    def context(self) -> int:
        """The longest that a sequence becomes."""
        return self.input_len + self.output_len


class Layout(NamedTuple):
    """How many devices hold a copy of the model, and how many copies there are."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.dp


class StepTime(NamedTuple):
    """The time of a step, and what it waits for."""

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
        """For keys and values; negative if it does not fit."""
        return self.memory - self.weight_bytes - self.activation_bytes - self.runtime_bytes


class Plan(NamedTuple):
    """A model on devices of one kind."""

    costs: Costs
    machine: Machine
    layout: Layout = Layout()

    @property
    def ledger(self) -> Ledger:
        num_devices = self.layout.tp * self.layout.pp
        decoder = self.costs.decoder
        numbers = _STEP_TOKENS * (4 * decoder.hidden_size + widest(decoder) / self.layout.tp)
        return Ledger(
            memory=self.machine.memory * num_devices,
            weight_bytes=self.costs.weight_bytes,
            activation_bytes=numbers * BYTES["fp16"] * num_devices,
            runtime_bytes=_RUNTIME * num_devices,
        )

    def max_batch(self, context: int) -> int:
        """Sequences of this length whose keys and values fit."""
        return max(0, math.floor(self.ledger.left / self.costs.kv_bytes(context)))

    def max_context(self, batch: int) -> int:
        """The longest sequence of which so many fit, within what the model's positions allow."""
        least, most = 0, self.costs.decoder.max_model_len
        while least < most:
            middle = (least + most + 1) // 2
            if self.max_batch(middle) >= batch:
                least = middle
            else:
                most = middle - 1
        return least

    def decode_step(self, batch: int, context: int) -> StepTime:
        """One token for each sequence."""
        read = self.costs.weight_bytes_read(batch) + batch * self.costs.kv_bytes(context)
        return self._step(batch, read, self.costs.operations([(context - 1, 1)]) * batch)

    def prefill(self, num_tokens: int) -> StepTime:
        """A whole prompt in one step."""
        read = self.costs.weight_bytes_read(num_tokens) + self.costs.kv_bytes(num_tokens)
        return self._step(num_tokens, read, self.costs.operations([(0, num_tokens)]))

    def tokens_per_second(self, batch: int, context: int) -> float:
        """Of all copies. The stages of a pipeline work on different sequences at the same time."""
        step = self.decode_step(max(1, batch // self.layout.pp), context).seconds
        return batch / step * self.layout.dp

    def _step(self, num_tokens: int, bytes_read: float, operations: float) -> StepTime:
        """The stages of a pipeline take turns in one step, so it is as long as if each device had them all."""
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
    """The fewest sequences at once with which a copy serves its part of the load; None: it cannot."""
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
    """By the number of devices, then by the number of those that must talk to each other."""
    copies = [Layout(tp, pp) for tp in _TENSOR_PARALLEL for pp in _STAGES if tp <= num_kv_heads or num_kv_heads == 1]
    all_of_them = [Layout(tp, pp, dp) for tp, pp, _ in copies for dp in range(1, most // (tp * pp) + 1)]
    yield from sorted(all_of_them, key=lambda layout: (layout.num_devices, layout.pp, layout.tp))


def smallest(costs: Costs, machine: Machine, load: Load, most: int = 64) -> Plan | None:
    """The plan with the fewest devices, up to `most`, that fits and meets the targets."""
    num_kv_heads = max(shape.num_heads for shape in costs.decoder.kv)
    for layout in layouts(num_kv_heads, most):
        plan = Plan(costs, machine, layout)
        if batch_for(plan, load) is not None:
            return plan
    return None
