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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.reference import GLOBAL_BATCH, MODEL, SEQ_LEN, TOKENS
from titanlite.runtime.launch import fork_context

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
        environments = {pid: read(Path(f"/proc/{pid}/environ")) for pid in self.processes()}
        found = {pid: re.search(r"(?:^|\0)RANK=(\d+)\0", text) for pid, text in environments.items()}
        return {int(match[1]): pid for pid, match in found.items() if match}

    def processes(self) -> list[int]:
        """All living processes that were started by this program, whoever is their parent now. Linux only.

        Not for forked programs: /proc shows the environment that a process was started with.
        """
        assert isinstance(self.process, subprocess.Popen)
        mark = f"TITANLITE_CACHE={self.workplace / 'cache'}\0"
        folders = [folder for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
        return [int(folder.name) for folder in folders if mark in read(folder / "environ")]


def read(file: Path) -> str:
    """Nothing where the process has ended or is somebody else's."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


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
    and the first that fails ends the others: the exit code is 1, as torchrun's is.
    """

    def __init__(
        self, ranks: int, command: Sequence[str], folder: Path, environment: dict[str, str], output: Path
    ) -> None:
        self._ranks = ranks
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks else None
        self._ended = False
        self._processes = []
        for rank in range(max(1, ranks)):
            given = environment
            if self._store is not None:
                given = torchrun_environment(rank, ranks, self._store.port) | environment
            process = fork_context().Process(target=_run_program, args=(command, folder, given, output))
            process.start()
            self._processes.append(process)

    def poll(self) -> int | None:
        """The exit code once all processes have ended; None before."""
        codes = [process.exitcode for process in self._processes]
        if self._ranks and any(codes) and not self._ended:
            self.terminate()
        if None in codes:
            return None
        return codes[0] if not self._ranks else int(any(codes))

    def wait(self, timeout: float) -> int:
        """The exit code. Raises TimeoutError."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"processes {[p.pid for p in self._processes]} are still running")
            running = [process.sentinel for process in self._processes if process.exitcode is None]
            wait(running, timeout=max(0.0, end - time.monotonic()))
        return code

    @property
    def pid(self) -> int:
        """Of a program of one process."""
        (process,) = self._processes
        assert process.pid is not None
        return process.pid

    def terminate(self) -> None:
        self._ended = True
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """To all processes that still run."""
        for process in self._processes:
            if process.exitcode is None:
                assert process.pid is not None
                os.kill(process.pid, number)


def torchrun_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets for a rank of one node, where it holds the store itself."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "tests",
    }


def _run_program(command: Sequence[str], folder: Path, environment: dict[str, str], output: Path) -> None:
    """`python COMMAND` in a process that has imported what it needs."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        *((n, output, os.O_WRONLY | os.O_APPEND) for n in (1, 2)),
    ):
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
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
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
