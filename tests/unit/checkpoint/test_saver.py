"""Saves in a thread that fail without agreement of all ranks."""

import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from titanlite.checkpoint import saver
from titanlite.checkpoint.manifest import Branch, Manifest
from titanlite.checkpoint.saver import Saver
from titanlite.checkpoint.state import HostCopy


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
