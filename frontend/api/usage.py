"""The usage reported with an answer: tokens, times, targets, and what the engine spent."""

from math import inf

from msgspec import UNSET

from penstock.frontend import schema
from penstock.frontend.engine.book import Bill
from penstock.frontend.engine.generation import Generation
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.targets import Targets
from penstock.frontend.validation.common import ValidRequest


def usage(record: RequestRecord, generation: Generation, valid: ValidRequest, price_per_hour: float) -> schema.Usage:
    """Tokens so far; each prompt counts once, however many sequences it has."""
    progress, num_reasoning = generation.progress, record.num_reasoning_tokens
    has_bill = valid.return_bill and generation.bill.is_complete
    return schema.Usage(
        prompt_tokens=record.num_prompt_tokens,
        completion_tokens=progress.num_output_tokens,
        total_tokens=record.num_prompt_tokens + progress.num_output_tokens,
        prompt_tokens_details=schema.PromptTokensDetails(0 if record.is_background else progress.num_cached_tokens),
        completion_tokens_details=schema.CompletionTokensDetails(num_reasoning) if num_reasoning else UNSET,
        timings=progress.timings(record.arrived) if valid.return_timings else UNSET,
        slo=UNSET if record.targets is None else _slo_report(record.targets, record.arrived, generation),
        bill=bill_as_sent(generation.bill, price_per_hour) if has_bill else UNSET,
    )


def _slo_report(targets: Targets, arrived: float, generation: Generation) -> schema.SloReport:
    progress = generation.progress
    return schema.SloReport(
        ttft_ms=targets.ttft_ms if targets.ttft_ms < inf else None,
        tpot_ms=targets.tpot_ms if targets.tpot_ms < inf else None,
        met=progress.targets_met(targets, arrived, generation.num_sequences),
        demoted=progress.late or UNSET,
    )


def bill_as_sent(bill: Bill, price_per_hour: float) -> schema.Bill:
    """What the engine has spent on a request, as far as it has reported."""
    return schema.Bill(
        queue_ms=None if bill.queue_seconds is None else round(bill.queue_seconds * 1e3, 3),
        steps=bill.num_steps,
        device_seconds=round(bill.device_seconds, 9),
        kv_byte_seconds=round(bill.kv_byte_seconds, 3),
        saved_tokens=bill.num_saved_tokens,
        preemptions=bill.num_preemptions,
        recomputed_tokens=bill.num_recomputed_tokens,
        guessed_tokens=bill.num_guessed_tokens or UNSET,
        accepted_tokens=bill.num_accepted_tokens if bill.num_guessed_tokens else UNSET,
        cache_miss=bill.cache_miss or UNSET,
        price=round(bill.price(price_per_hour), 12) if price_per_hour else UNSET,
    )
