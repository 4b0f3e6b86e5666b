"""A run resumed on another mesh each time: same tokens, state unchanged bit for bit, same losses."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.layouts import ALL_OPTIMIZERS, EXPERTS, GATHER
from tests.distributed.resuming import Outcome, Start, numbers, start_runs
from titanlite.data.ledger import read_ledger

pytestmark = pytest.mark.slow

STEPS_EACH = 2
SYNC, ASYNC = "checkpoint.async_mode=disabled", "checkpoint.async_mode=async"
ROUND = (
    (1, (SYNC,)),
    (2, ("parallelism.dp_shard=2", ASYNC)),
    (4, ("parallelism.tp=2", "parallelism.pp=2", SYNC)),
    (2, ("parallelism.dp_replicate=2", ASYNC)),
    (2, ("parallelism.cp=2", ASYNC)),
    (1, (SYNC,)),
)
INTERLEAVED = (
    (2, ("parallelism.pp=2", "parallelism.pp_schedule=Interleaved1F1B")),
    (2, ("parallelism.dp_shard=2",)),
    (2, ("parallelism.pp=2", "parallelism.pp_schedule=Interleaved1F1B", ASYNC)),
    (1, ()),
)
FOUR = (
    (4, ("parallelism.dp_replicate=2", "parallelism.dp_shard=2")),
    (4, ("parallelism.dp_shard=2", "parallelism.tp=2", ASYNC)),
    (4, ("parallelism.dp_replicate=2", "parallelism.cp=2", *GATHER)),
    (4, ("parallelism.pp=2", "parallelism.dp_shard=2", "parallelism.pp_schedule=ZBVZeroBubble")),
    (2, ("parallelism.tp=2", ASYNC)),
)
TIED = ((2, ("parallelism.tp=2", SYNC)), (1, (ASYNC,)), (2, ("parallelism.dp_shard=2", SYNC)))

DEALT_OUT = ((2, ("parallelism.ep=2", ASYNC)), (1, (SYNC,)), (2, ("parallelism.cp=2", "parallelism.ep=2", SYNC)))
UNEVEN = (
    (4, ("parallelism.dp_shard=4", SYNC)),
    (3, ("parallelism.dp_shard=3", "parallelism.ep=3", ASYNC)),
    (5, ("parallelism.dp_replicate=5", SYNC)),
)
"""In the second one, the ranks have different numbers of streams; in the third, some have only filler rows."""
MUON = (
    (4, ("parallelism.dp_shard=2", "parallelism.tp=2", SYNC)),
    (2, ("parallelism.cp=2", "parallelism.ep=2", ASYNC)),
    (1, (SYNC,)),
    (4, ("parallelism.dp_replicate=2", "parallelism.pp=2", SYNC)),
)
BIASED = (*EXPERTS, "model.bias_rate=0.01")

Meshes = Sequence[tuple[int, tuple[str, ...]]]


def resume_on_meshes(folder: Path, meshes: Meshes, *settings: str) -> tuple[Outcome, list[Outcome]]:
    """The uninterrupted run on one process, and the starts of a run that trains STEPS_EACH steps on each mesh.

    Checks that each start begins with the last state of the previous one. The learning rate does not depend on the
    number of steps.
    """
    uninterrupted = Start(
        (*settings, f"training.steps={STEPS_EACH * len(meshes)}", "checkpoint.interval=100"), run="uninterrupted"
    )
    starts = [
        Start((*settings, *axes, f"training.steps={STEPS_EACH * n}", "checkpoint.interval=100"), ranks)
        for n, (ranks, axes) in enumerate(meshes, 1)
    ]
    expected, *outcomes = start_runs(folder, [uninterrupted, *starts])
    for number, outcome in enumerate(outcomes):
        assert outcome.error == ""
        assert outcome.step == STEPS_EACH * number
        if number:
            assert outcome.begin == outcomes[number - 1].end
    found = {step: rows for outcome in outcomes for step, rows in outcome.rows.items()}
    assert found == expected.rows
    assert list(found) == list(range(1, STEPS_EACH * len(meshes) + 1))
    assert outcomes[-1].end.keys() == expected.end.keys()
    return expected, outcomes


def check_numbers(folder: Path, rel: float) -> None:
    found, expected = numbers(folder / "run"), numbers(folder / "uninterrupted")
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, expected_row in zip(found, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=rel, abs=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("meshes", "settings"),
    [
        pytest.param(ROUND, (), id="round", marks=pytest.mark.soak),
        pytest.param(INTERLEAVED, ("model.n_layers=4",), id="interleaved", marks=pytest.mark.soak),
        pytest.param(TIED, ("model.tie_embeddings=true",), id="tied", marks=pytest.mark.soak),
        pytest.param(DEALT_OUT, (*BIASED, *ALL_OPTIMIZERS), id="experts and all optimizers"),
        pytest.param(MUON, (*BIASED, *ALL_OPTIMIZERS), id="muon", marks=pytest.mark.soak),
        pytest.param(FOUR, ("model.n_layers=4",), id="four", marks=pytest.mark.soak),
    ],
)
def test_every_mesh_resumes_the_last_state_of_the_previous_mesh(
    meshes: Meshes, settings: tuple[str, ...], tmp_path: Path
) -> None:
    resume_on_meshes(tmp_path, meshes, *settings)
    check_numbers(tmp_path, 1e-12)


@pytest.mark.slow
def test_data_degrees_that_divide_nothing(tmp_path: Path) -> None:
    """Ledger, experts' biases and the state of the data are those of one process, in the middle of an epoch."""
    batch = ("training.global_batch_size=7", "data.num_streams=8", "data.ledger=true")
    _, outcomes = resume_on_meshes(tmp_path, UNEVEN, *BIASED, *batch)
    check_numbers(tmp_path, 1e-12)
    ledger = list(read_ledger(tmp_path / "run"))
    assert ledger == list(read_ledger(tmp_path / "uninterrupted"))
    assert [row[0] for _, rows in ledger for row in rows] == list(range(7 * STEPS_EACH * len(UNEVEN)))
    shares = [outcome.lines for outcome in outcomes]
    assert [[line for line in lines if "of the work is filler" in line] != [] for lines in shares] == [True] * 3


@pytest.mark.slow
def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    resume_on_meshes(tmp_path, (ROUND[1], (2, ("parallelism.tp=2", SYNC))), "training.dtype=bfloat16")
    check_numbers(tmp_path, 2e-2)
