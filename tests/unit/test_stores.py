"""The store that tests use, and the faults that its proxy plays, seen by an HTTP client alone."""

import http.client
import time
import urllib.error

import pytest

from tests.store_proxy import Fault, Proxy
from tests.stores import Bucket

pytestmark = pytest.mark.slow  # the server imports moto: 1 to 3 s


def test_faults(faulty_store: tuple[Bucket, Proxy]) -> None:
    bucket, proxy = faulty_store
    content = bytes(range(256)) * 400
    proxy.add(Fault("refuse", "PUT", "/a$", times=2, status=503))
    proxy.add(Fault("refuse", "PUT", "/a$", times=1, status=400, code="ExpiredToken"))
    for status in (503, 503, 400):
        with pytest.raises(urllib.error.HTTPError) as refused:
            bucket.request("PUT", "a", content)
        with refused.value as error:
            assert error.code == status
            assert (b"<Code>ExpiredToken</Code>" in error.read()) is (status == 400)
    proxy.add(Fault("cut upload", "PUT", "/a$", times=1))
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        bucket.request("PUT", "a", content)
    assert bucket.keys() == []
    proxy.add(Fault("cut answer", "PUT", "/a$", times=1))
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        bucket.request("PUT", "a", content)
    assert bucket.keys() == ["a"]
    proxy.add(Fault("cut download", "GET", "/a$", times=1))
    with pytest.raises(http.client.IncompleteRead):
        bucket.request("GET", "a")
    proxy.add(Fault("short", "GET", "/a$", times=1))
    assert bucket.request("GET", "a") == content[: len(content) // 2]
    proxy.add(Fault("alter", "GET", "/a$", times=1))
    altered = bucket.request("GET", "a")
    assert [a ^ b for a, b in zip(altered, content, strict=True) if a != b] == [1]
    proxy.add(Fault("slow", "GET", "/a$", times=1, seconds=0.3))
    start = time.monotonic()
    assert bucket.request("GET", "a") == content
    assert time.monotonic() - start >= 0.3
    assert len(proxy.matching("GET", "/a$")) == 4
    bucket.request("DELETE", "a")
    assert bucket.keys() == []
