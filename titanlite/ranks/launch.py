"""Run a function on N local ranks, forked from a server process that has imported torch.

Imports dominate the start-up time of a rank: the fork server imports once for all ranks.
"""

import json
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

from titanlite.runtime.errors import UserError
from titanlite.runtime.plugins import load_plugins, loaded_plugins

_LATE_FAILURES_S = 2.0
PRELOAD: tuple[str, ...] = (
    *("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch._dynamo", "torch._inductor.compile_fx"),  # else imported by the first optimizer, the first compiled block
)
"""Modules that the fork server imports, besides the module of the first function."""
MAX_TEMPORARY_BYTES = 107 - len("/pymp-01234567/listener-01234567")
"""Of the path of the folder of temporary files: multiprocessing has a socket below it, for which Linux allows 107."""


class RankError(RuntimeError):
    """At least one rank failed; the text contains its traceback."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks with a gloo process group; returns the results, by rank.

    `function` is a module-level function and returns JSON values; `args` are pickled. RANK, LOCAL_RANK and WORLD_SIZE
    are set. Raises RankError if a rank fails or if `timeout_s` seconds have passed; all ranks are then killed.
    """
    context = fork_context(function.__module__)
    ranks: list[tuple[ForkServerProcess, Connection]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                store_path = os.path.join(folder, "store")
                process = context.Process(
                    target=_run_rank,
                    args=(function, args, loaded_plugins(), rank, world_size, store_path, sender, timeout_s),
                    daemon=True,
                )
                process.start()
                sender.close()
                ranks.append((process, receiver))
            return collect(ranks, time.monotonic() + timeout_s)
        finally:
            for process, receiver in ranks:
                process.kill()
                process.join()
                receiver.close()


def fork_context(*modules: str) -> ForkServerContext:
    """Return the multiprocessing context whose processes are forked from the server.

    The first process starts the server, which imports PRELOAD and `modules` and runs no torch operation. Raises
    UserError if its socket would have too long a path.
    """
    folder = tempfile.gettempdir()
    if (length := len(os.fsencode(folder))) > MAX_TEMPORARY_BYTES:
        raise UserError(
            f"the folder of temporary files, {folder}, has a path of {length} bytes, but the socket of the processes "
            f"needs one of at most {MAX_TEMPORARY_BYTES}: export TMPDIR=/tmp, or another short one"
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *modules])
    return context


def collect(ranks: Sequence[tuple[ForkServerProcess, Connection]], deadline: float) -> list[Any]:
    """Return the result of each rank. Raises RankError with all known failures, the earliest first.

    deadline: in terms of time.monotonic().
    """
    results: dict[int, Any] = {}
    failures: list[tuple[float, str]] = []
    pending = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = pending.pop(receiver)
            try:
                answer = json.loads(receiver.recv_bytes())
            except EOFError:
                ranks[rank][0].join()
                failures.append((0.0, f"rank {rank} ended with exit code {ranks[rank][0].exitcode}"))
                continue
            if "error" in answer:
                failures.append((answer["time"], f"rank {rank} failed:\n{answer['error']}"))
            else:
                results[rank] = answer["result"]
        if failures:  # wait a little for the cause: other ranks may report a lost connection to it first
            deadline = min(deadline, time.monotonic() + _LATE_FAILURES_S)
    if failures:
        raise RankError("\n".join(text for _, text in sorted(failures)))
    if pending:
        raise RankError(f"ranks {sorted(pending.values())} are still running after the time limit")
    return [results[rank] for rank in range(len(ranks))]


def end_with_parent() -> None:
    """Exit this rank once the process that launched it has ended. Runs in a thread."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    plugins: tuple[str, ...],
    rank: int,
    world_size: int,
    store_path: str,
    sender: Connection,
    timeout_s: float,
) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        load_plugins(plugins)
        store = dist.FileStore(store_path, world_size)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        answer = json.dumps({"result": function(*args)})
        failed = False
    except BaseException:
        # The first failed rank answers first: the others fail only after its process has ended and closed its sockets.
        answer = json.dumps({"error": traceback.format_exc(), "time": time.monotonic()})
        failed = True
    sender.send_bytes(answer.encode())
    sender.close()
    # Wait for the other ranks: an early exit would break a collective that another rank is still in.
    if not failed:
        dist.destroy_process_group()
