"""Saves that fail on one rank: nothing half written is to be seen, all ranks know, and the run does as it was told."""

import errno
import os
import re
import resource
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.file_operations import watch
from tests.distributed.forked import Parent, fork_ranks, logged
from tests.distributed.standin import BATCH, Run, start_in
from titanlite.checkpoint import probe as probe_module
from titanlite.checkpoint.manifest import MANIFEST_FILE
from titanlite.checkpoint.probe import probe

pytestmark = pytest.mark.slow

WORLD = 2
FAILING = 2
"""The step whose save fails; the one before it and those after it do not."""


class Fault:
    """What goes wrong on this rank while files are written, once."""

    def __init__(self, root: Path) -> None:
        self._spec: dict[str, Any] = {}
        self._seen = 0
        self._limited = ""
        self._soft, self._hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.operations: list[str] = []
        watch(root, self._act)

    def arm(self, spec: dict[str, Any]) -> None:
        """rank; file: the file of the save of `step`, or of FAILING, from whose byte `bytes` on the disk is full; or
        at: the number of the operation, from 0, that raises `error`, an errno or 0 for a RuntimeError."""
        self._spec = spec if spec.get("rank") == dist.get_rank() else {}
        self._seen, self.operations = 0, []

    def _act(self, operation: str, name: str, descriptor: int) -> None:  # noqa: ARG002
        if self._limited and name != self._limited:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._soft, self._hard))
            self._limited = ""
        self.operations.append(f"{operation} {name.split('/', 1)[-1]}")
        spec = self._spec
        target = f".step-{spec.get('step', FAILING)}.writing/{spec.get('file')}"
        if operation == "create" and name.endswith(target):
            self._spec = {}
            resource.setrlimit(resource.RLIMIT_FSIZE, (spec["bytes"], self._hard))
            self._limited = name
        elif spec.get("at") == self._seen:
            self._spec = {}
            if spec["error"]:
                raise OSError(spec["error"], os.strerror(spec["error"]), name)
            raise RuntimeError("the writer has failed")
        self._seen += 1


def failing_runs(folder: Path, cases: list[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    """Runs one after another, each of four steps, the second of which is saved with a fault. first: their number."""
    fault = Fault(folder)
    found = []
    for number, case in enumerate(cases, first):
        logged().clear()
        run = Run(folder / f"{number}", **case["section"])
        error = None
        try:
            run.train("a", 1)

            def prepare(step: int, run: Run = run, case: dict[str, Any] = case) -> None:
                if step == FAILING:
                    fault.arm(case)
                    if case.get("poisoned") == dist.get_rank():
                        run.state.poison()

            run.train("a", 3, prepare)
        except Exception as failure:
            error = [type(failure).__name__, str(failure)]
        dist.barrier()
        names = sorted(os.listdir(folder / f"{number}"))
        found.append({"error": error, "step": run.step, "lines": list(logged()), "names": names})
    return found


def fail(folder: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case, what each rank met, and what the next start finds then."""
    ranks: list[Any] = []
    for first in range(0, len(cases), BATCH):
        ends = fork_ranks(failing_runs, WORLD, folder, cases[first : first + BATCH], first)
        for end in ends:
            assert end.error is None, end
        ranks += zip(*(end.result for end in ends), strict=True)
    nexts = start_in([folder / f"{number}" for number in range(len(cases))])
    return [{"ranks": list(of_ranks), "next": found} for of_ranks, found in zip(ranks, nexts, strict=True)]


MODES, POLICIES = ("disabled", "async"), ("stop", "continue")
FILES = {"__0_0.distcp": (0, 3154), "__1_0.distcp": (1, 7949), ".metadata.tmp": (0, 1749), MANIFEST_FILE: (0, 636)}
"""Of the stand-in's checkpoint, by the name under which they are written: by which rank, and about how many bytes."""


def full_disks(fractions: tuple[float, ...]) -> list[dict[str, Any]]:
    """For each mode, policy, file and share of the file that still has room."""
    return [
        {
            "rank": rank,
            "file": file,
            "bytes": int(fraction * size),
            "section": {"async_mode": mode, "on_save_error": policy, "keep_latest_k": 1},
        }
        for mode in MODES
        for policy in POLICIES
        for file, (rank, size) in FILES.items()
        for fraction in fractions
    ]


def check_failed(case: dict[str, Any], outcome: dict[str, Any], reason: str) -> None:
    """The save of FAILING has failed everywhere for `reason`, a pattern, and the policy has been followed."""
    one, other = outcome["ranks"]
    message = f"step {FAILING} could not be saved: rank {case['rank']}: {reason}"
    assert one["names"] == other["names"], (case, outcome)
    assert f"step-{FAILING}" not in one["names"], (case, outcome)
    assert not any(name.startswith(".") for name in one["names"]), (case, outcome)
    said = f"{message}.*; training goes on"
    told = [sum(bool(re.match(said, line)) for line in rank["lines"]) for rank in (one, other)]
    assert told == [int(case["section"]["on_save_error"] == "continue"), 0], (case, outcome)  # once, by rank 0
    for rank in (one, other):
        if case["section"]["on_save_error"] == "stop":
            kind, text = rank["error"]
            assert kind == "UserError"
            assert re.match(message, text), (case, text)
            assert "the checkpoints before it are whole" in text
            assert rank["step"] <= FAILING + (case["section"]["async_mode"] == "async")
        else:
            assert rank["error"] is None, (case, rank)
            assert rank["step"] == 4
    newest = max(int(name.removeprefix("step-")) for name in one["names"])
    if case["section"]["on_save_error"] == "continue":
        assert newest == 4
    for answer in outcome["next"]:
        assert (answer["step"], answer["branch"]) == (newest, "a"), (case, answer)


@pytest.mark.slow
def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_leaves_nothing_behind(
    parent: Parent, tmp_path: Path
) -> None:
    cases = full_disks((0.0, 0.6))[::3]
    for case, outcome in zip(cases, parent(fail, tmp_path, cases), strict=True):
        check_failed(case, outcome, rf"[^\n]*/\.step-2\.writing/{re.escape(case['file'])}: File too large")


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_disk_that_is_full_at_any_of_many_bytes(parent: Parent, tmp_path: Path) -> None:
    cases = full_disks(tuple(n / 40 for n in range(40)))
    for case, outcome in zip(cases, parent(fail, tmp_path, cases), strict=True):
        check_failed(case, outcome, rf"[^\n]*/\.step-2\.writing/{re.escape(case['file'])}: File too large")


def test_values_that_are_not_finite_on_one_rank_are_not_published_and_the_healthy_ones_stay(
    parent: Parent, tmp_path: Path
) -> None:
    cases = [
        {
            "rank": rank,
            "poisoned": rank,
            "section": {"async_mode": mode, "on_save_error": policy, "keep_latest_k": 1},
        }
        for rank, mode, policy in ((0, "disabled", "stop"), (1, "disabled", "continue"), (1, "async", "stop"))
    ]
    for case, outcome in zip(cases, parent(fail, tmp_path, cases), strict=True):
        check_failed(case, outcome, "optimizer/weight/exp_avg has values that are not finite")
        if case["section"] == {"async_mode": "disabled", "on_save_error": "stop", "keep_latest_k": 1}:
            assert outcome["ranks"][0]["names"] == ["step-1"]


def broken_operations(folder: Path, mode: str, shots: int | None) -> tuple[dict[str, int], list[str]]:
    """An error at every operation of a save beside one that goes with it, on each rank; outcomes, and bad ones."""
    section = {"async_mode": mode, "on_save_error": "continue", "keep_latest_k": 1}
    whole = {"rank": 0, "at": -1, "section": section}
    counts: Counter[str] = Counter()
    bad = []
    for rank in range(WORLD):
        noted = fork_ranks(operations_of_a_save, WORLD, folder / "model", section)[rank].result
        shutil.rmtree(folder / "model")
        chosen = range(0, len(noted), max(1, len(noted) // shots) if shots else 1)
        cases = [
            whole | {"rank": rank, "at": at, "error": (errno.EIO, errno.ENOSPC, 0)[n % 3]}
            for n, at in enumerate(chosen)
        ]
        for case, outcome in zip(cases, fail(folder / f"{rank}", cases), strict=True):
            kind, problem = judged(case, outcome)
            counts[kind] += 1
            if problem:
                bad.append(f"{mode}, rank {rank}, {noted[case['at']]}, {case['error']}: {problem}: {outcome}")
    return dict(counts), bad


def operations_of_a_save(folder: Path, section: dict[str, Any]) -> list[str]:
    """What this rank does to files in the save of FAILING."""
    fault = Fault(folder.parent)
    run = Run(folder, **section)
    run.train("a", 1)
    fault.arm({"rank": dist.get_rank()})
    run.train("a", 1)
    return fault.operations


def judged(case: dict[str, Any], outcome: dict[str, Any]) -> tuple[str, str]:
    """What an error with one operation has come to, and what is bad about that."""
    one, other = outcome["ranks"]
    said = [
        [line for line in rank["lines"] if line.startswith(f"step {FAILING} could not be saved: rank {case['rank']}: ")]
        for rank in (one, other)
    ]
    for rank in (one, other):
        if rank["error"] is not None:
            return "bad", "the run has ended"
    if any(answer.get("step") != 4 or answer["branch"] != "a" for answer in outcome["next"]):
        return "bad", "the next start does not go on from step 4"
    if any("damaged" in line for answer in outcome["next"] for line in answer["lines"]):
        return "bad", "something is damaged"
    if any(name.startswith(".step-2") for name in one["names"]):
        return "bad", "a temporary folder stays"
    if said[1]:
        return "bad", "said by each rank"
    if said[0]:
        return "failed", "" if len(said[0]) == 1 else "said more than once"
    if any("could not be deleted" in line for line in one["lines"]):
        return "saved, nothing deleted", ""
    return "saved", ""


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_an_error_in_some_operations_of_a_save_is_known_to_all_ranks(parent: Parent, tmp_path: Path, mode: str) -> None:
    counts, bad = parent(broken_operations, tmp_path, mode, 5)
    assert not bad, "\n".join(bad)
    assert counts["failed"] > 5


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("mode", MODES)
def test_an_error_in_any_operation_of_a_save_is_known_to_all_ranks(parent: Parent, tmp_path: Path, mode: str) -> None:
    counts, bad = parent(broken_operations, tmp_path, mode, None)
    print(f"{mode}: {counts}")
    assert not bad, "\n".join(bad)


def last_saves(folder: Path) -> list[Any]:
    """A run of three steps that saves every second one: the error of its last save, then of its last but one."""
    fault = Fault(folder)
    found = []
    for name, failing in (("last", 3), ("before", 2)):
        logged().clear()
        run = Run(folder / name, steps=3, interval=2, on_save_error="continue", async_mode="async")

        def prepare(step: int, failing: int = failing) -> None:
            if step == failing:
                fault.arm({"rank": 1, "file": "__1_0.distcp", "step": failing, "bytes": 500})

        error = None
        try:
            run.train("a", 3, prepare)
        except Exception as failure:
            error = str(failure)
        dist.barrier()
        found.append([error, list(logged()), sorted(os.listdir(folder / name))])
    return found


def fork_last_saves(folder: Path) -> list[Any]:
    return [[end.result, end.error] for end in fork_ranks(last_saves, WORLD, folder)]


def test_a_run_whose_last_save_fails_fails_and_one_whose_save_before_that_fails_says_so(
    parent: Parent, tmp_path: Path
) -> None:
    for rank, (result, error) in enumerate(parent(fork_last_saves, tmp_path)):
        assert error is None
        (last, _, there), (before, lines, saved) = result
        assert re.match(r"step 3 could not be saved: rank 1: .*: File too large", last)
        assert there == ["step-2"]
        assert before is None
        said = [line for line in lines if re.match("step 2 could not be saved: rank 1: .*: File too large", line)]
        assert len(said) == (rank == 0)
        assert saved == ["step-3"]


def probes(folder: Path) -> list[str]:
    """What is said about folders that cannot be used: by `rank 0` in the way, read-only, not shared, full."""
    rank = dist.get_rank()
    probe_module._PATIENCE_S = 0.2
    group = dist.group.WORLD
    assert group is not None
    said = []

    def note(path: Path, needed: int = 1) -> None:
        try:
            probe(path, needed, group)
            said.append("nothing")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    note(folder / "good")
    note(folder / "file" / "below")
    note(folder / f"of-rank-{rank}")
    note(folder / "good", 10**18)
    usage = shutil.disk_usage(folder)
    if rank == 0:
        shutil.disk_usage = lambda _: usage._replace(free=99)
    note(folder / "good", 100)
    note(folder / "good", 99)
    limited = Fault(folder)
    limited.arm({"rank": 0, "at": 1, "error": errno.ENOSPC})
    note(folder / "good", 1)
    if os.geteuid() == 0:
        os.seteuid(65534)
    note(folder / "read-only")
    os.seteuid(os.getuid())
    return said


def fork_probes(folder: Path) -> list[list[str]]:
    folder.chmod(0o777)
    (folder / "file").touch()
    (folder / "read-only").mkdir(mode=0o555)
    return [end.result for end in fork_ranks(probes, WORLD, folder)]


def test_a_folder_that_cannot_be_used_is_refused_at_the_start_on_all_ranks(parent: Parent, tmp_path: Path) -> None:
    one, other = parent(fork_probes, tmp_path)
    good, below, apart, huge, little, enough, no_space, read_only = one
    key = "UserError: checkpoint.folder: "
    assert (good, enough) == ("nothing", "nothing")
    assert below.startswith(f"{key}{tmp_path / 'file' / 'below'} cannot be written: rank 0: ")
    assert "Not a directory" in below
    assert "is not the same folder for all ranks: rank 1: on " in apart
    assert "choose a job.dump_folder that all nodes share" in apart
    assert "and a checkpoint of this run takes 953,674,316,406.2 MiB: make room" in huge
    assert little.startswith(f"{key}{tmp_path / 'good'} has 0.0 MiB of free space")
    assert re.search(r"cannot be written: rank 0: .*\.probe\.writing: No space left on device", no_space)
    assert re.search(r"cannot be written: rank 0: .*read-only.*: Permission denied", read_only)
    for mine, of_other in zip(one, other, strict=True):
        assert mine.split(":")[0] == of_other.split(":")[0]
