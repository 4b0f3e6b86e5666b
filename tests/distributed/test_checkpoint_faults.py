"""Single faults while a run saves checkpoints: a kill, a failing operation, a full disk, non-finite values.

A case is a scenario (existing checkpoints and a run), a save mode, and a fault. In each case, a folder is prepared, two
ranks train with the fault, and a new start resumes from the folder.
"""

import errno
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.file_operations import Fault, FaultPoints, one_of_each
from tests.distributed.forked import End, fork_ranks, logged, on_ranks, results
from tests.distributed.standin import BATCH, Run, save_steps, start_in
from titanlite.checkpoint import saver
from titanlite.checkpoint.folder import complete_manifest, published_steps
from titanlite.checkpoint.manifest import MANIFEST_FILE, InvalidCheckpointError
from titanlite.checkpoint.saver import probe
from titanlite.runtime.errors import UserError

pytestmark = pytest.mark.slow

WORLD = 2
FAILING = 2
"""Step whose save fails in runs that survive the fault. All other saves succeed."""


@dataclass(frozen=True)
class Scenario:
    """before: number of steps saved earlier, on branch "a". branch, steps, section: those of the run with the fault.

    leftovers: whether the folder contains interrupted saves and deletions. armed_at: step in whose save the fault
    occurs; 0: at any time after the start of the process.
    """

    before: int
    branch: str
    steps: int
    section: dict[str, Any] = field(default_factory=dict)
    leftovers: bool = False
    armed_at: int = 0

    @property
    def oldest(self) -> int:
        """The oldest step from which a later start may resume."""
        return int(self.section.get("load_step", self.before))


KILLED = {
    "first": Scenario(0, "a", 2),
    "beside": Scenario(2, "a", 2, {"keep_latest_k": 1}),  # the save of step 3 deletes step 1, that of step 4 step 3
    "back": Scenario(4, "b", 1, {"load_step": 2}),
    "leftovers": Scenario(2, "a", 1, leftovers=True),
}
SURVIVING = Scenario(0, "a", 4, {"keep_latest_k": 1}, armed_at=FAILING)
MODES, POLICIES = ("disabled", "async"), ("stop", "continue")


@dataclass(frozen=True)
class Case:
    """A scenario with a save mode, a fault and an on_save_error policy. fault: None for an undisturbed run."""

    scenario: Scenario
    mode: str
    fault: Fault | None = None
    policy: str = "stop"

    @property
    def section(self) -> dict[str, Any]:
        return self.scenario.section | {"async_mode": self.mode, "on_save_error": self.policy}


@dataclass(frozen=True)
class Outcome:
    """ends, reports: of the ranks of the run. Reports are None if the fault kills a rank.

    latest: latest step with a manifest after the run. damaged: published steps that are invalid. starts: results of a
    new start by rank. names: names in the folder after the run, and after the new start.
    """

    case: Case
    ends: list[End]
    reports: list[Any]
    latest: int
    damaged: list[int]
    names: list[list[str]]
    starts: list[dict[str, Any]]


def run_on_rank(root: Path, cases: list[Case], first: int) -> list[dict[str, Any]]:
    """Run the cases on this rank, one after another. first: number of the first case's folder."""
    points = FaultPoints(root)
    found = []
    for number, case in enumerate(cases, first):
        logged().clear()
        scenario, fault = case.scenario, case.fault
        mine = fault if fault is not None and fault.rank == dist.get_rank() else None
        points.arm(None if scenario.armed_at else mine)
        run = Run(root / f"{number}", **case.section)

        def before_save(
            step: int, run: Run = run, armed_at: int = scenario.armed_at, mine: Fault | None = mine
        ) -> None:
            if step == armed_at:
                points.arm(mine)
                if mine is not None and mine.kind == "not finite":
                    run.state.poison()

        error = None
        try:
            if scenario.armed_at:
                run.train(scenario.branch, scenario.armed_at - 1)
            run.train(scenario.branch, scenario.steps - max(0, scenario.armed_at - 1), before_save)
        except Exception as failure:
            error = [type(failure).__name__, str(failure)]
        operations = points.operations
        points.arm(None)
        dist.barrier()
        found.append({"error": error, "step": run.step, "lines": list(logged()), "operations": operations})
    return found


def prepare(folder: Path, scenario: Scenario) -> None:
    folder.mkdir(parents=True)
    if scenario.before:
        save_steps(folder, scenario.before)
    if scenario.leftovers:
        shutil.copytree(folder / "step-1", folder / ".step-3.writing")
        (folder / "step-1").rename(folder / ".step-1.deleting")


def outcomes(root: Path, cases: list[Case]) -> list[Outcome]:
    models: dict[str, Path] = {}
    folders = [root / f"{number}" for number in range(len(cases))]
    for case, folder in zip(cases, folders, strict=True):
        key = f"{case.scenario}"
        if key not in models:
            models[key] = root / f"model-{len(models)}"
            prepare(models[key], case.scenario)
        shutil.copytree(models[key], folder)
    ends: list[tuple[list[End], list[Any]]] = []
    for batch in batches(cases):
        of_batch = fork_ranks(run_on_rank, WORLD, root, batch, len(ends))
        by_rank = [[None] for _ in of_batch] if is_killed(batch[0]) else results(of_batch)
        ends += [(of_batch, list(reports)) for reports in zip(*by_rank, strict=True)]
    left = [(latest_step(folder), damaged_steps(folder), sorted(os.listdir(folder))) for folder in folders]
    starts = start_in(folders, steps=int(is_killed(cases[0])))
    return [
        Outcome(case, *of_case, latest, damaged, [names, sorted(os.listdir(folder))], start)
        for case, folder, of_case, (latest, damaged, names), start in zip(
            cases, folders, ends, left, starts, strict=True
        )
    ]


def batches(cases: list[Case]) -> Iterator[list[Case]]:
    """Group cases that share processes. A case with a kill is not grouped."""
    batch: list[Case] = []
    for case in cases:
        if batch and (is_killed(case) or is_killed(batch[0]) or len(batch) == BATCH):
            yield batch
            batch = []
        batch.append(case)
    yield batch


def is_killed(case: Case) -> bool:
    return case.fault is not None and case.fault.kind == "kill"


def latest_step(folder: Path) -> int:
    """Latest step with a manifest; 0 without one."""
    steps = (path.parent.name.removeprefix("step-") for path in folder.glob(f"step-*/{MANIFEST_FILE}"))
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def damaged_steps(folder: Path) -> list[int]:
    def is_valid(step: int) -> bool:
        try:
            return complete_manifest(folder, step).step == step
        except InvalidCheckpointError:
            return False

    return [step for step in published_steps(folder) if not is_valid(step)]


def sweep(root: Path, cases: list[Case], judge: Callable[[Outcome], tuple[str, str]]) -> dict[str, int]:
    """Number of cases by kind of outcome. Fails with a line for each bad outcome."""
    found = outcomes(root, cases)
    judged = [judge(outcome) for outcome in found]
    bad = [f"{outcome.case}: {text}" for outcome, (_, text) in zip(found, judged, strict=True) if text]
    assert not bad, "\n".join(bad)
    return dict(Counter(kind for kind, _ in judged))


def operations(root: Path, scenario: Scenario, mode: str) -> list[list[str]]:
    """Operations by rank at which a fault of the scenario can occur."""
    steps = scenario.armed_at or scenario.steps
    case = Case(Scenario(**vars(scenario) | {"steps": steps}), mode)
    (outcome,) = outcomes(root, [case])
    return [report["operations"] for report in outcome.reports]


def problems(found: dict[str, bool]) -> str:
    return ", ".join(text for text, applies in found.items() if applies)


# SIGKILL


def judge_killed(outcome: Outcome) -> tuple[str, str]:
    """(kind of outcome, problems or ""). The next start must load a consistent state, old or new."""
    scenario, fault = outcome.case.scenario, outcome.case.fault
    assert fault is not None
    one, other = outcome.starts
    if "error" in one or "error" in other:
        return "bad", f"{outcome.starts}"
    step, branch = one["step"], one["branch"]
    wrong = {
        "the run finished": not outcome.ends[fault.rank].was_killed,
        f"the other rank did not exit: {outcome.ends}": outcome.ends[1 - fault.rank].exit_code != 0,
        "ranks differ": (step, branch) != (other["step"], other["branch"]),
        f"step {step} was loaded, {outcome.latest} is the latest step": step != outcome.latest,
        "values are mixed": bool(step) and not branch,
        "a step was lost": step < scenario.oldest,
        f"steps {outcome.damaged} are invalid": bool(outcome.damaged),
        f"a checkpoint was quarantined: {outcome.names[1]}": any("invalid" in name for name in outcome.names[1]),
        f"leftovers remain: {outcome.names[1]}": any(name.startswith(".") for name in outcome.names[1]),
        "a new run was not logged": not step and not any("new run at step 0" in line for line in one["lines"]),
    }
    kind = "none" if not step else "new" if step > scenario.before or branch != "a" else "old"
    return kind, problems(wrong)


def kills(root: Path, name: str, mode: str, kinds: list[list[str]] | None) -> list[Case]:
    """Cases with a kill. kinds: by rank, kinds of operations, one operation of each; None: all operations."""
    scenario, cases = KILLED[name], []
    for rank, found in enumerate(operations(root, scenario, mode)):
        expected = {"create", "written", "fsync", "fsynced"} | ({"rename", "mkdir"} if rank == 0 else set())
        assert expected <= {operation.split()[0] for operation in found}
        numbers = range(len(found)) if kinds is None else one_of_each(found, *kinds[rank])
        cases += [Case(scenario, mode, Fault("kill", rank, number)) for number in numbers]
    return cases


CHANGES = ["mkdir", "create", "written", "fsync", "fsynced", "rename", "remove", "rmdir"]


@pytest.mark.parametrize(
    ("name", "mode", "kinds"),
    [
        ("first", "disabled", [["mkdir", "written", "rename"], ["written"]]),
        ("beside", "async", [CHANGES, ["create", "written", "fsynced"]]),
        ("back", "disabled", [["rename", "fsync"], ["fsync"]]),
        *(
            pytest.param(name, mode, None, marks=[pytest.mark.soak, pytest.mark.timeout(0)])
            for mode in MODES
            for name in KILLED
        ),
    ],
)
def test_kill_at_an_operation_leaves_a_consistent_state(
    tmp_path: Path, name: str, mode: str, kinds: list[list[str]] | None
) -> None:
    """At one operation of each of these kinds, by rank; or at every operation."""
    cases = kills(tmp_path / "undisturbed", name, mode, kinds)
    counts = sweep(tmp_path, cases, judge_killed)
    print(f"{name}, {mode}: {counts}")
    if kinds is None:
        assert set(counts) == ({"none", "new"} if name == "first" else {"old", "new"})
    else:
        assert sum(counts.values()) == sum(map(len, kinds))


# Operations that fail


def judge_survivor(outcome: Outcome) -> tuple[str, str]:
    """Like judge_killed, for an error in one operation of a save: the run must continue on all ranks."""
    fault, names = outcome.case.fault, outcome.names[0]
    assert fault is not None
    one, other = outcome.reports
    message = f"cannot save step {FAILING}: rank {fault.rank}: "
    counts = [sum(line.startswith(message) for line in report["lines"]) for report in (one, other)]
    wrong = {
        f"the run has ended: {outcome.reports}": bool(one["error"] or other["error"]),
        f"the next start does not resume from the last step: {outcome.starts}": any(
            (start.get("step"), start.get("branch")) != (SURVIVING.steps, "a") for start in outcome.starts
        ),
        "a checkpoint is damaged": any("corrupted" in line for start in outcome.starts for line in start["lines"]),
        "a temporary folder remains": any(name.startswith(f".step-{FAILING}") for name in names),
        "logged by each rank": counts[1] > 0,
        "logged more than once": counts[0] > 1,
    }
    undeleted = any("Cannot delete" in line for line in one["lines"])
    return "failed" if counts[0] else "saved, nothing deleted" if undeleted else "saved", problems(wrong)


def errors(root: Path, mode: str, *, everywhere: bool) -> list[Case]:
    """Cases with an error at one operation of each kind in a save, or at all operations (everywhere)."""
    return [
        Case(SURVIVING, mode, Fault("error", rank, at, (errno.EIO, errno.ENOSPC, 0)[number % 3]), "continue")
        for rank, found in enumerate(operations(root, SURVIVING, mode))
        for number, at in enumerate(range(len(found)) if everywhere else one_of_each(found))
    ]


@pytest.mark.parametrize(
    ("mode", "everywhere"),
    [
        *(pytest.param(mode, False, marks=[pytest.mark.soak] if mode == "disabled" else []) for mode in MODES),
        *(pytest.param(mode, True, marks=[pytest.mark.soak, pytest.mark.timeout(0)]) for mode in MODES),
    ],
)
def test_error_in_a_save_is_handled_by_all_ranks(tmp_path: Path, mode: str, everywhere: bool) -> None:
    cases = errors(tmp_path / "undisturbed", mode, everywhere=everywhere)
    counts = sweep(tmp_path, cases, judge_survivor)
    print(f"{mode}: {counts}")
    assert counts["failed"] > 5


# Saves that always fail

FILES = {"__0_0.distcp": (0, 3154), "__1_0.distcp": (1, 7949), ".metadata.tmp": (0, 1749), MANIFEST_FILE: (0, 636)}
"""Files of the stand-in's checkpoint, by their name while written: (rank, approximate size in bytes)."""


def writing(file: str, step: int = FAILING) -> str:
    return f".step-{step}.writing/{file}"


def full_disks(fractions: tuple[float, ...]) -> list[Case]:
    """Cases for each mode, policy, file, and fraction of the file that fits on the disk."""
    return [
        Case(SURVIVING, mode, Fault("full disk", rank, int(fraction * size), file=writing(file)), policy)
        for mode in MODES
        for policy in POLICIES
        for file, (rank, size) in FILES.items()
        for fraction in fractions
    ]


def judge_failed(outcome: Outcome) -> tuple[str, str]:
    """The save must fail on all ranks because of the fault, and the run must follow the policy."""
    case, names, fault = outcome.case, outcome.names[0], outcome.case.fault
    assert fault is not None
    bad_values = fault.kind == "not finite"
    file = rf"[^\n]*/{re.escape(fault.file)}: File too large"
    reason = "optimizer/weight/exp_avg has NaN or infinite values" if bad_values else file
    message = f"cannot save step {FAILING}: rank {fault.rank}: {reason}"
    stops = case.policy == "stop"
    counts = [
        sum(bool(re.match(f"{message}.*; training continues", line)) for line in report["lines"])
        for report in outcome.reports
    ]
    kinds, texts = zip(*((report["error"] or ("", "")) for report in outcome.reports), strict=True)
    steps = [report["step"] for report in outcome.reports]
    latest = max(int(name.removeprefix("step-")) for name in names if not name.startswith("."))
    last = FAILING + (case.mode == "async")
    wrong = {
        f"it is published: {names}": f"step-{FAILING}" in names,
        f"something is left: {names}": any(name.startswith(".") for name in names),
        f"logged {counts}": counts != [int(not stops), 0],  # once, by rank 0
        f"errors {kinds} {texts}": set(kinds) != ({"RanksError"} if stops else {""}),
        f"texts {texts}": stops and not all(re.match(message, text) for text in texts),
        f"no remedy: {texts}": stops and not all("earlier checkpoints are still valid" in text for text in texts),
        f"steps {steps}": max(steps) > last if stops else steps != [SURVIVING.steps] * WORLD,
        f"latest {latest}": latest != SURVIVING.steps and not stops,
        f"the valid checkpoint is gone: {names}": bad_values
        and stops
        and case.mode == "disabled"
        and names != ["step-1"],
        f"starts {outcome.starts}": any(
            (start.get("step"), start.get("branch")) != (latest, "a") for start in outcome.starts
        ),
    }
    return "failed", problems(wrong)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(full_disks((0.0, 0.6))[::5], id="some"),
        pytest.param(
            full_disks(tuple(n / 40 for n in range(40))), id="many", marks=[pytest.mark.soak, pytest.mark.timeout(0)]
        ),
    ],
)
def test_full_disk_on_one_rank_fails_the_save_on_all_ranks_without_leftovers(tmp_path: Path, cases: list[Case]) -> None:
    sweep(tmp_path, cases, judge_failed)


def test_nonfinite_values_on_one_rank_are_not_published(tmp_path: Path) -> None:
    chosen = ((0, "disabled", "stop"), (1, "disabled", "continue"), (1, "async", "stop"))
    cases = [Case(SURVIVING, mode, Fault("not finite", rank), policy) for rank, mode, policy in chosen]
    sweep(tmp_path, cases, judge_failed)


def test_a_failed_last_save_fails_the_run(tmp_path: Path) -> None:
    """Also with on_save_error = "continue"."""
    scenario = Scenario(0, "a", 3, {"steps": 3, "interval": 2}, armed_at=3)
    fault = Fault("full disk", 1, 500, file=writing("__1_0.distcp", 3))
    (outcome,) = outcomes(tmp_path, [Case(scenario, "async", fault, "continue")])
    assert outcome.names[0] == ["step-2"]
    message = r"cannot save step 3: rank 1: .*: File too large.*; earlier checkpoints are still valid. Fix the cause"
    assert all(re.match(message, report["error"][1]) for report in outcome.reports)


def probes(folder: Path) -> list[str]:
    """Errors of `probe`: of a folder that is not shared, and of an operation that fails on rank 0 only."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    saver._VISIBILITY_TIMEOUT_S = 0.2
    points = FaultPoints(folder)
    messages = []
    for name, fault in ((f"of-rank-{rank}", None), ("shared", Fault("error", 0, 1, errno.ENOSPC))):
        points.arm(fault if rank == 0 else None)
        with pytest.raises(UserError) as caught:
            probe(folder / name, 1, group)
        messages.append(str(caught.value))
    return messages


def test_unusable_folder_is_rejected_at_the_start_on_all_ranks(tmp_path: Path) -> None:
    """tests/unit/checkpoint/test_saver.py has more kinds, for one rank."""
    (tmp_path / "shared").mkdir()
    by_rank = on_ranks(probes, WORLD, tmp_path)
    for apart, no_space in by_rank:
        assert "is not the same folder for all ranks: rank 1: host " in apart
        assert re.search(r"cannot be written: rank 0: .*\.probe\.incomplete: No space left on device", no_space)
