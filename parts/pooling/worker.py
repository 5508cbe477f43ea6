"""Rows that return a vector instead of a token: it is pooled from the final hidden states of their positions."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.models.linear import PlainLinear
from penstock.gpu_worker.models.loading.stored import as_tensor
from penstock.gpu_worker.models.model import Classifies, Model
from penstock.gpu_worker.part import Context
from penstock.gpu_worker.steps.host_step import HostBatch
from penstock.gpu_worker.steps.row_part import RowPart, Sent
from penstock.ipc.messages import Pooling, PoolingKind, StepPlan, StepResult
from penstock.models.described import own_names_of
from penstock.models.embeddings import DenseActivation, dense_modules
from penstock.models.files.source import Checkpoint, LoadError
from penstock.models.weights.decoder import CLASSES

_SMALLEST = 1e-12
"""The least length that a vector is divided by, as in torch's `normalize`."""

_ACTIVATIONS: dict[DenseActivation, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
    "silu": functional.silu,
}

Step = Callable[[Tensor], Tensor]
"""fp32[S, inputs] -> fp32[S, outputs]"""


class Pooler(RowPart):
    """The rows that pool, and what has been pooled of their positions so far.

    Sums are float64: their order depends on how a prompt was cut into chunks, and in float64 that makes no difference
    that fp32 can show. A row that needs more than its last position begins at position 0.
    """

    draws = False

    def __init__(
        self, model: Model, dense: Sequence[Step] = (), classify: Step | None = None, *, one_by_one: bool = False
    ) -> None:
        """Nothing is known of rows yet.

        Args:
            model: the worker's.
            dense: what a pooled state goes through, for embeddings.
            classify: from a pooled state to the logits of classes.
            one_by_one: whether these two get one state at a time, so that its bits do not depend on the others.
        """
        self.rows: dict[int, Pooling] = {}
        self._model = model
        self._dense = [partial(_each, step) for step in dense] if one_by_one else dense
        self._classify = partial(_each, classify) if one_by_one and classify is not None else classify
        self._pooled: dict[int, Tensor] = {}  # fp64[H] or fp32[H], by row
        self._vectors: list[Tensor] = []  # fp32, of the current step

    @classmethod
    def of(cls, context: Context) -> "Pooler":
        checkpoint, model, on = context.checkpoint, context.model, context.device.torch_device
        is_dummy = context.config.worker.load_format == "dummy"
        dense = [] if is_dummy else _dense(checkpoint, on)
        classify: Step | None = None
        if isinstance(model, Classifies) and model.config.num_classes:
            classify = model.classify
        elif model.config.num_classes and not is_dummy:
            names = own_names_of(checkpoint.tensors(), model.config)
            classify = _product(as_tensor(checkpoint.tensors()[names[CLASSES]]), None, on)
        return cls(model, dense, classify, one_by_one=on.type == "cpu")

    def enter(self, plan: StepPlan) -> None:
        for row in np.frombuffer(plan.freed_rows, dtype=np.int32).tolist():
            self._forget(row)
        for new in plan.new_rows:
            self._forget(new.row)
            if new.sampling.pooling is not None:
                self.rows[new.row] = new.sampling.pooling

    def clear(self) -> None:
        """Forget all rows."""
        self.rows.clear()
        self._pooled.clear()
        self._vectors.clear()

    def _forget(self, row: int) -> None:
        self.rows.pop(row, None)
        self._pooled.pop(row, None)

    def computed(self, batch: HostBatch, hidden: Tensor) -> None:
        """Pool a step's final hidden states, [T, H]."""
        samples = {*batch.sample_idx.tolist()}
        ends = batch.num_new.cumsum().tolist()
        found: list[tuple[Pooling, Tensor]] = []
        for i, (row, end, count) in enumerate(zip(batch.rows.tolist(), ends, batch.num_new.tolist(), strict=True)):
            pooling = self.rows.get(row)
            if pooling is None:
                continue
            start = int(batch.start[i])
            state = self._so_far(row, pooling, hidden[end - count : end], start)
            if i in samples:
                found.append((pooling, _whole(pooling.kind, state, start + count)))
        self._vectors += self._finished(found)

    def _so_far(self, row: int, pooling: Pooling, chunk: Tensor, start: int) -> Tensor:
        """What is pooled of a row with its next chunk, [n, H], from this position on.

        That is a state [H], or for means the sum, fp64[H].
        """
        before = self._pooled.get(row)
        match pooling.kind:
            case "last":
                return chunk[-1]
            case "cls":
                state = chunk[0].clone() if before is None else before
            case "mean" | "mean_sqrt_len":
                state = chunk.sum(0, dtype=torch.float64)
                state = state if before is None else state + before
            case "weighted_mean":
                weights = torch.arange(start + 1, start + 1 + len(chunk), device=chunk.device, dtype=torch.float64)
                state = (chunk.double() * weights[:, None]).sum(0)
                state = state if before is None else state + before
            case "max":
                state = chunk.amax(0)
                state = state if before is None else torch.maximum(state, before)
        self._pooled[row] = state
        return state

    def _finished(self, found: Sequence[tuple[Pooling, Tensor]]) -> list[Tensor]:
        """The vectors of rows that are complete, fp32, in their order."""
        if not found:
            return []
        states = torch.stack([state.float() for _, state in found])
        made: dict[int, Tensor] = {}
        for returns in {pooling.returns for pooling, _ in found}:
            its = [i for i, (pooling, _) in enumerate(found) if pooling.returns == returns]
            some = states if len(its) == len(found) else states[its]
            match returns:
                case "vector":
                    for step in self._dense:
                        some = step(some)
                    vectors = [_cut(vector, found[i][0]) for i, vector in zip(its, some, strict=True)]
                case "classes":
                    assert self._classify is not None, "frontends know which models have classes"
                    vectors = list(self._classify(some).float())
                case "tokens":
                    dtype = found[0][1].dtype if found[0][0].kind in ("last", "cls", "max") else torch.float32
                    logits = self._model.logits(some.to(dtype)).float()
                    vectors = [logits[n, list(found[i][0].token_ids)] for n, i in enumerate(its)]
            made.update(zip(its, vectors, strict=True))
        return [made[i].contiguous() for i in range(len(found))]

    def sends(self) -> Sent | None:
        """The step's vectors, and their sizes."""
        vectors, self._vectors = self._vectors, []
        if not vectors:
            return None
        sizes = np.array([vector.shape[0] for vector in vectors], dtype=np.int32)
        return Sent(
            partial(_with_vectors, sizes.tobytes()), torch.cat([vector.view(torch.int32) for vector in vectors])
        )


def _whole(kind: PoolingKind, state: Tensor, num_tokens: int) -> Tensor:
    """What is pooled of a whole text, from what `_so_far` says at its end."""
    match kind:
        case "mean":
            return state / num_tokens
        case "mean_sqrt_len":
            return state / math.sqrt(num_tokens)
        case "weighted_mean":  # the first token counts once, the second one twice, and so on
            return state / (num_tokens * (num_tokens + 1) / 2)
        case _:
            return state


def _with_vectors(sizes: bytes, result: StepResult, vectors: bytes) -> StepResult:
    return replace(result, pooled=vectors, pooled_sizes=sizes)


def _each(step: Step, states: Tensor) -> Tensor:
    return torch.cat([step(state[None]) for state in states])


def _cut(vector: Tensor, pooling: Pooling) -> Tensor:
    """fp32[H] -> fp32[size]"""
    if pooling.size:
        vector = vector[: pooling.size]
    if pooling.is_normalized:
        vector = vector / vector.norm().clamp_min(_SMALLEST)
    return vector


def _dense(checkpoint: Checkpoint, device: torch.device) -> list[Step]:
    """The Dense modules of the checkpoint, with their weights."""
    steps: list[Step] = []
    for module in dense_modules(checkpoint):
        stored = checkpoint.module_tensors(module.number)
        names = ["linear.weight", "linear.bias"] if module.has_bias else ["linear.weight"]
        shapes = [(module.num_outputs, module.num_inputs), (module.num_outputs,)]
        for name, shape in zip(names, shapes, strict=False):
            if name not in stored or stored[name].shape != shape:
                found = f"shape {list(stored[name].shape)}" if name in stored else "is not there"
                raise LoadError(f"the Dense module's {name} should have shape {list(shape)}; {found}")
        weight, *bias = (as_tensor(stored[name]) for name in names)
        product = _product(weight, bias[0] if bias else None, device)
        steps += [product, _ACTIVATIONS[module.activation]]
    return steps


def _product(weight: Tensor, bias: Tensor | None, device: torch.device) -> Step:
    linear = PlainLinear(weight.float().to(device), None if bias is None else bias.float().to(device))
    return lambda x: linear(x, None)


PARTS = (Pooler,)
