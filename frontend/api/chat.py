"""POST /v1/chat/completions"""

from dataclasses import replace
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET

from penstock.frontend import schema
from penstock.frontend.api.body import read
from penstock.frontend.api.chunks import ChunkWriter
from penstock.frontend.api.logprobs import prompt_logprobs
from penstock.frontend.api.run import Run, submit
from penstock.frontend.api.service import Service
from penstock.frontend.api.text_model import TextModel
from penstock.frontend.draws_and_clock import CLOCK
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.parsing.parser import (
    PLAIN,
    MessageParser,
    OutputFormat,
    ParsedCall,
    ParsedMessage,
    ReasoningCounter,
    parse_message,
)
from penstock.frontend.parsing.parts import CallArguments, CallInput, CallStart, Content, Part, Reasoning
from penstock.frontend.prompt import Prompt
from penstock.frontend.validation.chat import ValidChat, validate_chat

_encode = msgspec.json.encode

_NUM_LAST_TOKENS = 16
"""How many of a prompt's last tokens show whether the template has opened reasoning."""


async def chat_completions(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """The handler.

    Raises:
        ApiError: before the first byte.
    """
    request, num_bytes = await read(schema.CHAT, record, body), len(body)
    service = await service.serving(request.model)
    with await service.admit(record, num_bytes) as admission:
        valid = validate_chat(request, admission.rules, service.model.template)
        admission.hold(valid.common)
        has_functions = valid.has_functions
        del body, request  # they may be large
        record.warnings += valid.conversation.warnings
        prompt = await service.prompts.render_and_encode(valid.conversation, admission.rules, record)
        prompt = valid.common.truncated_chat(prompt)
        run, output_format = await submit_chat(service, record, valid, prompt)
    del valid  # its conversation may be large too, and generating takes long
    with run:
        if not run.valid.stream:
            return Reply(await _completion(run, output_format, has_functions=has_functions))
        chunks = ChatChunks(run)
        if output_format is not PLAIN:
            chunks = ParsedChatChunks(run, output_format, has_functions=has_functions)
        await run.first_news()
        return run.streamed(chunks, chunks.opening())


async def submit_chat(
    service: Service, record: RequestRecord, valid: ValidChat, prompt: Prompt, *, is_prompt_only: bool = False
) -> tuple[Run, OutputFormat]:
    """Send a chat with this prompt to the engine; also return how its output is to be parsed.

    Raises:
        ApiError: as `submit`.
    """
    common, model = valid.common, service.model
    output_format = _output_format(model, valid, prompt.token_ids)
    if common.grammar is not None or (valid.tools is not None and valid.tools.binds_output):
        common = service.grammars.bound(common, output_format, model.tokenizer)
    shown: frozenset[int] = frozenset()
    if output_format is not PLAIN:
        shown = model.tokenizer.special_ids(output_format.marks)
    run = await submit(
        service,
        record,
        common,
        [prompt.token_ids],
        images=prompt.images,
        shown=shown,
        is_prompt_only=is_prompt_only,
    )
    return run, output_format


def _output_format(model: TextModel, valid: ValidChat, prompt: list[int]) -> OutputFormat:
    """Return how the model's output after this prompt is to be parsed."""
    reasoning, tools = model.reasoning_format, valid.tools
    tool_format = model.tool_format if tools is None else tools.tool_format
    is_prompted = tool_format is not None and tool_format.is_opened_by_prompt
    if tools is None and not is_prompted:
        tool_format = None
    if reasoning is None and tool_format is None:
        return PLAIN
    prompt_end = final = ""
    if reasoning is not None or is_prompted:
        conversation = valid.conversation
        continued = conversation.messages[-1].get("content") if conversation.continue_final_message else ""
        final = continued if isinstance(continued, str) else ""
        prompt_end = model.tokenizer.decode(prompt[-_NUM_LAST_TOKENS:])
    return OutputFormat(
        reasoning=reasoning,
        is_reasoning_open=reasoning is not None and reasoning.is_opened_by(prompt_end, final),
        is_reasoning_over=reasoning is not None and reasoning.is_closed_by(prompt_end, final),
        is_answer_open=reasoning is not None and not final and reasoning.is_answered_by(prompt_end),
        include_reasoning=valid.include_reasoning,
        tools=tools,
        tool_format=tool_format,
        is_call_open=tool_format is not None and is_prompted and prompt_end.endswith(tool_format.starts[0]),
    )


class ChatChunks(ChunkWriter):
    """chat.completion.chunk events."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion.chunk"
    nothing: ClassVar[dict[str, object]] = {"delta": {}}

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._after = b'},"logprobs":null,"finish_reason":null}]' + self._no_usage

    def opening(self) -> bytes:
        """The first chunk of each choice."""
        valid, [prompt] = self.run.valid, self.run.prompts
        opening = b""
        for index in range(valid.num_sequences):
            ids = b',"prompt_token_ids":' + _encode(prompt) if self._token_ids and index == 0 else b""
            delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            opening += self._head + b',"choices":[{"index":%d,' % index + delta + ids + self._tail()
        return opening

    def delta(self, index: int, delta: bytes) -> bytes:
        """A chunk with a delta that is already JSON."""
        choice = b'{"index":%d,"delta":' % index + delta + b',"logprobs":null,"finish_reason":null}'
        return self._head + b',"choices":[' + choice + b"]" + self._tail()

    def event(self, event: SequenceEvent) -> bytes:
        """Content chunk, finish chunk, or both; empty if there is nothing to show yet."""
        if self._is_checked:
            self._collect(event)
        chunks = b""
        scores = event.scores if self._scores is not None else None
        if event.text or scores or (self._token_ids and event.token_ids):
            before = self._before.get(event.index)
            if before is None:
                before = self._head + b',"choices":[{"index":%d,"delta":{"content":' % event.index
                self._before[event.index] = before
            if not (self._has_usage or self._token_ids or scores):
                chunks = before + _encode(event.text) + self._after
            else:
                ids = b',"token_ids":' + _encode(event.token_ids) if self._token_ids else b""
                logprobs = _encode(self._scores.chat(scores)) if self._scores is not None and scores else b"null"
                rest = b'},"logprobs":' + logprobs + b',"finish_reason":null' + ids + b"}]" + self._tail()
                chunks = before + _encode(event.text) + rest
        if event.finish_reason is not None:
            chunks += self._head + b',"choices":[' + self._choice(event, self.nothing) + b"]" + self._tail()
        return chunks


class ParsedChatChunks(ChatChunks):
    """chat.completion.chunk events of outputs with more than content: reasoning and tool calls."""

    def __init__(self, run: Run, output_format: OutputFormat, *, has_functions: bool) -> None:
        super().__init__(run)
        self._has_functions = has_functions
        sequences, tokenizer = range(run.valid.num_sequences), run.service.model.tokenizer
        self._parsers = [MessageParser(output_format) for _ in sequences]
        self._counters = [ReasoningCounter(output_format, tokenizer) for _ in sequences]
        self._num_reasoning_tokens = [0 for _ in sequences]

    def event(self, event: SequenceEvent) -> bytes:
        """One chunk for each part of the event; empty if nothing is certain yet."""
        index = event.index
        parser = self._parsers[index]
        self._num_reasoning_tokens[index] = self._counters[index].feed(event.token_ids)
        self.run.record.num_reasoning_tokens = sum(self._num_reasoning_tokens)
        parts = parser.feed(event.text)
        if event.finish_reason is None and len(parts) == 1 and isinstance(parts[0], Content):
            return super().event(replace(event, text=parts[0].text))
        reason = event.finish_reason
        if reason is not None:
            parts += parser.finish()
            reason = parser.end(reason)
            self.run.record.num_calling += reason == "tool_calls"
        # First the log-probabilities in a chunk without text, then the parts, then the end.
        chunks = super().event(replace(event, text="", finish_reason=None))
        for part in parts:
            if isinstance(part, Content):
                chunks += super().event(SequenceEvent(index, part.text, []))
            else:
                chunks += self.delta(index, _delta(part, has_functions=self._has_functions))
        if reason is not None:
            end = SequenceEvent(index, "", [], _shown_reason(reason, self._has_functions), event.stop_reason)
            chunks += super().event(end)
        return chunks


def _shown_reason(reason: str, has_functions: bool) -> str:
    return "function_call" if has_functions and reason == "tool_calls" else reason


def _delta(part: Part, *, has_functions: bool) -> bytes:
    delta: dict[str, Any]
    match part:
        case CallStart() if has_functions:
            delta = {"function_call": {"name": part.name, "arguments": ""}}
        case CallArguments() if has_functions:
            delta = {"function_call": {"arguments": part.text}}
        case Reasoning():
            delta = {"reasoning": part.text, "reasoning_content": part.text}
        case CallStart():
            kind, given = ("custom", "input") if part.is_custom else ("function", "arguments")
            call = {"index": part.index, "id": part.call_id, "type": kind, kind: {"name": part.name, given: ""}}
            delta = {"tool_calls": [call]}
        case CallArguments():
            delta = {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
        case CallInput():
            delta = {"tool_calls": [{"index": part.index, "custom": {"input": part.text}}]}
        case Content():
            delta = {"content": part.text}
    return _encode(delta)


async def _completion(run: Run, output_format: OutputFormat, *, has_functions: bool) -> bytes:
    """The body of a complete answer."""
    service, record, valid, [prompt] = run.service, run.record, run.valid, run.prompts
    answers = await run.answers()
    tokenizer = service.model.tokenizer
    counts = [ReasoningCounter(output_format, tokenizer).feed(answer.token_ids) for answer in answers]
    record.num_reasoning_tokens = sum(counts)
    messages = [parse_message(output_format, answer.text, answer.finish_reason) for answer in answers]
    record.num_calling = sum(message.finish_reason == "tool_calls" for message in messages)
    wrong = [await run.schema_error(message.content or "", message.finish_reason) for message in messages]
    scores = run.score_writer()
    of_prompt: schema.PromptLogprobs | None = None
    if valid.logprobs.prompt >= 0:
        [told] = await run.generation.prompt_logprobs()
        of_prompt = await tokenizer.off_loop(lambda: prompt_logprobs(tokenizer, valid.logprobs, told))
    choices = [
        schema.ChatChoice(
            index=index,
            message=_message(message, output_format, has_functions=has_functions),
            finish_reason=_shown_reason(message.finish_reason, has_functions),
            stop_reason=answer.stop_reason,
            logprobs=None if scores is None else scores.chat(answer.scores),
            token_ids=answer.token_ids if valid.return_token_ids else None,
            schema_error=wrong[index] or UNSET,
        )
        for index, (answer, message) in enumerate(zip(answers, messages, strict=True))
    ]
    completion = schema.ChatCompletion(
        id=f"chatcmpl-{record.request_id}",
        created=int(CLOCK.get()()),
        model=valid.model,
        choices=choices,
        usage=await run.final_usage(),
        system_fingerprint=service.fingerprint,
        prompt_token_ids=prompt if valid.return_token_ids else None,
        prompt_logprobs=of_prompt,
    )
    return msgspec.json.encode(completion)


def _message(message: ParsedMessage, output_format: OutputFormat, *, has_functions: bool) -> schema.ChatMessage:
    """The message with all its parts. The field for reasoning is always there, null if there was none."""
    reasoning: str | None = None
    if output_format.reasoning is not None and output_format.include_reasoning:
        reasoning = message.reasoning or None
    calls = [_call(call) for call in message.calls]
    functions = [schema.CalledFunction(call.name, call.arguments) for call in message.calls] if has_functions else []
    return schema.ChatMessage(
        role="assistant",
        content=message.content or None if calls else message.content,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=UNSET if has_functions else calls or UNSET,
        function_call=functions[0] if functions else UNSET,
    )


def _call(call: ParsedCall) -> schema.ToolCall | schema.CustomToolCall:
    if call.is_custom:
        return schema.CustomToolCall(call.call_id, schema.CalledCustomTool(call.name, call.arguments))
    return schema.ToolCall(call.call_id, schema.CalledFunction(call.name, call.arguments))
