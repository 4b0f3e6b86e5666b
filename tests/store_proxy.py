"""An HTTP proxy before an object store, which records requests and plays scripted faults."""

import http.client
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Literal, Self
from urllib.parse import unquote, urlsplit

Kind = Literal[
    "refuse",  # answer `status` with S3's error `code`, without asking the store
    "cut upload",  # close the connection after half of the request's body
    "cut answer",  # the store has done it, but the connection is closed before the answer
    "cut download",  # close the connection after half of the answer's body
    "short",  # half of the answer's body, as if that was the object
    "alter",  # one bit of the answer's body is flipped
    "stall",  # no answer until the proxy is closed
    "slow",  # forward after `seconds`
    "ignore condition",  # forward without If-None-Match and If-Match, as a store without conditional put
]
_CONDITIONS = ("if-none-match", "if-match")
_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "content-length"}


@dataclass
class Fault:
    """What happens to the next `times` requests of these methods whose path and query match."""

    kind: Kind
    methods: str = "PUT POST GET HEAD DELETE"
    path: str = ""
    """Regular expression, searched in "/bucket/key?query"."""
    times: float = float("inf")
    skip: int = 0
    """Matching requests to leave alone first."""
    status: int = 503
    code: str = "SlowDown"
    conditional: bool = False
    """Only requests with If-None-Match or If-Match."""
    seconds: float = 0.0
    before: Callable[[], object] = lambda: None
    """Called before the fault happens."""
    played: int = field(default=0, init=False)

    def applies(self, request: "Request") -> bool:
        if request.method not in self.methods.split() or not re.search(self.path, request.path):
            return False
        if self.conditional and not request.conditional:
            return False
        self.skip -= 1
        if self.skip >= 0 or self.played >= self.times:
            return False
        self.played += 1
        return True


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str
    conditional: bool
    sent: int
    """Bytes of the request's body."""
    at: float


class Proxy:
    """Context in which `endpoint` forwards to the store at `upstream`. `faults`: the first that applies is played."""

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.received = 0
        """Bytes of all answers' bodies to GET."""
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self.faults.append(fault)
        return fault

    def clear(self) -> None:
        with self._lock:
            self.faults.clear()
            self.requests.clear()
            self.received = 0

    def matching(self, method: str, path: str = "") -> list[Request]:
        """The requests so far with this method and a path that contains the expression."""
        with self._lock:
            return [request for request in self.requests if request.method == method and re.search(path, request.path)]

    def _fault_for(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            return next((fault for fault in self.faults if fault.applies(request)), None)


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 120

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except OSError:  # the other side has closed the connection
                self.close_connection = True

        def answer(self) -> None:
            length = int(self.headers.get("content-length", 0))
            conditional = any(name in self.headers for name in _CONDITIONS)
            path = unquote(self.path)
            request = Request(self.command, path, self.headers.get("range", ""), conditional, length, time.monotonic())
            fault = proxy._fault_for(request)
            kind = fault.kind if fault else None
            if fault:
                fault.before()
            if kind == "cut upload":
                self.rfile.read(length // 2)
                self.hang_up()
                return
            body = self.read_body(length)
            if kind == "stall":
                proxy.closing.wait(300)
                self.hang_up()
                return
            if kind == "refuse":
                assert fault
                self.send(fault.status, [], b"" if self.command == "HEAD" else _error(fault.code, path))
                return
            if kind == "slow":
                assert fault
                time.sleep(fault.seconds)
            dropped = _HOP | set(_CONDITIONS if kind == "ignore condition" else ())
            headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            status, answered, content = self.forward(body, headers)
            if kind == "cut answer":
                self.hang_up()
                return
            if kind == "short":
                content = content[: len(content) // 2]
            if kind == "alter" and content:
                middle = len(content) // 2
                content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            if self.command == "GET":
                with proxy._lock:
                    proxy.received += len(content)
            self.send(status, answered, content, cut=kind == "cut download")

        def read_body(self, length: int) -> bytes:
            if "chunked" not in self.headers.get("transfer-encoding", ""):
                return self.rfile.read(length)
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def forward(self, body: bytes, headers: dict[str, str]) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection(proxy.upstream, timeout=120)
            try:
                connection.request(self.command, self.path, body, headers)
                response = connection.getresponse()
                return response.status, response.getheaders(), response.read()
            finally:
                connection.close()

        def send(self, status: int, headers: list[tuple[str, str]], content: bytes, cut: bool = False) -> None:
            self.send_response_only(status)
            size = [value for name, value in headers if name.lower() == "content-length"]
            for name, value in headers:
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("Content-Length", size[0] if size and self.command == "HEAD" else str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if cut else content)
            if cut:
                self.hang_up()

        def hang_up(self) -> None:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(2)

        def log_message(self, format: str, *args: object) -> None:
            pass

    for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
        setattr(Handler, f"do_{method}", Handler.answer)
    return Handler


def _error(code: str, path: str) -> bytes:
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{code}: planted</Message>'
        f"<Resource>{path.split('?')[0]}</Resource><RequestId>0</RequestId></Error>"
    ).encode()
