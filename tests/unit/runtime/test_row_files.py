"""Files of rows with an index: the same results as without one, whatever has happened to both, and few rows read."""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanlite.data.ledger import Ledger
from titanlite.data.streams import Origin
from titanlite.metrics import jsonl
from titanlite.metrics.jsonl import (
    JsonlLogger,
    has_validation,
    keep_rows,
    kind_of,
    last_row,
    read_history,
    read_rows,
    read_series,
    value_at_end,
)
from titanlite.metrics.records import is_validation
from titanlite.runtime import row_files
from titanlite.runtime.row_files import find_rows, index_of, lines_from_end

pytestmark = pytest.mark.usefixtures("propagating_log")


class Rows:
    """A record of rows of metrics.jsonl."""

    FILE = "metrics.jsonl"

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.step = rows[0]["step"]
        self._rows = rows

    def rows(self) -> list[dict[str, Any]]:
        return [*self._rows]


def row(step: int, **others: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1 / step, **others}


def validation(step: int) -> dict[str, Any]:
    return {"step": step, "validation/loss": 2 / step}


def write(path: Path, *rows: dict[str, Any]) -> None:
    """As a run writes them."""
    logger = JsonlLogger(path)
    for each in rows:
        logger.write(Rows(each))  # type: ignore[arg-type]
    logger.close()


def expected(content: bytes, last_step: int) -> bytes:
    """What keep_rows leaves of the content: by hand, without an index."""
    rows: dict[tuple[int, bool, str], bytes] = {}
    for line in content.split(b"\n"):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if found["step"] <= last_step:
            key = found["step"], is_validation(found), str(found.get("prompt"))
            rows.pop(key, None)
            rows[key] = line + b"\n"
    return b"".join(rows[key] for key in sorted(rows, key=lambda key: key[0]))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(row_files, "INDEXED_BYTES", 200)
    monkeypatch.setattr(row_files, "CHECKED_ROWS", 2)
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lines that are parsed."""
    lines: list[bytes] = []
    original = row_files.row_of

    def noted(line: bytes) -> dict[str, Any] | None:
        lines.append(line)
        return original(line)

    monkeypatch.setattr(row_files, "row_of", noted)
    monkeypatch.setattr(jsonl, "row_of", noted)
    return lines


def is_indexed(path: Path) -> bool:
    with path.open("rb") as file:
        found = find_rows(file, path, kind_of)
        read = row_files._read_all(file, kind_of)
    if found.is_indexed:
        for one, other in ((found.begin, read.begin), (found.end, read.end), (found.step, read.step)):
            assert np.array_equal(one, other)
        assert np.array_equal(found.kind, read.kind)
    return found.is_indexed


def set_time(path: Path, other: Path, after_ns: int) -> None:
    """Set the time of a file to that of another one and some nanoseconds, if there is the other one."""
    if other.exists():
        time = other.stat().st_mtime_ns + after_ns
        os.utime(path, ns=(time, time))


def test_a_small_file_has_no_index(path: Path) -> None:
    write(path, row(1), row(2))
    assert not index_of(path).exists()
    write(path, *(row(step) for step in range(3, 30)))
    assert is_indexed(path)


def test_a_resume_reads_few_rows(path: Path, parsed: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, *(each for step in range(1, 2000) for each in (row(step), *[validation(step)] * (step % 10 == 0))))
    content = path.read_bytes()
    parsed.clear()
    monkeypatch.setattr(row_files, "_rewrite", None)
    keep_rows(path, 1990)
    assert path.read_bytes() == expected(content, 1990)
    assert has_validation(path, 1990)
    assert not has_validation(path, 1989)
    assert last_row(path)["step"] == 1990
    assert read_rows(path, range(5, 7)) == [row(5), row(6)]
    logger = JsonlLogger(path)
    logger.write(Rows(row(1991)))  # type: ignore[arg-type]
    logger.close()
    assert len(parsed) < 30
    assert is_indexed(path)


def test_the_end_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "_TAIL_BYTES", 7)
    path = tmp_path / "rows"
    for content in (b"", b"a", b"a\n", b"\n\n", b"abc\n" + b"d" * 30 + b"\n\nefghijk\nl", b"0123456\n7890123\n"):
        path.write_bytes(content)
        assert list(lines_from_end(path)) == (content.split(b"\n")[::-1] if content else [])


@pytest.mark.parametrize("seed", range(12))
def test_edits_and_old_indexes_change_no_result(path: Path, seed: int) -> None:
    """A few resumes of a run, between which the file, the index and their times are changed."""
    choose = random.Random(seed)
    step = 0
    for _ in range(6):
        rows = []
        for _ in range(choose.randrange(1, 30)):
            step += 1
            rows += [row(step), *[validation(step)] * (choose.random() < 0.2)]
        write(path, *rows)
        damage(path, choose)
        before = path.read_bytes()
        assert [each["step"] for each in read_rows(path, range(5, 40))] == [
            each["step"] for each in read_rows(path) if each["step"] in range(5, 40)
        ]
        step = max(1, step - choose.randrange(8))
        keep_rows(path, step)
        assert path.read_bytes() == expected(before, step)
        is_indexed(path)  # compares with the rows


def damage(path: Path, choose: random.Random) -> None:
    """One of what happens to a file or its index."""
    lines = path.read_bytes().splitlines(keepends=True)
    number = choose.randrange(len(lines))
    index = index_of(path)
    entries = index.read_bytes() if index.exists() else b""
    match choose.randrange(10):
        case 0:  # the last line is truncated
            path.write_bytes(b"".join(lines)[: -choose.randrange(1, 9)])
        case 1:  # a line is removed, and the index is newer
            path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
            set_time(path, index, -1)
        case 2:  # a line of another step of the same length
            step = json.loads(lines[number])["step"]
            changed = lines[number].replace(b'"step": %d' % step, b'"step": %d' % (10 ** len(str(step)) - 1))
            path.write_bytes(b"".join([*lines[:number], changed, *lines[number + 1 :]]))
            set_time(path, index, 1)
        case 3:  # a line in the wrong place
            path.write_bytes(b"".join([*lines, lines[number]]))
        case 4:
            index.unlink(missing_ok=True)
        case 5 if entries:  # of rows that were not written
            index.write_bytes(entries + entries[-24:])
        case 6 if entries:  # without the last rows
            index.write_bytes(entries[:-48])
        case 7 if entries:
            index.write_bytes(choose.randbytes(len(entries)))
        case 8 if entries:
            index.write_bytes(entries[:-5])


def test_an_index_that_cannot_be_written_ends_no_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = JsonlLogger(path)
    for step in range(1, 20):
        logger.write(Rows(row(step)))  # type: ignore[arg-type]
    assert index_of(path).exists()

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", fail)
        logger.write(Rows(row(20)))  # type: ignore[arg-type]
    logger.write(Rows(row(21)))  # type: ignore[arg-type]
    logger.close()
    assert not index_of(path).exists()
    assert [each["step"] for each in read_rows(path)] == list(range(1, 22))


def test_a_ledger_has_an_index(tmp_path: Path, path: Path, parsed: list[bytes]) -> None:
    del path
    ledger = Ledger(tmp_path, data_rank=0, data_degree=1)
    for step in range(1, 500):
        ledger.write(step, [2 * step, 2 * step + 1], [Origin(0, 0, step, 0)] * 2)
    ledger.close()
    (file,) = (tmp_path / "ledger").glob("*.jsonl")
    content = file.read_bytes()
    parsed.clear()
    keep_rows(file, 400)
    assert file.read_bytes() == expected(content, 400)
    assert len(parsed) < 10


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MOST_PARSED_BYTES", 2000)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("has_index", [True, False])
def test_some_rows_of_a_long_history(path: Path, has_index: bool) -> None:
    steps = [*range(1, 300), *range(250, 400)]  # the second start supersedes the end of the first
    write(path, *(each for step in steps for each in (row(step), *[validation(step)] * (step % 25 == 0))))
    if not has_index:
        index_of(path).unlink()
    found, full = read_history(path), read_series(path)
    assert found.note == "of one row in 9, the first and the last; all validations"
    drawn, every = found.series["loss"], full["loss"]
    assert drawn.steps.tolist() == sorted({*every.steps[::9].tolist(), 399})
    assert drawn.values.tolist() == [1 / step for step in drawn.steps.tolist()]
    assert found.series["validation/loss"].steps.tolist() == full["validation/loss"].steps.tolist()


@pytest.mark.usefixtures("few")
def test_all_rows_of_a_short_history(path: Path) -> None:
    write(path, *(row(step) for step in range(1, 40)))
    found = read_history(path)
    assert found.note == ""
    assert found.series["loss"].steps.tolist() == list(range(1, 40))


@pytest.mark.usefixtures("few")
def test_a_line_that_a_run_is_writing_is_not_damaged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a file without an index, of which some rows are read."""
    write(path, *(row(step) for step in range(1, 300)))
    for line, damaged in (('{"step": 300', 0), ("", 0), ('{"step": 300}', 0), ("{}\n", 1), ('{}\n{"step": 3', 1)):
        index_of(path).unlink(missing_ok=True)
        content = path.read_bytes()
        path.write_bytes(content + line.encode())
        caplog.clear()
        read_history(path)
        assert [record.args[1] for record in caplog.records if record.args] == [1] * damaged, line
        path.write_bytes(content)


def test_a_last_loss_is_read_by_the_index(path: Path, parsed: list[bytes]) -> None:
    write(path, *(each for step in range(1, 400) for each in (row(step), *[validation(step)] * (step % 19 == 0))))
    assert 399 % 19 == 0
    parsed.clear()
    assert value_at_end(path, "validation/loss", 399) == 2 / 399
    assert len(parsed) < 25
    assert value_at_end(path, "validation/loss", 380) is None
    assert value_at_end(path, "validation/accuracy", 399) is None
    write(path, {"step": 400, "validation/loss": "Infinity"}, {"step": 400, "validation/loss": "damaged"})
    assert value_at_end(path, "validation/loss", 400) == float("inf")


def test_values_of_some_keys(path: Path) -> None:
    steps = [*range(1, 30), *range(20, 40)]
    write(path, *(row(step, **{f"by_source/{n}": 1.0 for n in range(100)}) for step in steps))
    every, found = read_series(path), read_series(path, ("loss", "grad_norm"))
    assert [*found] == ["loss"]
    assert found["loss"].steps.tolist() == every["loss"].steps.tolist() == list(range(1, 40))
