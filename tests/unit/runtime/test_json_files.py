"""Strict reading of files and JSON: what is refused, and that nothing waits or recurses."""

import os
import tracemalloc
from pathlib import Path

import pytest
from typing_extensions import TypedDict

from titanlite.runtime.json_files import BLOCK_BYTES, MAX_DEPTH, JsonError, parse_json, read_json, read_regular


class Schema(TypedDict):
    count: int
    names: list[str]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b"{", "is not JSON"),
        (b'\xff{"a": 1}', "is not JSON"),
        (b'{"a": 1} x', "is not JSON"),
        (b'{"a": 1, "b": 2, "a": 3}', "has 'a' twice"),
        (b'{"a": {"b": [{"c": 1, "c": 2, "c": 3}]}}', "has 'c' 3 times"),
        (b'{"a": NaN}', "NaN, which is not finite"),
        (b'{"a": -Infinity}', "-Infinity, which is not finite"),
        (b'{"a": 1e999}', "1e999, which is not finite"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        (b'{"a": ' + b"[" * 100_000, "is not JSON: maximum recursion depth"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", f"has more than {MAX_DEPTH} levels"),
        (b'{"a": ' + b'{"a":' * 70 + b"1" + b"}" * 71, f"has more than {MAX_DEPTH} levels"),
    ],
)
def test_bad_content_is_refused_with_a_reason(text: bytes, reason: str) -> None:
    with pytest.raises(JsonError) as caught:
        parse_json(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"count": 1}', "is invalid: names: Field required"),
        (b'{"count": "1", "names": []}', "is invalid: count: Input should be a valid integer"),
        (b'{"count": 1, "names": ["a", "b", 3]}', "is invalid: names.2: Input should be a valid string"),
    ],
)
def test_a_schema_is_enforced_in_all_items(text: bytes, reason: str) -> None:
    with pytest.raises(JsonError) as caught:
        parse_json(text, Schema)
    assert reason in str(caught.value)
    assert parse_json(b'{"count": 1, "names": ["a"]}', Schema) == {"count": 1, "names": ["a"]}


def test_memory_follows_the_size_of_the_file_not_the_limit(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"1")
    (tmp_path / "large").write_bytes(b"12" * BLOCK_BYTES)
    tracemalloc.start()
    try:
        assert read_regular(tmp_path / "small") == b"1"
        assert tracemalloc.get_traced_memory()[1] < 8 * BLOCK_BYTES
    finally:
        tracemalloc.stop()
    assert read_regular(tmp_path / "large", 2 * BLOCK_BYTES) == b"12" * BLOCK_BYTES
    with pytest.raises(JsonError, match=f"has more than {2 * BLOCK_BYTES - 1:,} bytes"):
        read_regular(tmp_path / "large", 2 * BLOCK_BYTES - 1)


@pytest.mark.timeout(10)
def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path):
        with pytest.raises((JsonError, IsADirectoryError)):
            read_regular(path)
    (tmp_path / "file").write_bytes(b'{"a": 1}')
    assert read_json(tmp_path / "file") == {"a": 1}
    with pytest.raises(JsonError, match="has more than 7 bytes"):
        read_regular(tmp_path / "file", 7)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing")
