"""Who is told of requests: what can be said about it before a process starts."""

from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from penstock.config.groups.frontend import FrontendOptions

_TRACES = "--otlp-traces-endpoint"


def problem_with_observers(options: FrontendOptions) -> str:
    """Why requests cannot be told of as asked; empty if they can, or nobody asks."""
    if options.access_log and not Path(options.access_log).parent.is_dir():
        return f"--access-log {options.access_log!r}: there is no such folder"
    endpoint = options.otlp_traces_endpoint
    if not endpoint:
        return ""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return (
            f"{_TRACES} must be the URL of a collector that takes OTLP over HTTP, such as http://127.0.0.1:4318, "
            f"got {endpoint!r}"
        )
    try:
        is_there = find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        is_there = False
    return "" if is_there else f"{_TRACES} needs OpenTelemetry's packages: pip install 'penstock-llm[otel]'"
