"""Stores: objects in memory and on a server of S3's protocol on loopback."""

import os
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from tests.stores import Bucket
from titanlite.runtime.errors import UserError
from titanlite.storage import store as store_module
from titanlite.storage.address import Address, is_address, place
from titanlite.storage.store import Facts, LargeObjectError, Store, in_parallel

pytestmark = pytest.mark.slow


@pytest.fixture(params=["memory", "s3"])
def objects(request: pytest.FixtureRequest) -> Store:
    bucket = request.getfixturevalue("store").address if request.param == "s3" else f"memory://{uuid4().hex}"
    return Store(Address.parse(f"{bucket}/run"))


def test_write_read_list_and_delete(objects: Store) -> None:
    assert objects.list() == objects.children() == {}
    objects.write("a/b/x", b"hello")
    objects.write("y", b"first")
    objects.write("y", b"hello2")
    assert {name: facts.bytes for name, facts in objects.list().items()} == {"a/b/x": 5, "y": 6}
    assert [*objects.list("a")] == ["a/b/x"]
    assert objects.children() == {"a": None, "y": objects.facts("y")}
    assert objects.children("a") == {"b": None}
    assert objects.read("y") == b"hello2"
    assert [objects.read_range("y", *at) for at in ((2, 2), (4, 9), (6, 1), (0, 0))] == [b"ll", b"o2", b"", b""]
    for read in (objects.read, objects.facts, lambda name: objects.read_range(name, 0, 1)):
        with pytest.raises(FileNotFoundError, match=r"does not exist: '.*/a/b'"):
            read("a/b")
    assert [objects.exists(name) for name in ("y", "a", "none")] == [True, False, False]
    assert Store(objects.address / "y").facts() == objects.facts("y")
    before = objects.facts("y").etag
    objects.write("y", b"hello3")
    assert objects.facts("y").etag != before
    objects.delete(["y", "a/b/x", "none"])
    assert objects.list() == {}


def test_objects_whose_names_are_no_paths_are_left_out(objects: Store, caplog: pytest.LogCaptureFixture) -> None:
    odd = ["../x", "a/../../x", "a/./x", "a//x", "..", "a\\x", "a/\x1bx"]
    odd += [] if objects.address.protocol == "s3" else ["a/\nx", "a/\u2028x"]  # S3 stores them, moto does not
    for name in [*odd, "a/x", "y", "a/b.. é/..c"]:
        objects.write(name, b"1")
    assert [*objects.list()] == ["a/b.. é/..c", "a/x", "y"]
    assert [*objects.list("a")] == ["a/b.. é/..c", "a/x"]
    assert {*objects.children()} == {"a", "y"}
    assert {*objects.children("a")} == {"b.. é", "x"}
    objects.children("a")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len({*lines}) == 4
    assert f"{objects.address}: left out the object '..' and {len(odd) - 1} more: a name with" in lines[0]
    assert all(line.isprintable() for line in lines)


def test_large_objects_are_not_read_as_small_ones(objects: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    objects.write("x", bytes(100))
    assert objects.read("x", 100) == bytes(100)
    monkeypatch.setattr(type(objects._fs), "cat_file", None)
    with pytest.raises(UserError, match=r"run/x has 100 bytes, more than 99: titanlite has not written it") as error:
        objects.read("x", 99)
    assert isinstance(error.value, LargeObjectError)
    with pytest.raises(FileExistsError):
        objects.create("x", b"other")  # nor compared


def test_objects_that_stand_for_folders_are_not_listed(store: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    objects = Store(Address.parse(f"{store.address}/run"))
    for path in ("", "a/", "a/b/"):
        objects._fs.pipe_file(f"{objects.address.path}/{path}", b"")
    objects.write("a/x", b"1")
    assert [*objects.list()] == [*objects.list("a")] == ["a/x"]
    assert objects.children() == {"a": None}
    assert not caplog.records


def test_only_one_of_many_creates_an_object(objects: Store) -> None:
    def create(content: bytes) -> bool:
        try:
            objects.create("claim", content)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        created = [*threads.map(create, (b"%d" % n for n in range(8)))]
    winner = created.index(True)
    assert created.count(True) == 1
    assert objects.read("claim") == b"%d" % winner
    objects.create("claim", objects.read("claim"))  # a retry whose first answer was lost
    with pytest.raises(FileExistsError, match=r"exists already: '.*claim'"):
        objects.create("claim", b"other")


PART_BYTES = 5 * 2**20
"""The least that S3 takes."""


@pytest.mark.parametrize("num_bytes", [0, 10, 2 * PART_BYTES + 5])
def test_an_object_appears_complete_or_not_at_all(
    objects: Store, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "PART_BYTES", PART_BYTES)
    content = os.urandom(2**20) * (num_bytes // 2**20) + bytes(num_bytes % 2**20)
    with objects.writer("object") as upload:
        for start in range(0, len(content), 2_000_001):
            upload.write(memoryview(content)[start : start + 2_000_001])
        assert not objects.exists("object")
    assert objects.facts("object").bytes == num_bytes
    assert objects.read("object") == content
    with pytest.raises(KeyboardInterrupt), objects.writer("failed") as upload:  # noqa: PT012
        upload.write(content)
        raise KeyboardInterrupt
    del upload
    assert [*objects.list()] == ["object"]
    assert objects.abort_uploads() == 0


def test_unfinished_uploads_of_others_stay(store: Bucket) -> None:
    mine, other = Store(Address.parse(f"{store.address}/run")), Store(Address.parse(f"{store.address}/run2"))
    for each in (mine, other):
        each._s3("write", "object", "create_multipart_upload", Key=f"{each.address.name}/object")
    assert mine.abort_uploads() == 1
    assert other.abort_uploads() == 1


def test_a_forked_process_reads(objects: Store) -> None:
    objects.write("x", b"content")
    child = os.fork()
    if child == 0:
        os._exit(0 if objects.read("x") == b"content" else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([OSError(5, "cut")], b"x"),
        ([TimeoutError(), ConnectionResetError()], b"x"),
        ([TimeoutError()] * 9, "3 attempts in 0 s, last error: TimeoutError; check that its disk or server"),
        ([PermissionError("Access Denied")], "Access Denied; check that the credentials are valid and may list, read"),
        ([PermissionError("The provided token has expired.")], "the credentials have expired: renew them"),
    ],
)
def test_a_failed_request(monkeypatch: pytest.MonkeyPatch, failures: list[Exception], expected: bytes | str) -> None:
    store, pending = Store(Address.parse("memory://bucket/failing")), [*failures]
    store.write("x", b"x")
    read = store._fs.cat_file

    def cat_file(*arguments: object, **options: object) -> bytes:
        if pending:
            raise pending.pop()
        return read(*arguments, **options)

    monkeypatch.setattr(store_module, "DELAYS_S", (0.0, 0.0))
    monkeypatch.setattr(store._fs, "cat_file", cat_file)
    if isinstance(expected, bytes):
        assert store.read("x") == expected
        return
    with pytest.raises(UserError, match="cannot read memory://bucket/failing/x: ") as caught:
        store.read("x")
    assert expected in str(caught.value)


def test_a_missing_bucket_and_a_missing_package(store: Bucket) -> None:  # noqa: ARG001
    missing = Store(Address.parse("s3://missing/run"))
    for call in (missing.list, missing.children, lambda: missing.write("x", b""), lambda: missing.create("x", b"")):
        with pytest.raises(UserError, match="the bucket missing does not exist: create it, or fix the address"):
            call()
    pytest.importorskip("fsspec")
    with pytest.raises(UserError, match=r"pip install 'titanlite\[azure\]'"):
        Store(Address.parse("az://container/run")).list()


def test_addresses() -> None:
    address = Address.parse("s3://bucket/a/b/")
    assert [*map(str, (address, address.parent, address.with_name("c") / "d"))] == [
        *("s3://bucket/a/b", "s3://bucket/a", "s3://bucket/a/c/d")
    ]
    assert (address.name, address.bucket) == ("b", "bucket")
    for other, inside in {"s3://bucket/a": True, "s3://bucket/a/b": True, "s3://bucket/a/bc": False}.items():
        assert address.is_relative_to(Address.parse(other)) is inside
    texts = {"s3://x": True, "abc://y": True, "a/b": False, "/a://b": False, "C:/x": False, "hf:x": False}
    texts |= {"S3://x": True, "s3:/x": True, "./s3:/x": False}
    assert {text: is_address(text) for text in texts} == texts
    assert str(place("x", "folder")) == "folder/x"
    for text in (
        "ftp://x",
        "S3://a",
        "s3:/a",
        "s3://",
        "s3:///x",
        "s3://a//b",
        "s3://a/../b",
        "s3://a/b?versionId=1",
        "s3://a/b\n",
    ):
        with pytest.raises(UserError, match=r"begin it with s3://|write s3://BUCKET/NAME"):
            place(text)


def test_results_in_parallel_keep_their_order() -> None:
    assert in_parallel(lambda n: n * n, range(100)) == [n * n for n in range(100)]
    assert Facts(1) == Facts(1, "")
