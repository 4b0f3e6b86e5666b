"""Skipped steps on one process: limits across log lines, bounded memory, and which samples are named."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from titanlite.batch import StepStats
from titanlite.faults import skipped
from titanlite.faults.config import FaultsConfig
from titanlite.faults.skipped import MAX_SAMPLES, SkippedSteps
from titanlite.parallel.clip import MIN_NORMS, WINDOW, SpikeGate
from titanlite.runtime.errors import UserError

ROWS = 8


def steps_of(group: dist.ProcessGroup, **section: Any) -> SkippedSteps:
    loader = Mock(sequences=range(100, 100 + ROWS), origin_values=np.arange(4 * ROWS).reshape(ROWS, 4))
    loader.locate = lambda origin: f"piece {origin.piece}"
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return SkippedSteps(FaultsConfig(**section), [model], [0], loader, group, Mock(), counts_loss=True, bit_equal=True)


def stats_of(
    skipped: bool = False, bad_rows: tuple[int, ...] = (), bad_parameters: tuple[int, ...] = (), ratio: float = 0.0
) -> StepStats:
    norms, rows = torch.ones(4, dtype=torch.float64), torch.ones(ROWS)
    norms[list(bad_parameters)], rows[list(bad_rows)] = torch.inf, torch.nan
    one = torch.ones(())
    spike = torch.tensor(ratio, dtype=torch.float64)
    return StepStats(one, one, one, torch.tensor(5), torch.tensor(skipped), torch.zeros(3, 1), rows, norms, spike)


def test_a_row_of_skipped_steps_is_counted_across_log_lines(
    group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    steps = steps_of(group, max_skipped_steps=3)
    for step, is_skipped in enumerate([False, True, True], start=1):
        steps.note(step, stats_of(is_skipped, bad_parameters=(2,)))
    steps.check()
    assert "step 2 was skipped" in caplog.text
    assert "first gradient that is not finite: 1.weight, on rank 0" in caplog.text
    assert "overflowed, or a gradient exceeds 1,024 times the largest of its row so far\n" in caplog.text
    steps.note(4, stats_of(True))
    steps.note(5, stats_of(True))
    with pytest.raises(UserError, match="max_skipped_steps = 3: 4 steps in a row"):
        steps.check()


def test_a_good_step_ends_the_row(group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture) -> None:
    steps = steps_of(group, max_skipped_steps=1)
    for step in range(1, 9):
        steps.note(step, stats_of(step % 2 == 0))
        steps.check()
    assert caplog.text.count("was skipped") == 4


def test_samples_are_named_up_to_a_limit(group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture) -> None:
    steps = steps_of(group)
    steps.note(7, stats_of(True, bad_rows=(1, 2, 3, 4, 5, 6, 7), bad_parameters=(0,)))
    steps.check()
    lines = [line.strip() for line in caplog.text.splitlines() if "rank 0, sequence" in line]
    assert lines == [
        f"loss that is not finite: rank 0, sequence {100 + row}, piece {4 * row + 2}"
        for row in range(1, 1 + MAX_SAMPLES)
    ]
    assert "and 2 more" in caplog.text


def test_steps_are_checked_before_they_take_much_memory(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(skipped, "MAX_STEPS", 3)
    steps = steps_of(group)
    for step in range(1, 8):
        steps.note(step, stats_of(step == 2))
    assert caplog.text.count("step 2 was skipped") == 1
    assert len(steps._steps) == 1


def test_spikes_are_explained_and_count_as_skipped(group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture) -> None:
    steps = steps_of(group, spike_factor=4.0, on_spike="skip", max_skipped_steps=1)
    steps.note(1, stats_of(ratio=4.0))
    spike = stats_of(skipped=True, ratio=4.25)
    spike.row_losses[3] = 2.5
    steps.note(2, spike)
    steps.check()
    lines = caplog.messages[0].splitlines()
    assert lines[0] == (
        "step 2 is a spike and was skipped: gradient norm 1, 4.25 times the median of the last 128 steps "
        "(faults.spike_factor = 4)"
    )
    assert lines[1] == f"  {2.5 / 9.5:.1%} of the loss: rank 0, sequence 103, piece 14"
    assert lines[1 + MAX_SAMPLES].startswith("  to compute it again: ")
    assert len(lines) == 1 + MAX_SAMPLES + 2
    steps.note(3, spike)
    with pytest.raises(UserError, match="max_skipped_steps = 1: 2 steps in a row were skipped"):
        steps.check()


def test_the_median_of_recent_norms_decides() -> None:
    gate = SpikeGate(3.0, torch.device("cpu"), skips=True)
    norms = torch.linspace(1, 2, 200, dtype=torch.float64)
    for step in range(MIN_NORMS):
        assert gate.ratio(step, norms[step]) == 0.0
    assert gate.ratio(MIN_NORMS, torch.tensor(torch.inf)) == 0.0
    assert gate.ratio(MIN_NORMS, torch.tensor(5.0)) == torch.tensor(5.0) / norms[:MIN_NORMS].nanmedian()
    for step in range(MIN_NORMS + 1, 200):
        gate.ratio(step, norms[step])
    recent = norms[200 - WINDOW :]
    assert gate.ratio(200, torch.tensor(9.0)) == torch.tensor(9.0) / recent.nanmedian()
    kept = gate.norms.clone()
    gate.ratio(201, torch.tensor(torch.nan))
    assert ((gate.norms < 0) != (kept < 0)).sum() == 1
    gate = SpikeGate(3.0, torch.device("cpu"), skips=True)
    ratios = [gate.ratio(step, torch.tensor(0.0)).item() for step in range(200)]
    assert ratios == [0.0] * 200
    assert gate.ratio(200, torch.tensor(1.0)) == 0.0
