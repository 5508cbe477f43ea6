"""Steps before the first request, so that no request waits for a kernel to be compiled.

Triton compiles a kernel for every tile shape, dtype and kind of stride. The plans made here go through the runner like
a scheduler's. Together they cover every variant that serving can need: rows that decode beside rows that prefill, many
tokens and few, short and long contexts (splits, sliding windows), and each way to sample. What they leave in the first
pages is overwritten before anything reads it.
"""

from collections.abc import Iterator

import msgspec
import numpy as np

from penstock.gpu_worker.steps.made_up_plans import (
    GREEDY,
    MANY_TOKENS,
    SOME_TOKENS,
    Limits,
    MadeUpRow,
    made_up_plan,
)
from penstock.gpu_worker.steps.model_runner import ModelRunner
from penstock.ipc.messages import SamplingParams, StepPlan

_CONTEXTS = (64, 1024, 2048, 4096, 8192)
"""Attention over one row uses a different range of splits up to each of these lengths, and beyond the last."""
_NUM_LOGPROBS = (0, 1, 5, 20)
_FILTERS: tuple[tuple[str, float], ...] = (("min_p", 0.1), ("top_k", 1), ("top_p", 0.5))


def warm_up(runner: ModelRunner, limits: Limits) -> int:
    """Run the steps; return how many there were. All rows are free afterwards."""
    plans = [*_attention_plans(limits), *_sampling_plans(limits)]
    if limits.num_pages > 1:
        page = np.arange(2, dtype=np.int32).tobytes()
        plans.append(msgspec.structs.replace(plans[0], copy_src=page[:4], copy_dst=page[4:]))
    for plan in plans:
        runner.launch(plan).result()
    runner.warm_up_ahead(_contexts(limits))
    runner.clear_rows()
    return len(plans)


def warm_up_parts(runner: ModelRunner, limits: Limits) -> int:
    """As `warm_up`, for what only rows with parts launch."""
    num_plans = 0
    for part in runner.parts:
        for plan in part.warm_up(limits):
            runner.launch(plan).result()
            num_plans += 1
    runner.clear_rows()
    return num_plans


def _contexts(limits: Limits) -> list[int]:
    longest = max(1, limits.max_model_len - 1)
    return sorted({min(context, longest) for context in (*_CONTEXTS, longest)})


def _attention_plans(limits: Limits) -> Iterator[StepPlan]:
    longest = max(1, limits.max_model_len - 1)
    contexts = _contexts(limits)
    chunks = sorted({min(MANY_TOKENS, limits.max_num_batched_tokens, longest), min(2, longest)})
    for context in contexts:
        yield made_up_plan(limits, [MadeUpRow(context, samples=False)])  # a decode step that no graph covers
        for chunk in chunks:
            yield made_up_plan(limits, [MadeUpRow(max(context, chunk), chunk)])
            if limits.max_num_seqs > 1 and chunk < limits.max_num_batched_tokens:
                yield made_up_plan(limits, [MadeUpRow(context), MadeUpRow(chunk, chunk)])
    chunk = min(SOME_TOKENS, limits.max_num_batched_tokens, longest)
    yield made_up_plan(limits, [MadeUpRow(chunk, chunk)])
    chunk = MANY_TOKENS
    while (chunk := 4 * chunk) < limits.max_num_batched_tokens and chunk <= longest * limits.max_num_seqs:
        rows, rest = divmod(chunk, longest)
        yield made_up_plan(limits, [MadeUpRow(longest, longest)] * rows + [MadeUpRow(rest, rest)] * (rest > 0))
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    for num_rows in sorted({min(1 << i, most) for i in range(1, most.bit_length() + 1)}):
        for context in contexts:
            yield made_up_plan(limits, [MadeUpRow(context), *[MadeUpRow(1, samples=False)] * (num_rows - 1)])


def _sampling_plans(limits: Limits) -> Iterator[StepPlan]:
    """Sample from logits as the model returns them, and from edited ones (which are fp32), with each set of filters."""
    random = SamplingParams(max_tokens=1, temperature=1.0)
    edited = {
        "repetition_penalty": 1.1,
        "logit_bias": ((0, 1.0),),
        "min_tokens": 1,
        "stop_token_ids": (0,),
    }
    kinds: list[SamplingParams] = [
        GREEDY,
        random,
        *(msgspec.structs.replace(random, **{name: value}) for name, value in _FILTERS),
    ]
    kinds += [msgspec.structs.replace(kind, **edited) for kind in kinds]
    numbers = sorted({min(number, limits.vocab_size) for number in _NUM_LOGPROBS})
    kinds += [msgspec.structs.replace(random, num_logprobs=number, prompt_logprobs=number) for number in numbers]
    chunk = min(3, max(1, limits.max_model_len - 1), limits.max_num_batched_tokens)
    for kind in kinds:
        yield made_up_plan(limits, [MadeUpRow(chunk, chunk, sampling=kind)])
