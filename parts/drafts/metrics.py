"""What `/metrics` shows of drafts."""

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from penstock.frontend.exchange.engine_metric import EngineMetric
from penstock.ipc.messages import EngineStats


def _drafts(stats: EngineStats, field: str) -> dict[str, float]:
    """A field of the drafter's statistics, by the drafter's name; empty without a drafter."""
    drafts = stats.drafts
    return {} if not drafts else {drafts.drafter: getattr(drafts, field)}


def _drafts_at(stats: EngineStats, field: str) -> dict[str, float]:
    """The same, by position from 1 on."""
    return {} if not stats.drafts else {str(i): count for i, count in enumerate(getattr(stats.drafts, field), 1)}


METRICS = (
    EngineMetric(
        CounterMetricFamily, "penstock_draft_steps",
        "Steps that a drafter was asked to guess tokens for.", "drafter", lambda s: _drafts(s, "num_steps"),
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_draft_guessed_tokens",
        "Tokens guessed.", "drafter", lambda s: _drafts(s, "num_guessed"),
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_draft_accepted_tokens",
        "Guessed tokens that were right.", "drafter", lambda s: _drafts(s, "num_accepted"),
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_draft_guessed_tokens_by_position",
        "Tokens guessed, by their position among a row's guesses in a step, from 1 on.", "position",
        lambda s: _drafts_at(s, "guessed_at"),
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_draft_accepted_tokens_by_position",
        "Guessed tokens that were right, by their position among a row's guesses in a step, from 1 on.", "position",
        lambda s: _drafts_at(s, "accepted_at"),
    ),
    EngineMetric(
        GaugeMetricFamily, "penstock_draft_acceptance",
        "Guessed tokens that were right, as a part of all, over the last 100 steps or so with guesses.", "drafter",
        lambda s: _drafts(s, "acceptance"),
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_draft_seconds",
        "Times of guessing, which are part of the steps' times.", "drafter",
        lambda s: {name: us * 1e-6 for name, us in _drafts(s, "draft_us").items()},
    ),
    EngineMetric(
        GaugeMetricFamily, "penstock_draft_saved_seconds",
        "Device time saved since the start: what the same tokens would have taken without guesses, less what they "
        "took; an estimate, negative if guessing has cost more than it brought.", "drafter",
        lambda s: {name: us * 1e-6 for name, us in _drafts(s, "saved_us").items()},
    ),
    EngineMetric(
        GaugeMetricFamily, "penstock_drafter_failed",
        "1 for a drafter that could not be set up, or has failed and is switched off.", "drafter",
        lambda s: {name: int(not is_on) for name, is_on in _drafts(s, "is_on").items()},
    ),
)  # fmt: skip
