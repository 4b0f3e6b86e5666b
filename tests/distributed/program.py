"""Runs the program as a user does, as processes of its own, and looks at what they say and leave behind.

By default these are forked from the fork server, which has imported everything, and get the environment that torchrun
would give them. Tests of launching, signals and restarts say `launcher=TORCHRUN`, or `PYTHON` for a process alone.
"""

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from tests.distributed.reference import GLOBAL_BATCH, MODEL, SEQ_LEN, TOKENS
from titanlite.runtime.launch import end_with_parent, fork_context

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0  # of a test on a busy machine, where it is not about time
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
PYTHON = ()
TRAIN = ("-m", "titanlite.train")
FAULTY = (str(Path(__file__).with_name("faulty_train.py")),)

CONFIG = "\n".join(
    [
        "[model]",
        *MODEL,
        "[training]",
        "steps = 6",
        f"seq_len = {SEQ_LEN}",
        "local_batch_size = 2",
        f"global_batch_size = {GLOBAL_BATCH}",
        'dtype = "float64"',
        "[optimizer]",
        "lr = 1e-2",
        "[lr_schedule]",
        "warmup_steps = 2",
        "[metrics]",
        "log_freq = 1",
        "[[data.sources]]",
        'kind = "tokens"',
        f'path = "{TOKENS}"',
        "",
    ]
)


Starter = Callable[..., "Program"]


@dataclass
class Program:
    """A started program. workplace: the folder of its files; all processes that it has started know it, too."""

    process: "subprocess.Popen[bytes] | ForkedProcesses"
    workplace: Path
    output_file: Path

    @property
    def output(self) -> str:
        """stdout and stderr of all its processes, in the order of their lines."""
        return self.output_file.read_text(errors="replace")

    def wait_for(self, pattern: str) -> None:
        """Until the output has the pattern."""
        end = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.output, re.MULTILINE):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < end, self.output
            time.sleep(0.02)

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """Ends it and its ranks, if a test did not come to that."""
        if self.process.poll() is None:
            if isinstance(self.process, ForkedProcesses):
                self.process.kill()
            else:
                self.process.terminate()
            self.process.wait(PATIENCE_S)

    def workers(self, doing: str) -> list[int]:
        """Processes of training, torchrun's own left out, that have loaded a library whose name contains `doing`."""
        return [
            pid
            for pid in self.processes()
            if "torch.distributed.run" not in read(Path(f"/proc/{pid}/cmdline"))
            and doing in read(Path(f"/proc/{pid}/maps"))
        ]

    def ranks(self) -> dict[int, int]:
        """Living processes that a launcher has started, by rank."""
        if isinstance(self.process, ForkedProcesses):
            living = self.processes()
            return {rank: pid for rank, pid in enumerate(self.process.pids) if pid in living}
        environments = {pid: read(Path(f"/proc/{pid}/environ")) for pid in self.processes()}
        found = {pid: re.search(r"(?:^|\0)RANK=(\d+)\0", text) for pid, text in environments.items()}
        return {int(match[1]): pid for pid, match in found.items() if match}

    def processes(self) -> list[int]:
        """All living processes that were started by this program, whoever is their parent now. Linux only."""
        folders = [folder for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
        if isinstance(self.process, ForkedProcesses):  # /proc shows the environment of the fork server
            return [int(folder.name) for folder in folders if living_session(folder) in self.process.pids]
        mark = f"TITANLITE_CACHE={self.workplace / 'cache'}\0"
        return [int(folder.name) for folder in folders if mark in read(folder / "environ")]


def read(file: Path) -> str:
    """Nothing where the process has ended or is somebody else's."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def living_session(process: Path) -> int | None:
    """The session of a process, by its folder in /proc; None where it has ended."""
    fields = read(process / "stat").rpartition(")")[2].split()  # state, parent, process group, session, ...
    return int(fields[3]) if fields and fields[0] != "Z" else None


def start_program(
    workplace: Path,
    *arguments: str,
    ranks: int = 0,
    program: Sequence[str] = TRAIN,
    launcher: Sequence[str] | None = None,
    name: str = "output",
    environment: dict[str, str] | None = None,
) -> Program:
    """Starts training, with CONFIG unless the arguments say otherwise.

    ranks: 0 for a process without a launcher. launcher: None forks the processes.

    Outputs go to workplace / "out"; what it says to the file workplace / name.
    """
    config = workplace / "config.toml"
    if "--job.config_file" not in arguments:
        config.write_text(CONFIG)
        arguments = ("--job.config_file", str(config), *arguments)
    if "--job.dump_folder" not in arguments:
        arguments = ("--job.dump_folder", str(workplace / "out"), *arguments)
    return start_command(
        workplace, *arguments, ranks=ranks, program=program, launcher=launcher, name=name, environment=environment
    )


def start_command(
    workplace: Path,
    *arguments: str,
    ranks: int = 0,
    program: Sequence[str] = TRAIN,
    launcher: Sequence[str] | None = None,
    name: str = "output",
    environment: dict[str, str] | None = None,
) -> Program:
    """As start_program, with these arguments alone."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "TITANLITE_CACHE": str(workplace / "cache"),
    }
    environment = clean_environment() | settings | (environment or {})
    output = workplace / name
    output.write_bytes(b"")
    if launcher is None:
        forked = ForkedProcesses(ranks, [*program, *arguments], workplace, environment, output)
        return Program(forked, workplace, output)
    launched = (*launcher, "--nproc-per-node", str(ranks)) if ranks else ()
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *launched, *program, *arguments],
            cwd=workplace,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Program(process, workplace, output)


class ForkedProcesses:
    """A program's processes, forked by the fork server; what a test uses of subprocess.Popen.

    ranks: 0 for one process without a launcher. Else all get torchrun's environment, with a store that outlives them,
    and the first that fails ends the others, as torchrun does it: SIGTERM after TERMINATE_S, SIGKILL after KILL_S more,
    and exit code 1.
    """

    TERMINATE_S = 0.5  # torchrun looks after its ranks every 0.1 s: more time for a rank to tell what it should not
    KILL_S = 30.0

    def __init__(
        self, ranks: int, command: Sequence[str], folder: Path, environment: dict[str, str], output: Path
    ) -> None:
        self._launched = ranks > 0
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks else None
        self._failed_at: float | None = None
        self._terminated = False
        run_id = str(uuid4())
        self._processes = []
        try:
            for rank in range(max(1, ranks)):
                given = environment
                if self._store is not None:
                    given = torchrun_environment(rank, ranks, self._store.port, run_id) | environment
                # A daemon: ended with pytest. It may have processes of its own all the same.
                process = fork_context().Process(
                    target=_run_program, args=(command, folder, given, output), daemon=True
                )
                process.start()
                self._processes.append(process)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """By rank, whether they still run or not."""
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def pid(self) -> int:
        """Of a program of one process."""
        (pid,) = self.pids
        return pid

    def poll(self) -> int | None:
        """The exit code once all processes have ended; None before. Ends all where one has failed."""
        codes = [process.exitcode for process in self._processes]
        if None not in codes:
            return int(any(codes)) if self._launched else codes[0]
        if self._launched and any(codes):
            now = time.monotonic()
            self._failed_at = self._failed_at or now
            if now > self._failed_at + self.TERMINATE_S + self.KILL_S:
                self.kill()
            elif now > self._failed_at + self.TERMINATE_S and not self._terminated:
                self._terminated = True
                self.terminate()
        return None

    def wait(self, timeout: float) -> int:
        """The exit code. Raises TimeoutError."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"processes {self.pids} are still running")
            running = [process.sentinel for process in self._processes if process.exitcode is None]
            wait(running, timeout=0.1)
        return code

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """To all processes that still run."""
        for process in self._processes:
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, number)


def torchrun_environment(rank: int, ranks: int, port: int, run_id: str) -> dict[str, str]:
    """What torchrun sets for a rank of one node, where it holds the store itself."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def _run_program(command: Sequence[str], folder: Path, environment: dict[str, str], output: Path) -> None:
    """`python COMMAND` in a process that has imported what it needs."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_APPEND)):
        file = os.open(path, flags)
        os.dup2(file, number)
        os.close(file)
    os.dup2(1, 2)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 they stay open
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)
    if command[0] == "-m":
        sys.modules.pop(command[1], None)  # it is run anew, as __main__
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")


def clean_environment() -> dict[str, str]:
    """Without what a launcher has set around the tests."""
    launched = torchrun_environment(0, 0, 0, "")
    return {name: value for name, value in os.environ.items() if name not in launched}


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """metrics.jsonl of a dump folder."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def own_tracebacks(output: str) -> int:
    """Tracebacks of ours; torchrun prints one of its own after a failed rank."""
    parts = output.split("Traceback (most recent call last):")[1:]
    return sum(f'File "{REPOSITORY / "titanlite"}{os.sep}' in part for part in parts)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
