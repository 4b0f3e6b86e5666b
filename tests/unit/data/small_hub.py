"""A local Hugging Face hub over folders on disk: the few URLs that `datasets` and `huggingface_hub` request."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0" * 20


class SmallHub(ThreadingHTTPServer):
    """Serves the datasets and models `folder/user/name` at one commit. Other commits have the same files.

    failures: the number of requests for data that are still to fail with 503, as on an overloaded server.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder = folder
        self.commit = COMMIT
        self.failures = 0
        self.requests: list[tuple[str, str, int]] = []
        self.authorizations: set[str] = set()
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


class Answer(BaseHTTPRequestHandler):
    server: SmallHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Serve /api/datasets/USER/NAME[/revision/REV | /tree/REV/FOLDER] and /datasets/USER/NAME/resolve/REV/FILE; for
        models, /api/models/… and /USER/NAME/resolve/REV/FILE."""
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        self.server.authorizations.add(self.headers.get("Authorization", ""))
        self.commit = next((part for part in parts if re.fullmatch("[0-9a-f]{40}", part)), self.server.commit)
        if parts[:2] in (["api", "datasets"], ["api", "models"]):
            self.about(parts[2:], body)
        elif parts[0] == "datasets" and parts[3:4] == ["resolve"]:
            self.file(self.server.folder.joinpath(*parts[1:3], *parts[5:]))
        elif parts[2:3] == ["resolve"]:
            self.file(self.server.folder.joinpath(*parts[:2], *parts[4:]))
        else:
            self.send(404, b"")

    do_HEAD = do_POST = do_GET  # noqa: N815

    def about(self, parts: list[str], body: bytes) -> None:
        root = self.server.folder.joinpath(*parts[:2])
        if not root.is_dir():
            self.send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        elif parts[2:3] == ["tree"]:
            below = root.joinpath(*parts[4:])
            recursive = "recursive=True" in self.path or "recursive=true" in self.path
            found = sorted(below.rglob("*") if recursive else below.glob("*")) if below.is_dir() else []
            self.json([entry(root, path) for path in found])
        elif parts[2:3] == ["paths-info"]:
            wanted = (
                json.loads(body)["paths"] if body[:1] == b"{" else [unquote(p[6:]) for p in body.decode().split("&")]
            )
            self.json([entry(root, root / path) for path in wanted if (root / path).exists()])
        else:
            files = [{"rfilename": str(path.relative_to(root))} for path in sorted(root.rglob("*")) if path.is_file()]
            name = "/".join(parts[:2])
            facts = {"_id": "0", "id": name, "sha": self.commit, "private": False, "siblings": files, "tags": []}
            self.json(facts)

    def file(self, path: Path) -> None:
        if not path.is_file():
            self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.commit})
            return
        if path.name != "README.md" and self.server.failures:
            self.server.failures -= 1
            self.send(503, b"")
            return
        data = path.read_bytes()
        headers = {"ETag": f'"{etag(path)}"', "X-Repo-Commit": self.commit, "Accept-Ranges": "bytes"}
        span = self.headers.get("Range")
        if not span:
            self.send(200, data, headers)
            return
        first, _, last = span.removeprefix("bytes=").partition("-")
        end = min(int(last) + 1 if last else len(data), len(data))
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
        self.send(206, data[int(first) : end], headers)

    def json(self, facts: object) -> None:
        self.send(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.server.requests.append((self.command, self.path, status))
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def entry(root: Path, path: Path) -> dict[str, object]:
    """The hub API's description of a file or folder."""
    name = path.relative_to(root).as_posix()
    if path.is_dir():
        return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
    return {"type": "file", "oid": etag(path), "size": path.stat().st_size, "path": name}


def etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def small_hub(folder: Path) -> Iterator[SmallHub]:
    """Serve datasets and models within a `with` block."""
    with SmallHub(folder) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
