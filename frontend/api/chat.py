"""POST /v1/chat/completions"""

import time

import msgspec
from msgspec import UNSET

from penstock.frontend import schema
from penstock.frontend.api.chunks import ChatChunks
from penstock.frontend.api.gathering import gather
from penstock.frontend.api.logprobs import prompt_logprobs, score_writer
from penstock.frontend.api.output_format import output_format_for
from penstock.frontend.api.output_grammar import output_grammar_of
from penstock.frontend.api.parsed_chunks import ParsedChatChunks
from penstock.frontend.api.service import Service
from penstock.frontend.api.stream_check import CheckedChatChunks, Collected, last_words
from penstock.frontend.api.streaming import Chunks, stream_reply
from penstock.frontend.engine.generation import Generation
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.parsing.message_parser import ParsedMessage, ReasoningCounter, parse_message
from penstock.frontend.parsing.output_format import OutputFormat
from penstock.frontend.validation.chat import validate_chat
from penstock.frontend.validation.ready import ReadyRequest


async def chat_completions(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """Answer a chat request.

    Raises:
        ApiError: before the first byte.
    """
    request = schema.decode(schema.CHAT, body)
    record.warnings += schema.unknown_fields(schema.CHAT, body)
    rules = await service.admit(record)
    valid = validate_chat(request, rules, service.model.template)
    with service.place(record, valid.common, body):
        record.warnings += valid.conversation.warnings
        prompt = valid.common.truncated(await service.prompts.render_and_encode(valid.conversation, rules))
        output_format = output_format_for(service.model, valid, prompt)
        grammar = output_grammar_of(valid.common, output_format, service.model.tokenizer)
        ready = await service.make_ready(valid.common, [prompt], record, grammar)
        shown = service.model.tokenizer.special_ids(output_format.marks)
        generation = service.generate(ready, record, shown=shown)
    del body, request  # they may be large, and the generation takes its time
    try:
        if valid.common.stream:
            kind = CheckedChatChunks if ready.grammar.checked_schema else ChatChunks
            chunks = kind(
                f"chatcmpl-{record.request_id}",
                int(time.time()),
                valid.common.model,
                fingerprint=service.fingerprint,
                include_usage=valid.common.include_usage,
                token_ids=valid.common.return_token_ids,
                scores=score_writer(service.model.tokenizer, valid.common.logprobs),
            )
            usage = service.usage(generation, record) if valid.common.continuous_usage else None
            opening = b"".join(
                chunks.role(index, prompt if valid.common.return_token_ids and index == 0 else None, usage)
                for index in range(generation.num_sequences)
            )
            writer: Chunks = chunks
            if not output_format.is_plain:
                tokenizer = service.model.tokenizer
                writer = ParsedChatChunks(chunks, output_format, generation.num_sequences, tokenizer, record)
            before_end = None
            if isinstance(chunks, CheckedChatChunks):
                chunks.collected = Collected()
                before_end = last_words(service, record, ready.grammar, chunks)
            return await stream_reply(service, record, valid.common, generation, writer, opening, before_end)
        return await _whole(service, record, ready, generation, output_format)
    except BaseException:  # also a cancellation: the client has left
        service.finish(generation, record)
        raise


async def _whole(
    service: Service,
    record: RequestRecord,
    ready: ReadyRequest,
    generation: Generation,
    output_format: OutputFormat,
) -> Reply:
    valid, [prompt] = ready.valid, ready.prompts
    answers = await gather(generation)
    tokenizer = service.model.tokenizer
    counts = [ReasoningCounter(output_format, tokenizer).feed(answer.token_ids) for answer in answers]
    record.num_reasoning_tokens = sum(counts)
    messages = [parse_message(output_format, answer.text, answer.finish_reason) for answer in answers]
    record.num_calling = sum(message.finish_reason == "tool_calls" for message in messages)
    wrong = [
        await service.schema_error(ready.grammar, record, message.content or "", message.finish_reason)
        for message in messages
    ]
    scores = score_writer(tokenizer, valid.logprobs)
    of_prompt: schema.PromptLogprobs | None = None
    if valid.logprobs.prompt >= 0:
        [told] = await generation.prompt_logprobs()
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
        usage=service.usage(generation, record),
        system_fingerprint=service.fingerprint,
        prompt_token_ids=prompt if valid.return_token_ids else None,
        prompt_logprobs=of_prompt,
    )
    service.finish(generation, record)
    return Reply(msgspec.json.encode(completion))


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
