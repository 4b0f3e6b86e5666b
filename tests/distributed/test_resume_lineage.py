"""Going back, ending and going on beyond the end: which checkpoints a start takes, and what becomes of the others."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.resuming import Start, checkpoints_of, numbers, start_runs
from titanlite.checkpoint.manifest import read_manifest
from titanlite.checkpoint.storage import read_shapes

pytestmark = pytest.mark.slow

NO_DECAY = ("lr_schedule.decay=none",)
LINEAR = ("lr_schedule.decay=linear",)


@contextmanager
def restarted(*counts: int) -> Iterator[None]:
    """As torchrun says it to each rank: how often it has restarted those of the rank's node."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(counts[int(os.environ["RANK"])])
    try:
        yield
    finally:
        del os.environ["TORCHELASTIC_RESTART_COUNT"]


@contextmanager
def launched(name: str) -> Iterator[None]:
    """Under the torchrun launch of that name."""
    os.environ["TORCHELASTIC_RUN_ID"] = name
    try:
        yield
    finally:
        del os.environ["TORCHELASTIC_RUN_ID"]


def other_branch(name: str) -> str:
    """Without the branch's random name."""
    return re.sub(r"superseded-[0-9a-f]{8}", "superseded", name)


def test_after_going_back_the_new_branch_wins(tmp_path: Path) -> None:
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
    assert [other_branch(name) for name in checkpoints_of(killed)] == old
    assert (killed.step, killed.killed) == (4, True)
    assert killed.begin == automatic.begin
    assert (automatic.step, automatic.killed) == (4, True)
    # Both branches have a step 6 now, and the rows are those of the new one.
    assert sorted(other_branch(name) for name in checkpoints_of(automatic)) == sorted([*old, "step-6"])
    folder = tmp_path / "run/checkpoint"
    assert "checkpoint.load_step = 5\n" in missing.error
    assert f"a step of which there is a checkpoint in {folder}, and there are: 2, 4, 6\n" in missing.error
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


@pytest.mark.slow
def test_a_branch_that_has_saved_is_in_the_lineage_and_a_restart_goes_on_with_it(tmp_path: Path) -> None:
    back = ("checkpoint.load_step=4", "training.steps=12")
    one = partial(restarted, 1, 1)
    on_one_node = partial(restarted, 1, 0)  # the ranks of the other node did not die: their torchrun counts nothing
    first, gone_back, unsaved, saved, finished = start_runs(
        tmp_path,
        [
            Start(ranks=2),
            Start(back, ranks=2, kill=(5, 1)),
            Start(back, ranks=2, kill=(9, 0), around=one),
            Start(back, ranks=2, kill=(11, 0), around=on_one_node),
            Start(back, ranks=2, around=one),
        ],
    )
    assert [start.error for start in (first, gone_back, unsaved, saved, finished)] == [""] * 5
    assert [start.step for start in (gone_back, unsaved, saved, finished)] == [4, 4, 8, 10]
    assert [row["step"] for row in numbers(tmp_path / "run")] == list(range(1, 13))
    lineages = [read_manifest(tmp_path / f"run/checkpoint/step-{n}").lineage for n in (2, 6, 12)]
    assert [branch.step for branch in lineages[0]] == [0]
    assert [branch.step for branch in lineages[1]] == [0, 4]
    assert lineages[1] == lineages[2]


@pytest.mark.slow
def test_going_back_counts_once_for_each_launch_that_has_a_name(tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_a_damaged_manifest_does_not_make_a_restart_go_back_once_more(tmp_path: Path) -> None:
    back = ("checkpoint.load_step=2", "training.steps=8")
    start_runs(tmp_path, [Start(kill=(5, 0)), Start(back, kill=(7, 0))])
    with (tmp_path / "run/checkpoint/step-6/MANIFEST.json").open("ab") as file:
        file.write(b"}")
    (restart,) = start_runs(tmp_path, [Start(back, around=partial(restarted, 1))])
    assert restart.step == 4
    assert restart.says("step-6 is damaged: MANIFEST.json")


def test_a_step_to_go_back_to_has_to_be_there(tmp_path: Path) -> None:
    (none,) = start_runs(tmp_path, [Start(("checkpoint.load_step=4",))])
    assert none.error.endswith("and there are: none\n    remedy: leave it out")
    assert none.rows == {}


@pytest.mark.slow
def test_a_finished_run_says_so_and_an_extended_one_is_the_longer_one(tmp_path: Path) -> None:
    fixed = ("lr_schedule.decay=linear", "lr_schedule.decay_steps=4")
    short, more = ("training.steps=3",), ("training.steps=7",)
    starts = [
        *(Start((*more, *NO_DECAY), run="long"), Start((*more, *fixed), run="long fixed")),
        *(Start((*short, *NO_DECAY)), Start((*short, *NO_DECAY)), Start((*more, *NO_DECAY))),
        *(Start((*short, *fixed), run="fixed"), Start((*more, *fixed), run="fixed")),
        *(Start((*short, *LINEAR), run="linear"), Start((*more, *LINEAR), run="linear")),
    ]
    long, long_fixed, first, again, extended, _, fixed_extended, _, linear_extended = start_runs(tmp_path, starts)
    assert first.says("Done: 3 steps")
    assert again.says("Nothing to do: the run is finished, step 3 of training.steps = 3")
    assert again.says("--training.steps 6")
    assert again.rows == {}
    assert again.files == first.files
    for found, expected, name in ((extended, long, "run"), (fixed_extended, long_fixed, "fixed")):
        assert found.step == 3
        assert found.end == expected.end
        assert not found.says("Changed")
        whole = "long" if name == "run" else "long fixed"
        assert numbers(tmp_path / name) == numbers(tmp_path / whole)
    lines = [line for line in linear_extended.said if line.startswith("Changed")]
    assert len(lines) == 1
    assert lines[0].startswith("Changed since the checkpoint: training.steps: 3 in the checkpoint, 7 now; the decay")


def test_a_model_alone_ends_a_run_and_is_set_aside_when_it_is_extended(tmp_path: Path) -> None:
    last = ("checkpoint.last_save_model_only=true", *NO_DECAY)
    short, more = ("training.steps=4", *last), ("training.steps=6", *last)
    long, first, again, extended, only, stuck = start_runs(
        tmp_path,
        [
            Start(("training.steps=6", *NO_DECAY), run="long"),
            *(Start(short), Start(short), Start(more)),
            Start((*short, "checkpoint.interval=100"), run="only"),
            Start((*more, "checkpoint.interval=100"), run="only"),
        ],
    )
    assert checkpoints_of(first) == ["step-2", "step-4"]
    assert again.says("Nothing to do: the run is finished, step 4")
    assert again.files == first.files
    assert extended.step == 2
    names = ["step-2", "step-4", "step-4.superseded", "step-6"]  # step 4 again, in full
    assert [other_branch(name) for name in checkpoints_of(extended)] == names
    assert extended.end == long.end
    assert numbers(tmp_path / "run") == numbers(tmp_path / "long")
    folder = tmp_path / "run/checkpoint"
    assert [read_manifest(folder / f"step-{n}").content for n in (2, 6)] == ["full", "model"]
    shapes, full = (read_shapes(folder / f"step-{n}") for n in (6, 2))
    assert all(name.startswith("model/") for name in shapes)
    assert shapes.items() <= full.items()
    assert len(shapes) == sum(name.startswith("model/") for name in full)
    # Where no full one was ever saved there is nothing to go on from, and nothing is begun anew in its place.
    assert "no checkpoint in" in stuck.error
    assert stuck.files == only.files
