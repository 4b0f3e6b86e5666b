"""SIGKILL at every file operation of a run's checkpoints: the next start finds a state that is whole, old or new."""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.file_operations import Noted, watch
from tests.distributed.forked import End, Parent, fork_ranks
from tests.distributed.standin import Run, train_anew
from titanlite.checkpoint.folder import published_steps, whole_manifest
from titanlite.checkpoint.manifest import MANIFEST_FILE
from titanlite.checkpoint.storage import InvalidCheckpointError

WORLD = 2


@dataclass(frozen=True)
class Case:
    """before: steps that branch "a" has saved. branch, steps: of the run that is killed. section: its settings."""

    before: int
    branch: str
    steps: int
    section: dict[str, Any] = field(default_factory=dict)
    leftovers: bool = False

    @property
    def oldest(self) -> int:
        """The step that a later start may not fall behind."""
        return self.section.get("load_step", self.before)


CASES = {
    "first": Case(0, "a", 2),
    "beside": Case(2, "a", 2, {"keep_latest_k": 1}),  # the save of step 3 deletes step 1, that of step 4 step 3
    "back": Case(4, "b", 1, {"load_step": 2}),
    "leftovers": Case(2, "a", 1, leftovers=True),
}


def doomed(folder: Path, case: Case, mode: str, rank: int, kill_at: int) -> list[str]:
    """The run that is killed, on one of its ranks; returns what it did to the files where it was not."""
    noted = Noted(kill_at if dist.get_rank() == rank else -1)
    watch(folder, noted)
    train_anew(folder, case.branch, case.steps, case.section | {"async_mode": mode})
    return noted.names


def next_start(folder: Path) -> dict[str, Any]:
    """What a new start finds, and whether it can go on from there."""
    run = Run(folder)
    start = run.step
    branch = next((b for b in "ab" if run.state.is_that_of(start, b)), None)
    run.train("c", 1)
    return {"step": start, "branch": branch}


def prepare(folder: Path, case: Case) -> None:
    folder.mkdir()
    if case.before:
        for end in fork_ranks(train_anew, WORLD, folder, "a", case.before, {}):
            assert end.error is None, end
    if case.leftovers:
        shutil.copytree(folder / "step-1", folder / ".step-3.writing")
        shutil.copytree(folder / "step-1", folder / ".step-1.deleting")
        (folder / "step-1" / MANIFEST_FILE).rename(folder / "step-1" / f"{MANIFEST_FILE}.deleted")


def sweep(case_name: str, mode: str, kinds: list[list[str]]) -> tuple[dict[str, int], list[str], list[list[str]]]:
    """Kills at every operation. kinds: for each rank, only at one operation of each of these kinds; []: at all.

    Returns how often each outcome was seen, a line for each bad one, and the operations of each rank.
    """
    case = CASES[case_name]
    counts: Counter[str] = Counter()
    bad = []
    with tempfile.TemporaryDirectory() as name:
        model = Path(name, "model")
        prepare(model, case)
        shutil.copytree(model, Path(name, "undisturbed"))
        operations = [end.result for end in fork_ranks(doomed, WORLD, Path(name, "undisturbed"), case, mode, 0, -1)]
        for rank in range(WORLD):
            everything = range(len(operations[rank]))
            for kill_at in one_of_each(operations[rank], kinds[rank]) if kinds else everything:
                folder = Path(name, f"{rank}-{kill_at}")
                shutil.copytree(model, folder)
                ends = fork_ranks(doomed, WORLD, folder, case, mode, rank, kill_at)
                outcome, problem = judge(folder, case, rank, ends)
                counts[outcome] += 1
                if problem:
                    where = f"rank {rank}, operation {kill_at}, {operations[rank][kill_at]}"
                    bad.append(f"{case_name}, {mode}, {where}: {problem}")
                shutil.rmtree(folder)
    return dict(counts), bad, operations


def one_of_each(operations: list[str], kinds: list[str]) -> Iterator[int]:
    """The one in the middle of those of a kind."""
    for kind in kinds:
        found = [number for number, operation in enumerate(operations) if operation.startswith(f"{kind} ")]
        yield found[len(found) // 2]


def judge(folder: Path, case: Case, rank: int, ends: list[End]) -> tuple[str, str]:
    """(outcome, what is bad about it, if anything)."""
    if not ends[rank].was_killed:
        return "not killed", f"the run came to its end: {ends[rank]}"
    if ends[1 - rank].exit_code != 0:
        return "bad", f"the other rank did not end by itself: {ends[1 - rank]}"
    manifests = folder.glob(f"step-*/{MANIFEST_FILE}")
    newest = max((int(path.parent.name[5:]) for path in manifests if path.parent.name[5:].isdecimal()), default=0)
    damaged = [step for step in published_steps(folder) if not is_whole(folder, step)]
    found = fork_ranks(next_start, WORLD, folder)
    if any(end.error for end in found):
        return "bad", f"{found}"
    starts = [end.result for end in found]
    step, branch = starts[0]["step"], starts[0]["branch"]
    names = os.listdir(folder)
    said = found[0].lines
    problems = {
        "ranks differ": starts[0] != starts[1],
        f"step {step} was loaded, {newest} is the newest": step != newest,
        "values are mixed": bool(step) and branch is None,
        "a step was lost": step < case.oldest,
        f"steps {damaged} are neither whole nor being deleted": bool(damaged),
        "something counts as damaged": any("invalid" in name for name in names),
        "leftovers stay": any(name.startswith(".") for name in names),
        "a new start was not said": not step and not any("a new run, from step 0" in line for line in said),
    }
    wrong = [text for text, holds in problems.items() if holds]
    if wrong:
        return "bad", f"{wrong}, {sorted(names)}, {said}"
    if not step:
        return "anew", ""
    return ("new" if step > case.before or branch != "a" else "old"), ""


def is_whole(folder: Path, step: int) -> bool:
    try:
        return whole_manifest(folder, step).step == step
    except InvalidCheckpointError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "mode", "kinds"),
    [
        ("first", "disabled", [["mkdir", "written", "rename"], ["written"]]),
        ("beside", "async", [["create", "written", "fsynced", "rename", "remove", "rmdir"], ["create", "fsynced"]]),
        ("back", "disabled", [["rename", "fsync"], ["fsync"]]),
    ],
)
def test_a_kill_at_some_operations_leaves_a_state_that_is_whole(
    parent: Parent, case: str, mode: str, kinds: list[list[str]]
) -> None:
    counts, bad, _ = parent(sweep, case, mode, kinds)
    assert not bad, "\n".join(bad)
    assert sum(counts.values()) == sum(map(len, kinds))


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("case", CASES)
def test_a_kill_at_any_operation_leaves_a_state_that_is_whole(parent: Parent, case: str, mode: str) -> None:
    counts, bad, operations = parent(sweep, case, mode, [])
    print(f"{case}, {mode}: {counts}")
    assert not bad, "\n".join(bad)
    for rank in range(WORLD):
        kinds = {operation.split()[0] for operation in operations[rank]}
        expected = {"create", "written", "fsync", "fsynced"} | ({"rename", "mkdir"} if rank == 0 else set())
        assert expected <= kinds
    outcomes = {"first": {"anew", "new"}, "leftovers": {"old", "new"}}.get(case, {"old", "new"})
    assert set(counts) == outcomes
