"""Records of steps: damaged ones are reported and left out, a full disk leaves no unfinished one."""

import errno
import json
import logging
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.unit.planted import planted_at
from titanlite.config.schema import JobConfig
from titanlite.faults.record import (
    RECORD_FOLDER,
    UNFINISHED,
    NotedStep,
    Record,
    RecordedStep,
    StepRecorder,
    read_records,
)
from titanlite.metrics.config import METRICS_FILE
from titanlite.metrics.jsonl import last_row
from titanlite.runtime import durability
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log
from titanlite.tools.replay.compute import require_same_settings, require_start, require_trained

ABOUT = {"parameters": ["a", "b"], "config": {}, "code": {"torch": "2"}, "world_size": 2, "device": "cpu"}


def write(folder: Path, name: str, about: Any = ABOUT, save: Any = np.savez, **changed: Any) -> Path:
    file = folder / RECORD_FOLDER / f"{name}.npz"
    file.parent.mkdir(exist_ok=True)
    steps: dict[str, Any] = {"step": [4, 5], "num_valid": [8, 9], "skipped": [False, True], "grad_norm": [0.5, np.nan]}
    steps |= {"gradient_norms": np.ones((2, 2)), "row_losses": np.ones((2, 3)), "first_sequence": [9, 12]}
    save(file, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **steps | changed)
    return file


def test_damaged_records_are_reported_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "2")
    damaged = write(tmp_path, "1")
    content, draw = damaged.read_bytes(), random.Random(3)
    for _ in range(60):
        changed = bytearray(content)
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        damaged.write_bytes(changed)
        assert read_records(tmp_path)[0].steps[4].row_losses == [1.0, 1.0, 1.0]
    damaged.write_bytes(b"")
    write(tmp_path, "3", {**ABOUT, "config": {"model": {"overrides": "x"}}})
    caplog.clear()
    (record,) = read_records(tmp_path)
    assert (record.file.stem, list(record.steps)) == ("2", [4, 5])
    assert record.steps[5].gradient_norms == {"a": 1.0, "b": 1.0}
    assert [message.partition(" is not a record of steps: ")[0] for message in caplog.messages] == [
        str(tmp_path / RECORD_FOLDER / f"{name}.npz") for name in ("3", "1")
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"grad_norm": np.ones((2, 1))},
        {"row_losses": np.ones(2)},
        {"row_losses": np.full((2, 3), "x")},
        {"step": np.array(["4", "5"])},
        {"gradient_norms": np.ones((2, 3))},
        {"more": np.ones(2)},
    ],
)
def test_arrays_of_other_types_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, Any]
) -> None:
    write(tmp_path, "1", **changed)
    assert read_records(tmp_path) == []
    assert " is not a record of steps: " in caplog.text


def test_a_record_that_is_compressed_is_not_unpacked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    zeros = np.zeros((2, 20_000))
    write(tmp_path, "1", row_losses=zeros)
    assert len(read_records(tmp_path)) == 1
    write(tmp_path, "1", save=np.savez_compressed, row_losses=zeros)
    assert read_records(tmp_path) == []
    assert "its arrays are larger than it" in caplog.text


def recorder(folder: Path, group: dist.ProcessGroup) -> StepRecorder:
    """A recorder whose mesh has one rank, and whose model has one parameter."""
    mesh = Mock(data_rank=0, data_degree=1, coordinate={"pp": 0})
    mesh.is_first.return_value = True
    options: dict[str, Any] = {"sequences": 1, "counts_loss": False, "about": {}}
    return StepRecorder(str(folder), [nn.Linear(1, 1, bias=False)], [0], mesh, group, **options)


def noted(number: int) -> NotedStep:
    one = torch.ones(())
    stats = Mock(
        num_valid=one,
        skipped=one,
        grad_norm=one,
        shard_norms=torch.ones(1, dtype=torch.float64),
        row_losses=torch.ones(1),
    )
    return NotedStep(number, stats, 0, [0], np.empty(0, np.int64))


def test_a_full_disk_leaves_no_unfinished_file(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = recorder(tmp_path, group)
    steps.write([noted(1)])
    (file,) = (tmp_path / RECORD_FOLDER).iterdir()
    before = file.read_bytes()

    def fill(path: Path, content: bytes, *, synced: bool) -> None:  # noqa: ARG001
        path.write_bytes(content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durability, "write_file", fill)
    steps.write([noted(2)])
    assert list((tmp_path / RECORD_FOLDER).iterdir()) == [file]
    assert file.read_bytes() == before
    assert "is not written any more" in caplog.text


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_a_link_or_pipe_with_the_temporary_name_is_replaced(
    tmp_path: Path, group: dist.ProcessGroup, planted: str
) -> None:
    temporary = tmp_path / RECORD_FOLDER / UNFINISHED
    temporary.parent.mkdir()
    with planted_at(temporary, planted):
        recorder(tmp_path, group).write([noted(1)])
    assert [file.suffix for file in temporary.parent.glob("2*")] == [".npz"]


def record_of(lr: float, *steps: int) -> Record:
    numbers = RecordedStep(0, 1, False, 1.0, {}, [], 0)
    return Record(Path("x"), {"config": {"optimizer": {"lr": lr}}}, dict.fromkeys(steps, numbers))


def test_the_expected_time_is_left_out_if_the_metrics_are_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level(logging.INFO, logger="titanlite")
    record = Record(Path("x"), {"world_size": 2}, {})
    for row, expected in (('{"step": 9, "step_time_s": 0.5}', ", about 3 s on one device"), ('"x"', ""), ("[]", "")):
        text = row if row.startswith("{") else f'{{"step": 9, "step_time_s": {row}}}'
        (tmp_path / METRICS_FILE).write_text(f"{text}\n")
        require_start(
            tmp_path, last_row(tmp_path / METRICS_FILE), JobConfig(), [record], None, 4, from_checkpoint_only=False
        )
        assert caplog.messages[-1] == f"Replay of step 4 from the initial weights: after 3 steps from there{expected}"


def test_steps_of_other_settings_are_not_computed_again(tmp_path: Path) -> None:
    first, second = record_of(0.1, 1, 2, 3), record_of(0.2, 4, 5)
    require_same_settings(second, [second, record_of(0.2, 1, 2, 3)], None, None, 5)
    require_same_settings(record_of(0.1, 4), [first, second], None, None, 4)
    second.about["config"]["optimizer"]["ema_decay"] = 0.9  # changes no step
    require_same_settings(second, [second, record_of(0.2, 1, 2, 3)], None, None, 5)
    with pytest.raises(UserError, match=r"optimizer.lr: 0.1 in the checkpoint, 0.2 now"):
        require_same_settings(second, [second, first], None, None, 5)
    require_trained(tmp_path, {}, [second], [], 5)
    with pytest.raises(UserError, match="trained to step 5: give a --step from 1 to 5"):
        require_trained(tmp_path, {}, [second], [], 6)
