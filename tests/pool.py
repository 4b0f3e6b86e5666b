"""Pools of ranks that serve many test cases: forked once per test run, reset after each case, ended if a case fails.

`run_ranks` has the contract of titanlite.ranks.launch.run_ranks, but reuses processes for 1, 2 and 4 ranks.
"""

import faulthandler
import gc
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor.debug as dtensor

from titanlite.ranks import launch
from titanlite.runtime.logging import log

POOL_SIZES = (1, 2, 4)
launch.PRELOAD = (
    *launch.PRELOAD,
    *("titanlite.train", "titanlite.tools.parity.measure", "pytest", "tests.distributed.layouts"),
    *("tests.unsynced", "tests.frozen"),  # in this order
)

_WATCHED = ("titanlite", "torch.nn", "torch.distributed")
"""Packages whose code test cases may replace. Excludes torch.optim, which wraps `step` of its classes on first use."""
_RESET_S = 60.0
_MOST_THREADS = 20
"""Threads per rank above which a pool is closed: gloo's threads outlive their process groups and poll (docs/LOG.md)."""


class Pool:
    """Ranks that wait for cases. The pool closes after a case that fails, hangs, or leaves replaced code or too many
    threads."""

    def __init__(self, world_size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []
        self._world_size = world_size
        self.is_open = True
        context = launch.fork_context()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, self._folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    @property
    def pids(self) -> list[int | None]:
        return [process.pid for process, _ in self._ranks]

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        """Run one case; see run_ranks."""
        try:
            for _, connection in self._ranks:
                connection.send((function, args, timeout_s))
            results = launch.collect(self._ranks, time.monotonic() + timeout_s)
            # after all ranks are done: a rank that leaves its process group early breaks collectives of the others
            for _, connection in self._ranks:
                connection.send("reset")
            if any(launch.collect(self._ranks, time.monotonic() + _RESET_S)):
                self.close()
        except BaseException:
            self.close()
            raise
        return results

    def close(self) -> None:
        self.is_open = False
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._folder.cleanup()


_pools: dict[int, Pool] = {}


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """titanlite.ranks.launch.run_ranks on the pool of that size. Sizes without a pool are forked per call."""
    if world_size not in POOL_SIZES:
        return launch.run_ranks(function, world_size, *args, timeout_s=timeout_s)
    pool = _pools.get(world_size)
    if pool is None or not pool.is_open:
        pool = _pools[world_size] = Pool(world_size)
    return pool.run(function, args, timeout_s)


def close_pools() -> None:
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def _serve(rank: int, world_size: int, folder: str, connection: Connection) -> None:
    threading.Thread(target=launch.end_with_parent, daemon=True).start()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    faulthandler.enable()  # else a crash in native code leaves only an exit code
    gc.freeze()  # exclude the imported modules from garbage collections
    before = _State()
    case = 0
    while True:
        case += 1
        try:
            function, args, timeout_s = connection.recv()
            code = _replaceable_code()
            store = dist.FileStore(f"{folder}/store-{case}", world_size)
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
            message = json.dumps({"result": function(*args)}).encode()
        except BaseException:
            connection.send_bytes(json.dumps({"error": traceback.format_exc(), "time": time.monotonic()}).encode())
            os._exit(1)  # closes the sockets, so that the other ranks fail too
        connection.send_bytes(message)
        connection.recv()
        if dist.is_initialized():
            dist.destroy_process_group()
        before.restore()
        after = _replaceable_code()
        is_spoiled = any(after.get(name) is not value for name, value in code.items()) or _threads() > _MOST_THREADS
        connection.send_bytes(json.dumps({"result": is_spoiled}).encode())


def _threads() -> int:
    """Number of threads of this process, including those of libraries; 0 if unknown."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


class _State:
    """A snapshot of the process state that a case may change."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._folder = os.getcwd()
        self._argv, self._path = sys.argv[:], sys.path[:]
        self._random = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._threads = torch.get_num_threads()
        self._dtype = torch.get_default_dtype()
        self._deterministic = torch.get_deterministic_debug_mode()
        self._cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
        self._signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        self._log = log.level, log.propagate

    def restore(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        sys.argv[:], sys.path[:] = self._argv, self._path
        python, numpy, torchs = self._random
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)
        torch.set_num_threads(self._threads)
        torch.set_default_dtype(self._dtype)
        torch.set_deterministic_debug_mode(self._deterministic)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = self._cudnn
        torch.set_grad_enabled(True)
        torch._dynamo.reset()
        dtensor._clear_sharding_prop_cache()  # its entries refer to the meshes and process groups of this case
        signal.set_wakeup_fd(-1)
        for number, handler in self._signals.items():
            signal.signal(number, handler)
        logging.disable(logging.NOTSET)
        log.handlers.clear()
        log.filters.clear()
        log.setLevel(self._log[0])
        log.propagate = self._log[1]
        gc.enable()
        gc.collect()
        gc.freeze()  # again, since a training loop unfreezes all objects


def _replaceable_code() -> dict[tuple[str, ...], Any]:
    """The functions, classes and methods of the watched packages, by name."""
    found: dict[tuple[str, ...], Any] = {}
    for module_name, module in list(sys.modules.items()):
        if module is None or not f"{module_name}.".startswith(tuple(f"{package}." for package in _WATCHED)):
            continue
        for name, value in list(vars(module).items()):
            if not callable(value):
                continue
            found[module_name, name] = value
            if isinstance(value, type) and value.__module__ == module_name:
                found |= {(module_name, name, key): part for key, part in vars(value).items() if callable(part)}
    return found
