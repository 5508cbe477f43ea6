"""Steps before the first request, so that no request waits for a kernel to be compiled.

Triton compiles a kernel for every tile shape, dtype and kind of stride. The plans made here go through the runner like
a scheduler's. Together they cover every variant that serving can need: rows that decode beside rows that prefill, many
tokens and few, short and long contexts (splits, sliding windows), and each way to sample. What they leave in the first
pages is overwritten before anything reads it.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from penstock.gpu_worker.steps.model_runner import ModelRunner
from penstock.ipc.messages import EncodeImage, NewRow, PixelRef, PixelTensor, RowImage, SamplingParams, StepPlan

if TYPE_CHECKING:
    from penstock.gpu_worker.images.store import EmbeddingStore

_SOME_TOKENS = 40
_MANY_TOKENS = 80
"""Launches use other blocks above 16 tokens, and again above 64. Products of experts change blocks at two numbers of
tokens, the second four times the first. So among steps of `_MANY_TOKENS`, four times as many and so on, one lies
between the two."""
_CONTEXTS = (64, 1024, 2048, 4096, 8192)
"""Attention over one row uses a different range of splits up to each of these lengths, and beyond the last."""
_NUM_LOGPROBS = (0, 1, 5, 20)
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_FILTERS: tuple[tuple[str, float], ...] = (("min_p", 0.1), ("top_k", 1), ("top_p", 0.5))


class Limits(NamedTuple):
    """Bounds of the plans."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    vocab_size: int


class _Row(NamedTuple):
    """A sequence whose last `num_new` of `length` tokens are computed."""

    length: int
    num_new: int = 1
    samples: bool = True
    sampling: SamplingParams = _GREEDY


def warm_up(runner: ModelRunner, limits: Limits) -> int:
    """Run the steps; return how many there were. All rows are free afterwards."""
    plans = [*_attention_plans(limits), *_sampling_plans(limits)]
    if limits.num_pages > 1:
        page = np.arange(2, dtype=np.int32).tobytes()
        plans.append(msgspec.structs.replace(plans[0], copy_src=page[:4], copy_dst=page[4:]))
    if runner.image_store is not None:
        plans += _image_plans(limits, runner.image_store)
    for plan in plans:
        runner.launch(plan).result()
    runner.warm_up_drafter(_contexts(limits))
    runner.clear_rows()
    return len(plans)


def _contexts(limits: Limits) -> list[int]:
    longest = max(1, limits.max_model_len - 1)
    return sorted({min(context, longest) for context in (*_CONTEXTS, longest)})


def _attention_plans(limits: Limits) -> Iterator[StepPlan]:
    longest = max(1, limits.max_model_len - 1)
    contexts = _contexts(limits)
    chunks = sorted({min(_MANY_TOKENS, limits.max_num_batched_tokens, longest), min(2, longest)})
    for context in contexts:
        yield _plan(limits, [_Row(context, samples=False)])  # a decode step that no graph covers
        for chunk in chunks:
            yield _plan(limits, [_Row(max(context, chunk), chunk)])
            if limits.max_num_seqs > 1 and chunk < limits.max_num_batched_tokens:
                yield _plan(limits, [_Row(context), _Row(chunk, chunk)])
    chunk = min(_SOME_TOKENS, limits.max_num_batched_tokens, longest)
    yield _plan(limits, [_Row(chunk, chunk)])
    chunk = _MANY_TOKENS
    while (chunk := 4 * chunk) < limits.max_num_batched_tokens and chunk <= longest * limits.max_num_seqs:
        rows, rest = divmod(chunk, longest)
        yield _plan(limits, [_Row(longest, longest)] * rows + [_Row(rest, rest)] * (rest > 0))
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    for num_rows in sorted({min(1 << i, most) for i in range(1, most.bit_length() + 1)}):
        for context in contexts:
            yield _plan(limits, [_Row(context), *[_Row(1, samples=False)] * (num_rows - 1)])


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
        _GREEDY,
        random,
        *(msgspec.structs.replace(random, **{name: value}) for name, value in _FILTERS),
    ]
    kinds += [msgspec.structs.replace(kind, **edited) for kind in kinds]
    numbers = sorted({min(number, limits.vocab_size) for number in _NUM_LOGPROBS})
    kinds += [msgspec.structs.replace(random, num_logprobs=number, prompt_logprobs=number) for number in numbers]
    chunk = min(3, max(1, limits.max_model_len - 1), limits.max_num_batched_tokens)
    for kind in kinds:
        yield _plan(limits, [_Row(chunk, chunk, sampling=kind)])


def _image_plans(limits: Limits, store: "EmbeddingStore") -> Iterator[StepPlan]:
    """A picture goes through the tower, and then through the decoder at the beginning of prompts.

    Its positions may have rows and columns, and may see each other.
    """
    vision, key = store.tower.vision, bytes(32)
    grid = vision.small_grid
    count, shape = vision.num_embeddings(grid), vision.pixel_shape(grid)
    image = RowImage(key, 0, count, count, grid, embedding_id=1)
    longest = max(1, limits.max_model_len - 1)
    if count > longest or (vision.is_whole and count > limits.max_num_batched_tokens):
        return  # a request with a picture has no room either
    pixels = bytes(4 * prod(shape))
    tensors = (PixelTensor("pixel_values", "float32", shape, 0),)
    store.order(EncodeImage(1, key, grid, count, PixelRef("", len(pixels), tensors, pixels)))
    while (encoded := store.encode(1.0)) is None:
        pass
    if encoded.error:
        raise RuntimeError(f"the vision tower cannot be warmed up: {encoded.error}")
    for length in sorted({min(max(count, least), longest) for least in (2, _SOME_TOKENS, _MANY_TOKENS)}):
        chunk = min(length, limits.max_num_batched_tokens)
        batches = [[_Row(length, chunk)], [_Row(length)]]  # no graph covers a decode step of it
        if limits.max_num_seqs > 1 and chunk < limits.max_num_batched_tokens:
            batches.append([_Row(length, chunk), _Row(1)])
        for rows in batches:
            yield _showing(_plan(limits, rows), image, vision.image_token)


def _showing(plan: StepPlan, image: RowImage, image_token: int) -> StepPlan:
    """The same plan with a picture at the beginning of its first row."""
    first, *others = plan.new_rows
    token_ids = np.frombuffer(first.token_ids, dtype=np.int32).copy()
    token_ids[: image.length] = image_token
    first = msgspec.structs.replace(first, token_ids=token_ids.tobytes(), images=(image,))
    return msgspec.structs.replace(plan, new_rows=(first, *others))


def _plan(limits: Limits, rows: Sequence[_Row]) -> StepPlan:
    """A plan of new rows. All their tokens are 0, and all their pages are the first page."""
    new_rows = tuple(
        NewRow(
            row=i,
            token_ids=bytes(4 * row.length),
            num_prompt_tokens=row.length,
            sampling=row.sampling,
            page_ids=bytes(4 * -(-row.length // limits.page_size)),
        )
        for i, row in enumerate(rows)
    )
    num_new = np.array([row.num_new for row in rows], dtype=np.int32)
    start = np.array([row.length for row in rows], dtype=np.int32) - num_new
    return StepPlan(
        step_id=0,
        rows=np.arange(len(rows), dtype=np.int32).tobytes(),
        start=start.tobytes(),
        num_new=num_new.tobytes(),
        samples=bytes(row.samples for row in rows),
        new_rows=new_rows,
    )
