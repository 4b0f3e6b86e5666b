"""Rows of earlier starts in metrics.jsonl: which are kept or removed, and that a kill at any moment loses no row."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from titanlite.metrics.jsonl import has_validation, keep_rows, read_series
from titanlite.runtime import row_files
from titanlite.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("propagating_log")


def row(step: int, run: str = "a") -> bytes:
    return json.dumps({"step": step, "loss": 1 / step, "grad_norm": "NaN", "run": run}).encode() + b"\n"


def validation(step: int, run: str = "a") -> bytes:
    return json.dumps({"step": step, "validation/loss": 2.0, "run": run}).encode() + b"\n"


def sample(step: int, prompt: str) -> bytes:
    return json.dumps({"step": step, "prompt": prompt, "text": "x"}).encode() + b"\n"


def test_which_steps_have_a_validation(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert not has_validation(path, 20)
    path.write_bytes(row(20) + validation(10) + validation(30)[:-5])
    assert [step for step in (10, 20, 30) if has_validation(path, step)] == [10]


@pytest.mark.parametrize(
    ("content", "expected", "message"),
    [
        (row(1) + row(10) + row(20) + row(21), row(1) + row(10) + row(20), "1 of steps after 20"),
        (row(1) + row(10) + row(10, "b"), row(1) + row(10, "b"), "1 replaced by a later row of the same step"),
        (row(1) + row(20) + row(10, "b"), row(1) + row(10, "b") + row(20), ""),
        (row(1) + row(10)[:-7], row(1), "1 unfinished or unreadable"),
        (row(1) + row(10)[:-1], row(1) + row(10), ""),
        (row(1) + row(10)[:9] + b"\n" + row(20), row(1) + row(20), "1 unfinished or unreadable"),
        (b"\0" * 4096 + b"\n" + row(20), row(20), "1 unfinished or unreadable"),
        (row(1) + b"\0" * 4096, row(1), "1 unfinished or unreadable"),
        (row(1) + b"\xff\xfe\n\n[1]\n7\n", row(1), "4 unfinished or unreadable"),
        (b'{"step": 0}\n{"step": true}\n{"step": 2.0}\n{"loss": 1}\n' + row(3), row(3), "4 unfinished or unreadable"),
        (row(30), b"", "1 of steps after 20"),
        (
            validation(20) + row(20) + validation(10) + validation(20, "b") + validation(30),
            validation(10) + row(20) + validation(20, "b"),
            "1 of steps after 20, from which the run resumes, 1 replaced",
        ),
        (row(30) + row(30) + row(40)[:-3], b"", "3 rows removed: 2 of steps after 20"),
        (
            sample(10, "b") + sample(10, "a") + sample(20, "a") + sample(10, "b"),
            sample(10, "a") + sample(10, "b") + sample(20, "a"),
            "1 replaced by a later row of the same step",
        ),
    ],
)
def test_kept_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, expected: bytes, message: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    keep_rows(path, 20)
    assert path.read_bytes() == expected
    assert list(tmp_path.iterdir()) == [path]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(message)
    assert message in "".join(lines)
    keep_rows(path, 20)  # a second call changes and logs nothing
    assert path.read_bytes() == expected
    assert len(caplog.records) == len(lines)


@pytest.mark.parametrize("content", [None, b"", row(1) + row(10) + row(20)])
def test_a_file_without_rows_to_remove_is_not_rewritten(
    tmp_path: Path, content: bytes | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(row_files, "_rewrite", None)
    keep_rows(path, 20)
    assert path.exists() == (content is not None)
    assert not caplog.records


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace")])
def test_an_interrupted_rewrite_leaves_the_old_file(
    tmp_path: Path, owner: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    content = row(1) + row(10) + row(30)
    path.write_bytes(content)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(owner, name, fail)
        with pytest.raises(UserError, match=r"cannot rewrite .*metrics\.jsonl: No space left on device"):
            keep_rows(path, 20)
    assert path.read_bytes() == content
    keep_rows(path, 20)
    assert path.read_bytes() == row(1) + row(10)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("read", [keep_rows, has_validation])
@pytest.mark.parametrize(
    ("make", "reason"), [(os.mkdir, "Is a directory"), (os.mkfifo, "not a regular file but a pipe: rename or remove")]
)
def test_a_folder_or_pipe_in_place_of_the_file_is_an_error(
    make: Callable[[Path], None], reason: str, read: Callable[..., object], tmp_path: Path
) -> None:
    make(tmp_path / "metrics.jsonl")
    step = {"step": 1} if read is has_validation else {"last_step": 1}
    with pytest.raises(UserError, match=rf"cannot read .*metrics\.jsonl: {reason}"):
        read(path=tmp_path / "metrics.jsonl", **step)


@pytest.mark.parametrize(
    ("content", "steps", "message"),
    [
        (row(1) + row(10) + row(20), [1, 10, 20], ""),
        (row(1) + row(10) + row(20) + row(11, "b"), [1, 10, 11], ""),
        (row(1) + row(10)[:-7], [1], ""),  # being written
        (row(1) + row(10)[:-7] + b"\n\xff\n[1]\n" + row(20), [1, 20], "3 lines are not valid rows and were left out"),
        (b"", [], ""),
    ],
)
def test_numbers_are_read_by_key(
    content: bytes, steps: list[int], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_series(path) == {}
    path.write_bytes(content)
    series = read_series(path)
    assert set(series) == ({"loss", "grad_norm"} if steps else set())
    for each in series.values():
        assert each.steps.tolist() == steps
    if steps:
        assert series["loss"].values.tolist() == [1 / step for step in steps]
        assert np.isnan(series["grad_norm"].values).all()
    assert message in caplog.text
    assert bool(caplog.text) == bool(message)


def test_superseded_validations_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(row(10) + validation(10) + row(20) + validation(20) + row(11) + validation(10))
    series = read_series(path)
    assert series["loss"].steps.tolist() == [10, 11]
    assert series["validation/loss"].steps.tolist() == [10]
