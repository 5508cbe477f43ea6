"""GET and POST /v1/files, GET and DELETE /v1/files/{id}, GET /v1/files/{id}/content"""

import re
from urllib.parse import quote

import msgspec

from penstock.frontend.api.service import Service
from penstock.frontend.errors import InvalidParameter, UnsupportedParameter
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply, Upload
from penstock.parts.batches.frontend.files.multipart import FormReader
from penstock.parts.batches.frontend.files.shapes import DeletedFile, FileList
from penstock.parts.batches.frontend.files.store import FileStore, Limits, NewFile, database_of

MAX_PAGE = 10_000
MIN_SECONDS, MAX_SECONDS = 3600, 30 * 24 * 3600
"""Limits for a file's lifetime, if it has one."""

_MAX_FIELD_BYTES = 256
_MAX_NAME = 255  # characters
_NUMBER = re.compile(r"[0-9]{1,12}")


def files_of(service: Service) -> FileStore:
    """The server's files.

    Raises:
        NoDataDir: the server keeps none.
    """
    return FileStore(database_of(service), Limits(service.config.frontend.max_files_bytes))


async def upload_file(service: Service, record: RequestRecord, upload: Upload) -> Reply:
    """Store a file.

    Raises:
        ApiError: the form or the file cannot be used; then nothing is stored.
    """
    files = files_of(service)
    new: NewFile | None = None
    filename, fields = "", dict[str, str]()
    try:
        async for part in FormReader(upload.content_type, upload.next_piece).parts():
            if part.name == "file":
                if new is not None:
                    raise InvalidParameter("file: there may be only one", param="file")
                new, filename = await files.begin(), _name(part.filename)
                async for piece in part.pieces:
                    await new.write(piece)
            elif part.name in fields:
                raise InvalidParameter(f"{part.name}: given twice", param=part.name)
            elif part.name in ("purpose", "expires_after[anchor]", "expires_after[seconds]"):
                fields[part.name] = await part.text(_MAX_FIELD_BYTES)
            else:
                record.warnings.append(f"{part.name[:64]}: an unknown field, ignored")
        if new is None:
            raise InvalidParameter("file is missing", param="file")
        _check_purpose(fields.get("purpose"))
        stored = await files.add(new, record.key_id, filename, _lifetime(fields))
    finally:
        if new is not None:
            new.discard()
    return Reply(msgspec.json.encode(stored))


def _name(given: str | None) -> str:
    """A name that is only shown: without path and control characters."""
    name = (given or "upload").replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in name if char.isprintable())[:_MAX_NAME] or "upload"


def _check_purpose(given: str | None) -> None:
    if given is None:
        raise InvalidParameter("purpose is missing; it must be 'batch'", param="purpose")
    if given != "batch":
        raise UnsupportedParameter(f"purpose {given[:64]!r} is not supported; 'batch' is", param="purpose")


def _lifetime(fields: dict[str, str]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidParameter("expires_after.anchor must be 'created_at'", param="expires_after")
    return checked_lifetime("expires_after", int(seconds) if seconds and _NUMBER.fullmatch(seconds) else 0)


def checked_lifetime(field: str, seconds: int) -> int:
    """Return the seconds after which a file expires.

    Raises:
        InvalidParameter: the time is too short or too long.
    """
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise InvalidParameter(
            f"{field}.seconds must be a whole number between {MIN_SECONDS} and {MAX_SECONDS}", param=field
        )
    return seconds


async def list_files(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """A page of the files of the key's owner, the newest first.

    Raises:
        InvalidParameter: the query is not valid.
    """
    limit = page_size(record, MAX_PAGE, MAX_PAGE)
    order = record.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidParameter("order must be 'asc' or 'desc'", param="order")
    found, has_more = await files_of(service).page(
        record.key_id, record.query.get("purpose"), record.query.get("after"), limit, newest_first=order == "desc"
    )
    first, last = (found[0].id, found[-1].id) if found else (None, None)
    return Reply(msgspec.json.encode(FileList(found, first, last, has_more)))


def page_size(record: RequestRecord, default: int, most: int) -> int:
    """The query's `limit`.

    Raises:
        InvalidParameter: it is not a number from 1 to `most`.
    """
    given = record.query.get("limit", str(default))
    if not (_NUMBER.fullmatch(given) and 1 <= int(given) <= most):
        raise InvalidParameter(f"limit must be between 1 and {most}, got {given[:32]!r}", param="limit")
    return int(given)


async def show_file(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """A file's facts.

    Raises:
        FileNotFound: it is not there.
    """
    return Reply(msgspec.json.encode(await files_of(service).get(record.key_id, record.argument)))


async def file_content(service: Service, record: RequestRecord, body: bytes) -> StreamReply:
    """A file's bytes, from the disk to the client piece by piece.

    Raises:
        FileNotFound: it is not there.
    """
    files = files_of(service)
    found = await files.get(record.key_id, record.argument)
    headers = {
        "Content-Type": "application/octet-stream",
        "Content-Length": str(found.bytes),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(found.filename, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }
    return StreamReply(files.content(found.id), close=lambda: None, headers=headers)


async def delete_file(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """Delete a file.

    Raises:
        FileNotFound: it is not there.
        FileInUse: a batch reads it.
    """
    await files_of(service).delete(record.key_id, record.argument)
    return Reply(msgspec.json.encode(DeletedFile(record.argument)))
