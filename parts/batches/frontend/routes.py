"""Files and batches, as OpenAI's clients expect them."""

from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.replies import FORM
from penstock.frontend.exchange.statuses import READS_BODY
from penstock.parts.batches.frontend import handlers as batches
from penstock.parts.batches.frontend import shapes
from penstock.parts.batches.frontend.files import handlers as files
from penstock.parts.batches.frontend.files.shapes import DeletedFile, FileList, FileObject, FileUpload

_LOOKS_UP = (400, 404, 500, 503, 507)
_CHANGES = (*_LOOKS_UP[:2], 409, *_LOOKS_UP[2:])

ROUTES = (
    Route(
        "POST", "/v1/files", files.upload_file, "Upload a file",
        FileObject, FileUpload, (*READS_BODY, 503, 507), body_type=FORM,
    ),
    Route(
        "GET", "/v1/files", files.list_files, "The files that are kept", FileList, errors=_LOOKS_UP,
        query=(("purpose", "string"), ("limit", "integer"), ("order", "string"), ("after", "string")),
    ),
    Route("GET", "/v1/files/{id}", files.show_file, "A file's facts", FileObject, errors=_LOOKS_UP),
    Route(
        "GET", "/v1/files/{id}/content", files.file_content, "A file's content", errors=_LOOKS_UP,
        content_type="application/octet-stream",
    ),
    Route("DELETE", "/v1/files/{id}", files.delete_file, "Delete a file", DeletedFile, errors=_CHANGES),
    Route(
        "POST", "/v1/batches", batches.create_batch, "Answer the requests of a file within a day",
        shapes.Batch, shapes.BatchRequest, (*READS_BODY, 503, 507),
        required=("input_file_id", "endpoint", "completion_window"),
    ),
    Route(
        "GET", "/v1/batches", batches.list_batches, "The batches", shapes.BatchList, errors=_LOOKS_UP,
        query=(("limit", "integer"), ("after", "string")),
    ),
    Route("GET", "/v1/batches/{id}", batches.show_batch, "One batch", shapes.Batch, errors=_LOOKS_UP),
    Route(
        "POST", "/v1/batches/{id}/cancel", batches.cancel_batch, "End a batch", shapes.Batch, errors=_CHANGES
    ),
)  # fmt: skip
