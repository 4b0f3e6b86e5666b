"""An exhausted source stops the run at the same step on every mesh, with a checkpoint and without hanging ranks."""

from pathlib import Path

import numpy as np
import pytest

from tests.distributed.reference import TOKENS
from tests.distributed.resuming import Outcome, Start, checkpoints_of, numbers, start_runs
from titanlite.data.ledger import read_ledger

WINDOWS = 7
FINITE = (
    *("training.global_batch_size=4", "training.local_batch_size=1", "training.steps=40", "data.ledger=true"),
    *("data.sources.0.epochs=1", "checkpoint.interval=30", "metrics.log_freq=30"),
)
MESHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "two": (2, ()),
    "three": (3, ()),
    "four": (4, ("parallelism.dp_replicate=2", "parallelism.dp_shard=2")),
    "piped": (4, ("parallelism.pp=2", "parallelism.tp=2")),
}
RESTARTED = ("two", "piped")


def write_rows(folder: Path, windows: int) -> tuple[str, ...]:
    """Write a file of windows, the last one short; return the setting for it."""
    path = folder / f"{windows}.npy"
    np.save(path, np.load(TOKENS)[: windows * 16 - 5])
    return (f"data.sources.0.path={path}",)


def trained_on(folder: Path) -> list[tuple[int, ...]]:
    """(epoch, piece) of each sequence with tokens"""
    return sorted(tuple(row[2:4]) for _, rows in read_ledger(folder) for row in rows if row[3] >= 0)


@pytest.mark.soak  # default suite: the next ones
def test_seven_rows_on_one_to_four_ranks(tmp_path: Path) -> None:
    """One of 4 streams has a row less, so its last sequence is masked.

    On three data ranks, each step is uneven. A start after the end has nothing to do on any rank, with two data ranks
    or with a pipeline.
    """
    data = write_rows(tmp_path, WINDOWS)
    starts = {name: Start((*FINITE, *data, *axes), ranks, run=name) for name, (ranks, axes) in MESHES.items()}
    restarts = [
        Start((*starts[name].settings, "checkpoint.interval=31"), starts[name].ranks, run=name) for name in RESTARTED
    ]
    outcomes = start_runs(tmp_path, [*starts.values(), *restarts])
    reference = numbers(tmp_path / "one")
    for name, first in zip(starts, outcomes, strict=False):
        assert first.error == ""
        assert list(first.rows) == [1, 2]
        assert trained_on(tmp_path / name) == [(0, piece) for piece in range(WINDOWS)]
        assert checkpoints_of(first) == ["step-2"]
        assert first.logged("The data is exhausted after step 2 (data.sources.0, tokens ")
        assert not first.logged("train longer")
        found = numbers(tmp_path / name)
        assert [row["step"] for row in found] == [1, 2]
        assert sum(row["num_valid"] for row in found) == WINDOWS * 16 - 6
        for row, expected in zip(found, reference, strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    for again in outcomes[len(starts) :]:
        assert again.error == ""
        assert again.logged("Nothing to do: the data is exhausted after step 2 (data.sources.0, tokens ")
        assert (again.step, again.rows) == (2, {})


@pytest.mark.slow
def test_fewer_rows_than_ranks(tmp_path: Path) -> None:
    """Three rows for four ranks: the fourth rank has only masked sequences."""
    data = write_rows(tmp_path, 3)
    (outcome,) = start_runs(tmp_path, [Start((*FINITE, *data), 4)])
    assert outcome.error == ""
    assert checkpoints_of(outcome) == ["step-1"]
    assert trained_on(tmp_path / "run") == [(0, 0), (0, 1), (0, 2)]


def finite_and_repeating(folder: Path) -> tuple[str, ...]:
    """Settings of two sources; the first one is finite and has a third of the weight."""
    first, second = write_rows(folder, 9), write_rows(folder, 5)
    return (
        *first,
        *("data.sources.0.weight=1", "data.sources.1.kind=tokens", "data.sources.1.weight=2"),
        second[0].replace("sources.0", "sources.1"),
    )


def check_mixture(folder: Path, name: str, outcome: Outcome) -> int:
    assert outcome.error == ""
    ledger = list(read_ledger(folder / name))
    rows = [row for _, rows in ledger for row in rows]
    finite = sorted(row[3] for row in rows if row[1] == 0 and row[3] >= 0)
    assert finite == list(range(9))
    assert any(row[1] == 0 and row[3] >= 0 for row in ledger[-1][1]), "the run continued after the end of the source"
    assert sum(row[1] == 1 for row in rows) >= len(rows) / 2
    return len(ledger)


@pytest.mark.slow
def test_finite_source_of_a_mixture_ends_the_run_also_after_a_resume_on_another_mesh(tmp_path: Path) -> None:
    data = finite_and_repeating(tmp_path)
    short = (*FINITE, *data, "checkpoint.interval=2")
    starts = [
        Start(short, 1, run="reference"),
        Start(short, 1, (4, 0), run="killed"),
        Start((*short, "data.num_workers=1"), 2, run="killed"),
    ]
    reference, killed, end = start_runs(tmp_path, starts)
    assert killed.killed
    assert end.step == 2
    steps = check_mixture(tmp_path, "reference", reference)
    assert check_mixture(tmp_path, "killed", end) == steps
    assert list(read_ledger(tmp_path / "killed")) == list(read_ledger(tmp_path / "reference"))
    assert numbers(tmp_path / "killed")[-1]["loss"] == pytest.approx(
        numbers(tmp_path / "reference")[-1]["loss"], rel=1e-12
    )
