"""The numerics of the golden run do not change by accident."""

import json
from pathlib import Path

import pytest

from tests.golden.record import RECORD, first_steps


def test_the_first_steps_are_those_on_record(tmp_path: Path) -> None:
    recorded = json.loads(RECORD.read_text())
    assert len(recorded) == 20
    for found, expected in zip(first_steps(tmp_path / "out"), recorded, strict=True):
        # 20 steps of AdamW in float64: other processors round differently; a changed formula differs by far more.
        assert found == pytest.approx(expected, rel=1e-9, abs=0)
