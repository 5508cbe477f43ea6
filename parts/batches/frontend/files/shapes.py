"""Files as the API shows them."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

Purpose = Literal["batch", "batch_output"]


class FileObject(Struct, frozen=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    expires_at: int | UnsetType = UNSET


class FileList(Struct, frozen=True):
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(Struct, frozen=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class FileUpload(Struct, frozen=True):
    """The fields of the form."""

    file: str
    purpose: Literal["batch"]


class ExpiresAfter(Struct, frozen=True):
    """When a file expires: so many seconds after it was made."""

    anchor: Literal["created_at"]
    seconds: int
