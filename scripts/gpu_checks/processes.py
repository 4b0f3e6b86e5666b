"""Functions in processes of their own, with a time limit: a crash or a hang of one is a result like others."""

import json
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from typing import Any

from titanlite.runtime.launch import end_with_parent, fork_context

LATE_S = 3.0
"""Time that the other processes have to end after one of them has failed."""

Send = Callable[[Any], None]
"""Sends a JSON value to the process that waits for the results."""


@dataclass(frozen=True)
class Call:
    """A module-level function to be called as function(send, *args), with these environment variables."""

    function: Callable[..., None]
    args: tuple[Any, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a call has sent, and why it did not end as it should; None if it did."""

    sent: list[Any] = field(default_factory=list)
    failure: str | None = None


def process_context(device_type: str) -> SpawnContext | ForkServerContext:
    """The way to start processes. On CUDA a new interpreter each: torch may touch the driver while it is imported, and
    a process that is forked after that cannot use the GPU."""
    return fork_context("titanlite.train") if device_type == "cpu" else multiprocessing.get_context("spawn")


def run_calls(
    calls: Sequence[Call],
    device_type: str,
    limit_s: float,
    receive: Callable[[int, Any], None] = lambda _index, _value: None,
    *,
    depend: bool = False,
) -> list[Outcome]:
    """Run the calls at the same time; returns what became of each.

    receive(index of the call, value): called for every value as soon as it is sent. depend: whether the calls wait for
    one another, as ranks do: if one fails, the others are stopped after a few seconds.
    """
    context = process_context(device_type)
    deadline = time.monotonic() + limit_s
    outcomes = [Outcome() for _ in calls]
    processes: list[SpawnProcess | ForkServerProcess] = []
    receivers: dict[Connection, int] = {}
    try:
        for index, call in enumerate(calls):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(call.function, call.args, dict(call.environment), sender))
            process.start()
            sender.close()
            processes.append(process)
            receivers[receiver] = index
        while receivers:
            ready = wait(list(receivers), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                index = receivers[connection]
                outcome = outcomes[index]
                try:
                    kind, value = json.loads(connection.recv_bytes())
                except EOFError:
                    processes[index].join(LATE_S)  # sets the exit code
                    kind, value = "error", f"the process ended with code {processes[index].exitcode}"
                if kind == "value":
                    outcome.sent.append(value)
                    receive(index, value)
                    continue
                del receivers[connection]  # not at the end of the process, which may hang
                processes[index].join(LATE_S)
                if kind == "error":
                    outcome.failure = value
                    deadline = min(deadline, time.monotonic() + LATE_S) if depend else deadline
        for index in receivers.values():
            outcomes[index].failure = f"did not end within {limit_s:.0f} s"
        return outcomes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(function: Callable[..., None], args: tuple[Any, ...], environment: dict[str, str], sender: Connection) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.update(environment)

    def send(kind: str, value: Any) -> None:
        sender.send_bytes(json.dumps([kind, value]).encode())

    try:
        function(lambda value: send("value", value), *args)
    except BaseException:
        send("error", traceback.format_exc())
    else:
        send("ended", None)
    finally:
        sender.close()
