"""Reading the records of steps: damaged ones are reported, and left out."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanlite.faults.record import RECORD_FOLDER, Record, RecordedStep, read_records
from titanlite.runtime.errors import UserError
from titanlite.tools.replay.compute import require_same_settings, require_trained

ABOUT = {"parameters": ["a", "b"], "config": {}, "code": {"torch": "2"}, "world_size": 2, "device": "cpu"}


def write(folder: Path, name: str, about: Any = ABOUT) -> Path:
    file = folder / RECORD_FOLDER / f"{name}.npz"
    file.parent.mkdir(exist_ok=True)
    steps: dict[str, Any] = {"step": [4, 5], "num_valid": [8, 9], "skipped": [False, True], "grad_norm": [0.5, np.nan]}
    steps |= {"gradient_norms": np.ones((2, 2)), "row_losses": np.ones((2, 3)), "first_sequence": [9, 12]}
    np.savez(file, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **steps)
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
    write(tmp_path, "3", {**ABOUT, "config": 3})
    caplog.clear()
    (record,) = read_records(tmp_path)
    assert (record.file.stem, list(record.steps)) == ("2", [4, 5])
    assert record.steps[5].gradient_norms == {"a": 1.0, "b": 1.0}
    assert [message.partition(" is not a record of steps: ")[0] for message in caplog.messages] == [
        str(tmp_path / RECORD_FOLDER / f"{name}.npz") for name in ("3", "1")
    ]


def record_of(lr: float, *steps: int) -> Record:
    numbers = RecordedStep(0, 1, False, 1.0, {}, [], 0)
    return Record(Path("x"), {"config": {"optimizer": {"lr": lr}}}, dict.fromkeys(steps, numbers))


def test_steps_of_other_settings_are_not_computed_again(tmp_path: Path) -> None:
    first, second = record_of(0.1, 1, 2, 3), record_of(0.2, 4, 5)
    require_same_settings(second, [second, record_of(0.2, 1, 2, 3)], None, 5)
    require_same_settings(record_of(0.1, 4), [first, second], None, 4)
    with pytest.raises(UserError, match=r"optimizer.lr: 0.1 in the checkpoint, 0.2 now"):
        require_same_settings(second, [second, first], None, 5)
    require_trained(tmp_path, [second], 5)
    with pytest.raises(UserError, match="trained to step 5: give a --step from 1 to 5"):
        require_trained(tmp_path, [second], 6)
