"""Runs the program as a user does, as processes of its own, and looks at what they say and leave behind."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed.reference import GLOBAL_BATCH, MODEL, SEQ_LEN, TOKENS

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0  # of a test on a busy machine, where it is not about time
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
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

    process: subprocess.Popen[bytes]
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
        """All living processes that were started by this program, whoever is their parent now. Linux only."""
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
    launcher: Sequence[str] = TORCHRUN,
    name: str = "output",
    environment: dict[str, str] | None = None,
) -> Program:
    """Starts training, with CONFIG unless the arguments say otherwise; ranks: under `launcher`, 0: plain Python.

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
    launcher: Sequence[str] = TORCHRUN,
    name: str = "output",
    environment: dict[str, str] | None = None,
) -> Program:
    """As start_program, with these arguments alone."""
    launched = (*launcher, "--nproc-per-node", str(ranks)) if ranks else ()
    output = workplace / name
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "TITANLITE_CACHE": str(workplace / "cache"),
    }
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *launched, *program, *arguments],
            cwd=workplace,
            env=clean_environment() | settings | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Program(process, workplace, output)


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
