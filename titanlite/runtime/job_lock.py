"""One job per dump folder: a file in it names the process that writes there, while that process lives.

The file says who, it locks nothing by itself. Whether its owner still lives is asked of the system: a killed job frees
its folder without cleaning up. What only one starter at a time may do, judging the file and replacing it, is guarded by
the system's own lock (flock) on that file, for milliseconds.
"""

import errno
import fcntl
import json
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Literal

from titanlite.runtime.dump_folder import make_dump_folder
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log

JOB_LOCK_FILE = "job.lock"

# The ranks of a launcher that was killed end a little after it, and its next start may be faster than that.
WAIT_S = 10.0
POLL_S = 0.1
# Far above the milliseconds for which the file is locked: whoever waits so long waits for a process that is stopped.
GUARD_S = 30.0
GUARD_POLL_S = 0.01
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

State = Literal["lives", "ended", "unknown"]


@dataclass(frozen=True)
class Owner:
    """A process that writes into a folder, as its lock file has it. "" is what the system or the launcher lacks."""

    token: str
    """A random name of this one use of the folder."""
    host: str
    boot: str
    """The kernel's name for the time since the host was started."""
    pid_namespace: str
    """Where `pid` means something: a container has its own."""
    pid: int
    process_start: str
    """When the process began, as the system says it: tells it from a later one with the same pid."""
    started: str
    """When the job began, for people."""
    torchrun_id: str
    slurm_job_id: str
    slurm_restarts: int

    def __str__(self) -> str:
        launchers = (("torchrun", self.torchrun_id), ("Slurm job", self.slurm_job_id))
        launched = "".join(f", {what} {name}" for what, name in launchers if name)
        return f"process {self.pid} on host {self.host}, since {self.started}{launched}"


@contextmanager
def job_lock(
    folder: str | Path, rank: int, *, take_over: bool, environment: Mapping[str, str], wait_s: float = WAIT_S
) -> Iterator[None]:
    """Context in which this job is the only one in `folder`, which is made where it is missing.

    A folder whose owner has ended without leaving it is taken over, with a line in the log. An owner on this host is
    found to live or not; one that lives is given `wait_s` seconds to end. Of one elsewhere (another host, another
    container) it is known only that it has ended where the same torchrun launch has restarted its ranks, or Slurm has
    requeued the same job; else `take_over` (job.take_over) says so. It never takes the folder from an owner that is
    seen to live. A host that was started again since, by its name, has no process left from before.

    Only rank 0 touches the disk; on the others this does nothing, and they must not write before rank 0 is inside.
    environment: as the program found it. Left by any exception as well as at a good end; where the process ends without
    (os._exit, a signal), the file stays behind with an owner that is gone.
    Raises UserError where the folder has another owner, or cannot be made, written or read.
    """
    if rank != 0:
        yield
        return
    path = make_dump_folder(folder) / JOB_LOCK_FILE
    mine = _this_process(environment)
    try:
        _acquire(path, mine, take_over, wait_s)
    except OSError as error:
        raise UserError(
            f"job.dump_folder: cannot read and write {path}: {error.strerror}; give another folder with "
            "--job.dump_folder"
        ) from None
    try:
        yield
    finally:
        _release(path, mine)


def _acquire(path: Path, mine: Owner, take_over: bool, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        with _guarded(path) as file:
            content = file.read()
            owner = _parse(content)
            state = _state_of(owner, mine) if owner else "unknown"
            if not content:  # made just now, or by a starter that was killed before it had the folder
                return _write(path, mine)
            if state == "ended":
                log.info("%s: the job of %s has ended without leaving its folder; taken over", path.parent, owner)
                return _write(path, mine)
            if state == "unknown" and take_over:
                log.warning("%s: taken over from %s, as job.take_over says", path.parent, owner or "an unknown job")
                return _write(path, mine)
        if state == "unknown" or time.monotonic() >= deadline or _is_here(owner, mine):
            raise UserError(_refusal(path, owner, state))
        if not told:
            log.info("%s is in use by %s; waiting %.0f s for it to end", path.parent, owner, wait_s)
            told = True
        time.sleep(POLL_S)


def _release(path: Path, mine: Owner) -> None:
    """Remove the file if it is still of this use of the folder, by this process (not one forked from it)."""
    if mine.pid != os.getpid():
        return
    try:
        with _guarded(path) as file:
            content = file.read()
            owner = _parse(content)
            if not content or (owner and owner.token == mine.token):
                path.unlink()
            else:
                log.warning("%s was taken over meanwhile by %s", path.parent, owner or "an unknown job")
    except (OSError, UserError) as error:  # it tells nobody of more than a process that is gone
        log.warning("%s could not be removed: %s", path, error)


def _is_here(owner: Owner | None, mine: Owner) -> bool:
    """Whether the owner is this very process, in another use: no waiting ends that."""
    return owner is not None and (owner.pid, owner.process_start) == (mine.pid, mine.process_start)


def _state_of(owner: Owner, mine: Owner) -> State:
    """What is known of the owner, from where this process is."""
    if (owner.host, owner.boot, owner.pid_namespace) == (mine.host, mine.boot, mine.pid_namespace):
        start = _process_start(owner.pid)
        if start is None or (start and owner.process_start and start != owner.process_start):
            return "ended"
        return "lives"
    # torchrun ends the ranks of an attempt before it starts the next; Slurm ends a job before it requeues it.
    restarted = mine.torchrun_id == owner.torchrun_id != ""
    requeued = mine.slurm_job_id == owner.slurm_job_id != "" and mine.slurm_restarts > owner.slurm_restarts
    rebooted = mine.host == owner.host and "" != mine.boot != owner.boot != ""
    return "ended" if restarted or requeued or rebooted else "unknown"


def _refusal(path: Path, owner: Owner | None, state: State) -> str:
    another = "give another folder with --job.dump_folder"
    if owner is None:
        return (
            f"job.dump_folder: {path} says that a job uses the folder, and not which one: it is damaged; {another}, or "
            "say with --job.take_over true that no job uses it"
        )
    if state == "lives":
        return f"job.dump_folder: {path.parent} is in use by another job: {owner}; {another}, or end that job first"
    return (
        f"job.dump_folder: {path.parent} is in use by another job, or was when it ended: {owner}; that cannot be told "
        f"from host {socket.gethostname()}: {another}, or end that job and say with --job.take_over true that it has "
        "ended"
    )


def _this_process(environment: Mapping[str, str]) -> Owner:
    torchrun_id = environment.get("TORCHELASTIC_RUN_ID", "")
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    return Owner(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        boot=_first_line("/proc/sys/kernel/random/boot_id"),
        pid_namespace=_link("/proc/self/ns/pid"),
        pid=os.getpid(),
        process_start=_process_start(os.getpid()) or "",
        started=datetime.now().astimezone().isoformat(" ", "seconds"),
        torchrun_id="" if torchrun_id == "none" else torchrun_id,  # torchrun's default, the same for all launches
        slurm_job_id=environment.get("SLURM_JOB_ID", ""),
        slurm_restarts=int(restarts) if restarts.isdecimal() else 0,
    )


def _process_start(pid: int) -> str | None:
    """When the process began, in a form of the system's own; "" where that is hidden, None where no process is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # another user's
    if os.path.exists("/proc/self/stat"):
        try:
            values = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return ""  # hidden, or it has ended this moment: to be asked again
        status, start = values[0].decode(), values[19].decode()
    else:
        status, start = _status_by_ps(pid)
    return None if status[:1] in ("Z", "X") else start  # ended, and its parent has not taken note yet


def _status_by_ps(pid: int) -> tuple[str, str]:
    """State and start of a process where there is no /proc; "" for each where ps cannot say."""
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC0"}
    try:
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except OSError:
        return "", ""
    status, _, start = answer.stdout.strip().partition(" ")
    return status, start.strip()


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


@contextmanager
def _guarded(path: Path) -> Iterator[BinaryIO]:
    """The file at `path`, made empty where there is none; nobody else is in here until the context ends."""
    while True:
        with path.open("a+b") as file:
            _flock(file, path)
            if _is_at(file, path):
                file.seek(0)
                yield file
                return
        # It was removed or replaced while we waited for it: what is there now has a lock of its own.


def _flock(file: BinaryIO, path: Path) -> None:
    deadline = time.monotonic() + GUARD_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"job.dump_folder: another process keeps {path} locked; end it, or give another folder with "
                    "--job.dump_folder"
                ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return log.warning("%s has no file locks: jobs that start at the same moment are not told apart", path)
        time.sleep(GUARD_POLL_S)


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write(path: Path, owner: Owner) -> None:
    """Put the owner in place, whole at any moment, whenever the power is cut."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(json.dumps(asdict(owner), indent=1).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _parse(content: bytes) -> Owner | None:
    """None where the content is no owner, as after a power cut, or by another version."""
    try:
        owner = Owner(**json.loads(content))
    except (ValueError, TypeError):
        return None
    typed = all(type(getattr(owner, field.name)) is field.type for field in fields(owner))
    return owner if typed and 0 < owner.pid < 2**31 else None
