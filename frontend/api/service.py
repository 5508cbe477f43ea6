"""What all handlers share: the model's text tools, the engine, and the requests in progress.

Prompts become token ids off the event loop. A chat template is a program, and only running it shows whether it ends, so
it is always rendered in a process that can be killed. That costs about 0.2 milliseconds more than a thread would. Short
texts are tokenized in a thread, which takes a bounded time: any tokenizer reads 64 KiB in well under a second. Longer
texts are tokenized in the process too. Processes and threads serve the tenants in turns: see `fair_slots.py`.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
import structlog
from msgspec import UNSET

from penstock.config import Config
from penstock.config.api_keys import load_api_keys
from penstock.frontend import schema
from penstock.frontend.api.fingerprint import fingerprint_of
from penstock.frontend.api.grammar_part import GrammarPart
from penstock.frontend.api.image_part import ImagePart
from penstock.frontend.api.text_model import TextModel
from penstock.frontend.engine.book import RequestBook
from penstock.frontend.engine.generation import Generation
from penstock.frontend.errors import (
    ApiError,
    ContextLengthExceeded,
    InvalidParameter,
    InvalidRequest,
    NotGenerated,
    ShuttingDown,
    TemplateFailed,
)
from penstock.frontend.exchange.access import Access
from penstock.frontend.exchange.exchange import Observer, Route
from penstock.frontend.exchange.metrics import Metrics
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.exchange.tenants import user_of
from penstock.frontend.image_source import ImageLimits
from penstock.frontend.part import FrontendParts
from penstock.frontend.prompt import Prompt
from penstock.frontend.storage.database import Database
from penstock.frontend.streams.keeper import StreamKeeper
from penstock.frontend.streams.kept import Bounds
from penstock.frontend.streams.siblings import Siblings
from penstock.frontend.text.chat_template import ValidConversation
from penstock.frontend.text.child_pool import ChildDiedError, ChildPool, ChildTooSlowError, ChildUnusableError
from penstock.frontend.text.fair_slots import FairSlots
from penstock.frontend.text.template_facts import TemplateFacts
from penstock.frontend.text.tokenizer import NUM_THREADS, TextTokenizer
from penstock.frontend.validation.common import MAX_BYTES_PER_TOKEN, Rules, ValidRequest, check_text_size
from penstock.frontend.validation.completion import ValidCompletion
from penstock.ipc.addresses import addresses_in
from penstock.ipc.messages import EngineReady
from penstock.models.finding.registry import model_path

log = structlog.get_logger()

MAX_RENDER_SECONDS = 5.0
MAX_ENCODE_SECONDS = 10.0

SHORT_TEXT = 64 << 10
"""The longest text that is tokenized in a thread, in characters."""

MAX_QUICK = 16 << 10
"""Conversations of so many bytes, and texts of so many characters, take milliseconds, however they are made up."""

_NUM_LOOKS = 3
_MAX_PROCESSES = 2
_MAX_QUEUED = 8192  # the largest possible number of connections
_MAX_ANSWER_BYTES = 256 << 20

BASE_BODY_BYTES = 2 << 20
BODY_BYTES_PER_TOKEN = 32
"""A body may have the base plus this much per token of context: a token is a few bytes, but escapes take more."""

READY_WAIT_SECONDS = 10.0
"""How long a request waits for an engine that is not ready."""

KEEP_ALIVE_SECONDS = 15.0
"""Silence after which a stream gets a comment, so that no proxy takes it for dead."""


class PromptReader:
    """Makes prompts for one model; lives in a running event loop until `close`."""

    def __init__(
        self,
        model: Path,
        template_file: str,
        tokenizer: TextTokenizer,
        *,
        parse_special_tokens: bool = False,
        images: ImagePart | None = None,
        texts: str = "",
    ) -> None:
        """`model` is the checkpoint's path; `template_file` and `parse_special_tokens` are options.

        Args:
            images: puts images into prompts, if the model takes any.
            texts: the folder of an adapter with texts of its own.
        """
        self._tokenizer = tokenizer
        self.images = images
        self._children = ChildPool(
            "penstock.frontend.text.child",
            (str(model), template_file, "tokens" if parse_special_tokens else "text", *filter(None, (texts,))),
            max_processes=_MAX_PROCESSES,
            max_queued=_MAX_QUEUED,
            max_answer_bytes=_MAX_ANSWER_BYTES,
            max_short=MAX_QUICK,
        )
        self._threads = FairSlots(NUM_THREADS, _MAX_QUEUED, "to be read")

    async def warm(self) -> None:
        """Start a helper process before the first request arrives."""
        await self._children.warm()

    async def close(self) -> None:
        """End the processes."""
        await self._children.close()

    async def render_and_encode(
        self, conversation: ValidConversation, rules: Rules, record: RequestRecord, *, add_special_tokens: bool = False
    ) -> Prompt:
        """Render and tokenize a conversation. Templates write their own special tokens, so none are added by default.

        The conversation's images are held until the record's request has ended.

        Raises:
            TemplateFailed: if the template refuses the messages, or does not end.
            ContextLengthExceeded: if the text is too long to fit, however it is tokenized.
            InvalidImage: an image cannot be read.
        """
        text, seam, warnings = await self._render(conversation, rules, record.tenant)
        record.warnings += warnings
        check_text_size("messages", text, rules)

        async def encode(text: str) -> list[int]:
            [token_ids] = await self.encode_all(
                [text], record.tenant, field="messages", add_special_tokens=add_special_tokens, seam=seam
            )
            return token_ids

        if conversation.images and self.images is not None:
            return await self.images.prompt(text, conversation.images, encode, record)
        token_ids = await encode(text)
        if not token_ids:
            raise InvalidRequest("the chat template turns these messages into an empty prompt", param="messages")
        return Prompt(token_ids)

    async def encode_prompts(self, completion: ValidCompletion, client: str) -> list[list[int]]:
        """The token ids of each prompt.

        Raises:
            InvalidParameter: if a prompt has no tokens, or takes too long.
        """
        return await self.encode_inputs(
            completion.prompts, client, field="prompt", add_special_tokens=completion.add_special_tokens
        )

    async def encode_inputs(
        self, inputs: list[str] | list[list[int]], client: str, *, field: str, add_special_tokens: bool
    ) -> list[list[int]]:
        """The token ids of each input of the given field. Raises the same errors."""
        texts = [each for each in inputs if isinstance(each, str)]
        if not texts:
            return [each for each in inputs if isinstance(each, list)]
        encoded = await self.encode_all(texts, client, field=field, add_special_tokens=add_special_tokens)
        for index, token_ids in enumerate(encoded):
            if not token_ids:
                raise InvalidParameter(f"{field}[{index}] is empty: it has no tokens", param=field)
        return encoded

    async def encode_all(
        self, texts: list[str], client: str, *, field: str, add_special_tokens: bool, seam: str = ""
    ) -> list[list[int]]:
        """Tokenize a client's texts, and leave out the seam's tokens.

        Raises:
            InvalidParameter: if it takes too long.
            Overloaded: if too many texts wait.
        """
        num_chars = sum(map(len, texts))
        if num_chars <= SHORT_TEXT:
            async with self._thread(client, num_chars):
                return await self._tokenizer.encode_all(texts, add_special_tokens=add_special_tokens, seam=seam)
        return [
            await self._tokenized(["encode", [text, seam], add_special_tokens], field, client, len(text))
            for text in texts
        ]

    async def encode_pairs(
        self, pairs: list[tuple[str, str]], client: str, *, field: str, most: int = 0, most_of_second: int = 0
    ) -> list[tuple[list[int], int]]:
        """The token ids of each pair of texts, as `TextTokenizer.encode_pair` makes them. Raises the same errors."""
        num_chars = sum(len(first) + len(second) for first, second in pairs)
        if num_chars <= SHORT_TEXT:
            encode = partial(self._tokenizer.encode_pair, most=most, most_of_second=most_of_second)
            async with self._thread(client, num_chars):
                return await self._tokenizer.off_loop(lambda: [encode(*pair) for pair in pairs])
        found = []
        for first, second in pairs:
            question = ["pair", [first, second, most, most_of_second], None]
            ids, second_from = await self._tokenized(question, field, client, len(first) + len(second))
            found.append((ids, second_from))
        return found

    async def encode_plain(self, texts: list[str], client: str, *, field: str) -> list[list[int]]:
        """Tokenize texts without adding special tokens, and read those that are spelled out in them as plain text.

        Raises the same errors.
        """
        question = ["plain", texts, None]
        return [*await self._tokenized(question, field, client, sum(map(len, texts)))]

    async def decode(self, token_ids: list[int], client: str) -> str:
        """The text of token ids that a client chose.

        Raises:
            Overloaded: if too many texts wait.
        """
        async with self._thread(client, len(token_ids)):
            return await self._tokenizer.decode_off_loop(token_ids)

    def _thread(self, client: str, size: int) -> AbstractAsyncContextManager[None]:
        return self._threads.slot(client, "short" if size <= MAX_QUICK else "long")

    async def _tokenized(self, question: list[Any], field: str, client: str, num_chars: int) -> Any:
        try:
            token_ids, error = await self._children.ask(question, MAX_ENCODE_SECONDS, client)
        except ChildTooSlowError:
            error = f"it takes longer than {MAX_ENCODE_SECONDS:g} seconds"
        except ChildDiedError:
            error = "it takes too much memory, or crashes the tokenizer"
        except ChildUnusableError as unusable:
            error = str(unusable)
        if error:
            log.warning("tokenizing failed", num_chars=num_chars, reason=error)
            raise InvalidParameter(f"{field} cannot be tokenized: {error}", param=field)
        return token_ids

    async def look(self) -> TemplateFacts | None:
        """What the chat template shows; None if it does not end, or the process cannot be asked."""
        try:
            facts, error = await self._children.ask(["look", None, None], MAX_RENDER_SECONDS, "")
            if not error:
                return msgspec.convert(facts, TemplateFacts)
        except (ChildTooSlowError, ChildDiedError, ChildUnusableError, ApiError, msgspec.ValidationError) as failed:
            error = str(failed) or type(failed).__name__
        log.warning("chat template not probed: formats are found by its words", reason=error)
        return None

    async def _render(self, conversation: ValidConversation, rules: Rules, client: str) -> tuple[str, str, list[str]]:
        limit = MAX_BYTES_PER_TOKEN * rules.max_model_len
        if conversation.images:
            conversation = replace(conversation, images=())  # their places are in the messages
        question = ["render", conversation, limit]
        try:
            rendered, error = await self._children.ask(question, MAX_RENDER_SECONDS, client)
        except ChildTooSlowError:
            log.warning("chat template timed out", seconds=MAX_RENDER_SECONDS)
            error = f"the chat template takes longer than {MAX_RENDER_SECONDS:g} seconds on these messages"
        except ChildDiedError:
            log.warning("chat template process died")
            error = "the chat template takes too much memory on these messages, or crashes"
        except ChildUnusableError as unusable:
            error = str(unusable)
        if error:
            raise TemplateFailed(error, param="messages")
        if rendered is None:
            raise ContextLengthExceeded(
                f"the chat template turns these messages into more than {limit} characters; "
                f"{rules.max_model_len} tokens of context hold at most {limit} bytes",
                param="messages",
            )
        text, seam, warnings = rendered
        return str(text), str(seam), warnings


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
        """Add a generation that is about to start."""
        self._live[id(generation)] = generation

    def remove(self, generation: Generation) -> bool:
        """Remove a generation that has ended; False if it was removed already."""
        is_known = self._live.pop(id(generation), None) is not None
        if not self._live:
            self._idle.set()
        return is_known

    async def keep_alive(self) -> None:
        """Keep silent streams alive; runs as long as the process."""
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            silent_since = time.monotonic() - KEEP_ALIVE_SECONDS
            for generation in self:
                if generation.progress.last_token_at < silent_since:
                    generation.tick()

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Let running requests finish for this many seconds, or until `hurry`; then end the rest with an error."""
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
            await asyncio.sleep(0.2)  # time for their handlers to send the error


@dataclass(frozen=True, slots=True)
class Variant:
    """A model beside the served one: the same engine answers with an adapter of its weights."""

    model: TextModel  # under its one name
    prompts: PromptReader
    adapter: str  # as engines know it
    root: str  # where it was loaded from
    parent: str  # the served model's name


@dataclass
class Service:
    """The application behind the routes. One per process; lives in a running event loop.

    A variant's requests see a view of it (`view`), whose texts are the variant's; all else is shared.
    """

    config: Config
    model: TextModel
    engine: RequestBook
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    access: Access = field(init=False)
    database: Database | None = field(init=False)  # that of --data-dir
    streams: StreamKeeper = field(init=False)
    siblings: Siblings | None = field(default=None, init=False)  # other frontends of the launch
    grammars: GrammarPart = field(init=False)
    prompts: PromptReader = field(init=False)
    parts: FrontendParts = field(init=False)
    generations: Generations = field(default_factory=Generations)
    observers: tuple[Observer, ...] = ()  # called for requests that have ended
    routes: tuple[Route, ...] = ()  # all that are served; empty: none are, and handlers are called directly
    variants: dict[str, Variant] = field(default_factory=dict, init=False)  # by name; a part adds and removes them
    variant: Variant | None = field(default=None, init=False)  # whose view this is
    coming: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)  # variants that are being read
    _logits_processors: tuple[str, ...] = field(default=(), init=False)
    _facts: EngineReady | None = field(default=None, init=False)
    _system: tuple[str, schema.SystemParts] | None = field(default=None, init=False)  # and the fingerprint made from it

    def __post_init__(self) -> None:
        options = self.config.frontend
        self.database = Database(options.data_dir) if options.data_dir else None
        self.access = Access(load_api_keys(options.api_keys_file))
        self.streams = StreamKeeper(options.max_resumable_bytes, Bounds())
        self.parts = FrontendParts(self)
        self.grammars = self.parts.get(GrammarPart) or GrammarPart()
        self.prompts = PromptReader(
            model_path(self.config),
            options.chat_template,
            self.model.tokenizer,
            parse_special_tokens=options.parse_special_tokens,
            images=self.parts.get(ImagePart),
        )
        of_parts = self.config.of_parts()
        self._logits_processors = tuple(name for options in of_parts for name in options.processor_names)

    async def start(self) -> None:
        """Get ready to serve; call it once, before requests."""
        await self.learn()
        await self.parts.start()

    def share_stored(self, other: "Service") -> None:
        """From now on, share what is stored, and streams, with another service in this process."""
        self.streams = other.streams
        self.parts.share_stored(other.parts)

    async def meet_siblings(self, name: str) -> None:
        """Find the other frontends, so that their streams can be continued here; `name` is this frontend's own."""
        address = addresses_in(self.config.ipc.frontend_address)[0]
        if self.config.frontend.num_frontends > 1 and self.streams.is_on and address.startswith("ipc://"):
            siblings = Siblings(self.streams, Path(address.removeprefix("ipc://")).parent, name)
            try:
                await siblings.listen()
            except OSError as error:  # requests can be answered without them
                log.warning("streams not resumable at other frontends", reason=str(error))
            self.siblings = siblings

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a request's `model` may have."""
        return (*self.model.names, *self.variants)

    async def serving(self, name: str | None) -> "Service":
        """The service for requests to a model of this name; an unknown name is refused by whoever validates them.

        Raises:
            Unavailable: if no engine has been ready yet, which might know the name.
        """
        if name and name not in self.names:
            if self.engine.last_facts is None:
                await self.engine.wait_ready(READY_WAIT_SECONDS)
            if (coming := self.coming.get(name)) is not None:
                await asyncio.wait([coming], timeout=READY_WAIT_SECONDS)
        return self.view(name)

    def view(self, name: str | None) -> "Service":
        """The service as requests see it that name this model: itself, unless that is a variant."""
        variant = self.variants.get(name or "")
        if variant is None:
            return self
        view = copy(self)
        view.variant, view.model, view.prompts = variant, variant.model, variant.prompts
        view._facts = view._system = None  # its fingerprint is another one
        return view

    async def admit(self, record: RequestRecord, num_bytes: int, *, draws: bool = True) -> "Admission":
        """Let a request in whose body has so many bytes, before anything expensive is done for it.

        `draws`: whether it asks for tokens, which not every model has.

        Raises:
            NotGenerated: the model has none.
            ShuttingDown, Unavailable, Overloaded: if it cannot be served now.
        """
        if draws:
            self.check_draws()
        if self.generations.is_draining:
            raise ShuttingDown("the server is shutting down", retry_after=5)
        if self.engine.facts is None:
            await self.engine.wait_ready(READY_WAIT_SECONDS)
        return Admission(self, record, num_bytes)

    def check_draws(self) -> None:
        """Refuse what asks for tokens, if the model has none.

        Raises:
            NotGenerated: it has none.
        """
        if not self.model.draws_tokens:
            kind = "classes" if self.model.classes else "vectors"
            raise NotGenerated(f"the served model, {self.model.names[0]}, turns texts into {kind} and generates none")

    async def learn(self) -> None:
        """Try out the chat template, to know how the model writes calls and reasoning. Done once, before requests.

        A model without chats needs no process for that; the first long text starts one.
        """
        if not self.model.draws_tokens:
            return
        if self.model.template is None:
            await self.prompts.warm()
            return
        for _ in range(_NUM_LOOKS):  # a machine that starts a server may be too busy for the first one
            if (facts := await self.prompts.look()) is not None:
                self.model = self.model.with_facts(facts, self.config.frontend)
                return

    def rules(self) -> Rules:
        """This server's limits, and the facts about the model that the engine has reported so far."""
        facts = self.engine.last_facts
        vocab_size = facts.vocab_size if facts is not None else 1 << 31
        return Rules(
            model_names=self.model.names,
            max_n=self.config.frontend.max_n,
            max_model_len=facts.max_model_len if facts is not None else 1 << 20,
            vocab_size=vocab_size,
            eos_token_ids=tuple(token_id for token_id in self.model.eos_token_ids if token_id < vocab_size),
            defaults=self.model.defaults,
            tool_format=self.model.tool_format,
            hides_calls=self.model.hides_calls,
            images=self.image_limits,
            why_no_images=self.why_no_images,
            has_drafts=facts is None or bool(facts.max_drafts),
            logits_processors=self._logits_processors,
        )

    @property
    def image_limits(self) -> ImageLimits | None:
        """The limits for images in requests; None until an engine has reported that it takes images."""
        facts = self.engine.last_facts
        if self.prompts.images is None or facts is None or not facts.takes_images:
            return None
        return self.prompts.images.limits

    @property
    def why_no_images(self) -> str:
        """Why a model that sees is served as text only: a clause; empty if it is not, or if it sees nothing anyway."""
        facts = self.engine.last_facts
        images = self.prompts.images
        if images is None:
            return ""
        if images.limits is not None and facts is not None and not facts.takes_images:
            return "its engine computes no images"
        return images.why_none

    @property
    def fingerprint(self) -> str | None:
        """The `system_fingerprint` of answers; None until an engine has reported its facts."""
        system = self.system
        return None if system is None else system[0]

    @property
    def system(self) -> tuple[str, schema.SystemParts] | None:
        """The fingerprint, and what it is made from: all that a seeded answer depends on besides the request."""
        facts = self.engine.last_facts
        if facts is not None and facts is not self._facts:
            adapter = UNSET if self.variant is None else self.variant.adapter
            self._facts, self._system = facts, fingerprint_of(facts, self.model.digest, adapter)
        return self._system

    @property
    def max_model_len(self) -> int | None:
        """Prompt plus output tokens of one sequence; None until an engine has reported it."""
        facts = self.engine.last_facts
        return facts.max_model_len if facts is not None else None

    @property
    def max_body_bytes(self) -> int:
        """The largest body allowed, in bytes: as configured, else enough for any prompt that fits the context."""
        given = self.config.frontend.max_body_bytes
        of_images = 2 * self.image_limits.max_bytes if self.image_limits is not None else 0
        return given or BASE_BODY_BYTES + BODY_BYTES_PER_TOKEN * (self.max_model_len or 0) + of_images

    async def close(self) -> None:
        """Fail the requests that still run, disconnect from the engine, and end helper processes and threads."""
        for generation in self.generations:
            generation.fail(ShuttingDown("the server closed before the request was finished", retry_after=5))
        if self.siblings is not None:
            await self.siblings.close()
        self.streams.close()
        await self.engine.close()
        await self.prompts.close()
        await self.parts.close()
        if self.database is not None:
            self.database.close()
        self.model.tokenizer.close()


class Admission:
    """A request that has been let in. It holds a place in the queue until the engine has it: use it in a `with`.

    First that is a place for one sequence, which most requests have; the queue's gate is asked again only for others.
    """

    def __init__(self, service: Service, record: RequestRecord, num_bytes: int) -> None:
        """No text has more tokens than its body's bytes.

        Raises:
            Overloaded: if there is no room in the queue.
        """
        self.rules = service.rules()
        """To validate the request by."""
        self._service = service
        self._record = record
        self._num_bytes = num_bytes
        self._place = service.engine.queue.reserve(1, self._num_tokens(1), record.tenant)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._place.give_back()

    def hold(self, valid: ValidRequest, num_prompts: int = 1, *, num_added: int = 0) -> None:
        """Hold what the request turns out to need.

        `num_added`: the most tokens that the prompts have together beyond the body's bytes, such as those of a text
        that goes before each of them.

        Raises:
            InvalidParameter: it has more sequences than this server, or its API key, allows.
            RateLimitExceeded: its API key may not start that many now.
            Overloaded: if there is no room for them.
        """
        record, most = self._record, self._service.config.frontend.max_request_seqs
        num_seqs = num_prompts * valid.num_at_once
        if num_seqs > most:
            raise InvalidParameter(
                f"a request may have at most {most} sequences, this one has {num_seqs}: {num_prompts} prompts, "
                f"{valid.num_at_once} sequences each",
                param="n" if num_prompts == 1 else valid.prompt_field,
            )
        if record.key_use is not None and num_seqs > 1:
            record.key_use.add_sequences(num_seqs - 1)
            record.num_added_seqs = num_seqs - 1
        if record.key_use is not None and record.key_use.key.tenant_by == "user" and valid.user:
            record.tenant = user_of(record.tenant, valid.user)
        num_tokens = self._num_tokens(num_prompts, num_added) * valid.num_at_once
        self._place.resize(num_seqs, num_tokens, record.tenant)

    def _num_tokens(self, num_prompts: int, num_added: int = 0) -> int:
        """The most tokens that the prompts can have together."""
        most = self._num_bytes + num_added
        return min(most, num_prompts * (self._service.max_model_len or most))
