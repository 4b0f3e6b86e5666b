"""Object stores for tests: a moto server in a child process, and buckets in it.

`store` gives an empty bucket to one test; `faulty_store` gives one behind a proxy that plays scripted faults.
"""

import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from titanlite.storage.store import _file_system

if TYPE_CHECKING:
    from tests.store_proxy import Proxy

# It ends with its standard input: also if pytest is killed.
_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""

# moto reads the key's name from it, and checks no signature
_HEADERS = {
    "Content-Type": "application/octet-stream",
    "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, Signature=0",
}


@dataclass(frozen=True)
class Bucket:
    name: str
    endpoint: str

    @property
    def address(self) -> str:
        return f"s3://{self.name}"

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs to reach the bucket, and nothing of the user's own settings."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def request(self, method: str, key: str = "", body: bytes | None = None) -> bytes:
        """Read, write or delete an object, or the bucket itself, around the code under test."""
        url = f"{self.endpoint}/{self.name}/{key}" if key else f"{self.endpoint}/{self.name}"
        with urllib.request.urlopen(urllib.request.Request(url, body, _HEADERS, method=method)) as response:
            return bytes(response.read())

    def keys(self) -> list[str]:
        """The keys of the objects, sorted."""
        from xml.etree import ElementTree

        root = ElementTree.fromstring(self.request("GET", "?list-type=2"))
        return [str(key.text) for key in root.iter() if key.tag.endswith("}Key")]


@contextmanager
def serving() -> Iterator[str]:
    """Context with a server's URL."""
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdin=-1, stdout=-1, stderr=-3, cwd=Path.home()) as server:
        assert server.stdin
        assert server.stdout
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.stdin.close()
        server.kill()


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    """The server's URL."""
    with serving() as url:
        yield url


@pytest.fixture
def store(moto_server: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new bucket, which this process and its child programs reach by their environment."""
    bucket = Bucket(f"test-{uuid.uuid4().hex}", moto_server)
    bucket.request("PUT")
    _enter(bucket, monkeypatch)
    return bucket


def _enter(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    _file_system.cache_clear()  # a process keeps its client, with the endpoint of its first request


@pytest.fixture
def faulty_store(store: Bucket, monkeypatch: pytest.MonkeyPatch) -> "Iterator[tuple[Bucket, Proxy]]":
    """`store`, reached through a proxy. The bucket's own `request` and `keys` pass the proxy too."""
    from tests.store_proxy import Proxy

    with Proxy(store.endpoint) as proxy:
        bucket = Bucket(store.name, proxy.endpoint)
        _enter(bucket, monkeypatch)
        yield bucket, proxy
