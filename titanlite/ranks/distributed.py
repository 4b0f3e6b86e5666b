"""Rank, device and backend of this process; timeouts of process groups."""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist

from titanlite.runtime.errors import UserError, integer_variable
from titanlite.runtime.settings import Affects, setting
from titanlite.runtime.torch_internals import set_group_timeout

ELASTIC = "TITANLITE_ELASTIC"
"""Environment variable that the launcher sets for ranks whose number may change at a restart: the path of a file, which
a rank writes when all ranks of its attempt are connected."""
_FINISHED = "finished"
_IDLE_POLL_S = 60
RECORDED_COLLECTIVES = 2_000
"""Collectives that torch's flight recorder keeps: about 1 MB as JSON."""
NCCL_FILE = "nccl-rank-"
"""Torch adds the number of the rank."""
NCCL_AFTER_S = 60
"""After a timeout, NCCL ends the process, with a message that blames a rank that waits: the exchanges on gloo, whose
message names the rank that hangs, have their timeouts before."""
MAX_TIMEOUT_S = 604_800
"""A week."""


class ConnectError(UserError):
    """Ranks are not connected."""

    may_pass = True


@dataclass(frozen=True)
class CommConfig:
    """Timeouts of collectives."""

    AFFECTS: ClassVar[Affects] = "nothing"

    init_timeout_s: int = setting(300, least=1, most=MAX_TIMEOUT_S)
    """Timeout in seconds for a collective during start-up, the first step and the first validation, which compile."""
    train_timeout_s: int = setting(100, least=1, most=MAX_TIMEOUT_S)
    """Timeout in seconds for a collective in later steps and validations."""
    save_timeout_s: int = setting(1800, least=1, most=MAX_TIMEOUT_S)
    """Timeout in seconds for a collective while a checkpoint is written or read."""


@dataclass(frozen=True)
class World:
    """The ranks that the launcher assigned. rank and local_rank start at 0; device_type: "cpu" or "cuda".
    local_size: number of ranks that this node's launcher has started."""

    rank: int
    local_rank: int
    size: int
    device_type: str
    local_size: int = 1

    def first(self, size: int) -> "World":
        """The world of the first `size` ranks only, which include this one."""
        return replace(self, size=size, local_size=min(self.local_size, size - self.local_ranks.start))

    @property
    def local_ranks(self) -> range:
        """The ranks of this node: torchrun numbers them in one piece."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)

    @property
    def device(self) -> torch.device:
        return torch.device(self.device_type, self.local_rank) if self.device_type != "cpu" else torch.device("cpu")

    @property
    def backend(self) -> str:
        """torch's backend string. It always includes gloo, used by rank agreement and checkpoints."""
        return "cpu:gloo,cuda:nccl" if self.device_type == "cuda" else "gloo"


def world_from_environment() -> World:
    """Read torchrun's environment variables; without them, return a world of one process. Raises UserError."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    missing = [name for name in names if name not in os.environ]
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if len(missing) == len(names):
        return World(0, 0, 1, device_type)
    remedy = "start with torchrun, which sets all of them, or unset them for a run in one process"
    if missing:
        present = ", ".join(name for name in names if name not in missing)
        raise UserError(f"the environment sets {present} but not {', '.join(missing)}: {remedy}")
    texts = [os.environ[name] for name in names]
    given = ", ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True))
    if not all(text.isdecimal() for text in texts):
        raise UserError(f"the environment sets {given}, but these must be integers from 0: {remedy}")
    rank, local_rank, size = map(int, texts)
    if rank >= size:
        raise UserError(f"the environment sets {given}, but RANK must be below WORLD_SIZE: {remedy}")
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if size > 1 and absent:
        raise UserError(f"the environment sets {given} but not {', '.join(absent)}, the address of rank 0: {remedy}")
    if size > 1:
        integer_variable("MASTER_PORT", 0, least=1, most=65_535)  # connect() reads it
    processes = integer_variable("LOCAL_WORLD_SIZE", local_rank + 1, least=local_rank + 1, most=size)
    if device_type == "cuda" and processes > torch.cuda.device_count():
        raise UserError(
            f"{processes} processes were started on a node with {torch.cuda.device_count()} GPUs: start one process "
            'per GPU, or set CUDA_VISIBLE_DEVICES="" to train on the CPU'
        )
    return World(rank, local_rank, size, device_type, processes)


def wait_until_finished(store: dist.Store) -> None:
    """Wait, as an idle rank, until `note_finished`. Raises UserError if the store is lost."""
    while True:
        try:
            return store.wait([_FINISHED], timedelta(seconds=_IDLE_POLL_S))
        except dist.DistStoreError:
            continue
        except (dist.DistNetworkError, RuntimeError) as error:
            cause = f"{error}".partition("\n")[0]
            raise ConnectError(f"a rank that waits idle has lost the store of the launcher: {cause}") from None


def note_finished(store: dist.Store) -> None:
    """Let the idle ranks end: the run is finished."""
    store.set(_FINISHED, "")


def enable_flight_recorder() -> None:
    """Keep the last collectives in memory, as many as the environment says. Call before the first collective."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED_COLLECTIVES))


def keep_nccl_records(folder: Path) -> None:
    """Let NCCL's watchdog write the last collectives into this folder before it ends a process, and not into the
    temporary files of its node. Call before the first collective."""
    with suppress(OSError):  # what cannot be written is reported by what a run needs
        folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / NCCL_FILE))


def set_timeout(groups: Iterable[dist.ProcessGroup], seconds: int) -> None:
    """Set the timeout of later collectives of these groups."""
    for group in groups:
        set_group_timeout(group, timedelta(seconds=seconds), timedelta(seconds=seconds + NCCL_AFTER_S))
