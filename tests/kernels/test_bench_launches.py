"""What `bench/kernels` launches at its real sizes can be compiled; nothing is run, and no GPU is needed."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from bench.kernels import __main__ as kernels
from bench.kernels import inputs as kernels_inputs
from bench.kernels import small as kernels_small
from bench.kernels.inputs import AttentionProblem
from penstock.kernels.triton import device
from penstock.kernels.triton.attention import paged_attention
from tests.faults.soak import only_in_soak
from tests.kernels.launch_forms import Form, errors_of, form_of

LIMITS = {"memory_bytes_per_s": 1.0, "matrix_flop_per_s": 1.0}


def inputs(problem: AttentionProblem, rotations: int) -> tuple[Tensor, ...]:
    """As `attention_inputs`, without numbers."""
    pages = -(-problem.context // problem.page_size)
    num_tokens = problem.batch * problem.query_len
    heads = (problem.num_kv_heads, problem.page_size, problem.head_dim)
    of_ints = [(problem.batch, pages), (problem.batch + 1,), (problem.batch,)]
    return (
        torch.empty(rotations, num_tokens, problem.num_q_heads, problem.head_dim, dtype=problem.dtype, device="meta"),
        torch.empty(rotations, 2, problem.batch * pages, *heads, dtype=problem.dtype, device="meta"),
        *(torch.empty(shape, dtype=torch.int32, device="meta") for shape in of_ints),
    )


def call_once(calls: Sequence[Callable[[], object]]) -> float:
    """In place of a timer."""
    calls[0]()
    return 1.0


@only_in_soak  # most of it is what test_compiled.py compiles for Llama-3.1-8B
@pytest.mark.timeout(600)
def test_what_the_benchmark_launches_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    forms: set[Form] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        forms.add(form_of(self, args, kwargs))

    monkeypatch.setattr(triton.runtime.JITFunction, "run", run)
    monkeypatch.setattr(kernels_inputs, "attention_inputs", inputs)
    monkeypatch.setattr(kernels_inputs, "num_rotations", lambda num_bytes: 2)
    monkeypatch.setattr(kernels_small, "num_rotations", lambda num_bytes: 2)
    monkeypatch.setattr(kernels, "decode_peers", lambda problem: [])
    monkeypatch.setattr(kernels, "prefill_peers", lambda problem: [])
    monkeypatch.setattr(paged_attention, "device_facts", lambda _: device.DeviceFacts(132, (9, 0)))
    monkeypatch.setattr(kernels_small, "_device", lambda dry: "meta")
    monkeypatch.setattr(Tensor, "is_cuda", True)
    for part in kernels.PARTS:
        if part == "quantized":  # weights are packed by what they are; test_compiled.py compiles these shapes
            continue
        bench = {"decode": kernels.bench_decode, "prefill": kernels.bench_prefill}.get(part)
        made = bench(call_once, LIMITS, False) if bench else kernels.bench_cases(part, call_once, LIMITS, False)
        assert sum(result.seconds for result in made) > 3
    monkeypatch.undo()
    assert {form[0].split(":")[1] for form in forms} >= {
        "decode_kernel",
        "prefill_kernel",
        "draw_kernel",
        "rope_kernel",
    }
    errors = errors_of(sorted(forms, key=repr))
    assert not errors, "\n".join(errors)
