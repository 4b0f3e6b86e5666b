"""Saves in a thread that fail without agreement of all ranks."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from titanlite.checkpoint import saver
from titanlite.checkpoint.manifest import Branch, Manifest
from titanlite.checkpoint.saver import Saver


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
    own = Saver(tmp_path, group, "async", delete_older=list)
    own.begin(Manifest(3, "full", (Branch("a", 0),), {}, {}, {}, {}, "", {}), {"w": torch.ones(2)})
    own.drain()
    assert own.has_failed
    with pytest.raises(RuntimeError) as raised:
        own.take_failure()
    assert str(raised.value) == text
    assert raised.value.__cause__ is error
    assert own.take_failure() is None
