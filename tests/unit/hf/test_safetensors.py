"""Files in the safetensors format, against the format's own library."""

import json
import os
import stat
from collections.abc import Callable
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from titanlite.hf import safetensors
from titanlite.hf.safetensors import read_box_, read_header, write_tensors
from titanlite.runtime.errors import UserError

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((7,), (5, 6), (3, 4, 5), (1, 9))


def boxes(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Some of each dimension: all, the front, the middle, one, zero."""
    of_dims = [[slice(0, n), slice(0, n // 2), slice(n // 3, n), slice(n - 1, n), slice(n, n)] for n in shape]
    return list(product(*of_dims))


@pytest.mark.parametrize("block_bytes", [24, 2**23])
def test_each_box_is_what_the_library_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """In every dtype, and converted to others; read are no bytes but its own."""
    monkeypatch.setattr(safetensors, "_BLOCK_BYTES", block_bytes)
    read: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(preadv(*args)) or read[-1])
    tensors = {f"{shape} {dtype}": torch.randn(shape).to(dtype) for shape in SHAPES for dtype in DTYPES}
    save_file(tensors, tmp_path / "file")
    header = read_header(tmp_path / "file")
    assert header.keys() == tensors.keys()
    with safe_open(tmp_path / "file", "pt") as reader:
        for name, tensor in tensors.items():
            assert (header[name].dtype, header[name].shape) == (tensor.dtype, tuple(tensor.shape))
            for box in boxes(tuple(tensor.shape)):
                expected = reader.get_slice(name)[box]
                offset = tuple(part.start for part in box)
                for dtype in (tensor.dtype, torch.float32):
                    read.clear()
                    out = torch.full(expected.shape, torch.nan, dtype=dtype)
                    read_box_(out, header[name], offset)
                    assert torch.equal(out, expected.to(dtype)), (name, box)
                    assert sum(read) == expected.numel() * tensor.element_size(), (name, box)


def test_a_part_that_is_not_contiguous_is_filled(tmp_path: Path) -> None:
    tensor = torch.randn(6, 5)
    save_file({"a": tensor}, tmp_path / "file")
    out = torch.empty(3, 4).t()
    read_box_(out, read_header(tmp_path / "file")["a"], (1, 2))
    assert torch.equal(out, tensor[1:5, 2:5])


def test_what_is_written_is_read_by_the_library(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.randn(3, number + 1).to(dtype) for number, dtype in enumerate(DTYPES)}
    for name in ("one", "two"):
        write_tensors(tmp_path / name, tensors)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    found = load_file(tmp_path / "one")
    assert read_header(tmp_path / "one").keys() == found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "one", "pt") as reader:
        assert reader.metadata() == {"format": "pt"}


def test_a_file_is_never_replaced_and_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_tensors(tmp_path / "file", {"a": torch.ones(3)})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "file", {"a": torch.zeros(3)})
    assert torch.equal(load_file(tmp_path / "file")["a"], torch.ones(3))
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.randn(100)}, tmp_path / "file")
    stored = read_header(tmp_path / "file")["a"]
    os.truncate(tmp_path / "file", 200)
    with pytest.raises(UserError, match="was truncated while"):
        read_box_(torch.empty(100), stored, (0,))


Header = dict[str, Any]


def changed(name: str, **entry: Any) -> Callable[[Header], None]:
    return lambda header: header[name].update(entry)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed("b", data_offsets=[0, 8]), "begins at byte"),  # over a
        (changed("b", data_offsets=[12, 20]), "begins at byte"),
        (changed("b", data_offsets=[8, 2**70]), "lists of integers"),
        (changed("b", data_offsets=[8, 4]), "b, F32 of shape (2,), has -4 bytes instead of 8"),
        (changed("b", data_offsets=[-8, 0]), "lists of integers"),
        (changed("b", data_offsets=[8.0, 16]), "lists of integers"),
        (changed("b", data_offsets=[8, 16, 24]), "lists of integers"),
        (changed("b", data_offsets=[8, 16 + 2**40], shape=[2 + 2**38]), "tensors end at byte"),
        (changed("b", shape=[2, True]), "lists of integers"),
        (changed("b", shape=[3]), "b, F32 of shape (3,), has 8 bytes instead of 12"),
        (changed("b", shape=[2**40, 2**40]), "has 8 bytes instead of"),
        (changed("b", dtype="I8"), "b has dtype 'I8'"),
        (changed("b", dtype=["F32"]), "b has dtype ['F32']"),
        (changed("b", shape=[1] * 9), "b has 9 dimensions, more than 8"),
        (changed("b", more=1), "b must have exactly dtype"),
        (lambda header: header.update({"b" * 1025: header.pop("b")}), "has 1,025 characters, more than 1,024"),
        (changed("b", shape=[2**62] * 400), "b has 400 dimensions, more than 8"),
        (changed("b", shape=[1] * 60_000), "b has 60,000 dimensions, more than 8"),
        (changed("b", shape=[1] * 60_000 + [True]), "b has shape [1, 1, 1, 1, 1, 1, ...] and data_offsets"),
        (changed("b", dtype="x" * 10**6), "b has dtype 'xxxxxxxxxxxx...xxxxxxxxxxxxx'"),
        (lambda header: header.pop("b"), "tensors end at byte"),
        (lambda header: header.update(b=7), "b must have exactly dtype"),
    ],
)
def test_a_header_that_is_wrong_is_refused(tmp_path: Path, change: Callable[[Header], Any], said: str) -> None:
    header: Header = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
    }
    change(header)
    refuses(tmp_path, json.dumps(header).encode(), said)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"[1]", "not a JSON object"),
        (b'{"a": ', "is not JSON"),
        (b"\xff\xff", "is not JSON"),
        (b'{"a": 1, "a": 2}', "has 'a' twice"),
        (b'{"a": 1, "b": 1, "b": 2, "b": 3}', "has 'b' 3 times"),
        (b"[" * 10**5, "is not JSON"),
    ],
)
def test_a_header_that_is_none_is_refused(tmp_path: Path, raw: bytes, said: str) -> None:
    refuses(tmp_path, raw, said)


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("MAX_TENSORS", 1, "it has 2 tensors, more than 1"),
        ("MAX_HEADER_BYTES", 100, "its header has 128 bytes, more than 100"),
    ],
)
def test_a_header_over_a_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, said: str
) -> None:
    entry = {"dtype": "F32", "shape": [2]}
    header = {"a": entry | {"data_offsets": [0, 8]}, "b": entry | {"data_offsets": [8, 16]}}
    raw = json.dumps(header).encode().ljust(128)
    (tmp_path / "file").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    assert len(read_header(tmp_path / "file")) == 2
    monkeypatch.setattr(safetensors, limit, value)
    refuses(tmp_path, raw, said)


ENTRY = '"t%d":{"dtype":"F32","shape":[],"data_offsets":[%d,%d]},'
FLOODS = {
    "names": lambda: (
        "{" + "".join(ENTRY % (n, 4 * n, 4 * n + 4) for n in range(300_000)) + ENTRY[:-1] % (7, 0, 4) + "}"
    ),
    "lists": lambda: '{"a":[' + "[]," * 8_000_000 + "0]}",
    "braces": lambda: '{"a":' + "{" * 20_000_000,
}
"""Headers of up to 24 MB, which take seconds to parse; the first has a name twice."""


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_of_entries_is_refused_before_it_is_parsed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors, "parse_json", lambda _: pytest.fail("was parsed"))
    raw = FLOODS[kind]().encode()
    assert 20_000_000 < len(raw) < safetensors.MAX_HEADER_BYTES
    refuses(tmp_path, raw, "its header has more entries than 100,000 tensors need")


def refuses(folder: Path, raw: bytes, said: str) -> None:
    (folder / "file").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    start = process_time()
    with pytest.raises(UserError) as error:
        read_header(folder / "file")
    assert process_time() - start < 1
    assert said in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "content", [b"", b"abc", (2**60).to_bytes(8, "little"), (9).to_bytes(8, "little") + b"12345678"]
)
def test_a_torn_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match="exceeds the file of"):
        read_header(tmp_path / "file")
