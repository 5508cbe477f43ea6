"""What engines do, for administrators."""

from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.statuses import READS_BODY
from penstock.parts.watching.frontend import handlers, shapes, simulate

_ENGINE = ("engine", "string")

ROUTES = (
    Route(
        "GET", "/debug/steps", handlers.watch_steps, "Steps as they happen, as server-sent events",
        shapes.StepsShape, errors=(400, 404, 500, 503), streams=True, scope="admin", is_quiet=True,
        query=(_ENGINE, ("seconds", "integer"), ("last", "integer"), ("hold", "integer")),
    ),
    Route(
        "GET", "/debug/kv", handlers.show_pages, "Who owns each page of the KV pool",
        shapes.PageMapShape, errors=(404, 500, 503), scope="admin", query=(_ENGINE,),
    ),
    Route(
        "GET", "/debug/prefix_tree", handlers.show_prefixes, "What is in the prefix cache",
        shapes.PrefixTreeShape, errors=(400, 404, 500, 503), scope="admin",
        query=(_ENGINE, ("depth", "integer"), ("limit", "integer")),
    ),
    Route(
        "GET", "/debug/requests/{id}", handlers.show_life, "What has happened to a request, and why it waited",
        shapes.LifeShape, errors=(404, 500, 503), scope="admin", query=(_ENGINE,),
    ),
    Route(
        "GET", "/debug/recordings", simulate.list_recordings, "Recordings that can be simulated",
        shapes.RecordingList, errors=(500,), scope="admin",
    ),
    Route(
        "POST", "/debug/simulate", simulate.simulate, "A recorded load under other options",
        shapes.Simulated, shapes.SimulationRequest, READS_BODY, scope="admin",
    ),
)  # fmt: skip
