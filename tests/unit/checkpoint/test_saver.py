"""Saves in a thread that fail on one rank; the probe of the folder at the start."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.unit.checkpoint.making import content_of, make
from titanlite.checkpoint import saver
from titanlite.checkpoint.manifest import Branch, Manifest
from titanlite.checkpoint.saver import Saver, probe
from titanlite.checkpoint.state import HostCopy
from titanlite.runtime.errors import UserError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("Timed out waiting 5000ms"), "cannot save step 3: RuntimeError: Timed out waiting 5000ms"),
        (ValueError("planted"), "cannot save step 3: ValueError: planted"),
    ],
)
def test_an_error_of_one_rank_is_raised_in_the_main_thread(
    error: Exception, text: str, tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "save_tensors", Mock(side_effect=error))
    own = Saver(tmp_path, group, "async", torch.device("cpu"), delete_older=list)
    own.begin(Manifest(3, "full", (Branch("a", 0),), {}, {}, {}, {}, "", {}), {"w": torch.ones(2)})
    own.drain()
    assert own.has_failed
    with pytest.raises(RuntimeError) as raised:
        own.take_failure()
    assert str(raised.value) == text
    assert raised.value.__cause__ is error
    assert own.take_failure() is None


def test_the_thread_takes_the_device_of_its_rank_and_waits_for_the_copies(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new thread has GPU 0: each rank would start a context there."""
    calls: list[tuple[str, str]] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *_: calls.append((name, threading.current_thread().name))

    monkeypatch.setattr(torch.cuda, "set_device", noted("set_device"))
    monkeypatch.setattr(HostCopy, "wait", noted("wait"))
    monkeypatch.setattr(Saver, "_write", noted("write"))
    own = Saver(tmp_path, group, "async", torch.device("cuda", 3), delete_older=list)
    own.begin(Manifest(3, "full", (Branch("a", 0),), {}, {}, {}, {}, "", {}), {"w": torch.ones(2)})
    own.drain()
    assert calls == [(name, "titanlite-save") for name in ("set_device", "wait", "write")]


def test_probe_creates_the_folder_and_leaves_no_files(tmp_path: Path, group: dist.ProcessGroup) -> None:
    folder = tmp_path / "a" / "checkpoint"
    probe(folder, 1, group)
    assert content_of(folder) == {}
    make(folder, 5)
    before = content_of(folder)
    probe(folder, 1, group)
    assert content_of(folder) == before


def test_probe_ignores_leftovers_of_a_killed_probe(tmp_path: Path, group: dist.ProcessGroup) -> None:
    for name in (".probe", ".probe.incomplete"):
        (tmp_path / name).write_text("another nonce, and longer than one could be " * 9)
    probe(tmp_path, 1, group)
    assert content_of(tmp_path) == {}


def test_an_unwritable_folder_is_reported(tmp_path: Path, group: dist.ProcessGroup) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "checkpoint"
    with pytest.raises(UserError) as caught:
        probe(folder, 1, group)
    text = str(caught.value)
    assert text.startswith(f"checkpoint.folder: {folder} cannot be written: rank 0: ")
    assert "Not a directory" in text
    assert text.endswith("choose another job.dump_folder")


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_probe_needs_rename_and_fsync(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(UserError, match=r"cannot be written: rank 0: .*Operation not supported"):
        probe(tmp_path, 1, group)


def test_a_folder_that_is_not_shared_is_reported(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a local disk of rank 0's node under the same path."""
    write = saver._write_probe
    monkeypatch.setattr(saver, "_write_probe", lambda folder, nonce: write(folder.with_name("elsewhere"), nonce))
    monkeypatch.setattr(saver, "_VISIBILITY_TIMEOUT_S", 0.0)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for _ in range(2):
        with pytest.raises(UserError, match=r"is not the same folder for all ranks: rank 0: host .* reads .*all nodes"):
            probe(folder, 1, group)
        (folder / ".probe").write_text("of another job")
    assert (tmp_path / "elsewhere").exists()


def test_probe_waits_for_a_file_that_appears_late(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, calls = Path.read_text, []

    def late(path: Path) -> str:
        calls.append(path)
        if len(calls) < 3:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_text", late)
    probe(tmp_path, 1, group)
    assert len(calls) == 3


def test_too_little_space_is_reported_with_both_sizes(tmp_path: Path, group: dist.ProcessGroup) -> None:
    with pytest.raises(
        UserError, match=r"has [\d.,]+ MiB of free space, but a checkpoint .* needs 1,073,741,824\.0 MiB: free"
    ):
        probe(tmp_path, 2**50, group)
    assert content_of(tmp_path) == {}
