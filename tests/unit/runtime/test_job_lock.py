"""Two jobs on one dump folder: one has it, whoever was there before, however that one ended."""

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from titanlite.runtime import job_lock as job_lock_module
from titanlite.runtime.errors import UserError
from titanlite.runtime.job_lock import JOB_LOCK_FILE, job_lock
from titanlite.runtime.logging import log

JOB = """
import os, sys, time
from titanlite.runtime.errors import UserError
from titanlite.runtime.job_lock import job_lock
folder, go, wait_s = sys.argv[1], sys.argv[2], float(sys.argv[3])

def say(text):
    os.write(1, f"{text}\\n".encode())  # a line in one piece

say("ready")
while go and not os.path.exists(go):
    time.sleep(0.0005)
try:
    with job_lock(folder, 0, take_over=False, environment=os.environ, wait_s=wait_s):
        say("inside")
        sys.stdin.read()
except UserError as error:
    say(f"refused: {error}")
"""
JOBS = JOB.replace('say("ready")', 'all(os.fork() for _ in range(7))\nsay("ready")').replace(
    'say("inside")', 'say(f"inside {os.getpid()}")'
)
"""Eight of them, which have imported everything when they begin."""


@pytest.fixture(autouse=True)
def _log_reaches_caplog(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level(logging.INFO, logger="titanlite")


def enter(folder: Path, *, take_over: bool = False, wait_s: float = 0.0, **environment: str) -> Any:
    return job_lock(folder, 0, take_over=take_over, environment=environment, wait_s=wait_s)


def owner_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / JOB_LOCK_FILE).read_text()))


def leave(folder: Path, **changes: Any) -> None:
    """A lock file as of a job of this process, with changes: such as of another host."""
    environment = {
        "TORCHELASTIC_RUN_ID": changes.pop("torchrun_id", "none"),
        "SLURM_JOB_ID": changes.pop("slurm_job_id", ""),
        "SLURM_RESTART_COUNT": changes.pop("slurm_restarts", ""),
    }
    with job_lock(folder, 0, take_over=False, environment=environment):
        owner = owner_in(folder)
    (folder / JOB_LOCK_FILE).write_text(json.dumps({**owner, **changes}))


@contextmanager
def job(folder: Path, *, go: str = "", wait_s: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    """A process that takes the folder and stays until its stdin is closed."""
    command = [sys.executable, "-c", JOB, str(folder), go, str(wait_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert says(process) == "ready"
            yield process
        finally:
            process.kill()


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def finish(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == 0


def test_the_file_says_who_while_the_job_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "new" / "folder"
    with enter(folder, TORCHELASTIC_RUN_ID="launch", SLURM_JOB_ID="17", SLURM_RESTART_COUNT="2"):
        owner = owner_in(folder)
        assert (owner["pid"], owner["host"]) == (os.getpid(), os.uname().nodename)
        assert (owner["torchrun_id"], owner["slurm_job_id"], owner["slurm_restarts"]) == ("launch", "17", 2)
        assert [path.name for path in folder.iterdir()] == [JOB_LOCK_FILE]
    assert list(folder.iterdir()) == []
    assert not caplog.records


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, UserError])
def test_the_folder_is_free_after_a_failed_job_too(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), enter(tmp_path):
        raise error("failed")
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_leave_the_disk_alone(tmp_path: Path) -> None:
    with job_lock(tmp_path / "new", 1, take_over=False, environment={}):
        assert list(tmp_path.iterdir()) == []


def test_a_second_job_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with job(tmp_path) as first:
        assert says(first) == "inside"
        for take_over in (False, True):
            with pytest.raises(UserError) as refusal, enter(tmp_path, take_over=take_over):
                pass
            message = str(refusal.value)
            assert f"job.dump_folder: {tmp_path} is in use by another job: process {first.pid} on host " in message
            assert ", since 2" in message
            assert message.endswith("; give another folder with --job.dump_folder, or end that job first")
        finish(first)
        with enter(tmp_path):
            assert owner_in(tmp_path)["pid"] == os.getpid()


def test_the_first_job_keeps_its_folder_when_others_were_refused(tmp_path: Path) -> None:
    with job(tmp_path) as first:
        assert says(first) == "inside"
        before = (tmp_path / JOB_LOCK_FILE).read_bytes()
        with job(tmp_path) as second:
            assert says(second).startswith("refused: job.dump_folder: ")
            finish(second)
        assert (tmp_path / JOB_LOCK_FILE).read_bytes() == before
        assert [path.name for path in tmp_path.iterdir()] == [JOB_LOCK_FILE]
        finish(first)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_owner_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, reaped: bool) -> None:
    with job(tmp_path) as first:
        assert says(first) == "inside"
        first.send_signal(signal.SIGKILL)
        if reaped:
            first.wait()
        else:
            os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        with enter(tmp_path):
            assert owner_in(tmp_path)["pid"] == os.getpid()
    (record,) = caplog.records
    assert f"process {first.pid} on host" in record.getMessage()
    assert record.getMessage().endswith("has ended without leaving its folder; taken over")
    assert list(tmp_path.iterdir()) == []


def test_an_owner_that_ends_a_little_later_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the ranks of a launcher that was killed: they end a little after it."""
    with job(tmp_path) as first:
        assert says(first) == "inside"
        with job(tmp_path, wait_s=30.0) as second:
            time.sleep(0.3)
            first.kill()
            assert says(second) == "inside"
            start = time.monotonic()
            with pytest.raises(UserError, match="in use by another job"), enter(tmp_path, wait_s=0.4):
                pass
            assert 0.4 <= time.monotonic() - start < 10
            finish(second)
    assert [record.getMessage().rpartition("; ")[2] for record in caplog.records] == ["waiting 0 s for it to end"]


def test_a_pid_that_another_process_has_now_is_no_owner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with job(tmp_path / "elsewhere") as other:
        leave(tmp_path, pid=other.pid, process_start="1")
        with enter(tmp_path):
            pass
    assert "has ended" in caplog.text


def test_an_owner_whose_start_is_hidden_lives(tmp_path: Path) -> None:
    leave(tmp_path, pid=1, process_start="")
    with pytest.raises(UserError, match="is in use by another job: process 1 on host"), enter(tmp_path):
        pass


def test_one_process_cannot_have_a_folder_twice(tmp_path: Path) -> None:
    with enter(tmp_path):
        start = time.monotonic()
        with pytest.raises(UserError, match="in use by another job"), enter(tmp_path, wait_s=30.0):
            pass
        assert time.monotonic() - start < 10
        with enter(tmp_path / "another"):
            pass
        assert owner_in(tmp_path)["pid"] == os.getpid()
    for _ in range(2):
        with enter(tmp_path):
            pass


ELSEWHERE: list[dict[str, Any]] = [{"host": "other"}, {"pid_namespace": "pid:[7]"}, {"host": "other", "boot": "b"}]


@pytest.mark.parametrize("where", ELSEWHERE)
def test_an_owner_elsewhere_needs_a_word(
    tmp_path: Path, where: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path, **where, slurm_job_id="17")
    for environment in ({}, {"TORCHELASTIC_RUN_ID": "none"}, {"SLURM_JOB_ID": "17"}, {"SLURM_JOB_ID": "18"}):
        with pytest.raises(UserError, match=r"Slurm job 17; that cannot be told from .*--job\.take_over true"):
            enter(tmp_path, wait_s=30.0, **environment).__enter__()
    assert not caplog.records
    with enter(tmp_path, take_over=True):
        assert owner_in(tmp_path)["pid_namespace"] != "pid:[7]"
        assert owner_in(tmp_path)["host"] != "other"
    (record,) = caplog.records
    assert "as job.take_over says" in record.getMessage()


@pytest.mark.parametrize("where", ELSEWHERE)
@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"torchrun_id": "a"}, {"TORCHELASTIC_RUN_ID": "a"}),
        ({"slurm_job_id": "17"}, {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}),
        ({"slurm_job_id": "17", "slurm_restarts": "1"}, {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}),
    ],
)
def test_the_same_launch_on_another_host_goes_on(
    tmp_path: Path, where: dict[str, Any], before: dict[str, Any], now: dict[str, str]
) -> None:
    leave(tmp_path, **where, **before)
    with enter(tmp_path, **now):
        pass


def test_the_same_launch_does_not_take_from_an_owner_that_is_seen_to_live(tmp_path: Path) -> None:
    leave(tmp_path, torchrun_id="a", pid=os.getppid(), process_start="")
    with pytest.raises(UserError, match="is in use"), enter(tmp_path, take_over=True, TORCHELASTIC_RUN_ID="a"):
        pass


def test_a_host_that_was_started_again_has_no_owner(tmp_path: Path) -> None:
    leave(tmp_path, boot="before", pid_namespace="pid:[7]")
    with enter(tmp_path):
        pass


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"\0" * len(content),
        lambda content: b"[]" + content[:0],
        lambda content: content.replace(b'"pid": ', b'"pid": 9999999999'),
        lambda content: content.replace(b'"pid": ', b'"pid": -'),
        lambda content: content.replace(b'"boot": "', b'"boot": 1, "more": "'),
    ],
)
def test_a_damaged_file_is_of_an_unknown_owner(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path)
    path = tmp_path / JOB_LOCK_FILE
    path.write_bytes(damage(path.read_bytes()))
    damaged = path.read_bytes()
    with pytest.raises(UserError, match=r"job\.lock says that a job uses .* damaged; .*--job\.take_over true"):
        enter(tmp_path, wait_s=30.0).__enter__()
    assert path.read_bytes() == damaged
    with enter(tmp_path, take_over=True):
        assert owner_in(tmp_path)["pid"] == os.getpid()
    assert "taken over from an unknown job" in caplog.text


@pytest.mark.parametrize("name", [JOB_LOCK_FILE, JOB_LOCK_FILE + ".new"])
def test_what_a_starter_leaves_that_was_killed_before_it_had_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with enter(tmp_path):
        assert owner_in(tmp_path)["pid"] == os.getpid()


@pytest.mark.parametrize("meanwhile", ["another", "nothing", "damaged"])
def test_only_what_is_ours_is_removed(tmp_path: Path, meanwhile: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / JOB_LOCK_FILE
    with enter(tmp_path):
        if meanwhile == "another":
            path.write_text(json.dumps({**owner_in(tmp_path), "token": "another", "host": "other"}))
        elif meanwhile == "damaged":
            path.write_text("?")
        else:
            path.unlink()
    assert path.exists() == (meanwhile != "nothing")
    assert ("was taken over meanwhile" in caplog.text) == (meanwhile != "nothing")


def test_a_process_forked_from_the_owner_does_not_free_its_folder(tmp_path: Path) -> None:
    program = JOB.replace("sys.stdin.read()", "os.fork() or sys.exit()\n        os.wait(); sys.stdin.read()")
    command = [sys.executable, "-c", program, str(tmp_path), "", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert [says(process), says(process)] == ["ready", "inside"]
        time.sleep(0.3)
        assert owner_in(tmp_path)["pid"] == process.pid
        finish(process)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("before", ["nothing", "killed", "empty"])
def test_of_many_jobs_that_start_at_once_one_has_the_folder(tmp_path: Path, before: str) -> None:
    for attempt in range(3):
        folder, go = tmp_path / f"folder{attempt}", tmp_path / f"go{attempt}"
        if before == "killed":
            leave(folder, process_start="1")
        elif before == "empty":
            folder.mkdir()
            (folder / JOB_LOCK_FILE).touch()
        command = [sys.executable, "-c", JOBS, str(folder), str(go), "0"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as jobs:
            try:
                assert [says(jobs) for _ in range(8)] == ["ready"] * 8
                go.touch()
                *refused, winner = sorted((says(jobs) for _ in range(8)), key=lambda line: line.startswith("inside "))
                pid = int(winner.removeprefix("inside "))
                assert all(answer.startswith("refused: ") and f"process {pid} on" in answer for answer in refused)
                assert owner_in(folder)["pid"] == pid
            finally:
                go.touch()
                jobs.communicate()  # until the last of them has ended
        assert list(folder.iterdir()) == []


USERS = """
import os, random, sys, time
from titanlite.runtime.errors import UserError
from titanlite.runtime.job_lock import job_lock
folder, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
rng, uses, end = random.Random(seed), 0, time.monotonic() + seconds
while time.monotonic() < end:
    dies, pause_s = rng.random() < 0.5, rng.random() * 0.003
    child = os.fork()
    if child == 0:
        try:
            with job_lock(folder, 0, take_over=False, environment={}, wait_s=0):
                os.close(os.open(folder + ".used", os.O_CREAT | os.O_EXCL))  # fails where another is inside
                time.sleep(pause_s)
                os.unlink(folder + ".used")
                if dies:
                    os._exit(7)
            os._exit(7)
        except UserError:
            os._exit(0)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 7):
        sys.exit(1)
    uses += code == 7
print(uses)
"""


@pytest.mark.parametrize("seconds", [1.0, pytest.param(30.0, marks=pytest.mark.soak)])
def test_no_two_jobs_are_ever_inside_at_once(seconds: float, tmp_path: Path) -> None:
    """Six starters again and again: some leave in order, some die inside, some are refused."""
    commands = [[sys.executable, "-c", USERS, str(tmp_path / "folder"), str(seed), str(seconds)] for seed in range(6)]
    users = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [user.communicate()[0] for user in users]
    assert [user.returncode for user in users] == [0] * 6, outputs
    assert sum(map(int, outputs)) > 6, outputs


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with enter(tmp_path), pytest.raises(UserError, match="in use by another job"), enter(tmp_path):
        pass
    assert "has no file locks" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_stays_locked_is_an_error_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_lock_module, "GUARD_S", 0.1)
    with (tmp_path / JOB_LOCK_FILE).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process keeps .*job\.lock locked"), enter(tmp_path):
            pass


def test_what_cannot_be_written_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"job\.dump_folder: .*file is a file, not a folder"), enter(tmp_path / "file"):
        pass

    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fsync)
        with pytest.raises(
            UserError, match=r"cannot read and write .*job\.lock: No space left on device; give another"
        ):
            enter(tmp_path).__enter__()
    with enter(tmp_path):  # and the folder has no owner after it
        pass


def test_a_removal_that_fails_does_not_hide_what_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unlink(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(ValueError, match="the cause"), enter(tmp_path):
        raise ValueError("the cause")
    assert "could not be removed" in caplog.text


def test_a_system_without_proc_asks_ps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path != "/proc/self/stat" and real(path))
    with job(tmp_path / "elsewhere") as other:
        start = job_lock_module._process_start(other.pid)
        assert start
        assert len(start.split()) == 5  # Fri Nov 20 15:47:00 2026
        assert job_lock_module._process_start(other.pid) == start
        leave(tmp_path, pid=other.pid, process_start=start)
        with pytest.raises(UserError, match="is in use by another job"), enter(tmp_path):
            pass
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert job_lock_module._process_start(other.pid) is None
        with enter(tmp_path):
            pass
