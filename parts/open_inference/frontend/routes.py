"""The Open Inference Protocol, as KServe's probes and clients expect it."""

from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.statuses import LOOKS_UP
from penstock.parts.open_inference.frontend import handlers

ROUTES = (
    Route(
        "GET", "/v2", handlers.server, "The server, in the Open Inference Protocol",
        handlers.ServerMetadata, errors=(500,),
    ),
    Route(
        "GET", "/v2/health/live", handlers.live, "Whether this process makes progress",
        handlers.Live, errors=(500, 503), scope="", is_quiet=True,
    ),
    Route(
        "GET", "/v2/health/ready", handlers.ready, "Whether requests would be served now",
        handlers.Ready, errors=(500, 503), scope="", is_quiet=True,
    ),
    Route(
        "GET", "/v2/models/{id}/ready", handlers.model_ready, "Whether a model would be served now",
        handlers.ModelReady, errors=(*LOOKS_UP, 503), argument=".+", is_quiet=True,
    ),
    Route(
        "GET", "/v2/models/{id}", handlers.model, "One model, in the Open Inference Protocol",
        handlers.ModelMetadata, errors=LOOKS_UP, argument=".+",
    ),
)  # fmt: skip
