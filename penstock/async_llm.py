"""`AsyncLLM`: prompts to outputs in the caller's event loop, by the same code that makes the server's answers.

prompt, SamplingParams ──▶ validation, template, tokenizer ──▶ RequestBook ──▶ engine: a thread, or processes
RequestOutput ◀── text, stop strings, log-probabilities ◀── Generation ◀──────────┘
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import structlog

from penstock.config import ConfigError
from penstock.engine_processes import EngineProcesses
from penstock.engine_thread import EngineThread
from penstock.frontend.api.logprobs import prompt_logprobs
from penstock.frontend.api.run import submit
from penstock.frontend.api.service import Service
from penstock.frontend.api.text_model import load_text_model
from penstock.frontend.api.usage import bill_as_sent
from penstock.frontend.embeddings.embeddings import encoded, floats, read_embedding
from penstock.frontend.embeddings.schema import EmbeddingRequest
from penstock.frontend.engine.book import RequestBook
from penstock.frontend.engine.link import EngineLink
from penstock.frontend.engine.router.router import router_for
from penstock.frontend.errors import InvalidParameter, RouteNotFound
from penstock.frontend.exchange.metrics import Metrics
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.part import routes_of_parts
from penstock.frontend.validation.chat import validate_conversation
from penstock.frontend.validation.common import ValidRequest, check_num_best, validate_common
from penstock.frontend.validation.completion import validate_completion
from penstock.ipc.messages import EngineReady, ImageRef
from penstock.lora_request import LoRARequest
from penstock.models.check import check_checkpoint
from penstock.models.files.source import fingerprint
from penstock.models.finding.located import located
from penstock.models.finding.registry import open_model
from penstock.models.part import check_further
from penstock.options import apart_only, config_of, quiet
from penstock.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from penstock.prompts import Chat, Messages, Prompt, read_prompt
from penstock.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

log = structlog.get_logger()

EngineKind = Literal["thread", "process"]

_READY_SECONDS = 60.0


class AsyncLLM:
    """A model in an event loop. Requests run side by side; each is an async generator, and closing it aborts it."""

    def __init__(self, model: str | Path = "", *, engine: EngineKind = "thread", **options: Any) -> None:
        """`model` and `options` are those of `penstock serve`; an empty model is the bundled demo model.

        Nothing is loaded before `start`, which `async with` and the first request call.

        Args:
            engine: "thread" computes in a thread of this process; "process" starts a scheduler and a worker, which
                are started again if they die.

        Raises:
            ConfigError: if an option is unknown, out of bounds or without effect, or the checkpoint cannot be served.
        """
        if engine not in ("thread", "process"):
            raise ConfigError(f"engine must be 'thread' or 'process', got {engine!r}")
        if engine == "thread" and (surplus := apart_only() & options.keys()):
            raise ConfigError(f"{min(surplus)} has an effect only with engine='process'")
        config = config_of({"model": str(model)} | options)
        quiet(config.log.log_level)
        has_weights = config.worker.load_format != "dummy"
        self.config = located(config, with_weights=has_weights)
        worker = self.config.worker
        check_checkpoint(
            open_model(self.config),
            "auto",
            worker.quantization,
            worker.kv_cache_dtype,
            self.config.parallel,
            with_weights=has_weights,
            with_tokenizer=True,
        )
        check_further(self.config, with_weights=has_weights)
        self._engine = EngineThread(self.config) if engine == "thread" else EngineProcesses(self.config)
        self._start = asyncio.Lock()
        self._loading = asyncio.Lock()
        self._service: Service | None = None
        self._is_closed = False
        self._ids = itertools.count()

    async def start(self) -> None:
        """Load the model. Idempotent.

        Raises:
            ConfigError: if the configuration or the checkpoint cannot work.
        """
        await self.service()

    async def facts(self) -> EngineReady:
        """What the engine has reported of itself; starts it if necessary.

        Raises:
            ConfigError: if the configuration or the checkpoint cannot work.
        """
        return await (await self.service()).engine.wait_ready(_READY_SECONDS)

    async def service(self) -> Service:
        """The service behind a server's handlers, which answers requests. Started if it is not running.

        Raises:
            ConfigError: if the configuration or the checkpoint cannot work.
        """
        async with self._start:
            if self._is_closed:
                raise RuntimeError("this LLM is closed")
            if self._service is None:
                model = await asyncio.to_thread(load_text_model, self.config)
                try:
                    await self._engine.start()
                except BaseException:
                    model.tokenizer.close()
                    raise
                addresses = self._engine.addresses("api", fingerprint(open_model(self.config)))
                links = [EngineLink(each, self._engine.connect, log.error) for each in addresses]
                metrics = Metrics(dict, price_per_hour=self.config.frontend.price_per_hour)
                router = router_for(self.config, len(links), metrics.registry)
                book = RequestBook(links, self.config.scheduler, router)
                self._service = Service(self.config, model, book, metrics)
                await self._service.start()
                await self._service.engine.wait_ready(_READY_SECONDS)
            return self._service

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str = "",
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the output of one prompt: a text, token ids, or the messages of a chat.

        `sampling_params.output_kind` decides what each output contains; the last one has `finished` set. With
        `lora_request`, the model answers with that adapter, and with its chat template if it has one.

        Raises:
            ApiError: as the server would answer it; see `penstock.frontend.errors`.
        """
        params = sampling_params or SamplingParams()
        service = await self._ready_service(lora_request)
        service.check_draws()
        record = RequestRecord(request_id or str(next(self._ids)), "generate", time.monotonic())
        try:
            valid, output, images = await self._read(service, prompt, params, record)
            output.request_id, output.warnings = record.request_id, record.warnings
            run = await submit(service, record, valid, [output.prompt_token_ids], images=images)
        except BaseException:
            record.end()
            raise
        generation = run.generation
        try:
            tokenizer = service.model.tokenizer
            if valid.logprobs.prompt >= 0:
                [told] = await generation.prompt_logprobs()
                of_prompt = await tokenizer.off_loop(lambda: prompt_logprobs(tokenizer, valid.logprobs, told))
                output.prompt_logprobs = of_prompt
            output.outputs = [CompletionOutput(index) for index in range(valid.n)]
            scores, kind = run.score_writer(), params.output_kind
            async for events in generation:
                for event in events:
                    output.outputs[event.index].add(event, scores)
                output.finished = generation.is_finished
                if output.finished:
                    await generation.billed()
                    output.bill = bill_as_sent(run.generation.bill, service.metrics.price_per_hour)
                output.num_cached_tokens = generation.progress.num_cached_tokens
                if output.finished and run.grammar.checked_schema:
                    for each in output.outputs:
                        await run.schema_error(each.text, each.finish_reason or "")
                if kind is RequestOutputKind.DELTA:
                    yield output
                    output = replace(output, outputs=[CompletionOutput(each.index) for each in output.outputs])
                elif output.finished or kind is RequestOutputKind.CUMULATIVE:
                    yield replace(output, outputs=[each.copy() for each in output.outputs])
        finally:
            run.finish()
            record.end()

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str = "",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The same for a chat. The model's chat template makes the prompt from messages and tools.

        The output is the model's plain text: reasoning and tool calls are not extracted.
        """
        chat = Chat(messages, add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        return self.generate(chat, sampling_params, request_id=request_id, lora_request=lora_request)

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        *,
        request_id: str = "",
        lora_request: LoRARequest | None = None,
    ) -> BeamSearchOutput:
        """The most likely sequences after one prompt, as transformers finds them with as many beams.

        Raises:
            ApiError: as the server would answer it; see `penstock.frontend.errors`.
        """
        final = msgspec.structs.replace(params.sampling(), output_kind=RequestOutputKind.FINAL_ONLY)
        async with aclosing(self.generate(prompt, final, request_id=request_id, lora_request=lora_request)) as outputs:
            found = await anext(outputs)
        tokenizer = (await self.service()).model.tokenizer
        sequences = []
        for each in found.outputs:
            outputs_kept = each.token_ids
            if each.finish_reason == "stop" and not params.include_stop_str_in_output:
                outputs_kept = outputs_kept[:-1]
            tokens = [*found.prompt_token_ids, *outputs_kept]
            text = await tokenizer.off_loop(partial(tokenizer.decode, tokens))
            scores = each.cumulative_logprob or 0.0, each.logprobs or []
            sequences.append(BeamSearchSequence(tokens, text, *scores, each.finish_reason, each.stop_reason))
        return BeamSearchOutput(found.request_id, sequences)

    async def embed(
        self,
        prompt: Prompt,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        request_id: str = "",
        lora_request: LoRARequest | None = None,
    ) -> EmbeddingRequestOutput:
        """The vector of one prompt, a text or token ids; other parameters are those of `/v1/embeddings`.

        Raises:
            ApiError: as the server would answer it; see `penstock.frontend.errors`.
        """
        service = await self._ready_service(lora_request)
        record = RequestRecord(request_id or str(next(self._ids)), "embed", time.monotonic())
        read = read_prompt(prompt)
        if isinstance(read, Chat):
            raise InvalidParameter("an embedding is made of a text or of token ids, not of a chat", param="prompt")
        request = EmbeddingRequest(
            input=read if isinstance(read, str) else [read],
            dimensions=dimensions,
            normalize=normalize,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        valid = read_embedding(service, service.rules(), request)
        [token_ids] = await encoded(service, record, valid)
        output = EmbeddingRequestOutput(record.request_id, prompt_token_ids=token_ids, warnings=record.warnings)
        with await submit(service, record, valid.common, [output.prompt_token_ids], is_prompt_only=True) as run:
            await run.answers()
            await run.generation.billed()
            output.bill = bill_as_sent(run.generation.bill, service.metrics.price_per_hour)
            output.num_cached_tokens = run.generation.progress.num_cached_tokens
            [vector] = run.generation.pooled
            output.outputs = EmbeddingOutput(floats(vector))
            return output

    async def score(
        self, data_1: str, data_2: str, *, truncate_prompt_tokens: int | None = None, request_id: str = ""
    ) -> ScoringRequestOutput:
        """How well two texts fit each other, as `/v1/score` says it.

        Raises:
            ApiError: as the server would answer it.
        """
        body = {"text_1": data_1, "text_2": data_2, "truncate_prompt_tokens": truncate_prompt_tokens}
        name, answer = await self._asked("/v1/score", body, request_id)
        output = ScoringOutput(answer["data"][0]["score"])
        return ScoringRequestOutput(name, output, answer["usage"]["prompt_tokens"])

    async def classify(
        self, prompt: Prompt, *, truncate_prompt_tokens: int | None = None, request_id: str = ""
    ) -> ClassificationRequestOutput:
        """The probability of each class for one text (or its token ids), as `/v1/classify` says it.

        Raises:
            ApiError: as the server would answer it.
        """
        body = {"input": _pooled_input(prompt), "truncate_prompt_tokens": truncate_prompt_tokens}
        name, answer = await self._asked("/v1/classify", body, request_id)
        [found] = answer["data"]
        output = ClassificationOutput(found["probs"], found["label"])
        return ClassificationRequestOutput(name, output, answer["usage"]["prompt_tokens"])

    async def encode(
        self,
        prompt: Prompt,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        request_id: str = "",
    ) -> PoolingRequestOutput:
        """What the model pools of one text (or its token ids), as `/pooling` says it.

        `pooling_task`: "embed" or "classify"; None: what the model does.

        Raises:
            ApiError: as the server would answer it.
        """
        body = {
            "input": _pooled_input(prompt), "task": pooling_task, "truncate_prompt_tokens": truncate_prompt_tokens,
        }  # fmt: skip
        name, answer = await self._asked("/pooling", body, request_id)
        output = PoolingOutput(answer["data"][0]["data"])
        return PoolingRequestOutput(name, output, answer["usage"]["prompt_tokens"])

    async def _asked(self, path: str, body: dict[str, Any], request_id: str) -> tuple[str, Any]:
        """The request's id, and the answer of the server's route at this path, which a part may bring."""
        service = await self._ready_service(None)
        record = RequestRecord(request_id or str(next(self._ids)), path, time.monotonic())
        route = next((route for route in routes_of_parts() if path in route.paths), None)
        if route is None:
            raise RouteNotFound(f"there is no {path} here: the part that answers it is not installed")
        reply = await route.handler(service, record, msgspec.json.encode(body))
        assert isinstance(reply, Reply)
        return record.request_id, msgspec.json.decode(reply.body)

    async def _ready_service(self, adapter: LoRARequest | None) -> Service:
        """The service, as requests to an adapter see it; the adapter is loaded if it is new."""
        service = await self.service()
        if service.engine.facts is None:
            await service.engine.wait_ready(self._engine.patience)
        if adapter is None:
            return service
        async with self._loading:
            found = service.variants.get(adapter.lora_name)
            if found is None:
                await service.parts.serve(adapter.lora_name, adapter.lora_path)
            elif found.root != adapter.lora_path:
                raise InvalidParameter(
                    f"the adapter {adapter.lora_name!r} is that of {found.root!r}, not of {adapter.lora_path!r}",
                    param="lora_request",
                )
        return service.view(adapter.lora_name)

    async def _read(
        self, service: Service, prompt: Prompt, params: SamplingParams, record: RequestRecord
    ) -> tuple[ValidRequest, RequestOutput, tuple[ImageRef, ...]]:
        """The request, an output that contains the prompt, and the prompt's images."""
        read, rules = read_prompt(prompt), service.rules()
        if isinstance(read, Chat):
            request = params.request()
            num_best = check_num_best("logprobs", request.logprobs, rules)
            valid = validate_common(
                request, rules, max_tokens=request.max_tokens, prompt_field="messages", num_best=num_best
            )
            conversation = validate_conversation(
                [dict(message) for message in read.messages],
                rules,
                service.model.template,
                add_generation_prompt=read.add_generation_prompt and not read.continue_final_message,
                continue_final_message=read.continue_final_message,
                variables=read.chat_template_kwargs,
                tools=read.tools,
            )
            valid = replace(valid, warnings=(*valid.warnings, *conversation.warnings))
            whole = await service.prompts.render_and_encode(conversation, rules, record)
            kept = valid.truncated_chat(whole)
            return valid, RequestOutput("", prompt_token_ids=kept.token_ids), kept.images
        completion = validate_completion(params.request(read), rules)
        [token_ids] = await service.prompts.encode_prompts(completion, record.tenant)
        valid = completion.common
        text = read if isinstance(read, str) else None
        return valid, RequestOutput("", text, valid.truncated(token_ids)), ()

    async def reset_prefix_cache(self) -> None:
        """Drop all cached pages that no sequence uses."""
        (await self.service()).engine.reset_prefix_cache()

    async def close(self) -> None:
        """Abort all requests, and free the model. Idempotent."""
        async with self._start:
            self._is_closed = True
            service, self._service = self._service, None
            if service is not None:
                await service.close()
            await self._engine.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _pooled_input(prompt: Prompt) -> str | list[list[int]]:
    read = read_prompt(prompt)
    if isinstance(read, Chat):
        raise InvalidParameter("a text or token ids are pooled, not a chat", param="prompt")
    return read if isinstance(read, str) else [read]
