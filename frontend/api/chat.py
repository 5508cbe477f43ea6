"""POST /v1/chat/completions"""

import time
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from msgspec import UNSET

from penstock.frontend import schema
from penstock.frontend.api.chunks import ChatChunks, ParsedChatChunks
from penstock.frontend.api.logprobs import prompt_logprobs
from penstock.frontend.api.output_grammar import output_grammar_of
from penstock.frontend.api.run import Chunks, Job, Prepared, Run, run
from penstock.frontend.api.service import Service
from penstock.frontend.api.text_model import TextModel
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.parsing.parser import PLAIN, OutputFormat, ParsedMessage, ReasoningCounter, parse_message
from penstock.frontend.validation.chat import ValidChat, validate_chat
from penstock.frontend.validation.common import Rules

_NUM_LAST_TOKENS = 16
"""Enough of a prompt's end to see whether the template has opened reasoning."""


async def _validated(
    service: Service, record: RequestRecord, request: schema.ChatRequest, rules: Rules, num_bytes: int
) -> Job:
    valid = validate_chat(request, rules, service.model.template)

    async def prepare() -> Prepared:
        record.warnings += valid.conversation.warnings
        prompt = valid.common.truncated(await service.prompts.render_and_encode(valid.conversation, rules))
        return prepared_chat(service, valid, prompt, _chunks, _whole)

    return Job(valid.common, prepare)


chat_completions = partial(run, schema.CHAT, _validated)
"""The handler."""


def prepared_chat(
    service: Service,
    valid: ValidChat,
    prompt: list[int],
    chunks: Callable[[OutputFormat, Run], Chunks],
    whole: Callable[[OutputFormat, Run], Awaitable[bytes]],
) -> Prepared:
    """What a chat with this prompt takes.

    Raises:
        InvalidParameter: if the output cannot end.
    """
    output_format = _output_format(service.model, valid, prompt)
    is_free = valid.common.grammar is None and valid.tools is None
    return Prepared(
        [prompt],
        None if is_free else output_grammar_of(valid.common, output_format, service.model.tokenizer),
        partial(chunks, output_format),
        partial(whole, output_format),
        frozenset() if output_format is PLAIN else service.model.tokenizer.special_ids(output_format.marks),
    )


def _output_format(model: TextModel, valid: ValidChat, prompt: list[int]) -> OutputFormat:
    """How what the model will write behind this prompt is to be read."""
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
        include_reasoning=valid.include_reasoning,
        tools=tools,
        tool_format=tool_format,
        is_call_open=tool_format is not None and is_prompted and prompt_end.endswith(tool_format.starts[0]),
    )


def _chunks(output_format: OutputFormat, run: Run) -> Chunks:
    return ChatChunks(run) if output_format is PLAIN else ParsedChatChunks(run, output_format)


async def _whole(output_format: OutputFormat, run: Run) -> bytes:
    service, record, valid, [prompt] = run.service, run.record, run.ready.valid, run.ready.prompts
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
            message=_message(message, output_format),
            finish_reason=message.finish_reason,
            stop_reason=answer.stop_reason,
            logprobs=None if scores is None else scores.chat(answer.scores),
            token_ids=answer.token_ids if valid.return_token_ids else None,
            schema_error=wrong[index] or UNSET,
        )
        for index, (answer, message) in enumerate(zip(answers, messages, strict=True))
    ]
    completion = schema.ChatCompletion(
        id=f"chatcmpl-{record.request_id}",
        created=int(time.time()),
        model=valid.model,
        choices=choices,
        usage=run.usage(),
        system_fingerprint=service.fingerprint,
        prompt_token_ids=prompt if valid.return_token_ids else None,
        prompt_logprobs=of_prompt,
    )
    return msgspec.json.encode(completion)


def _message(message: ParsedMessage, output_format: OutputFormat) -> schema.ChatMessage:
    """The message with what there is in it; a model with reasoning always says whether it reasoned."""
    reasoning: str | None = None
    if output_format.reasoning is not None and output_format.include_reasoning:
        reasoning = message.reasoning or None
    calls = [schema.ToolCall(call.call_id, schema.CalledFunction(call.name, call.arguments)) for call in message.calls]
    return schema.ChatMessage(
        role="assistant",
        content=message.content or None if calls else message.content,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls or UNSET,
    )
