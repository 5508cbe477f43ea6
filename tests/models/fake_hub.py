"""A server that speaks as much of the Hugging Face hub as a download needs, over real sockets."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Asked(NamedTuple):
    """One request."""

    method: str
    path: str
    begin: int  # of the bytes that are asked for
    token: str


class FakeHub:
    """Repositories by name: folders, of which every revision in `revisions` is the one commit there is."""

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.revisions = {"main", "v1", COMMIT}
        self.gated: set[str] = set()
        self.cuts: dict[str, int] = {}  # file -> how many times its transfer breaks off in the middle
        self.refused: set[str] = set()  # files that the server fails to give
        self.claimed_size: dict[str, int] = {}  # file -> what the listing says instead of its size
        self.asked: list[Asked] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self, "GET")

            def do_HEAD(self) -> None:
                hub._answer(self, "HEAD")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeHub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def fetched(self) -> list[str]:
        """The files of which bytes have been asked for."""
        gets = [asked.path for asked in self.asked if asked.method == "GET" and "/resolve/" in asked.path]
        return [path.rsplit("/", 1)[1] for path in gets]

    def _answer(self, request: Any, method: str) -> None:
        begin = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        path = request.path.partition("?")[0]
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.asked.append(Asked(method, path, begin, token))
        words = path.strip("/").split("/")
        if words[:2] == ["api", "models"]:
            name, revision = "/".join(words[2:4]), words[5] if words[4:5] == ["revision"] else "main"
        elif words[2:3] != ["resolve"]:  # what the library asks beside
            return _send(request, 404, {})
        else:  # org/name/resolve/revision/file
            name, revision = "/".join(words[:2]), words[3]
        folder = self.repositories.get(name)
        if folder is None:
            return _send(request, 401 if not token else 404, {"X-Error-Code": "RepoNotFound"})
        if revision not in self.revisions:
            return _send(request, 404, {"X-Error-Code": "RevisionNotFound"})
        if words[0] == "api":
            return _send(request, 200, {"Content-Type": "application/json"}, self._info(name, folder))
        if name in self.gated and token != "good":
            return _send(request, 401 if not token else 403, {"X-Error-Code": "GatedRepo"})
        return self._send_file(request, folder / words[-1], begin)

    def _info(self, name: str, folder: Path) -> bytes:
        files = [
            {
                "rfilename": path.name,
                "size": self.claimed_size.get(path.name, path.stat().st_size),
                "blobId": _etag(path),
            }
            for path in sorted(folder.iterdir())
        ]
        return json.dumps({"id": name, "modelId": name, "sha": COMMIT, "siblings": files, "tags": []}).encode()

    def _send_file(self, request: Any, path: Path, begin: int) -> None:
        if path.name in self.refused:
            return _send(request, 403, {})
        if not path.is_file():
            return _send(request, 404, {"X-Error-Code": "EntryNotFound"})
        body = path.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(path)}"', "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
        is_cut = request.command == "GET" and self.cuts.get(path.name, 0) > 0
        if is_cut:
            self.cuts[path.name] -= 1
        return _send(request, 206 if begin else 200, headers, body[begin:], len(body) // 2 if is_cut else None)


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _send(request: Any, status: int, headers: dict[str, str], body: bytes = b"", cut_at: int | None = None) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(body[:cut_at])
    if cut_at is not None:
        request.close_connection = True
