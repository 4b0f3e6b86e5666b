"""Fixtures of the tests with hostile inputs."""

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.security.guarded import Case, Guard
from tests.security.workplace import Workplace, write_clean

COLUMNS = ("step", "loss", "digest", "computed_by", "unix_time", "validation/loss")
"""Of the trained run's metrics.jsonl."""


class Server(ThreadingHTTPServer):
    """Answers 404 to everything, and counts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _NotFound)
        self.requests: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _NotFound(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.server.requests.append(f"{self.command} {self.path} {self.headers}")
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def _serving() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="session")
def stranger() -> Iterator[Server]:
    """A server that no command may ask."""
    yield from _serving()


@pytest.fixture(scope="session")
def own_server() -> Iterator[Server]:
    """The server that the user names by AWS_ENDPOINT_URL."""
    yield from _serving()


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guard]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))  # libraries read it when they are imported
        with Guard() as guard:
            yield guard


@pytest.fixture(scope="session")
def clean(guard: Guard, own_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace with a trained run, which no command may change."""
    place = Workplace(tmp_path_factory.mktemp("clean") / "place", own=own_server.url)
    write_clean(place)
    trained = guard.run(Case(("train", "mine.toml"), place.here, place.environment(), (place.root,)))
    assert trained.code == 0, trained.output
    # A chart takes 60 ms, and those of a few columns show what those of all show.
    metrics = place.here / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps({key: row[key] for key in COLUMNS if key in row}) + "\n" for row in rows))
    return place


@pytest.fixture
def place(clean: Workplace, stranger: Server, own_server: Server) -> Iterator[Workplace]:
    """A copy of the clean workplace, to be changed. Its path is short: sockets are among its temporary files."""
    with TemporaryDirectory(prefix="place-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        shutil.copytree(clean.root, root := Path(folder, "place"), symlinks=True)
        yield Workplace(root, stranger.url, own_server.url)
    requests, stranger.requests[:] = stranger.requests[:], []
    assert requests == []
