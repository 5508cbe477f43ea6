"""The Open Inference Protocol, as KServe's probes and clients expect it."""

from penstock.frontend.api import open_inference
from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.statuses import LOOKS_UP

ROUTES = (
    Route(
        "GET", "/v2", open_inference.server, "The server, in the Open Inference Protocol",
        open_inference.ServerMetadata, errors=(500,),
    ),
    Route(
        "GET", "/v2/health/live", open_inference.live, "Whether this process makes progress",
        open_inference.Live, errors=(500, 503), scope="", is_quiet=True,
    ),
    Route(
        "GET", "/v2/health/ready", open_inference.ready, "Whether requests would be served now",
        open_inference.Ready, errors=(500, 503), scope="", is_quiet=True,
    ),
    Route(
        "GET", "/v2/models/{id}/ready", open_inference.model_ready, "Whether a model would be served now",
        open_inference.ModelReady, errors=(*LOOKS_UP, 503), argument=".+", is_quiet=True,
    ),
    Route(
        "GET", "/v2/models/{id}", open_inference.model, "One model, in the Open Inference Protocol",
        open_inference.ModelMetadata, errors=LOOKS_UP, argument=".+",
    ),
)  # fmt: skip
