"""Start programs as a user does, in separate processes, and inspect their output and files.

By default, processes are forked from the fork server, which has imported all modules, and get torchrun's environment
variables. Tests of launching, signals and restarts pass `launcher=TORCHRUN`, or `PYTHON` for a single process.
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
from ipaddress import ip_address
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import torch
import torch.distributed as dist

from tests.distributed.reference import GLOBAL_BATCH, MODEL, SEQ_LEN, TOKENS
from titanlite.data.bpe import train_bpe
from titanlite.ranks.collector import PROCESS_NAME
from titanlite.ranks.launch import end_with_parent, fork_context
from titanlite.ranks.network import LISTENS

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0  # on a busy machine, for tests that do not measure time
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
PYTHON = ()
TRAIN = ("-m", "titanlite.train")
FAULTY = (str(Path(__file__).with_name("faulty_train.py")),)
TEXT = "the model reads what it is given, and says it again\n"

CONFIG = "\n".join(
    [
        "[model]",
        *MODEL,
        "[training]",
        "steps = 6",
        f"seq_len = {SEQ_LEN}",
        "local_batch_size = 8",  # each microbatch costs collectives
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
    """A started program. workplace: folder of its files, named in the environment of all its processes."""

    process: "subprocess.Popen[bytes] | ForkedProcesses"
    workplace: Path
    output_file: Path

    @property
    def output(self) -> str:
        """stdout and stderr of all processes, in the order of writing."""
        return self.output_file.read_text(errors="replace")

    def wait_for(self, pattern: str) -> None:
        """Wait until the output matches the regular expression."""
        self.wait_until(lambda: re.search(pattern, self.output, re.MULTILINE) is not None)

    def wait_until(self, condition: Callable[[], bool], every_s: float = 0.02) -> None:
        """Wait until the condition holds; fail if the program ends before. every_s: seconds between the checks."""
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < end, self.output
            time.sleep(every_s)

    def wait_until_gone(self, within_s: float) -> None:
        """Wait until no process of this program runs."""
        end = time.monotonic() + within_s
        while left := self.processes():
            self.process.poll()
            assert time.monotonic() < end, left
            time.sleep(0.02)

    def wait(self) -> int:
        """Wait for the program and return its exit code."""
        return self.process.wait(PATIENCE_S)

    def succeed(self) -> Self:
        """Wait for the program, whose exit code must be 0."""
        assert self.wait() == 0, self.output
        return self

    def close(self) -> None:
        """Stop the program and its ranks if they are still running."""
        if self.process.poll() is None:
            if isinstance(self.process, ForkedProcesses):
                self.process.kill()
            else:
                self.process.terminate()
            self.process.wait(PATIENCE_S)

    def workers(self, library: str) -> list[int]:
        """PIDs, except torchrun's, that have loaded a library whose name contains `library`."""
        return [
            pid
            for pid in self.processes()
            if "torch.distributed.run" not in read(Path(f"/proc/{pid}/cmdline"))
            and library in read(Path(f"/proc/{pid}/maps"))
        ]

    def ranks(self) -> dict[int, int]:
        """PIDs of running ranks, by rank."""
        if isinstance(self.process, ForkedProcesses):
            living = self.processes()
            return {rank: pid for rank, pid in enumerate(self.process.pids) if pid in living}
        names = {pid: read(Path(f"/proc/{pid}/comm")).strip() for pid in self.processes()}
        # The process that collects the heartbeats of a node is forked from its first rank.
        pids = [pid for pid, name in names.items() if name != PROCESS_NAME]
        environments = {pid: read(Path(f"/proc/{pid}/environ")) for pid in pids}
        found = {pid: re.search(r"(?:^|\0)RANK=(\d+)\0", text) for pid, text in environments.items()}
        return {int(match[1]): pid for pid, match in found.items() if match}

    def listeners(self) -> list[str]:
        """The addresses on which running processes of this program accept connections, such as 127.0.0.1. Linux."""
        found = []
        for pid in self.processes():
            links = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
            for name in ("tcp", "tcp6"):
                for line in read(Path(f"/proc/{pid}/net/{name}")).splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == LISTENS and f"socket:[{fields[9]}]" in links:
                        words = bytes.fromhex(fields[1].partition(":")[0])  # of 32 bits, in the order of this machine
                        parts = [
                            words[start : start + 4][:: 1 if sys.byteorder == "big" else -1]
                            for start in range(0, len(words), 4)
                        ]
                        found.append(str(ip_address(b"".join(parts))))
        return found

    def processes(self) -> list[int]:
        """PIDs of all running processes started by this program, including orphans. Linux only."""
        folders = [folder for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
        if isinstance(self.process, ForkedProcesses):  # /proc shows the environment of the fork server
            return [int(folder.name) for folder in folders if living_session(folder) in self.process.pids]
        mark = f"TITANLITE_CACHE={self.workplace / 'cache'}\0"
        return [int(folder.name) for folder in folders if mark in read(folder / "environ")]


def read(file: Path) -> str:
    """Text of a file in /proc; empty if the process has ended or belongs to another user."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def living_session(process: Path) -> int | None:
    """Session ID of a process, given its folder in /proc; None if the process has ended."""
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
    """Start training, with CONFIG unless the arguments name a configuration file.

    ranks: 0 for one process without a launcher. launcher: None forks the processes.

    The default dump folder is workplace / "out"; stdout and stderr go to the file workplace / name.
    """
    config = workplace / "config.toml"
    if "--job.config_file" not in arguments:
        if not config.exists():  # programs started before may be reading it
            config.write_text(CONFIG)
        arguments = ("--job.config_file", str(config), *arguments)
    if "--job.dump_folder" not in arguments:
        arguments = ("--job.dump_folder", str(workplace / "out"), *arguments)
    return start_command(
        workplace, *arguments, ranks=ranks, program=program, launcher=launcher, name=name, environment=environment
    )


def write_text(folder: Path) -> tuple[str, ...]:
    """Write text.txt and a tokenizer of it; return the arguments that train on them."""
    (folder / "text.txt").write_text(TEXT * 100)
    train_bpe(iter([TEXT] * 4), 280, folder)
    source = ("--data.sources.0.kind", "text", "--data.sources.0.path", str(folder / "text.txt"))
    return (*source, "--tokenizer.path", str(folder), "--model.vocab_size", "300")


def start_command(
    workplace: Path,
    *arguments: str,
    ranks: int = 0,
    program: Sequence[str] = TRAIN,
    launcher: Sequence[str] | None = None,
    name: str = "output",
    environment: dict[str, str] | None = None,
) -> Program:
    """Like start_program, without default arguments."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "TITANLITE_CACHE": str(workplace / "cache")}
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
    """A program's processes, forked by the fork server. Implements the part of subprocess.Popen that tests use.

    ranks: 0 for one process without a launcher. Otherwise all ranks get torchrun's environment and a store that
    outlives them. If a rank fails, the others are stopped as torchrun does it: SIGTERM after TERMINATE_S, SIGKILL after
    another KILL_S, and exit code 1.
    """

    TERMINATE_S = 0.5  # longer than torchrun's 0.1 s: exposes ranks that print errors they should not print
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
                variables = environment
                if self._store is not None:
                    variables = torchrun_environment(rank, ranks, self._store.port, run_id) | environment
                # A daemon, so it stops with pytest. It can still start child processes.
                process = fork_context().Process(
                    target=_run_program, args=(command, folder, variables, output), daemon=True
                )
                process.start()
                self._processes.append(process)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """PIDs by rank, of running and ended processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def pid(self) -> int:
        """PID of a program with one process."""
        (pid,) = self.pids
        return pid

    def poll(self) -> int | None:
        """Return the exit code, or None while processes are running. Stops all processes if one has failed."""
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
        """Wait for all processes and return the exit code. Raises TimeoutError."""
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
        """Send a signal to all running processes."""
        for process in self._processes:
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, number)


def torchrun_environment(rank: int, ranks: int, port: int, run_id: str) -> dict[str, str]:
    """Variables that torchrun sets for a rank of a single node if its agent hosts the store."""
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
    """Run `python COMMAND` in this process, whose modules are already imported."""
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
        sys.modules.pop(command[1], None)  # runs again, as __main__
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")


def clean_environment() -> dict[str, str]:
    """Environment without the variables of a launcher that started the tests."""
    launched = torchrun_environment(0, 0, 0, "")
    return {name: value for name, value in os.environ.items() if name not in launched}


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Rows of metrics.jsonl in a dump folder."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def own_tracebacks(output: str) -> int:
    """Number of titanlite's tracebacks; torchrun prints another one after a failed rank."""
    parts = output.split("Traceback (most recent call last):")[1:]
    return sum(f'File "{REPOSITORY / "titanlite"}{os.sep}' in part for part in parts)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
