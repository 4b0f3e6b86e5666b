"""run_ranks: results by rank, the earliest error first, and no processes left."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titanlite.ranks import launch
from titanlite.ranks.launch import RankError, run_ranks
from titanlite.runtime.errors import UserError


def note_pid(folder: str) -> None:
    Path(folder, f"rank{dist.get_rank()}").write_text(str(os.getpid()))


def is_gone(pid: int, within_s: float = 3.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


EARLIER: set[int | None] = set()
"""Processes of other tests, such as a shared pool."""


@pytest.fixture(autouse=True)
def note_earlier_processes() -> None:
    EARLIER.update(process.pid for process in multiprocessing.active_children())


def children() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()} - EARLIER


def assert_nothing_left(folder: Path, ranks: int = 2) -> None:
    assert children() == set()
    pids = [int(file.read_text()) for file in folder.iterdir()]
    assert len(pids) == ranks
    assert all(is_gone(pid) for pid in pids)


def facts(folder: str, text: str) -> list[Any]:
    """Return facts about the rank; rank 0 returns last."""
    note_pid(folder)
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    time.sleep(0.3 * (dist.get_rank() == 0))
    environment = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    return [text, dist.get_rank(), int(total), dist.get_backend(), environment]


def test_results_are_returned_by_rank(tmp_path: Path) -> None:
    assert run_ranks(facts, 3, str(tmp_path), "text") == [
        ["text", rank, 6, "gloo", [str(rank), str(rank), "3"]] for rank in range(3)
    ]
    assert_nothing_left(tmp_path, ranks=3)


def fails_on_rank_1(folder: str, how: str) -> int:
    """Fail on rank 1 while rank 0 is in a collective, which then fails too."""
    note_pid(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("the cause")
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return 0


CAUSES = {
    "raise": "rank 1 failed:\nTraceback",
    "exit": "rank 1 ended with exit code 3",
    "kill": "rank 1 ended with exit code -9",
}


@pytest.mark.parametrize("how", sorted(CAUSES))
def test_the_failure_of_one_rank_is_raised(how: str, tmp_path: Path) -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(fails_on_rank_1, 2, str(tmp_path), how)
    assert str(raised.value).startswith(CAUSES[how])
    assert ("ValueError: the cause" in str(raised.value)) == (how == "raise")
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("how", sorted(CAUSES))
def test_the_earliest_failure_is_reported_first(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = launch.wait

    def wait_for_all(receivers: list[Any], timeout: float) -> list[Any]:
        end = time.monotonic() + timeout
        while len(wait(receivers, 0.0)) < len(receivers) and time.monotonic() < end:
            time.sleep(0.01)
        return wait(receivers, 0.0)

    monkeypatch.setattr(launch, "wait", wait_for_all)
    with pytest.raises(RankError, match="rank 0 failed") as raised:
        run_ranks(fails_on_rank_1, 2, str(tmp_path), how)
    assert str(raised.value).startswith(CAUSES[how])


def returns_no_json() -> Any:
    return torch.zeros(1)


def test_a_result_must_be_json() -> None:
    with pytest.raises(RankError, match="Tensor is not JSON serializable"):
        run_ranks(returns_no_json, 1)


def never_ends_on_rank_1(folder: str) -> None:
    note_pid(folder)
    if dist.get_rank() == 1:
        time.sleep(100)


@pytest.mark.slow
def test_ranks_are_killed_after_the_timeout(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[1\] are still running"):
        run_ranks(never_ends_on_rank_1, 2, str(tmp_path), timeout_s=4.0)
    assert time.monotonic() - start < 30
    assert_nothing_left(tmp_path)


class PicklesOnce:
    """Can be pickled only once, so that only one rank starts."""

    sent = False

    def __reduce__(self) -> tuple[Any, ...]:
        if PicklesOnce.sent:
            raise OSError("no more ranks can be started")
        PicklesOnce.sent = True
        return (PicklesOnce, ())


def test_a_rank_that_cannot_be_started_kills_the_previous_ranks() -> None:
    with pytest.raises(OSError, match="no more ranks"):
        run_ranks(never_ends_on_rank_1, 2, PicklesOnce())
    assert children() == set()


def test_a_long_folder_of_temporary_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", f"/tmp/{'a' * 71}")
    with pytest.raises(UserError, match=r"aaa, has a path of 76 bytes, .* of at most 75: export TMPDIR=/tmp"):
        launch.fork_context()
    monkeypatch.setattr("tempfile.tempdir", f"/tmp/{'a' * 70}")
    assert launch.fork_context()
