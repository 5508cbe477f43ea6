"""Our metrics under the names, labels and values that vLLM gives them.

Dashboards made for vLLM, and the endpoint pickers of Kubernetes gateways with their default settings, can then read
this server like one of vLLM's. Metrics that vLLM has no name for are exported under our names alone.
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
"""Names that are the same except for the prefix."""

_THEIRS = {f"penstock_{name}": (f"vllm:{name}",) for name in _SAME} | {
    "penstock_engine_prompt_tokens": ("vllm:prefix_cache_queries",),
    # Older dashboards use its second name.
    "penstock_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "penstock_draft_steps": ("vllm:spec_decode_num_drafts",),
    "penstock_draft_guessed_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "penstock_draft_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "penstock_draft_accepted_tokens_by_position": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
}
"""Our name -> theirs."""

_VALUES = {
    "finished_reason": {"tool_calls": "stop"},  # vLLM's is the sequence's reason, not the answer's
    "position": {str(position): str(position - 1) for position in range(1, 65)},  # vLLM counts from 0
}
"""Label -> our value -> vLLM's, where they differ."""

LIVE_BY_ADAPTER = "penstock_adapter_requests_in_frontend"

_OURS_ALONE = ("drafter",)
"""Labels that vLLM does not have."""


def vllm_families(families: Iterable[Metric], model: str, max_adapters: int) -> list[Metric]:
    """The same metrics under vLLM's names, labelled with the model's name.

    `max_adapters`: that a worker can have in its memory.
    """
    found, adapters_in_use = list[Metric](), list[str]()
    for family in families:
        if family.name == LIVE_BY_ADAPTER:
            adapters_in_use = sorted(sample.labels["adapter"] for sample in family.samples)
        for name in _THEIRS.get(family.name, ()):
            told = Metric(name, family.documentation, family.type)
            told.samples = _samples(family, name, model)
            found.append(told)
    # Endpoint pickers look for adapters in any case.
    adapters = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters of running and waiting requests.",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    adapters.add_metric((str(max_adapters), ",".join(adapters_in_use), ""), 1)
    return [*found, adapters]


def _samples(family: Metric, name: str, model: str) -> list[Sample]:
    """A family's samples under their new names and labels; samples with the same labels are added up."""
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
