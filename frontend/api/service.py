"""What all handlers share: the model's text tools, the engine, and the requests in progress."""

import asyncio
import hashlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import structlog

from penstock.core.checkpoint.registry import model_path
from penstock.core.config import Config
from penstock.core.config.api_keys import load_api_keys
from penstock.frontend.api.prompts import PromptReader
from penstock.frontend.api.response_store import ResponseStore, store_path
from penstock.frontend.api.text_model import TextModel
from penstock.frontend.engine.book import RequestBook
from penstock.frontend.engine.generation import Generation
from penstock.frontend.errors import InvalidParameter, ShuttingDown
from penstock.frontend.exchange.access import Access
from penstock.frontend.exchange.metrics import Metrics
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.grammars.reader import GrammarReader
from penstock.frontend.validation.common import Rules, ValidRequest
from penstock.ipc.version import VERSION

log = structlog.get_logger()

BASE_BODY_BYTES = 2 << 20
BODY_BYTES_PER_TOKEN = 32
"""A body may have this many bytes, plus these for each token of context: tokens are a few bytes, escapes are more."""

READY_WAIT_SECONDS = 10.0
"""How long a request waits for an engine that is not ready."""

KEEP_ALIVE_SECONDS = 15.0
"""Silence after which a stream gets a comment, so that no proxy takes it for dead."""


class Generations:
    """The requests from their submission to their end."""

    def __init__(self) -> None:
        self.is_draining = False
        self.num_made = 0  # requests sent to the engine
        self._live: dict[int, Generation] = {}
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self._live.values()))

    def next_number(self) -> int:
        """Return the number of a new request to the engine."""
        self.num_made += 1
        return self.num_made

    def add(self, generation: Generation) -> None:
        """Add one that is about to start."""
        self._live[id(generation)] = generation

    def remove(self, generation: Generation) -> bool:
        """Remove one that has ended; False if it was removed already."""
        is_known = self._live.pop(id(generation), None) is not None
        if not self._live:
            self._idle.set()
        return is_known

    async def keep_alive(self) -> None:
        """Keep silent streams alive, for as long as the process runs."""
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            silent_since = time.monotonic() - KEEP_ALIVE_SECONDS
            for generation in self:
                if generation.progress.last_token_at < silent_since:
                    generation.tick()

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Let running requests finish for this many seconds, or until `hurry`, then end them with an error."""
        self.is_draining = True
        log.info("draining", num_requests=len(self), seconds=seconds)
        if self._live:
            self._idle.clear()
            ends = [asyncio.create_task(event.wait()) for event in (self._idle, hurry)]
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
        for generation in self:
            generation.fail(ShuttingDown("the server shut down before the request was finished", retry_after=5))
        if self._live:
            await asyncio.sleep(0.2)  # their handlers send the error


@dataclass
class Service:
    """The application behind the routes. One per process; lives in a running event loop."""

    config: Config
    model: TextModel
    engine: RequestBook
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    access: Access = field(init=False)
    responses: ResponseStore = field(init=False)
    grammars: GrammarReader = field(init=False)
    prompts: PromptReader = field(init=False)
    generations: Generations = field(default_factory=Generations)

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

    async def admit(self, record: RequestRecord) -> Rules:
        """Accept a request before anything expensive is done for it; return the rules to validate it by.

        Raises:
            ShuttingDown, Unavailable, Overloaded: if it cannot be served now.
        """
        if self.generations.is_draining:
            raise ShuttingDown("the server is shutting down", retry_after=5)
        if self.engine.facts is None:
            await self.engine.wait_ready(READY_WAIT_SECONDS)
        self.engine.queue.check(tenant=record.tenant)
        return self.rules()

    def reserve(
        self, record: RequestRecord, valid: ValidRequest, num_bytes: int, num_prompts: int
    ) -> AbstractContextManager[None]:
        """Reserve room in the queue while a request's prompts are tokenized. No text has more tokens than bytes.

        Raises:
            InvalidParameter: the request has more sequences than allowed here, or for its API key.
            RateLimitExceeded: its API key may not start that many now.
            Overloaded: when entered, if there is no room.
        """
        num_seqs, most = num_prompts * valid.num_sequences, self.config.frontend.max_request_seqs
        if num_seqs > most:
            raise InvalidParameter(
                f"a request may have at most {most} sequences, this one has {num_seqs}: {num_prompts} prompts, "
                f"{valid.num_sequences} sequences each",
                param="n" if num_prompts == 1 else "prompt",
            )
        if record.key_use is not None and num_seqs > 1:
            record.key_use.add_sequences(num_seqs - 1)
            record.num_added_seqs = num_seqs - 1
        num_tokens = min(num_bytes, num_prompts * (self.max_model_len or num_bytes))
        return self.engine.queue.reserve(num_seqs, num_tokens * valid.num_sequences, record.tenant)

    def rules(self) -> Rules:
        """This server's limits, and the model's facts as far as the engine has reported them."""
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
        """Everything that a seeded answer depends on besides the request: this program, weights, device and dtype."""
        facts = self.engine.last_facts
        if facts is None:
            return f"fp_{VERSION}"
        told = f"{VERSION} {facts.model_fingerprint} {facts.device} {facts.dtype}"
        return f"fp_{hashlib.sha256(told.encode()).hexdigest()[:12]}"

    @property
    def max_model_len(self) -> int | None:
        """Prompt plus output tokens of one sequence; None until an engine has reported it."""
        facts = self.engine.last_facts
        return facts.max_model_len if facts is not None else None

    @property
    def max_body_bytes(self) -> int:
        """The largest body allowed: as configured, or else what a prompt that fits can need."""
        given = self.config.frontend.max_body_bytes
        return given or BASE_BODY_BYTES + BODY_BYTES_PER_TOKEN * (self.max_model_len or 0)

    async def close(self) -> None:
        """Fail what still runs, disconnect from the engine, and end helper processes and threads."""
        for generation in self.generations:
            generation.fail(ShuttingDown("the server closed before the request was finished", retry_after=5))
        await self.engine.close()
        await self.grammars.close()
        await self.prompts.close()
        self.responses.close()
        self.model.tokenizer.close()
