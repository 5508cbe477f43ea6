"""Routes for administrators: probes, metrics, engines, what requests are doing."""

from penstock.frontend import schema
from penstock.frontend.api import engines, operations
from penstock.frontend.exchange import metrics
from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.statuses import READS_BODY

ROUTES = (
    Route(
        "POST", "/reset_prefix_cache", operations.reset_prefix_cache, "Forget cached prompts",
        schema.Health, errors=(500, 503), scope="admin",
    ),
    Route(
        "POST", "/start_profile", operations.start_profile, "Record the workers' next steps in trace files",
        schema.Health, errors=(400, 500, 503), scope="admin", query=(("num_steps", "integer"),),
    ),
    Route(
        "POST", "/stop_profile", operations.stop_profile, "Write what has been recorded",
        schema.Health, errors=(400, 500, 503), scope="admin",
    ),
    Route("GET", "/engines", engines.list_engines, "The engines, and their states", schema.EngineList, scope="admin"),
    Route(
        "POST", "/engines/{id}/drain", engines.drain_engine, "Take all requests from an engine",
        schema.EngineStatus, errors=(404, 500, 503), scope="admin",
    ),
    Route(
        "POST", "/engines/{id}/undrain", engines.undrain_engine, "Let a drained engine take requests again",
        schema.EngineStatus, errors=(404, 500, 503), scope="admin",
    ),
    Route(
        "POST", "/engines/{id}/restart", engines.restart_engine, "Drain an engine, and start its processes again",
        schema.EngineStatus, errors=(404, 500, 503), scope="admin",
    ),
    Route(
        "POST", "/engines/{id}/role", engines.set_role, "Make an engine prefill, decode, or both",
        schema.EngineStatus, schema.RoleRequest, errors=(*READS_BODY, 503), scope="admin",
    ),
    Route(
        "GET", "/debug/requests", operations.list_requests, "What requests are doing, and why they wait",
        schema.RequestStatusList, errors=(400, 500, 503), scope="admin",
        query=(("limit", "integer"), ("state", "string"), ("id", "string")),
    ),
    Route(
        "GET", "/debug/expert_load", operations.expert_load, "How many tokens went to each expert",
        schema.ExpertLoad, errors=(404, 500), scope="admin",
    ),
    Route(
        "GET", "/health", operations.health, "Whether this process makes progress",
        schema.Health, errors=(500, 503), aliases=("/v1/health", "/ping"), scope="", is_quiet=True,
    ),
    Route(
        "GET", "/ready", operations.ready, "Whether requests would be served now",
        schema.Health, errors=(500, 503), scope="", is_quiet=True,
    ),
    Route(
        "GET", "/metrics", operations.show_metrics, "Metrics in Prometheus' text format", errors=(500,),
        content_type=metrics.CONTENT_TYPE, scope="metrics", is_quiet=True,
    ),
    Route(
        "GET", "/version", operations.version, "The server's version, and what answers depend on",
        schema.Version, errors=(500,),
    ),
)  # fmt: skip
