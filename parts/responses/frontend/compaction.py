"""POST /v1/responses/compact: the served model sums a conversation up, and the client goes on from the summary.

    items ──▶ prompt, with the wish for a summary ──▶ summary ──▶ the user's messages, and a `compaction` item

The summary is an answer like any other: it waits in the queue, is bounded, and counts as usage. A later request with
the item has the summary in its prompt (`items.py`).
"""

from dataclasses import replace

import msgspec

from penstock.frontend.api.body import read
from penstock.frontend.api.chat import submit_chat
from penstock.frontend.api.run import Run
from penstock.frontend.api.service import Service
from penstock.frontend.draws_and_clock import CLOCK, DRAWS
from penstock.frontend.errors import InvalidParameter, ServerError
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.heavy_turns import heavy_turn
from penstock.frontend.parsing.parser import OutputFormat, ReasoningCounter, parse_message
from penstock.frontend.validation.common import Rules
from penstock.parts.responses.frontend.history import earlier_items, with_references
from penstock.parts.responses.frontend.response_writer import response_usage
from penstock.parts.responses.frontend.schema import (
    COMPACT,
    CompactedResponse,
    CompactionItem,
    CompactRequest,
    ReasoningOptions,
    ResponsesRequest,
)
from penstock.parts.responses.frontend.summaries import sealed
from penstock.parts.responses.frontend.tool_items import Item
from penstock.parts.responses.frontend.validate import ValidResponse, input_items, validate_response

DEFAULT_TOKENS = 2048
"""Limit for a summary, its reasoning included, if the request names none."""

_WISH = (
    "Summarize this conversation for someone who has to carry it on without having read it. Say what the user wants, "
    "what was decided and found out, which files, names and figures matter, what was done, and what is left to do. "
    "Write plain text, without a greeting. Do not answer the conversation, and call no tools."
)


class NoSummary(ServerError, code="no_summary"):
    """The model wrote no summary."""


async def compact(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """The handler.

    Raises:
        ApiError: as for a response; NoSummary if the model writes none.
    """
    asked, num_bytes = await read(COMPACT, record, body), len(body)
    service = await service.serving(asked.model)
    with await service.admit(record, num_bytes) as admission:
        valid = await _validated(service, record, asked, admission.rules, num_bytes)
        admission.hold(valid.chat.common)
        del body, asked  # they may be large
        conversation = valid.chat.conversation
        prompt = await service.prompts.render_and_encode(conversation, admission.rules, record)
        record.warnings += conversation.warnings
        run, output_format = await submit_chat(service, record, valid.chat, prompt)
    with run:
        return Reply(await _compacted(run, valid, output_format))


async def _validated(
    service: Service, record: RequestRecord, asked: CompactRequest, rules: Rules, num_bytes: int
) -> ValidResponse:
    """The response that is asked for: the conversation, with the wish for its summary."""
    request = ResponsesRequest(
        model=asked.model,
        instructions=asked.instructions,
        previous_response_id=asked.previous_response_id,
        max_output_tokens=DEFAULT_TOKENS if asked.max_output_tokens is None else asked.max_output_tokens,
        reasoning=None if asked.reasoning is None else ReasoningOptions(asked.reasoning.effort),
        service_tier=asked.service_tier,
        prompt_cache_key=asked.prompt_cache_key,
        prompt_cache_retention=asked.prompt_cache_retention,
        store=False,
    )
    previous, num_before = await earlier_items(service, record, request, num_bytes)
    items = [] if asked.input is None and previous else input_items(asked.input)
    given = await with_references(service, record, items, num_before, num_bytes)
    if not previous and not given:
        raise InvalidParameter("input is empty: there is nothing to summarize", param="input")
    await heavy_turn()  # a few bytes may have brought much along
    wish: Item = {"type": "message", "role": "user", "content": _WISH}
    valid = validate_response(request, rules, service.model.template, previous, [*given, wish])
    return replace(valid, items=valid.items[:-1])


async def _compacted(run: Run, valid: ValidResponse, output_format: OutputFormat) -> bytes:
    """The body of the answer."""
    record = run.record
    [answer] = await run.answers()
    counter = ReasoningCounter(output_format, run.service.model.tokenizer)
    record.num_reasoning_tokens = counter.feed(answer.token_ids)
    summary = parse_message(output_format, answer.text, answer.finish_reason).content.strip()
    if not summary and answer.finish_reason == "length":
        raise InvalidParameter(
            f"max_output_tokens: the model wrote no summary within {len(answer.token_ids)} tokens",
            param="max_output_tokens",
        )
    if not summary:
        raise NoSummary(f"the model wrote no summary in {len(answer.token_ids)} tokens")
    if answer.finish_reason == "length":
        record.warnings.append(f"output: the summary was cut off after {len(answer.token_ids)} tokens")
    kept = [item for item in valid.items if item["type"] == "message" and item["role"] == "user"]
    compacted = CompactedResponse(
        id=f"resp_{DRAWS.get().randbytes(24).hex()}",
        created_at=int(CLOCK.get()()),
        output=[*kept, CompactionItem(f"cmp_{DRAWS.get().randbytes(16).hex()}", sealed(summary))],
        usage=response_usage(await run.final_usage(), record.num_reasoning_tokens),
    )
    return msgspec.json.encode(compacted)
