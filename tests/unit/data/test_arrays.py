"""Arrays in files: equal to numpy's, and what is refused."""

import gc
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanlite.data.sources import arrays
from titanlite.data.sources.arrays import ArrayFile
from titanlite.data.sources.formats import FORMATS, PAGES_PER_READ, STARTS_PER_PAGE, DocumentStarts
from titanlite.runtime import retry
from titanlite.runtime.errors import UserError


@pytest.mark.parametrize("dtype", ["i1", "u1", "<u2", ">u2", "<i4", ">u4", "<i8", "u8"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_reads_what_numpy_reads(dtype: str, version: tuple[int, int], tmp_path: Path) -> None:
    values = np.arange(100).astype(dtype)
    with (tmp_path / "file.npy").open("wb") as out:
        np.lib.format.write_array(out, values, version)
    values.tofile(tmp_path / "file.bin")
    found = [ArrayFile(tmp_path / "file.npy")]
    if not dtype.startswith(">"):
        found.append(ArrayFile(tmp_path / "file.bin", dtype))
    for file in found:
        assert (len(file), file.dtype) == (100, values.dtype)
        for begin, end in ((0, 100), (3, 4), (50, 50), (99, 100)):
            np.testing.assert_array_equal(file.read(begin, end), values[begin:end])


def test_a_descriptor_is_closed_with_its_array(tmp_path: Path) -> None:
    np.save(tmp_path / "file.npy", np.arange(10))
    gc.collect()  # of other tests
    before = len(os.listdir("/proc/self/fd"))
    files = [ArrayFile(tmp_path / "file.npy") for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before + 20
    files.clear()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ArrayFile]:
    """Twelve files, file n with ten times n, of which three stay open."""
    monkeypatch.setattr(arrays._FILES, "limit", 3)
    for n in range(12):
        np.save(tmp_path / f"{n}.npy", np.full(10, n, np.uint16))
    return [ArrayFile(tmp_path / f"{n}.npy") for n in range(12)]


def test_few_files_stay_open(many: list[ArrayFile]) -> None:
    for n in [*range(12), *range(0, 12, 5), 11, 11]:
        assert many[n].read(0, 10).tolist() == [n] * 10
        opened = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
        assert sum(str(many[0].path.parent) in path for path in opened) <= 3
    for file in many:
        file.check_unchanged()


@pytest.mark.parametrize("change", ["written", "replaced", "deleted"])
def test_a_file_that_changes_while_it_is_not_open_is_refused(many: list[ArrayFile], change: str) -> None:
    path = str(many[0].path)
    if change == "written":
        os.utime(path, (0, 0))
    elif change == "replaced":
        np.save(path, np.zeros(11, np.uint16))
    else:
        os.remove(path)
    reason = "can no longer be read" if change == "deleted" else "was written while it was in use: it has"
    for use in (many[0].check_unchanged, lambda: many[0].read(0, 10)):
        with pytest.raises(UserError, match=f"{path} {reason}"):
            use()
    assert many[1].read(0, 10).tolist() == [1] * 10


def npy_header(shape: str) -> bytes:
    text = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    ("content", "dtype", "reason"),
    [
        (b"", "", "magic string"),
        (b"\x93NUMPY\x01", "", "expected"),
        (b"\x93NUMPY\x09\x00", "", "version"),
        (npy_header(f"({'-' * 9000}1,)"), "", ""),
        (b"", "uint16", "0 bytes are not a multiple of 2"),
        (b"123", "uint16", "3 bytes are not a multiple of 2, the size of uint16"),
    ],
)
def test_other_files_are_refused(content: bytes, dtype: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match=f"file is not a 1-D array of integers: .*{reason}"):
        ArrayFile(tmp_path / "file", dtype)


def test_a_file_shorter_than_its_header_says_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "file.npy", np.arange(1000))
    os.truncate(tmp_path / "file.npy", 8127)
    with pytest.raises(UserError, match="its 1,000 elements would end at byte 8,128, but it has 8,127 bytes"):
        ArrayFile(tmp_path / "file.npy")


def test_a_damaged_header_is_always_a_user_error(tmp_path: Path) -> None:
    np.save(tmp_path / "file.npy", np.arange(1000, dtype=np.uint16))
    good = (tmp_path / "file.npy").read_bytes()
    rng = random.Random(0)
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(rng.choice([1, 2, 10])):
            bad[rng.randrange(80)] = rng.choice(b"\x00\xff'\"()[]{},:0123456789-\n\\ \t")
        (tmp_path / "file.npy").write_bytes(bad)
        try:
            file = ArrayFile(tmp_path / "file.npy")
            file.read(0, len(file))
        except UserError:
            pass


def test_transient_errors_are_retried_and_others_name_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "file.npy", np.arange(1000))
    file = ArrayFile(tmp_path / "file.npy")
    errors = [OSError(5, "Input/output error"), OSError(116, "Stale file handle")]
    preadv = os.preadv

    def read(*arguments: Any) -> int:
        if errors:
            raise errors.pop()
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(retry.retrying, "__defaults__", ((0.0,) * 6, lambda _: None))
    np.testing.assert_array_equal(file.read(5, 10), np.arange(5, 10))
    errors[:] = [OSError(9, "Bad file descriptor")]
    with pytest.raises(UserError, match=r"file.npy can no longer be read at byte 168: Bad file descriptor"):
        file.read(5, 10)


def write_documents(folder: Path, starts: Any) -> None:
    with (folder / "file.documents").open("wb") as out:
        np.save(out, starts)


def starts_of(folder: Path, num_tokens: int) -> DocumentStarts:
    return DocumentStarts(FORMATS[0].positions(folder / "file.npy"), num_tokens)


@pytest.mark.parametrize(
    "count", [0, 1, STARTS_PER_PAGE, 3 * STARTS_PER_PAGE + 7, PAGES_PER_READ * STARTS_PER_PAGE + 1]
)
def test_starts_of_documents_are_those_of_the_array(count: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(count)
    size = 2 * count + 1
    starts = np.sort(rng.integers(0, size + 1, count))  # with repeats: empty documents
    write_documents(tmp_path, starts)
    found = starts_of(tmp_path, size)
    edges = [(0, size), (0, 0), (size, size), *np.sort(rng.integers(0, size + 1, (200, 2))).tolist()]
    for begin, end in edges:
        inside = starts[(starts >= begin) & (starts < end)]
        np.testing.assert_array_equal(found.between(begin, end), inside)


def test_starts_of_documents_out_of_order_between_two_reads_are_refused(tmp_path: Path) -> None:
    starts = np.arange(PAGES_PER_READ * STARTS_PER_PAGE + 10)
    starts[PAGES_PER_READ * STARTS_PER_PAGE :] -= 2
    write_documents(tmp_path, starts)
    with pytest.raises(UserError, match="in ascending order"):
        starts_of(tmp_path, 10**6)
