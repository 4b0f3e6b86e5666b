"""Two jobs on one dump folder: one gets it, whatever the previous owner was and however it ended."""

import errno
import fcntl
import json
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

from titanlite.ranks import job_lock as job_lock_module
from titanlite.ranks.job_lock import JOB_LOCK_FILE, job_lock, require_own
from titanlite.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("propagating_log")

JOB = """
import os, sys, time
from titanlite.runtime.errors import UserError
from titanlite.ranks.job_lock import job_lock
folder, wait_s = sys.argv[1], float(sys.argv[2])

def say(text):
    os.write(1, f"{text}\\n".encode())  # one write per line

say("ready")
try:
    with job_lock(folder, 0, take_over=False, environment=os.environ, wait_s=wait_s):
        say("inside")
        sys.stdin.read()
except UserError as error:
    say(f"refused: {error}")
"""


def enter(folder: Path, *, take_over: bool = False, wait_s: float = 0.0, **environment: str) -> Any:
    return job_lock(folder, 0, take_over=take_over, environment=environment, wait_s=wait_s)


def owner_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / JOB_LOCK_FILE).read_text()))


def leave(folder: Path, **changes: Any) -> None:
    """Write the lock file of a job of this process, with changes such as another host."""
    environment = {
        "TORCHELASTIC_RUN_ID": changes.pop("torchrun_id", "none"),
        "SLURM_JOB_ID": changes.pop("slurm_job_id", ""),
        "SLURM_RESTART_COUNT": changes.pop("slurm_restarts", ""),
    }
    with job_lock(folder, 0, take_over=False, environment=environment):
        owner = owner_in(folder)
    (folder / JOB_LOCK_FILE).write_text(json.dumps({**owner, **changes}))


@contextmanager
def job(folder: Path, *, wait_s: float = 0.0, instead: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that takes the folder and keeps it until its stdin is closed. instead: of reading its stdin."""
    program = JOB.replace("sys.stdin.read()", instead or "sys.stdin.read()")
    command = [sys.executable, "-c", program, str(folder), str(wait_s)]
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


def test_the_file_names_the_owner_while_the_job_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "new" / "folder"
    with enter(folder, TORCHELASTIC_RUN_ID="launch", SLURM_JOB_ID="17", SLURM_RESTART_COUNT="2"):
        owner = owner_in(folder)
        assert (owner["pid"], owner["host"]) == (os.getpid(), os.uname().nodename)
        assert (owner["torchrun_id"], owner["slurm_job_id"], owner["slurm_restarts"]) == ("launch", "17", 2)
        # else an upgrade of titanlite would take a running job's file for a damaged one
        names = ["token", "host", "boot", "pid_namespace", "pid", "process_start", "started"]
        assert list(owner) == [*names, "torchrun_id", "slurm_job_id", "slurm_restarts"]
        assert [path.name for path in folder.iterdir()] == [JOB_LOCK_FILE]
    assert list(folder.iterdir()) == []
    assert not caplog.records


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, UserError])
def test_a_failed_job_frees_the_folder(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), enter(tmp_path):
        raise error("failed")
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_do_not_touch_the_disk(tmp_path: Path) -> None:
    with job_lock(tmp_path / "new", 1, take_over=False, environment={}):
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_second_job_is_refused_and_changes_nothing(tmp_path: Path, is_stopped: bool) -> None:
    with job(tmp_path) as first:
        assert says(first) == "inside"
        if is_stopped:
            first.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, first.pid, os.WSTOPPED)
        before = (tmp_path / JOB_LOCK_FILE).read_bytes()
        for take_over in (False, True):
            message = (
                rf"^job\.dump_folder: {tmp_path} is in use by another job: process {first.pid} on host .*, since 2.*"
                r"; give another folder with --job\.dump_folder, or end that job first$"
            )
            with pytest.raises(UserError, match=message), enter(tmp_path, take_over=take_over):
                pass
        assert (tmp_path / JOB_LOCK_FILE).read_bytes() == before
        assert [path.name for path in tmp_path.iterdir()] == [JOB_LOCK_FILE]
        first.send_signal(signal.SIGCONT)
        finish(first)
        with enter(tmp_path):
            assert owner_in(tmp_path)["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_owner_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, reaped: bool) -> None:
    with job(tmp_path) as first:
        assert says(first) == "inside"
        first.send_signal(signal.SIGKILL)
        if reaped:
            first.wait()
        else:
            os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # it remains a zombie
        with enter(tmp_path):
            assert owner_in(tmp_path)["pid"] == os.getpid()
    (record,) = caplog.records
    assert f"process {first.pid} on host" in record.getMessage()
    assert record.getMessage().endswith("has ended without releasing the folder; taken over")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_job_waits_for_an_owner_that_ends_shortly_after(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as the ranks of a killed launcher: they end shortly after it."""
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
    assert [record.getMessage().rpartition("; ")[2] for record in caplog.records] == ["waiting up to 0 s for it to end"]


def test_one_process_cannot_lock_a_folder_twice(tmp_path: Path) -> None:
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


# State -> (changes of the owner in the file, environment of the new job).
OWNERS: dict[str, list[tuple[dict[str, Any], dict[str, str]]]] = {
    "ended": [
        ({"pid": os.getppid(), "process_start": "1"}, {}),  # a later process has its pid
        ({"boot": "before"}, {}),  # its host was rebooted
        ({"boot": "before", "pid_namespace": "pid:[7]"}, {}),
        *(
            (where | before, now)
            for where in ELSEWHERE
            for before, now in (
                ({"torchrun_id": "a"}, {"TORCHELASTIC_RUN_ID": "a"}),
                ({"slurm_job_id": "17"}, {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}),
                ({"slurm_job_id": "17", "slurm_restarts": "1"}, {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}),
            )
        ),
    ],
    "running": [
        ({"pid": 1, "process_start": ""}, {}),  # its start time is hidden
        ({"pid": os.getppid(), "process_start": "", "torchrun_id": "a"}, {"TORCHELASTIC_RUN_ID": "a"}),
    ],
    "unknown": [
        (where | {"slurm_job_id": "17"}, now)
        for where in ELSEWHERE
        for now in ({}, {"TORCHELASTIC_RUN_ID": "none"}, {"SLURM_JOB_ID": "17"}, {"SLURM_JOB_ID": "18"})
    ],
}


@pytest.mark.parametrize(("state", "owner", "now"), [(state, *row) for state, rows in OWNERS.items() for row in rows])
def test_an_owner_is_checked(
    tmp_path: Path, state: str, owner: dict[str, Any], now: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """One that runs keeps the folder; one whose state is unknown, unless job.take_over is true."""
    leave(tmp_path, **owner)
    refusal = {"running": "is in use", "unknown": r"Slurm job 17; host .* cannot check whether .*--job\.take_over true"}
    wait_s = 30.0 if state == "unknown" else 0.0  # nobody waits for it
    for take_over in (False, True):
        if state == "ended" or (state == "unknown" and take_over):
            with enter(tmp_path, take_over=take_over, **now):
                assert (owner_in(tmp_path)["host"], owner_in(tmp_path)["pid"]) == (os.uname().nodename, os.getpid())
            break
        with pytest.raises(UserError, match=refusal[state]), enter(tmp_path, take_over=take_over, wait_s=wait_s, **now):
            pass
    logged = {"ended": ["has ended without releasing"], "running": [], "unknown": ["because job.take_over = true"]}
    assert len(caplog.messages) == len(logged[state])
    assert all(text in message for text, message in zip(logged[state], caplog.messages, strict=True))


@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_job_whose_folder_was_taken_over_is_told(tmp_path: Path, where: dict[str, Any]) -> None:
    path = tmp_path / JOB_LOCK_FILE
    require_own(tmp_path)
    with enter(tmp_path):
        require_own(tmp_path)
        own = path.read_text()
        path.write_text("?")
        require_own(tmp_path)
        path.write_text(json.dumps({**json.loads(own), **where}))
        with pytest.raises(UserError, match=r"was taken over by process .* while this job ran"):
            require_own(tmp_path)


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
def test_the_owner_of_a_damaged_file_is_unknown(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path)
    path = tmp_path / JOB_LOCK_FILE
    path.write_bytes(damage(path.read_bytes()))
    damaged = path.read_bytes()
    with pytest.raises(UserError, match=r"job\.lock is damaged, so .* is unknown; .*--job\.take_over true"):
        enter(tmp_path, wait_s=30.0).__enter__()
    assert path.read_bytes() == damaged
    with enter(tmp_path, take_over=True):
        assert owner_in(tmp_path)["pid"] == os.getpid()
    assert "taken over from an unknown job" in caplog.text


@pytest.mark.parametrize("name", [JOB_LOCK_FILE, JOB_LOCK_FILE + ".incomplete"])
def test_a_job_that_was_killed_while_it_took_the_folder_does_not_keep_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with enter(tmp_path):
        assert owner_in(tmp_path)["pid"] == os.getpid()


@pytest.mark.parametrize("meanwhile", ["another", "nothing", "damaged"])
def test_release_removes_only_its_own_file(tmp_path: Path, meanwhile: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / JOB_LOCK_FILE
    with enter(tmp_path):
        if meanwhile == "another":
            path.write_text(json.dumps({**owner_in(tmp_path), "token": "another", "host": "other"}))
        elif meanwhile == "damaged":
            path.write_text("?")
        else:
            path.unlink()
    assert path.exists() == (meanwhile != "nothing")
    assert ("while this job ran" in caplog.text) == (meanwhile != "nothing")


def test_a_forked_child_that_exits_does_not_free_the_folder(tmp_path: Path) -> None:
    with job(tmp_path, instead="os.fork() or sys.exit()\n        os.wait(); sys.stdin.read()") as process:
        assert says(process) == "inside"
        time.sleep(0.3)
        assert owner_in(tmp_path)["pid"] == process.pid
        finish(process)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_that_outlives_a_killed_owner_does_not_keep_the_folder(tmp_path: Path) -> None:
    forks = "child = os.fork()\n        say(child) if child else None\n        sys.stdin.read()"
    with job(tmp_path, instead=forks) as owner:
        assert says(owner) == "inside"
        child = int(says(owner))
        owner.kill()
        owner.wait()
        os.kill(child, 0)  # raises if it has ended
        with enter(tmp_path):
            assert owner_in(tmp_path)["pid"] == os.getpid()
            os.kill(child, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_an_owner_with_a_thread_left_counts_as_running(tmp_path: Path) -> None:
    """Such as after a SIGKILL while a writer thread is blocked in the kernel: the main thread is a zombie by then."""
    thread = "import ctypes, threading; threading.Thread(target=sys.stdin.read).start()"
    with job(tmp_path, instead=f"{thread}; ctypes.CDLL(None).pthread_exit(None)") as owner:
        assert says(owner) == "inside"
        stat = Path(f"/proc/{owner.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        for take_over in (False, True):
            with pytest.raises(UserError, match=f"process {owner.pid} on"), enter(tmp_path, take_over=take_over):
                pass
        owner.kill()
        owner.wait()
        with enter(tmp_path):
            pass


USERS = """
import os, random, sys, time
from titanlite.runtime.errors import UserError
from titanlite.ranks.job_lock import job_lock
folder, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
rng, uses, end = random.Random(seed), 0, time.monotonic() + seconds
while time.monotonic() < end:
    dies, pause_s = rng.random() < 0.5, rng.random() * 0.003
    child = os.fork()
    if child == 0:
        try:
            with job_lock(folder, 0, take_over=False, environment={}, wait_s=0):
                os.close(os.open(folder + ".used", os.O_CREAT | os.O_EXCL))  # fails if another job is inside
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


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.0, pytest.param(30.0, marks=pytest.mark.soak)])
def test_two_jobs_are_never_inside_at_once(seconds: float, tmp_path: Path) -> None:
    """Six processes start jobs in a loop: some jobs end normally, some are killed inside, some are refused."""
    commands = [[sys.executable, "-c", USERS, str(tmp_path / "folder"), str(seed), str(seconds)] for seed in range(6)]
    users = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [user.communicate()[0] for user in users]
    assert [user.returncode for user in users] == [0] * 6, outputs
    assert sum(map(int, outputs)) > 6, outputs


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_system_locks_the_owner_is_still_checked(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with job(tmp_path) as first:
        assert says(first) == "inside"
        monkeypatch.setattr(fcntl, "flock", flock)
        for take_over in (False, True):
            with pytest.raises(UserError, match=f"in use by another job: process {first.pid}"):
                enter(tmp_path, take_over=take_over, wait_s=0.3).__enter__()
        first.kill()
        first.wait()
        with enter(tmp_path):
            assert owner_in(tmp_path)["pid"] == os.getpid()
    assert caplog.text.count("the file system has no locks") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("event", ["replaced", "removed"])
def test_a_file_that_changes_between_open_and_lock_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    real, path = fcntl.flock, tmp_path / JOB_LOCK_FILE
    leave(tmp_path, pid=os.getppid(), process_start="")
    owner = path.rename(tmp_path / "owner")
    path.touch()
    changes: list[Callable[[], object]] = [path.unlink if event == "removed" else lambda: owner.replace(path)]

    def flock(file: Any, operation: int) -> None:
        if changes:
            changes.pop()()
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    if event == "replaced":
        with pytest.raises(UserError, match=f"in use by another job: process {os.getppid()} on"), enter(tmp_path):
            pass
    else:
        with enter(tmp_path):
            assert owner_in(tmp_path)["pid"] == os.getpid()


def test_a_file_that_stays_locked_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_lock_module, "GUARD_S", 0.1)
    with (tmp_path / JOB_LOCK_FILE).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process keeps .*job\.lock locked"), enter(tmp_path):
            pass


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("pipe", "not a regular file but a pipe"),
        ("link", "it is a link to '/dev/zero', which is not followed"),
        ("flock", "Input/output error"),
        ("fsync", "No space left on device"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str, reason: str
) -> None:
    path = tmp_path / JOB_LOCK_FILE

    def fail(*_: object) -> None:
        raise OSError(errno.EIO if problem == "flock" else errno.ENOSPC, reason)

    if problem == "pipe":
        os.mkfifo(path)
    elif problem == "link":
        path.symlink_to("/dev/zero")
    with monkeypatch.context() as broken:
        for owner, name in ((fcntl, "flock"), (os, "fsync")):
            if name == problem:
                broken.setattr(owner, name, fail)
        message = rf"job\.dump_folder: cannot read or write .*job\.lock: {reason}; (fix this|remove the link), or give"
        with pytest.raises(UserError, match=message), enter(tmp_path):
            pass
    if problem == "fsync":
        with enter(tmp_path):  # the failed write left no owner
            pass


def test_a_failed_removal_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unlink(_: Path, missing_ok: bool = False) -> None:
        if not missing_ok:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(ValueError, match="the cause"), enter(tmp_path):
        raise ValueError("the cause")
    assert "could not be removed" in caplog.text
