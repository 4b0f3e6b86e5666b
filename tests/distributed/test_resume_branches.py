"""Several decays of the learning rate from one checkpoint of a trunk, which has a constant learning rate."""

from pathlib import Path

import pytest

from tests.distributed.resuming import Start, checkpoints_of, numbers, start_runs

pytestmark = pytest.mark.slow

COMMON = ("checkpoint.interval=4", "training.local_batch_size=16")
TRUNK = (*COMMON, "lr_schedule.decay=none")
SQRT = (*COMMON, "lr_schedule.decay=sqrt", "lr_schedule.final_decay_steps=2", "lr_schedule.min_lr_factor=0")
LINEAR = (*COMMON, "lr_schedule.decay=linear", "lr_schedule.final_decay_steps=5", "lr_schedule.min_lr_factor=0.1")


def test_decays_branch_from_a_trunk_that_trains_on(tmp_path: Path) -> None:
    branch = (
        f"checkpoint.initial_load_path={tmp_path / 'trunk/checkpoint/step-4'}",
        "checkpoint.initial_load_model_only=false",
    )
    sqrt, linear = (*branch, *SQRT, "training.steps=8"), (*branch, *LINEAR, "training.steps=10")
    trunk, short, long, killed, resumed, late, forgotten, further, uninterrupted = start_runs(
        tmp_path,
        [
            Start((*TRUNK, "training.steps=6"), run="trunk"),
            Start(sqrt, run="short"),
            Start(linear, run="long"),
            Start(linear, run="killed", kill=(9, 0)),  # inside the decay
            Start(linear, run="killed"),
            Start((*branch, *LINEAR, "training.steps=8"), run="late"),  # should have begun at step 4
            Start((*branch, *SQRT, "training.steps=8"), run="trunk"),  # without a folder of its own
            Start((*TRUNK, "training.steps=10"), run="trunk"),
            Start((*TRUNK, "training.steps=10", "checkpoint.enable=false"), run="uninterrupted"),
        ],
    )
    assert [start.error for start in (trunk, short, long, killed, resumed, late, further)] == [""] * 7
    assert [start.step for start in (short, long, killed, resumed, late, further)] == [4, 4, 4, 8, 4, 6]
    constant = numbers(tmp_path / "uninterrupted")

    # The state, the data and, before the decay, all numbers of a branch are those of the trunk.
    assert short.begin == long.begin == late.begin
    assert short.rows == {step: uninterrupted.rows[step] for step in range(5, 9)}
    assert long.rows == {step: uninterrupted.rows[step] for step in range(5, 11)}
    assert numbers(tmp_path / "short")[:2] == constant[4:6]
    assert numbers(tmp_path / "long")[:1] == constant[4:5]
    rates = {name: [row["lr"] for row in numbers(tmp_path / name)] for name in ("short", "long", "late")}
    assert rates["short"] == pytest.approx([0.01, 0.01, 0.01 * (1 - 0.5**0.5), 0.0])
    assert rates["long"] == pytest.approx([0.01, *(0.001 + 0.009 * left / 5 for left in (4, 3, 2, 1, 0))])
    assert short.logged(
        "Learning rate: warm-up to 0.01 in steps 1 to 3, constant to step 6, sqrt decay to 0 in steps 7 to 8"
    )

    # A branch resumes in its own folder.
    assert killed.killed
    assert checkpoints_of(long) == checkpoints_of(resumed) == ["step-8", "step-10"]
    assert resumed.end == long.end
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "long")

    # The trunk is unchanged and trains on.
    assert checkpoints_of(trunk) == ["step-4", "step-6"]
    assert further.end == uninterrupted.end
    assert numbers(tmp_path / "trunk") == constant

    # Mistakes.
    assert rates["late"] == pytest.approx([0.001 + 0.009 * left / 5 for left in (3, 2, 1, 0)])
    jump = "The learning rate jumps: step 4 was trained with 0.01, and has 0.0082 in this run's schedule. "
    assert late.logged(f"{jump}The decay would have begun at step 4; to begin it at step 5: ")
    assert late.logged("--lr_schedule.final_decay_steps 4")
    assert not any(start.logged("jumps") for start in (trunk, short, long, killed, resumed, further))
    assert "--job.dump_folder ANOTHER" in forgotten.error
    assert forgotten.files == trunk.files
