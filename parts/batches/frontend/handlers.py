"""GET and POST /v1/batches, GET /v1/batches/{id}, POST /v1/batches/{id}/cancel"""

import secrets
import time
from typing import Any

import msgspec

from penstock.frontend.api.body import read
from penstock.frontend.api.service import Service
from penstock.frontend.errors import InvalidParameter, UnsupportedParameter
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.parts.batches.frontend.files.handlers import checked_lifetime, files_of, page_size
from penstock.parts.batches.frontend.files.store import FileNotFound, database_of
from penstock.parts.batches.frontend.shapes import (
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    WINDOW_SECONDS,
    Batch,
    BatchList,
    BatchRequest,
    endpoints_of,
)
from penstock.parts.batches.frontend.store import BatchStore

MAX_PAGE, _PAGE = 100, 20
_request = msgspec.json.Decoder(BatchRequest)


def batches_of(service: Service) -> BatchStore:
    """The server's batches.

    Raises:
        NoDataDir: the server keeps none.
    """
    return BatchStore(database_of(service))


async def create_batch(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """Make a batch from an uploaded file; a runner finds it in the database.

    Raises:
        ApiError: it cannot be made.
    """
    batches = batches_of(service)
    request = await read(_request, record, body)
    endpoint, window = request.endpoint, request.completion_window
    endpoints = endpoints_of(service.routes)
    if not endpoints:
        raise UnsupportedParameter("batches do not run on this server (they do under penstock serve)")
    if endpoint is None or endpoint not in endpoints:
        raise UnsupportedParameter(_one_of("endpoint", endpoint, endpoints), param="endpoint")
    if window is None or window not in WINDOW_SECONDS:
        raise UnsupportedParameter(_one_of("completion_window", window, WINDOW_SECONDS), param="completion_window")
    if not request.input_file_id:
        raise InvalidParameter("input_file_id is missing", param="input_file_id")
    try:
        given = await files_of(service).get(record.key_id, request.input_file_id)
    except FileNotFound as error:
        raise InvalidParameter(f"input_file_id: {error.message}", param="input_file_id") from None
    if given.purpose != "batch":
        raise InvalidParameter(
            f"input_file_id: the file's purpose is {given.purpose!r}, and must be 'batch'", param="input_file_id"
        )
    expires_after = request.output_expires_after
    if expires_after is not None:
        checked_lifetime("output_expires_after", expires_after.seconds)
    now = int(time.time())
    batch = Batch(
        id=f"batch_{secrets.token_hex(12)}",
        endpoint=endpoint,
        input_file_id=given.id,
        completion_window=window,
        status="validating",
        created_at=now,
        expires_at=now + WINDOW_SECONDS[window],
        metadata=_checked_metadata(request.metadata),
        output_expires_after=expires_after,
    )
    await batches.create(record.key_id, record.tenant, batch)
    return Reply(msgspec.json.encode(batch))


def _one_of(field: str, given: str | None, supported: Any) -> str:
    names = " or ".join(map(repr, supported))
    return f"{field} must be {names}, got {'nothing' if given is None else repr(given[:64])}"


def _checked_metadata(given: dict[str, Any] | None) -> dict[str, str] | None:
    for key, value in (given or {}).items():
        if not isinstance(value, str) or len(value) > MAX_METADATA_VALUE or len(key) > MAX_METADATA_KEY:
            raise InvalidParameter(
                f"metadata: keys are strings of at most {MAX_METADATA_KEY} characters, values of at most "
                f"{MAX_METADATA_VALUE}",
                param="metadata",
            )
    if given is not None and len(given) > MAX_METADATA:
        raise InvalidParameter(f"metadata: at most {MAX_METADATA} entries, got {len(given)}", param="metadata")
    return given


async def list_batches(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """A page of the batches of the key's owner, the newest first.

    Raises:
        InvalidParameter: the query is not valid.
    """
    limit = page_size(record, _PAGE, MAX_PAGE)
    found, has_more = await batches_of(service).page(record.key_id, record.query.get("after"), limit)
    first, last = (found[0].id, found[-1].id) if found else (None, None)
    return Reply(msgspec.json.encode(BatchList(found, first, last, has_more)))


async def show_batch(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """A batch as it is now.

    Raises:
        BatchNotFound: there is no such batch.
    """
    return Reply(msgspec.json.encode(await batches_of(service).get(record.key_id, record.argument)))


async def cancel_batch(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """Cancel a batch. Its files will have the lines that were answered by then.

    Raises:
        BatchNotFound: there is no such batch.
        BatchIsOver: the batch has ended.
    """
    return Reply(msgspec.json.encode(await batches_of(service).cancel(record.key_id, record.argument)))
