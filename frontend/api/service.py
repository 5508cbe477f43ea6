"""What all handlers work with: the model's text tools, the engine, and the requests now being generated."""

import asyncio
import hashlib
import struct
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import structlog
from msgspec import UNSET

from penstock.core.checkpoint.json_fields import JsonFields
from penstock.core.checkpoint.registry import model_path, open_model, served_model_names
from penstock.core.checkpoint.source import Checkpoint, eos_token_ids
from penstock.core.config import Config
from penstock.core.config.api_keys import load_api_keys
from penstock.frontend.api.prompts import PromptReader
from penstock.frontend.api.response_store import ResponseStore, store_path
from penstock.frontend.engine.book import RequestBook
from penstock.frontend.engine.generation import Generation, OutputRules
from penstock.frontend.errors import ApiError, InvalidParameter, ShuttingDown
from penstock.frontend.exchange.access import Access
from penstock.frontend.exchange.exchange import exceeded
from penstock.frontend.exchange.metrics import Metrics
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.grammars.reader import Grammar, GrammarReader, GrammarSource
from penstock.frontend.parsing.calls.format import ToolFormat
from penstock.frontend.parsing.reasoning import REASONING_FORMATS, ReasoningFormat, reasoning_format_of
from penstock.frontend.parsing.tool_formats.registry import TOOL_FORMATS, tool_format_of
from penstock.frontend.schema import CompletionTokensDetails, PromptTokensDetails, Usage
from penstock.frontend.text.chat_template import ChatTemplate, load_chat_template
from penstock.frontend.text.tokenizer import TextTokenizer, load_tokenizer
from penstock.frontend.validation.common import Rules, SamplingDefaults, ValidRequest
from penstock.frontend.validation.ready import ReadyRequest, make_ready
from penstock.frontend.version import VERSION
from penstock.ipc.messages import AddRequest

log = structlog.get_logger()

BASE_BODY_BYTES = 2 << 20
BODY_BYTES_PER_TOKEN = 32
"""A body may have this much, and this much for each token of context: tokens are a few bytes, escapes are more."""

READY_WAIT_SECONDS = 10.0
"""How long a request waits for an engine that is not ready."""

KEEP_ALIVE_SECONDS = 15.0
"""Silence after which a stream gets a comment, so that no proxy takes it for dead."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """What the frontend knows of the checkpoint."""

    names: tuple[str, ...]
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    defaults: SamplingDefaults
    eos_token_ids: tuple[int, ...]
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)


def load_text_model(config: Config) -> TextModel:
    """Read tokenizer, chat template and generation defaults of the checkpoint.

    Raises:
        ConfigError: in one clear sentence, if one of them cannot be used.
    """
    checkpoint = open_model(config)
    tokenizer = load_tokenizer(checkpoint)
    eos = eos_token_ids(checkpoint)
    if not eos and tokenizer.eos_token_id is not None:
        eos = (tokenizer.eos_token_id,)
    template = load_chat_template(checkpoint, config.frontend.chat_template, tokenizer.special_tokens)
    source = "" if template is None else template.source
    tool_parser, reasoning_parser = config.frontend.tool_call_parser, config.frontend.reasoning_parser
    return TextModel(
        names=served_model_names(config),
        tokenizer=tokenizer,
        template=template,
        defaults=_sampling_defaults(checkpoint),
        eos_token_ids=eos,
        tool_format=tool_format_of(source) if tool_parser == "auto" else TOOL_FORMATS.get(tool_parser),
        reasoning_format=(
            reasoning_format_of(source) if reasoning_parser == "auto" else REASONING_FORMATS.get(reasoning_parser)
        ),
        tokenizer_config=checkpoint.tokenizer_config,
    )


def _sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """generation_config.json's say on sampling; absent fields keep the neutral values."""
    found = JsonFields("generation_config.json", checkpoint.generation_config)
    neutral = SamplingDefaults()
    names = ("temperature", "top_p", "min_p", "repetition_penalty")
    values = {name: found.number(name, getattr(neutral, name)) for name in names}
    return SamplingDefaults(**values, top_k=max(found.whole("top_k", 0, least=-1), 0))


@dataclass
class Service:
    """The application behind the routes. One per process; lives in a running event loop."""

    config: Config
    model: TextModel
    engine: RequestBook
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    access: Access = field(init=False)
    responses: ResponseStore = field(init=False)
    grammars: GrammarReader = field(init=False)
    prompts: PromptReader = field(init=False)
    _generations: dict[int, Generation] = field(default_factory=dict)
    _num_made: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        options = self.config.frontend
        self.access = Access(load_api_keys(options.api_keys_file), shares_prefix_cache=options.share_prefix_cache)
        self.grammars = GrammarReader(model_path(self.config))
        self.prompts = PromptReader(
            model_path(self.config),
            options.chat_template,
            self.model.tokenizer,
            parse_special_tokens=options.parse_special_tokens,
        )
        self.responses = ResponseStore(
            store_path(self.config), options.max_stored_responses, options.max_stored_response_bytes
        )

    @property
    def num_generating(self) -> int:
        """Requests between submission and their end."""
        return len(self._generations)

    async def admit(self, record: RequestRecord) -> Rules:
        """Let a request in, before anything costly is done for it; the rules to validate it by.

        Raises:
            ShuttingDown, Unavailable, Overloaded: if it cannot be served now.
        """
        if self.is_draining:
            raise ShuttingDown("the server is shutting down", retry_after=5)
        if self.engine.facts is None:
            await self.engine.wait_ready(READY_WAIT_SECONDS)
        self.engine.queue.check(tenant=record.tenant)
        return self.rules()

    def place(
        self, record: RequestRecord, valid: ValidRequest, body: bytes, num_prompts: int = 1
    ) -> AbstractContextManager[None]:
        """Room in the queue while a request's prompts are made. No text has more tokens than bytes.

        Raises:
            InvalidParameter: the request has more sequences than one may have here, or with its API key.
            RateLimitExceeded: its API key may not have so many more now.
            Overloaded: when entered, if there is no room.
        """
        num_seqs, most = num_prompts * valid.num_sequences, self.config.frontend.max_request_seqs
        if num_seqs > most:
            raise InvalidParameter(
                f"a request may have {most} sequences at most, this one has {num_seqs}: {num_prompts} prompts, "
                f"{valid.num_sequences} sequences each",
                param="n" if num_prompts == 1 else "prompt",
            )
        if record.key_use is not None and num_seqs > 1:
            record.key_use.add_sequences(num_seqs - 1)
            record.num_added_seqs = num_seqs - 1
        num_tokens = min(len(body), num_prompts * (self.max_model_len or len(body)))
        return self.engine.queue.place(num_seqs, num_tokens * valid.num_sequences, record.tenant)

    async def make_ready(
        self, valid: ValidRequest, prompts: list[list[int]], record: RequestRecord, grammar: GrammarSource | None
    ) -> ReadyRequest:
        """The request with these prompts, and with its grammar read.

        Raises:
            InvalidRequest: if the grammar cannot be used, a prompt is too long, or nothing is left to draw.
            Overloaded: if too many grammars wait to be read.
        """
        read = Grammar() if grammar is None else await self.grammars.read(grammar, record.tenant)
        is_strict = self.config.frontend.strict_requests
        return make_ready(valid, prompts, read, self.model.tokenizer, record.warnings, is_strict=is_strict)

    async def schema_error(self, grammar: Grammar, record: RequestRecord, text: str, finish_reason: str) -> str:
        """What is wrong with a finished text, where its form could not be enforced as a whole; else empty."""
        if not grammar.checked_schema or finish_reason != "stop":
            return ""
        wrong = await self.grammars.mismatch(grammar.checked_schema, text, record.tenant)
        if wrong:
            record.warnings.append(f"schema_error: {wrong}")
        return wrong

    def rules(self) -> Rules:
        """This server's limits, and the model's facts as far as the engine has told them."""
        facts = self.engine.last_facts
        return Rules(
            model_names=self.model.names,
            max_n=self.config.frontend.max_n,
            max_model_len=facts.max_model_len if facts is not None else 1 << 20,
            vocab_size=facts.vocab_size if facts is not None else 1 << 31,
            eos_token_ids=self.model.eos_token_ids,
            defaults=self.model.defaults,
            tool_format=self.model.tool_format,
        )

    @property
    def fingerprint(self) -> str:
        """What an equal answer to an equal seeded request takes: this program, weights, device and precision."""
        facts = self.engine.last_facts
        if facts is None:
            return f"fp_{VERSION}"
        told = f"{VERSION} {facts.model_fingerprint} {facts.device} {facts.dtype}"
        return f"fp_{hashlib.sha256(told.encode()).hexdigest()[:12]}"

    @property
    def max_model_len(self) -> int | None:
        """Prompt plus output tokens of one sequence; None as long as no engine has said."""
        facts = self.engine.last_facts
        return facts.max_model_len if facts is not None else None

    @property
    def max_body_bytes(self) -> int:
        """The most that a request's body may have: as configured, else what a prompt that fits can need."""
        given = self.config.frontend.max_body_bytes
        return given or BASE_BODY_BYTES + BODY_BYTES_PER_TOKEN * (self.max_model_len or 0)

    def generate(
        self,
        ready: ReadyRequest,
        record: RequestRecord,
        *,
        shown: frozenset[int] = frozenset(),
        is_prompt_only: bool = False,
    ) -> Generation:
        """Submit a request: one AddRequest per prompt. The caller closes the generation on every path.

        The special tokens in `shown` stay in the text in any case. If `is_prompt_only`, nothing of the output is told.

        Raises:
            RateLimitExceeded: if the API key's tokens are used up.
            Unavailable: if the engine's queue is not reachable.
        """
        valid, prompts, tokenizer, key_use = ready.valid, ready.prompts, self.model.tokenizer, record.key_use
        requests = []
        group = f"{self.engine.name}:{self._num_made}"
        left = None if record.seconds is None else max(0.001, record.arrived + record.seconds - time.monotonic())
        for prompt, sampling in zip(prompts, ready.sampling, strict=True):
            self._num_made += 1
            requests.append(
                AddRequest(
                    request_id=f"{self.engine.name}:{self._num_made}:{record.request_id}",
                    prompt_token_ids=struct.pack(f"<{len(prompt)}i", *prompt),
                    sampling=sampling,
                    n=valid.num_sequences,
                    priority=valid.priority,
                    cache_salt=valid.cache_salt if key_use is None else key_use.salted(valid.cache_salt),
                    tenant=record.tenant,
                    group=group,
                    seconds_left=left or 0.0,
                )
            )
        rules = OutputRules(
            make_detokenizer=lambda: tokenizer.detokenizer(skip_special_tokens=valid.skip_special_tokens, shown=shown),
            stop=valid.stop,
            include_stop=valid.include_stop,
            min_tokens=valid.sampling.min_tokens,
            is_prompt_only=is_prompt_only,
            reported_stop_token_ids=valid.user_stop_token_ids,
        )
        num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        if key_use is not None:
            key_use.use_prompt(num_prompt_tokens)
        record.num_prompt_tokens = num_prompt_tokens
        record.is_stream = valid.stream
        record.wants_timings = valid.return_timings
        on_tokens = None if key_use is None else key_use.use_outputs
        generation = Generation(self.engine, requests, rules, self.metrics.inter_token_latency.note, on_tokens)
        self._generations[id(generation)] = generation
        if left is not None and record.seconds is not None:
            generation.deadline = asyncio.get_running_loop().call_later(left, generation.end, exceeded(record.seconds))
        self.engine.queue.submitted(
            generation.num_sequences, record.num_prompt_tokens * valid.num_sequences, record.tenant
        )
        try:
            generation.start()
        except ApiError:
            self.finish(generation, record)
            raise
        return generation

    def finish(self, generation: Generation, record: RequestRecord) -> None:
        """Close a generation and note what became of it. Idempotent."""
        generation.close()
        if self._generations.pop(id(generation), None) is not None:
            self.engine.queue.ended(generation.num_sequences)
            if record.error is None and not generation.is_finished:
                record.error = generation.error  # nobody may have been there to read of it
            progress = generation.progress
            record.num_output_tokens = progress.num_output_tokens
            record.num_cached_tokens = progress.num_cached_tokens
            record.first_token_at = progress.first_token_at
            record.last_token_at = progress.last_token_at
            record.submitted_at = progress.submitted_at
            record.queue_seconds = progress.queue_seconds
            reasons = progress.finish_reasons
            for _ in range(record.num_calling):  # to the engine they just stopped
                reasons[reasons.index("stop")] = "tool_calls"
            record.finish_reasons = reasons + ["abort"] * (generation.num_sequences - len(reasons))
        if not self._generations:
            self._idle.set()

    def usage(self, generation: Generation, record: RequestRecord) -> Usage:
        """Tokens so far; prompts count once however many sequences they have."""
        num_output = generation.progress.num_output_tokens
        num_reasoning = record.num_reasoning_tokens
        timings = generation.progress.timings(record.arrived) if record.wants_timings else UNSET
        return Usage(
            prompt_tokens=record.num_prompt_tokens,
            completion_tokens=num_output,
            total_tokens=record.num_prompt_tokens + num_output,
            prompt_tokens_details=PromptTokensDetails(generation.progress.num_cached_tokens),
            completion_tokens_details=CompletionTokensDetails(num_reasoning) if num_reasoning else UNSET,
            timings=timings,
        )

    async def keep_alive(self) -> None:
        """Let silent streams show that they live, for as long as the process runs."""
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            silent_since = time.monotonic() - KEEP_ALIVE_SECONDS
            for generation in list(self._generations.values()):
                if generation.progress.last_token_at < silent_since:
                    generation.tick()

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Take no new work; let running requests finish for so long, or until `hurry`, then end them with an error."""
        self.is_draining = True
        log.info("draining", num_requests=self.num_generating, seconds=seconds)
        if self._generations:
            self._idle.clear()
            ends = [asyncio.create_task(event.wait()) for event in (self._idle, hurry)]
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
        for generation in list(self._generations.values()):
            generation.fail(ShuttingDown("the server shut down before the request was finished", retry_after=5))
        if self._generations:
            await asyncio.sleep(0.2)  # their handlers send the error
