"""Rank, device and backend of this process; rendezvous, process group and timeouts."""

import os
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist

from titanlite.runtime.errors import UserError, integer_variable
from titanlite.runtime.settings import Affects, setting
from titanlite.runtime.torch_internals import set_group_timeout
from titanlite.runtime.waiting import waiting

JOIN_POLL_S = 0.02
ELASTIC = "TITANLITE_ELASTIC"
"""Environment variable that the launcher sets for ranks whose number may change at a restart: the path of a file, which
a rank writes when all ranks of its attempt are connected."""
_FINISHED = "finished"
_IDLE_POLL_S = 60
RECORDED_COLLECTIVES = 512
"""Collectives that torch's flight recorder keeps: several steps of a sharded model, about 0.25 MB as JSON."""
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


def connect(world: World, section: CommConfig) -> dist.Store:
    """Wait for all ranks; returns the store for their process groups. Allocates no device memory. Raises UserError."""
    if world.size == 1:
        return dist.HashStore()
    timeout_s = section.init_timeout_s
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    others = f"the other ranks at {address} (RANK={world.rank} of WORLD_SIZE={world.size}): start all of them; "
    try:
        with waiting(lambda: f"{others}for a run in one process, unset RANK, LOCAL_RANK, WORLD_SIZE"):
            found: tuple[dist.Store, int, int] = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        cause = f"{error}".partition("\n")[0]
        raise ConnectError(
            f"rank {world.rank} cannot connect to the other ranks at {address}, the address of rank 0, within "
            f"comm.init_timeout_s = {timeout_s}: {cause}. Start all ranks, or check MASTER_ADDR and MASTER_PORT"
        ) from None
    store = dist.PrefixStore("titanlite", found[0])
    return dist.PrefixStore(agree_on_attempt(store, world.rank, world.size, timeout_s), store)


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


def agree_on_attempt(store: dist.Store, rank: int, size: int, timeout_s: int) -> str:
    """Return a name that is unique to this attempt and equal on all its ranks. Waits for all ranks. Raises UserError.

    torchrun's store outlives the ranks: after a restart it still has the keys of earlier attempts. No environment
    variable identifies the attempt on all nodes: MASTER_PORT does not change, and TORCHELASTIC_RESTART_COUNT increases
    on the node of a failed rank, but not on a node whose ranks are only restarted with it (rdzv-backend c10d). So rank
    0 draws the name, and each other rank requests it under a random key of its own, which no earlier attempt can have
    answered. Answers to requests of earlier attempts are never read.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"asks/{rank}", own)
        with waiting(lambda: "the answer of rank 0, which may still start: see its log"):
            store.wait([f"answer/{own}"], timedelta(seconds=timeout_s))
        attempt = store.get(f"answer/{own}").decode()
        store.set(f"{attempt}/joined/{rank}", "")
        return attempt
    missing = list(range(1, size))
    deadline = time.monotonic() + timeout_s
    with waiting(lambda: f"{len(missing)} of {size} ranks to connect, such as {missing[:1]}: see their logs"):
        while missing:
            for other in missing:
                if store.check([f"asks/{other}"]):
                    store.set(f"answer/{store.get(f'asks/{other}').decode()}", own)
            missing = [other for other in missing if not store.check([f"{own}/joined/{other}"])]
            if missing and time.monotonic() > deadline:
                raise ConnectError(
                    f"comm.init_timeout_s = {timeout_s}: {len(missing)} of {size} ranks did not connect in time, for "
                    f"example rank {missing[0]}. Check the logs of these ranks, or increase comm.init_timeout_s if "
                    "they start slowly"
                )
            time.sleep(JOIN_POLL_S if missing else 0)
    return own


def enable_flight_recorder() -> None:
    """Keep the last collectives in memory, as many as the environment says. Call before the first collective."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED_COLLECTIVES))


def init_process_group(world: World, store: dist.Store, section: CommConfig) -> dist.ProcessGroup:
    """Initialize torch's default group with all ranks and the start-up timeout."""
    enable_flight_recorder()
    if world.device_type == "cuda":
        torch.cuda.set_device(world.device)
    dist.init_process_group(
        world.backend,
        store=dist.PrefixStore("default", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=section.init_timeout_s),
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def set_timeout(groups: Iterable[dist.ProcessGroup], seconds: int) -> None:
    """Set the timeout of later collectives of these groups."""
    for group in groups:
        set_group_timeout(group, timedelta(seconds=seconds))
