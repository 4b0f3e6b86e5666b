"""Run commands in forked processes that note what they touch: files, processes, servers, time and memory.

Python's audit hooks see what Python code does. Libraries in C escape them, so the files of the workplace are also
compared before and after (`files_of`).
"""

import gc
import json
import multiprocessing
import os
import re
import resource
import runpy
import signal
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import torch

from titanlite.__main__ import COMMANDS
from titanlite.ranks.launch import PRELOAD

HANGS_S = 90.0
"""Wall time after which a command counts as hanging, on a busy machine."""
DEADLY_CPU_S = 60
DEADLY_BYTES = 4 * 2**30
"""Limits beyond those that are checked: a hole ends its own process, not the tests."""
LIBRARIES = (
    *("datasets", "fsspec.implementations.http", "huggingface_hub", "jinja2.sandbox", "lm_eval.api.task", "matplotlib"),
    *(
        "lm_eval.evaluator",
        "lm_eval.tasks",
        "matplotlib.pyplot",
        "pyarrow.parquet",
        "s3fs",
        "safetensors.torch",
        "tests.unsynced",
        "tokenizers",
    ),
    "torch.utils.tensorboard",
)

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {  # audit event -> which of its arguments are paths that it changes
    **dict.fromkeys(
        ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.chown", "shutil.rmtree"), (0,)
    ),
    **dict.fromkeys(("os.link", "os.symlink", "shutil.copyfile"), (1,)),
    "os.rename": (0, 1),
}
_BELOW_FOLDER = {"os.mkdir", "os.remove", "os.rmdir"}
"""Events whose last argument may be the descriptor of a folder."""
_PROCESSES = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.forkpty", "pty.spawn"}
_HARMLESS = {("git", "rev-parse"), ("uname", "-p")}
"""Programs that titanlite and the standard library start: the first word, and one of the others."""


@dataclass(frozen=True)
class Case:
    """A command to run. argv: without "titanlite". folder: the current folder. writable: the only folders that it may
    write into. servers: host and port that it may reach."""

    argv: tuple[str, ...]
    folder: Path
    environment: dict[str, str]
    writable: tuple[Path, ...]
    servers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """code: of the exit, negative for a signal; None: it hung. noted: forbidden acts."""

    code: int | None
    output: str
    cpu_s: float
    peak_bytes: int
    noted: list[str] = field(default_factory=list)


class Guard:
    """Forks commands from a process that has imported all modules of all commands. A context.

    The process is a new one: in a fork of the tests' fork server, libraries may have read HF_HOME before.
    """

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()  # its imports take as long as the tests take to write their files
        return self

    @cached_property
    def idle_bytes(self) -> int:
        """Of the process, once it has imported all modules."""
        received = self._connection.recv()
        assert isinstance(received, int)
        return received

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def run(self, case: Case) -> Outcome:
        assert self.idle_bytes
        self._connection.send(case)
        outcome = self._connection.recv()
        assert isinstance(outcome, Outcome), outcome
        return outcome


def files_of(folder: Path, *without: Path) -> dict[str, bytes | str]:
    """Bytes of files, targets of links and kinds of others by path, except below `without`."""
    found: dict[str, bytes | str] = {}
    for path, names, files in os.walk(folder):
        names[:] = [name for name in names if Path(path, name) not in without]
        for name in [*names, *files]:
            each = Path(path, name)
            mode = each.lstat().st_mode
            if stat.S_ISLNK(mode):
                found[str(each)] = f"-> {each.readlink()}"
            elif stat.S_ISREG(mode) and each not in without:
                size = each.stat().st_size  # a bomb has holes
                found[str(each)] = each.read_bytes() if size < 2**24 else f"{size} bytes"
            elif not stat.S_ISREG(mode):
                found[str(each)] = f"mode {mode:o}"
    return found


def _serve(connection: Connection) -> None:
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    for name in [*PRELOAD, *LIBRARIES, *(module for module, _ in COMMANDS.values())]:
        if name == "torch._inductor.compile_fx":  # no case compiles, and it takes 2 s
            continue
        if find_spec(name) is not None:
            import_module(name)
        if name.startswith("titanlite.") and find_spec(f"{name}.__main__" if _is_package(name) else name):
            import_module(f"{name}.__main__" if _is_package(name) else name)
    import_module("tests.frozen")
    gc.collect()
    gc.freeze()  # otherwise each child's collections copy the pages of all modules
    connection.send(_own_bytes(os.getpid()))
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        connection.send(_guarded(case))


def _is_package(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and spec.submodule_search_locations is not None


def _guarded(case: Case) -> Outcome:
    """Fork, run the command, and wait for it."""
    output, notes = case.folder.parent / "output", case.folder.parent / "notes"
    for file in (output, notes):
        file.write_bytes(b"")
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            _enter(case, output)
            _watch(case, os.open(notes, os.O_WRONLY | os.O_APPEND))
            code = _exit_code(case.argv)
        finally:
            os._exit(code)
    status, usage, peak_bytes = _wait(pid)
    code = None if status is None else os.waitstatus_to_exitcode(status)
    noted = list(dict.fromkeys(notes.read_text(errors="replace").splitlines()))
    cpu_s = usage.ru_utime + usage.ru_stime
    return Outcome(code, output.read_bytes().decode(errors="replace"), cpu_s, peak_bytes, noted)


def _wait(pid: int) -> tuple[int | None, resource.struct_rusage, int]:
    """(status, None if it hung; usage; peak of its own memory)."""
    end, peak_bytes = time.monotonic() + HANGS_S, 0
    while time.monotonic() < end:
        peak_bytes = max(peak_bytes, _own_bytes(pid))
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            return status, usage, peak_bytes
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    return None, os.wait4(pid, 0)[2], peak_bytes


def _own_bytes(pid: int) -> int:
    """Resident memory of a process without mapped files, whose pages the system takes back when it needs them."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0  # none: it has ended


def _enter(case: Case, output: Path) -> None:
    os.setsid()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # parity starts ranks
    os.chdir(case.folder)
    os.environ.clear()
    os.environ.update(case.environment)
    tempfile.tempdir = None  # of the guard's environment
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_APPEND)):
        file = os.open(path, flags)
        os.dup2(file, number)
        os.close(file)
    os.dup2(1, 2)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 they stay open
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {
        resource.RLIMIT_AS: pages * os.sysconf("SC_PAGE_SIZE") + DEADLY_BYTES,
        resource.RLIMIT_CPU: DEADLY_CPU_S,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def _exit_code(argv: Sequence[str]) -> int:
    """Run titanlite with these arguments, or `-m MODULE` with those behind it, as Python would."""
    try:
        if argv[0] == "-m":
            sys.argv = list(argv[1:])
            sys.modules.pop(argv[1], None)
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = ["titanlite", *argv]
            warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # the module is imported
            import_module("titanlite.__main__").main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _watch(case: Case, notes: int) -> None:
    """Note what this process does from now on that the case does not allow."""
    roots = [os.path.realpath(each) for each in (*case.writable, "/dev/null", "/dev/shm", "/dev/tty")]

    def note(what: str, *values: Any) -> None:
        os.write(notes, (" ".join([what, *map(repr, values)]) + "\n").encode(errors="replace"))

    def check(event: str, path: Any, *, follows: bool, folder: int = -1) -> None:
        """follows: whether the call follows a link. folder: a descriptor, to which the path is relative."""
        if isinstance(path, int) or path is None:
            return
        base = os.getcwd() if folder == -1 else os.readlink(f"/proc/self/fd/{folder}")
        name = os.path.join(base, os.fsdecode(path))
        parent, last = os.path.split(name)
        real = os.path.realpath(name) if follows else os.path.join(os.path.realpath(parent), last)
        if not any(real == root or real.startswith(root + os.sep) for root in roots):
            note("writes:", event, name)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            if args[2] & _WRITES:
                # os.open has no mode. The flags of an `opener` are not in the event of open(), whose writes through
                # a link are found by files_of.
                check(event, args[0], follows=args[1] is None and not args[2] & os.O_NOFOLLOW)
        elif event in _CHANGES:
            for position in _CHANGES[event]:
                folder = args[-1] if event in _BELOW_FOLDER else -1
                check(event, args[position], follows=False, folder=folder)
        elif event == "subprocess.Popen":
            words = [os.fsdecode(each) for each in ([args[1]] if isinstance(args[1], str) else args[1])]
            if not any(words[0] == first and other in words for first, other in _HARMLESS):
                note("starts:", words)
        elif event in _PROCESSES:
            note("starts:", event, args[:2])
        elif event == "socket.connect" and isinstance(args[1], tuple):
            if f"{args[1][0]}:{args[1][1]}" not in case.servers:
                note("connects to:", args[1])
        elif event == "socket.getaddrinfo" and args[0] not in (None, "localhost", "127.0.0.1"):
            note("looks up:", args[0])

    _replace_popen(note)
    sys.addaudithook(hook)


def _replace_popen(note: Any) -> None:
    """Fork titanlite's own processes in place of starting Python, once their command line is checked: imports take
    seconds."""
    import subprocess

    real = subprocess.Popen

    class Child:
        """The part of Popen that titanlite needs."""

        def __init__(self, words: Sequence[str], env: dict[str, str]) -> None:
            at = words.index("-m")
            self.pid = os.fork()
            if self.pid == 0:
                os.environ.clear()
                os.environ.update(env)
                code = 70
                try:
                    code = _exit_code(words[at:])
                finally:
                    os._exit(code)

        def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def start(command: Any, *args: Any, **options: Any) -> Any:
        words = [command] if isinstance(command, str) else [*map(str, command)]
        if words[0] != sys.executable or "-m" not in words or "stdin" in options:
            return real(command, *args, **options)
        environment = options.get("env") or dict(os.environ)
        if "-P" not in words[: words.index("-m")] and not environment.get("PYTHONSAFEPATH"):
            note("starts with the current folder on its path:", words)
        return Child(words, environment)

    subprocess.Popen = start  # type: ignore[assignment,misc]


def server_of(url: str) -> str:
    """HOST:PORT."""
    return urlsplit(url).netloc


def report(case: Case, outcome: Outcome) -> str:
    """What a failed test shows."""
    return json.dumps({"argv": case.argv, "code": outcome.code, "noted": outcome.noted}, indent=1) + outcome.output
