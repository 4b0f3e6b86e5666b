"""Requests to a store whose connection or server fails: repeated, bounded, explained; nothing partial is left."""

import os
import time
from collections.abc import Callable

import pytest

from tests.store_proxy import Fault, Proxy
from tests.stores import Bucket
from titanlite.runtime.errors import UserError
from titanlite.storage import store as store_module
from titanlite.storage.address import Address
from titanlite.storage.config import StorageConfig
from titanlite.storage.store import Store, apply_settings

pytestmark = pytest.mark.slow

SMALL, LARGE = os.urandom(1000), os.urandom(12 * 2**20)


@pytest.fixture
def objects(faulty_store: tuple[Bucket, Proxy], monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(store_module, "DELAYS_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(store_module, "PART_BYTES", 5 * 2**20)  # the least that S3 takes
    monkeypatch.setenv("TITANLITE_STORAGE", "")
    apply_settings(StorageConfig(timeout_s=1))
    return Store(Address.parse(f"{faulty_store[0].address}/run"))


def write_large(store: Store) -> None:
    with store.writer("x") as upload:
        for start in range(0, len(LARGE), 2**20):
            upload.write(LARGE[start : start + 2**20])


WRITES: dict[str, tuple[Callable[[Store], None], bytes]] = {
    "write": (lambda store: store.write("x", SMALL), SMALL),
    "create": (lambda store: store.create("x", SMALL), SMALL),
    "writer": (write_large, LARGE),
}


# The client is built once per test, in half a second; so each test plays many faults.
REPEATED = {
    "write": [Fault("cut upload", "PUT", times=2), Fault("refuse", "PUT", times=2, status=429, code="TooManyRequests")],
    "create": [
        Fault("cut upload", "PUT", times=1),
        Fault("cut answer", "PUT", times=2),
        Fault("refuse", "PUT", times=1, status=409, code="ConditionalRequestConflict"),
        Fault("stall", "PUT", times=1),
    ],
    "writer": [
        Fault("cut upload", "PUT", times=2, skip=1),
        Fault("cut answer", "PUT", times=2),
        Fault("cut answer", "POST", "uploadId", times=2),
        Fault("refuse", "PUT POST", times=3),
        Fault("refuse", "PUT", times=2, status=500, code="InternalError"),
    ],
}


def test_writes_are_repeated(objects: Store, faulty_store: tuple[Bucket, Proxy]) -> None:
    bucket, proxy = faulty_store
    for way, faults in REPEATED.items():
        for fault in faults:
            write, content = WRITES[way]
            proxy.add(fault)
            write(objects)
            assert fault.played == fault.times, fault
            proxy.clear()
            assert objects.read("x") == content, fault
            assert objects.abort_uploads() == 0, fault
            assert bucket.keys() == ["run/x"], fault
            objects.delete(["x"])


def test_failed_writes_leave_nothing(objects: Store, faulty_store: tuple[Bucket, Proxy]) -> None:
    bucket, proxy = faulty_store
    for way, fault, expected in [
        ("writer", Fault("cut upload", "PUT"), "4 attempts in .* last error"),
        ("writer", Fault("refuse", "POST", "uploadId"), "4 attempts in .* SlowDown: planted"),
        ("create", Fault("stall", "PUT"), "4 attempts in .* last error"),
        ("write", Fault("refuse", "PUT", status=403, code="AccessDenied"), "check that the credentials are valid"),
        ("writer", Fault("refuse", "PUT", status=400, code="ExpiredToken"), "credentials have expired: renew them"),
        ("writer", Fault("refuse", "PUT", status=507, code="InsufficientStorage"), "Storage: planted; check the"),
    ]:
        proxy.add(fault)
        start = time.monotonic()
        with pytest.raises(UserError, match=f"cannot write {objects.address}/x: .*{expected}"):
            WRITES[way][0](objects)
        assert time.monotonic() - start < 10
        if fault.status in (403, 400):
            assert fault.played <= 3, "not repeated; the writer sends parts side by side"
        proxy.clear()
        assert bucket.keys() == [], fault
        assert objects.abort_uploads() == 0, fault


def test_reads_are_repeated(objects: Store, faulty_store: tuple[Bucket, Proxy]) -> None:
    objects.write("x", SMALL)
    for read, expected in (
        (lambda: objects.read("x"), SMALL),
        (lambda: objects.read_range("x", 10, 500), SMALL[10:510]),
    ):
        for fault in (
            Fault("cut download", "GET", times=2),
            Fault("refuse", "GET HEAD", times=2),
            Fault("stall", "GET", times=1),
            Fault("alter", "GET", times=1 if expected is SMALL else 0),  # S3 has checksums of whole objects only
        ):
            faulty_store[1].add(fault)
            assert read() == expected
            assert fault.played == fault.times, fault
