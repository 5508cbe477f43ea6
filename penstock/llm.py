"""`LLM`: batches of prompts to their outputs, for scripts and notebooks.

It is an `AsyncLLM` in an event loop of its own, which a thread runs. So the caller may or may not have an event loop.
"""

import asyncio
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future
from contextlib import aclosing
from itertools import repeat
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from msgspec.structs import replace
from tqdm import tqdm

from penstock.async_llm import AsyncLLM, EngineKind
from penstock.frontend.errors import ApiError
from penstock.lora_request import LoRARequest
from penstock.outputs import (
    BatchError,
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from penstock.prompts import Chat, Messages, Prompt, each_prompt
from penstock.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

T = TypeVar("T")
Output = TypeVar(
    "Output",
    RequestOutput,
    BeamSearchOutput,
    EmbeddingRequestOutput,
    ScoringRequestOutput,
    ClassificationRequestOutput,
    PoolingRequestOutput,
)

_ROWS_AHEAD = 2
"""Requests in flight, as a multiple of the rows: those that run, and as many that wait for a free row."""


class _Background:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="penstock-loop", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start the coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Start the coroutine, and wait for its result. If the wait is interrupted, it is cancelled."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End loop and thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class LLM:
    """A model that is loaded once and answers batches. Use it as a context manager, or `close` it."""

    def __init__(self, model: str | Path = "", *, engine: EngineKind = "thread", **options: Any) -> None:
        """Load a model; see `AsyncLLM` for arguments and errors."""
        self._llm = AsyncLLM(model, engine=engine, **options)
        self._background = background = _Background()
        self._finalizer = weakref.finalize(self, _close, background, self._llm)
        try:
            facts = background.run(self._llm.facts())
        except BaseException:
            self.close()
            raise
        self._max_in_flight = _ROWS_AHEAD * facts.max_num_seqs

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """The outputs of all prompts, in the order of the prompts.

        Prompts are texts, token ids (`list[int]`) or chats (lists of messages): one, several, or an iterator of them.
        Prompts are read as the engine takes them, so only running ones are in memory beside the results.
        `lora_request` names an adapter for all prompts, or one for each.

        Raises:
            ApiError: a single prompt failed, as the server would answer it.
            BatchError: some of several prompts failed. The others were computed, and the error has their outputs.
        """
        batch = each_prompt(prompts)
        outputs: list[RequestOutput] = []
        num_tokens = 0
        total = len(batch) if isinstance(batch, Sized) else None
        with tqdm(total=total, desc="Prompts", unit="prompt", disable=not use_tqdm) as progress:
            for output in self.generate_iter(batch, sampling_params, lora_request):
                outputs.append(output)
                progress.update()
                if use_tqdm:
                    num_tokens += sum(len(each.token_ids) for each in output.outputs)
                    seconds = progress.format_dict["elapsed"]
                    progress.set_postfix_str(f"{num_tokens / max(seconds, 1e-9):.0f} tokens/s", refresh=False)
        return _in_order(outputs)

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> list[BeamSearchOutput]:
        """The most likely sequences after each prompt, in the order of the prompts; see `AsyncLLM.beam_search`.

        Raises:
            ApiError, BatchError: as in `generate`.
        """
        batch = each_prompt(prompts)
        total = len(batch) if isinstance(batch, Sized) else None
        ask = self._llm.beam_search
        work = (
            (_or_error(BeamSearchOutput, ask, (prompt, params), i, lora_request=lora_request), params.beam_width)
            for i, prompt in enumerate(batch)
        )
        return _in_order(
            list(tqdm(self._as_they_finish(work), total=total, desc="Prompts", unit="prompt", disable=not use_tqdm))
        )

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of all prompts (texts or token ids), in their order; parameters are those of `/v1/embeddings`.

        Raises:
            ApiError, BatchError: as in `generate`.
        """
        batch = each_prompt(prompts)
        total = len(batch) if isinstance(batch, Sized) else None
        told = {
            "dimensions": dimensions,
            "normalize": normalize,
            "truncate_prompt_tokens": truncate_prompt_tokens,
            "lora_request": lora_request,
        }
        work = ((_vector(self._llm, prompt, index, told), 1) for index, prompt in enumerate(batch))
        running = self._as_they_finish(work)
        return _in_order(list(tqdm(running, total=total, desc="Prompts", unit="prompt", disable=not use_tqdm)))

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """How well the texts of each pair fit each other; a single first text is paired with each second one.

        Raises:
            ValueError: there are several first texts, but not as many as second ones.
            ApiError, BatchError: as in `generate`.
        """
        firsts, seconds = ([data] if isinstance(data, str) else [*data] for data in (data_1, data_2))
        if len(firsts) not in (1, len(seconds)):
            raise ValueError(f"{len(firsts)} first texts do not fit {len(seconds)} second ones: one, or equally many")
        firsts *= len(seconds) if len(firsts) == 1 else 1
        work = (
            _or_error(ScoringRequestOutput, self._llm.score, pair, i, truncate_prompt_tokens=truncate_prompt_tokens)
            for i, pair in enumerate(zip(firsts, seconds, strict=True))
        )
        return self._pooled(work, len(seconds), use_tqdm=use_tqdm)

    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each class for each text (or its token ids).

        Raises:
            ApiError, BatchError: as in `generate`.
        """
        batch = [*each_prompt(prompts)]
        told = {"truncate_prompt_tokens": truncate_prompt_tokens}
        work = (
            _or_error(ClassificationRequestOutput, self._llm.classify, (prompt,), i, **told)
            for i, prompt in enumerate(batch)
        )
        return self._pooled(work, len(batch), use_tqdm=use_tqdm)

    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """What the model pools of each text (or its token ids); see `AsyncLLM.encode`.

        Raises:
            ApiError, BatchError: as in `generate`.
        """
        batch = [*each_prompt(prompts)]
        told = {"pooling_task": pooling_task, "truncate_prompt_tokens": truncate_prompt_tokens}
        work = (
            _or_error(PoolingRequestOutput, self._llm.encode, (prompt,), i, **told) for i, prompt in enumerate(batch)
        )
        return self._pooled(work, len(batch), use_tqdm=use_tqdm)

    def _pooled(self, work: Iterable[Coroutine[Any, Any, Output]], total: int, *, use_tqdm: bool) -> list[Output]:
        running = self._as_they_finish((each, 1) for each in work)
        return _in_order(list(tqdm(running, total=total, desc="Prompts", unit="prompt", disable=not use_tqdm)))

    def chat(
        self,
        messages: Messages | Iterable[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """The same for one chat or several; see `AsyncLLM.chat`."""
        said = (add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        chats = [Chat(cast("Messages", each), *said) for each in each_prompt(messages)]
        return self.generate(chats, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def generate_iter(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """The outputs of any number of prompts in the order in which they finish; `request_id` is the prompt's number.

        Further prompts are read as outputs are taken. If a prompt fails, its output has `error` set. `lora_request`
        names an adapter for all prompts, or one for each.
        """
        if isinstance(sampling_params, Mapping):
            raise TypeError("sampling_params must be SamplingParams, or one for each prompt, not a dict")
        if isinstance(prompts, Sized) and isinstance(sampling_params, Sized) and len(prompts) != len(sampling_params):
            raise ValueError(f"there are {len(prompts)} prompts, but {len(sampling_params)} sampling parameters")
        if isinstance(prompts, Sized) and isinstance(lora_request, Sized) and len(prompts) != len(lora_request):
            raise ValueError(f"there are {len(prompts)} prompts, but {len(lora_request)} adapters")
        each = _endless(sampling_params) if isinstance(sampling_params, SamplingParams | None) else sampling_params
        pairs = zip(prompts, each, strict=not isinstance(sampling_params, SamplingParams | None))
        adapters = repeat(lora_request) if isinstance(lora_request, LoRARequest | None) else lora_request
        work = enumerate(zip(pairs, adapters, strict=not isinstance(lora_request, LoRARequest | None)))
        return self._as_they_finish(
            (_whole(self._llm, prompt, params, adapter, i), params.n) for i, ((prompt, params), adapter) in work
        )

    def _as_they_finish(self, work: Iterator[tuple[Coroutine[Any, Any, T], int]]) -> Generator[T, None, None]:
        """Yield the results of requests as they finish; `work` has each request with the number of its sequences."""
        if not self._finalizer.alive:
            raise RuntimeError("this LLM is closed")
        done: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
        running: dict[Future[T], int] = {}  # with the number of sequences of each
        has_more = True
        try:
            while True:
                while has_more and (not running or sum(running.values()) < self._max_in_flight):
                    try:
                        request, num_sequences = next(work)
                    except StopIteration:
                        has_more = False
                        break
                    future = self._background.submit(request)
                    running[future] = num_sequences
                    future.add_done_callback(done.put)
                if not running:
                    return
                future = done.get()
                del running[future]
                yield future.result()
        finally:  # also when the caller stops taking outputs, or presses Ctrl-C
            for future in running:
                future.cancel()

    def reset_prefix_cache(self) -> None:
        """Drop all cached pages that no sequence uses."""
        self._background.run(self._llm.reset_prefix_cache())

    def close(self) -> None:
        """Free the model. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(background: _Background, llm: AsyncLLM) -> None:
    background.run(llm.close())
    background.stop()


def _endless(params: SamplingParams | None) -> Iterator[SamplingParams]:
    only = params or SamplingParams()
    while True:
        yield only


async def _whole(
    llm: AsyncLLM, prompt: Prompt, params: SamplingParams, adapter: LoRARequest | None, index: int
) -> RequestOutput:
    try:
        final = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = llm.generate(prompt, final, request_id=str(index), lora_request=adapter)
        async with aclosing(outputs):
            return await anext(outputs)
    except ApiError as error:
        return RequestOutput(str(index), error=error)


async def _vector(llm: AsyncLLM, prompt: Prompt, index: int, told: dict[str, Any]) -> EmbeddingRequestOutput:
    try:
        return await llm.embed(prompt, request_id=str(index), **told)
    except ApiError as error:
        return EmbeddingRequestOutput(str(index), error=error)


async def _or_error(
    kind: Callable[..., Output],
    ask: Callable[..., Coroutine[Any, Any, Output]],
    prompts: Iterable[Any],
    index: int,
    **told: Any,
) -> Output:
    try:
        return await ask(*prompts, request_id=str(index), **told)
    except ApiError as error:
        return kind(str(index), error=error)


def _in_order(outputs: list[Output]) -> list[Output]:
    outputs.sort(key=lambda output: int(output.request_id))
    if any(output.error is not None for output in outputs):
        if len(outputs) == 1 and outputs[0].error is not None:
            raise outputs[0].error
        raise BatchError(outputs)
    return outputs
