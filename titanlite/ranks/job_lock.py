"""Lock of the dump folder: one job at a time writes into it.

`job.lock` names the owner of the folder: the process of rank 0. Whether the owner still runs is checked by its pid and
start time, so a killed job frees the folder without cleanup, on file systems without locks as well. A system lock
(flock) on the file lets one starting job at a time read and replace it; it is held for milliseconds.
"""

import errno
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal

from titanlite.runtime.dump_folder import make_dump_folder
from titanlite.runtime.durability import replace_file
from titanlite.runtime.environment import read_system
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import open_regular, open_to_append
from titanlite.runtime.json_files import JsonError, parse_json
from titanlite.runtime.logging import log
from titanlite.runtime.waiting import waiting

JOB_LOCK_FILE = "job.lock"

# The ranks of a killed launcher end shortly after it; its next start may be faster.
WAIT_S = 10.0
POLL_S = 0.1
# A starting job holds the system lock for milliseconds. After this timeout its process must be stopped (SIGSTOP).
GUARD_S = 30.0
GUARD_POLL_S = 0.01
MAX_BYTES = 2**16
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}

State = Literal["running", "ended", "unknown"]


@dataclass(frozen=True)
class Owner:
    """Process of rank 0 of the job that uses a folder. "" for a value that the system or the launcher lacks."""

    token: str
    """Random id of this use of the folder."""
    host: str
    boot: str
    """The kernel's id of the current boot."""
    pid_namespace: str
    """The namespace of `pid`: a container may have its own."""
    pid: int
    process_start: str
    """Start time of the process, as the system reports it: a later process with the same pid has another."""
    started: str
    """Start time of the job, for messages."""
    torchrun_id: str
    slurm_job_id: str
    slurm_restarts: int

    @property
    def place(self) -> tuple[str, str, str, int, str]:
        """What identifies the process."""
        return self.host, self.boot, self.pid_namespace, self.pid, self.process_start

    def encode(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    def __str__(self) -> str:
        launchers = (("torchrun", self.torchrun_id), ("Slurm job", self.slurm_job_id))
        launched = "".join(f", {launcher} {name}" for launcher, name in launchers if name)
        return f"process {self.pid} on host {self.host}, since {self.started}{launched}"


@contextmanager
def job_lock(
    folder: str | Path, rank: int, *, take_over: bool, environment: Mapping[str, str], wait_s: float = WAIT_S
) -> Iterator[None]:
    """Context in which this job is the only one in `folder`, which is created if missing.

    An owner on this host is checked: if it has ended, the folder is taken over and a line logged; if it runs, it gets
    `wait_s` seconds to end, and then this job is refused, whatever `take_over` is. An owner on another host or in
    another container cannot be checked. It has ended if torchrun restarted the ranks of the same launch, if Slurm
    requeued the same job, or if its host has rebooted; otherwise its state is unknown, and only `take_over`
    (job.take_over) takes the folder.

    Only rank 0 touches the disk; the other ranks must not write before rank 0 is inside.
    environment: the environment variables at program start. Any exception releases the folder too. If the process ends
    without one (os._exit, a signal), the file remains with an owner that has ended.
    Raises UserError if the folder has another owner, or cannot be created, written or read.
    """
    if rank != 0:
        yield
        return
    path = make_dump_folder(folder) / JOB_LOCK_FILE
    mine = this_process(environment)
    try:
        _acquire(path, mine, take_over, wait_s)
    except OSError as error:
        fix = "remove the link" if path.is_symlink() else "fix this"
        raise UserError(
            f"job.dump_folder: cannot read or write {path}: {error.strerror or error}; {fix}, or give another folder "
            "with --job.dump_folder"
        ) from None
    try:
        yield
    finally:
        _release(path, mine)


def require_own(folder: str | Path) -> None:
    """Raise UserError if another job has taken over the folder of this process, which has locked it.

    That happens to a node that is cut off from the others, continues to run, and is taken as lost; and by mistake with
    job.take_over. A lock file that is missing or damaged tells nothing.
    """
    path = Path(folder) / JOB_LOCK_FILE
    try:
        with open_regular(path) as file:
            owner = parse_owner(file.read(MAX_BYTES))
    except OSError:
        return
    if owner is not None and owner.place != this_process({}).place:
        raise UserError(
            f"job.dump_folder: {path.parent} was taken over by {owner}, while this job ran: this job ends, and saves "
            "nothing more"
        )


def _acquire(path: Path, mine: Owner, take_over: bool, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    logged = False
    while True:
        with _locked(path) as content:
            owner = parse_owner(content)
            state = state_of(owner, mine) if owner else "unknown"
            if not content:  # created just now, or by a job that was killed before it wrote its owner
                return _write(path, mine)
            if state == "ended":
                log.info("%s: the job of %s has ended without releasing the folder; taken over", path.parent, owner)
                return _write(path, mine)
            if state == "unknown" and take_over:
                name = owner or "an unknown job"
                log.warning("%s: taken over from %s, because job.take_over = true", path.parent, name)
                return _write(path, mine)
        is_this_process = owner and (owner.pid, owner.process_start) == (mine.pid, mine.process_start)
        if state == "unknown" or is_this_process or time.monotonic() >= deadline:
            raise UserError(_refusal(path, owner, state))
        if not logged:
            log.info("%s is in use by %s; waiting up to %.0f s for it to end", path.parent, owner, wait_s)
            logged = True
        time.sleep(POLL_S)


def _release(path: Path, mine: Owner) -> None:
    """Remove the file if it belongs to this use of the folder. A process forked from the owner leaves it alone."""
    if mine.pid != os.getpid():
        return
    try:
        with _locked(path) as content:
            owner = parse_owner(content)
            if not content or (owner and owner.token == mine.token):
                path.unlink()
            else:
                log.warning("%s was taken over by %s while this job ran", path.parent, owner or "an unknown job")
    except (OSError, UserError) as error:  # harmless: the owner in the file ends with this process
        log.warning("%s could not be removed: %s", path, error)


def state_of(owner: Owner, mine: Owner) -> State:
    """State of the owner, as far as this process can tell."""
    if (owner.host, owner.boot, owner.pid_namespace) == (mine.host, mine.boot, mine.pid_namespace):
        start = _process_start(owner.pid)
        if start is None or (start and owner.process_start and start != owner.process_start):
            return "ended"
        return "running"
    # torchrun ends the ranks of an attempt before it starts the next; Slurm ends a job before it requeues it.
    restarted = mine.torchrun_id == owner.torchrun_id != ""
    requeued = mine.slurm_job_id == owner.slurm_job_id != "" and mine.slurm_restarts > owner.slurm_restarts
    rebooted = mine.host == owner.host and "" != mine.boot != owner.boot != ""
    return "ended" if restarted or requeued or rebooted else "unknown"


def _refusal(path: Path, owner: Owner | None, state: State) -> str:
    another = "give another folder with --job.dump_folder"
    if owner is None:
        return (
            f"job.dump_folder: {path} is damaged, so the job that uses the folder is unknown; {another}, or pass "
            "--job.take_over true if no job uses it"
        )
    in_use = f"job.dump_folder: {path.parent} is in use by another job: {owner}"
    if state == "running":
        return f"{in_use}; {another}, or end that job first"
    return (
        f"{in_use}; host {socket.gethostname()} cannot check whether it still runs: {another}, or end that job and "
        "pass --job.take_over true"
    )


def this_process(environment: Mapping[str, str]) -> Owner:
    torchrun_id = environment.get("TORCHELASTIC_RUN_ID", "")
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    return Owner(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        boot=read_system("/proc/sys/kernel/random/boot_id"),
        pid_namespace=read_system("/proc/self/ns/pid"),
        pid=os.getpid(),
        process_start=_process_start(os.getpid()) or "",
        started=datetime.now().astimezone().isoformat(" ", "seconds"),
        torchrun_id="" if torchrun_id == "none" else torchrun_id,  # torchrun's default, the same for all launches
        slurm_job_id=environment.get("SLURM_JOB_ID", ""),
        slurm_restarts=int(restarts) if restarts.isdecimal() else 0,
    )


def _process_start(pid: int) -> str | None:
    """Start time of a process, in the system's own format; "" if it is hidden, None if the process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # it belongs to another user
    try:
        values = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""  # no /proc, or hidden, or the process has just ended: the next check will tell
    status, threads, start = values[0].decode(), int(values[17]), values[19].decode()
    # A zombie has ended and waits for its parent, unless another of its threads is still blocked in the kernel.
    return None if status in ("Z", "X") and threads <= 1 else start


@contextmanager
def _locked(path: Path) -> Iterator[bytes]:
    """Context with the content of the file at `path`, created if missing, under an exclusive system lock.

    Only the first MAX_BYTES are read. Raises OSError, also for a pipe or device.
    """
    with _open_locked(path) as file:
        file.seek(0)
        yield file.read(MAX_BYTES)


def _open_locked(path: Path) -> BinaryIO:
    deadline = time.monotonic() + GUARD_S
    with waiting(lambda: f"another process, which keeps {path} locked: end it"):
        while True:
            with ExitStack() as unless_locked:
                file = unless_locked.enter_context(open_to_append(path))
                if _try_lock(file, path):
                    unless_locked.pop_all()
                    return file
            if time.monotonic() >= deadline:
                raise UserError(
                    f"job.dump_folder: another process keeps {path} locked; end it, or give another folder with "
                    "--job.dump_folder"
                )
            time.sleep(GUARD_POLL_S)


def _try_lock(file: BinaryIO, path: Path) -> bool:
    """Lock the open file; False if it is locked elsewhere, or another job has removed or replaced it at `path`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _warn_without_locks(path)
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())  # st_nlink == 0 is not reliable on NFS
    except FileNotFoundError:
        return False


@cache
def _warn_without_locks(path: Path) -> None:
    """Log the warning once per file."""
    log.warning("%s: the file system has no locks; jobs that start at the same moment may all run", path)


def _write(path: Path, owner: Owner) -> None:
    replace_file(path, owner.encode())


def parse_owner(content: bytes) -> Owner | None:
    """The owner; None if the content is damaged or has the format of another version."""
    try:
        owner = Owner(**parse_json(content))
    except (JsonError, TypeError):
        return None
    typed = all(type(getattr(owner, field.name)) is field.type for field in fields(owner))
    return owner if typed and 0 < owner.pid < 2**31 else None
