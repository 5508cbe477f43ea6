"""Our metrics under the names, labels and values that vLLM gives them.

Dashboards made for vLLM, and the endpoint pickers of Kubernetes' gateways with their own settings, then read this
server as one of vLLM's. What vLLM has no name for is told under ours alone.
"""

from collections.abc import Iterable

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

_SAME = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "num_preemptions",
    "prefix_cache_hits",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_time_per_output_token_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_inference_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)
"""Names that are the same but for what they begin with."""

_THEIRS = {f"penstock_{name}": (f"vllm:{name}",) for name in _SAME} | {
    "penstock_engine_prompt_tokens": ("vllm:prefix_cache_queries",),
    # Older dashboards know this name of it.
    "penstock_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "penstock_draft_steps": ("vllm:spec_decode_num_drafts",),
    "penstock_draft_guessed_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "penstock_draft_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "penstock_draft_accepted_tokens_by_position": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
}
"""Our name -> theirs."""

_VALUES = {
    "finished_reason": {"tool_calls": "stop"},  # there it is the answer's, not the sequence's
    "position": {str(position): str(position - 1) for position in range(1, 65)},  # there they begin at 0
}
"""Label -> our values that are others there."""

_OURS_ALONE = ("drafter",)
"""Labels that vLLM does not have."""


def vllm_families(families: Iterable[Metric], model: str) -> list[Metric]:
    """These metrics under vLLM's names, of a model of this name."""
    found = []
    for family in families:
        for name in _THEIRS.get(family.name, ()):
            told = Metric(name, family.documentation, family.type)
            told.samples = _samples(family, name, model)
            found.append(told)
    # There are no adapters, which pickers look for in any case.
    adapters = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters of running and waiting requests.",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    adapters.add_metric(("0", "", ""), 1)
    return [*found, adapters]


def _samples(family: Metric, name: str, model: str) -> list[Sample]:
    """A family's samples by their new names and labels; those whose labels become the same are added up."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    for sample in family.samples:
        labels = {"model_name": model, "engine": "0"}
        for label, value in sample.labels.items():
            if label not in _OURS_ALONE:
                labels[label] = _VALUES.get(label, {}).get(value, value)
        full_name = name + sample.name.removeprefix(family.name)
        key = (full_name, tuple(labels.items()))
        before = sums[key].value if key in sums else 0
        sums[key] = Sample(full_name, labels, before + sample.value)
    return list(sums.values())
