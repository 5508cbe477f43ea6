"""The router's metrics."""

from prometheus_client import CollectorRegistry, Counter


class RouterMetrics:
    """Counters of one frontend's choices, in the frontend's registry of metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "penstock_router_requests",
            "Requests sent to an engine, by engine and reason: most of the prompt is cached there (prefix), more is "
            "cached where more waits (load), nothing is cached anywhere (new), all engines have their turns (turn).",
            ["engine", "reason"],
            registry=registry,
        )
        self.refused = Counter(
            "penstock_router_refused",
            "Requests that an engine's full queue did not take, and that were offered to another one.",
            ["engine"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "penstock_router_prompt_tokens", "Tokens of the prompts sent.", ["engine"], registry=registry
        )
        self.expected_tokens = Counter(
            "penstock_router_expected_tokens",
            "Of these, expected in the engine's cache, by requests that have begun.",
            ["engine"],
            registry=registry,
        )
        self.found_tokens = Counter(
            "penstock_router_found_tokens", "Of these, found there.", ["engine"], registry=registry
        )
        self.gaps = Counter(
            "penstock_router_event_gaps",
            "Messages of what an engine has cached that were missed: a snapshot was asked for.",
            ["engine"],
            registry=registry,
        )
