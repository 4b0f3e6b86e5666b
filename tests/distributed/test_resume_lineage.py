"""Rewinding, finishing, extending, branching: which checkpoint a start loads, and what it does with the others."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.resuming import Start, checkpoints_of, numbers, start_runs
from titanlite.checkpoint.manifest import read_manifest

pytestmark = pytest.mark.slow


@contextmanager
def restarted(*counts: int) -> Iterator[None]:
    """Set torchrun's restart count on each rank; torchrun counts the restarts of each node."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(counts[int(os.environ["RANK"])])
    try:
        yield
    finally:
        del os.environ["TORCHELASTIC_RESTART_COUNT"]


@contextmanager
def launched(name: str) -> Iterator[None]:
    """Set torchrun's run ID."""
    os.environ["TORCHELASTIC_RUN_ID"] = name
    try:
        yield
    finally:
        del os.environ["TORCHELASTIC_RUN_ID"]


def without_branch_id(name: str) -> str:
    """The name without the branch's random ID."""
    return re.sub(r"superseded-[0-9a-f]{8}", "superseded", name)


def test_new_branch_wins_after_a_rewind(tmp_path: Path) -> None:
    new = ("optimizer.lr=2e-2",)
    back = (*new, "checkpoint.load_step=4")
    first, killed, automatic, missing, again = start_runs(
        tmp_path,
        [
            Start(),
            Start(back, kill=(6, 0)),  # before its first save
            Start(new, kill=(8, 0)),
            Start((*back[:-1], "checkpoint.load_step=5")),
            Start(new),
        ],
    )
    assert checkpoints_of(first) == ["step-2", "step-4", "step-6", "step-8"]
    old = ["step-2", "step-4", "step-6.superseded", "step-8.superseded"]
    assert [without_branch_id(name) for name in checkpoints_of(killed)] == old
    assert (killed.step, killed.killed) == (4, True)
    assert killed.begin == automatic.begin
    assert (automatic.step, automatic.killed) == (4, True)
    # Both branches have a step 6 now; metrics.jsonl has the rows of the new branch.
    assert sorted(without_branch_id(name) for name in checkpoints_of(automatic)) == sorted([*old, "step-6"])
    folder = tmp_path / "run/checkpoint"
    assert "checkpoint.load_step = 5\n" in missing.error
    assert f"the step of a checkpoint in {folder}, which has: 2, 4, 6\n" in missing.error
    assert missing.files == automatic.files
    assert again.step == 6
    found = numbers(tmp_path / "run")
    assert [row["step"] for row in found] == list(range(1, 9))
    assert [row["lr"] for row in found[3:]] == pytest.approx([1e-2, *[2e-2] * 4])
    lineages = {n: read_manifest(tmp_path / f"run/checkpoint/step-{n}").lineage for n in (2, 4, 6, 8)}
    assert [branch.step for branch in lineages[4]] == [0]
    assert lineages[2] == lineages[4]
    names = [name for name in checkpoints_of(again) if "superseded" in name]
    assert {name.rpartition("-")[2] for name in names} == {lineages[2][0].id}


@pytest.mark.soak  # default suite: test_new_branch_wins_after_a_rewind
def test_saved_branch_is_in_the_lineage_and_continued_by_a_restart(tmp_path: Path) -> None:
    back = ("checkpoint.load_step=4", "training.steps=12")
    one = partial(restarted, 1, 1)
    on_one_node = partial(restarted, 1, 0)  # no rank of the other node died: its torchrun counts 0
    first, rewound, unsaved, saved, finished = start_runs(
        tmp_path,
        [
            Start(ranks=2),
            Start(back, ranks=2, kill=(5, 1)),
            Start(back, ranks=2, kill=(9, 0), around=one),
            Start(back, ranks=2, kill=(11, 0), around=on_one_node),
            Start(back, ranks=2, around=one),
        ],
    )
    assert [start.error for start in (first, rewound, unsaved, saved, finished)] == [""] * 5
    assert [start.step for start in (rewound, unsaved, saved, finished)] == [4, 4, 8, 10]
    assert [row["step"] for row in numbers(tmp_path / "run")] == list(range(1, 13))
    lineages = [read_manifest(tmp_path / f"run/checkpoint/step-{n}").lineage for n in (2, 6, 12)]
    assert [branch.step for branch in lineages[0]] == [0]
    assert [branch.step for branch in lineages[1]] == [0, 4]
    assert lineages[1] == lineages[2]


def test_rewind_happens_once_for_each_named_launch(tmp_path: Path) -> None:
    back = ("checkpoint.load_step=4", "training.steps=8")
    starts = start_runs(
        tmp_path,
        [
            Start(),
            Start(back, around=partial(launched, "a"), kill=(7, 0)),
            Start(back, around=partial(launched, "a"), kill=(8, 0)),
            Start(back, around=partial(launched, "b"), kill=(8, 0)),
            Start(back, around=partial(launched, "none"), kill=(8, 0)),
        ],
    )
    assert [start.step for start in starts] == [0, 4, 6, 4, 4]
    lineage = read_manifest(tmp_path / "run/checkpoint/step-6").lineage
    assert [(branch.step, branch.launch) for branch in lineage] == [(0, ""), (4, "")]


def test_damaged_manifest_does_not_make_a_restart_rewind_again(tmp_path: Path) -> None:
    back = ("checkpoint.load_step=2", "training.steps=8")
    start_runs(tmp_path, [Start(kill=(5, 0)), Start(back, kill=(7, 0))])
    with (tmp_path / "run/checkpoint/step-6/MANIFEST.json").open("ab") as file:
        file.write(b"}")
    (restart,) = start_runs(tmp_path, [Start(back, around=partial(restarted, 1))])
    assert restart.step == 4
    assert restart.logged("step-6 is corrupted: MANIFEST.json")


def test_finished_run_does_nothing_and_extended_run_matches_the_longer_run(tmp_path: Path) -> None:
    fixed, linear = (("lr_schedule.decay=linear", *more) for more in (("lr_schedule.decay_steps=4",), ()))
    short, long = ("training.steps=3",), ("training.steps=7",)
    longer, first, again, extended, _, linear_extended = start_runs(
        tmp_path,
        [
            Start((*long, *fixed), run="longer"),
            *(Start((*short, *fixed)), Start((*short, *fixed)), Start((*long, *fixed))),
            *(Start((*short, *linear), run="linear"), Start((*long, *linear), run="linear")),
        ],
    )
    assert first.logged("Done: 3 steps")
    assert again.logged("Nothing to do: the run is finished, step 3 of training.steps = 3")
    assert again.logged("--training.steps 6")
    assert again.rows == {}
    assert again.files == first.files
    assert extended.step == 3
    assert extended.end == longer.end
    assert not extended.logged("Changed")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "longer")
    (line,) = [line for line in linear_extended.lines if line.startswith("Changed")]
    assert line.startswith("Changed since the checkpoint: training.steps: 3 in the checkpoint, 7 now; the decay")


# Several decays of the learning rate from one checkpoint of a trunk, which has a constant learning rate

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
