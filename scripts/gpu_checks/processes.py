"""Functions in processes of their own, with a time limit: a crash or a hang of one is a result like others."""

import json
import math
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

import torch

from titanlite.ranks.launch import end_with_parent, fork_context

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
    """What a call has sent, why it did not end as it should (None if it did), and how long it took."""

    sent: list[Any] = field(default_factory=list)
    failure: str | None = None
    seconds: float = 0.0


def process_context(device_type: str) -> SpawnContext | ForkServerContext:
    """The way to start processes. On CUDA a new interpreter each: torch may touch the driver while it is imported, and
    a process that is forked after that cannot use the GPU."""
    return fork_context("titanlite.train") if device_type == "cpu" else multiprocessing.get_context("spawn")


@dataclass
class Running:
    """A started call. index: of the call. begin, end: start and time limit, in terms of time.monotonic()."""

    index: int
    process: SpawnProcess | ForkServerProcess
    begin: float
    end: float


def run_calls(
    calls: Sequence[Call],
    device_type: str,
    limit_s: float,
    receive: Callable[[int, Any], None] = lambda _index, _value: None,
    *,
    at_once: int | None = None,
    deadline: float = math.inf,
) -> list[Outcome]:
    """Run the calls, each for at most `limit_s` seconds; returns what became of each.

    receive(index of the call, value): called for every value as soon as it is sent. at_once: processes that run at the
    same time. None: all, because they wait for one another, as ranks do: if one fails, the others are stopped after a
    few seconds. deadline: of all calls, in terms of time.monotonic().
    """
    context = process_context(device_type)
    outcomes = [Outcome() for _ in calls]
    waiting = list(range(len(calls)))
    running: dict[Connection, Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < (at_once or len(calls)):
                index = waiting.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                call = calls[index]
                process = context.Process(target=_run, args=(call, device_type, sender))
                process.start()
                sender.close()
                now = time.monotonic()
                running[receiver] = Running(index, process, now, min(now + limit_s, deadline))
            first_end = min(each.end for each in running.values())
            for ready in wait(list(running), timeout=max(0.0, first_end - time.monotonic())):
                assert isinstance(ready, Connection)
                if not _take(ready, running[ready], outcomes, receive):
                    ended = running.pop(ready)
                    outcomes[ended.index].seconds = time.monotonic() - ended.begin
                    _stop(ended.process, LATE_S)
                    if outcomes[ended.index].failure is not None and at_once is None:
                        for each in running.values():
                            each.end = min(each.end, time.monotonic() + LATE_S)
            for receiver in [each for each, call in running.items() if call.end <= time.monotonic()]:
                late = running.pop(receiver)
                outcomes[late.index].seconds = time.monotonic() - late.begin
                outcomes[late.index].failure = f"did not end within {late.end - late.begin:.0f} s"
                _stop(late.process, 0.0)
        return outcomes
    finally:
        for each in running.values():
            _stop(each.process, 0.0)


def _take(
    receiver: Connection, running: Running, outcomes: Sequence[Outcome], receive: Callable[[int, Any], None]
) -> bool:
    """Take a message of a call; returns whether more may come. Its process may still run, and hang, after the last."""
    outcome = outcomes[running.index]
    try:
        kind, value = json.loads(receiver.recv_bytes())
    except EOFError:
        running.process.join(LATE_S)  # sets the exit code
        kind, value = "error", f"the process ended with code {running.process.exitcode}"
    if kind == "value":
        outcome.sent.append(value)
        receive(running.index, value)
    elif kind == "error":
        outcome.failure = value
    return bool(kind == "value")


def _stop(process: SpawnProcess | ForkServerProcess, patience_s: float) -> None:
    """Wait for the end of the process, then kill it."""
    process.join(patience_s)
    process.kill()
    process.join()


def _run(call: Call, device_type: str, sender: Connection) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.update(call.environment)
    if device_type == "cpu":
        torch.set_num_threads(1)  # the processes share the cores

    def send(kind: str, value: Any) -> None:
        sender.send_bytes(json.dumps([kind, value]).encode())

    try:
        call.function(lambda value: send("value", value), *call.args)
    except BaseException:
        send("error", traceback.format_exc())
    else:
        send("ended", None)
    finally:
        sender.close()
