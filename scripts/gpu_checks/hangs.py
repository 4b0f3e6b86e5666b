"""Check 11: what a GPU that hangs stops on its host, and how the process ends."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_checks.device import occupied
from gpu_checks.processes import Call, Outcome, Send, run_calls
from gpu_checks.rows import Emit, Found, SkippedError, WrongError, run_case
from gpu_checks.workload import Setup
from titanlite.ranks.distributed import NCCL_FILE, CommConfig, World, enable_flight_recorder, keep_nccl_records
from titanlite.ranks.message import timeout_of_waiting
from titanlite.ranks.network import connect, init_process_group
from titanlite.runtime.torch_internals import (
    has_static_launcher,
    numbers_of_collectives,
    recorded_collectives,
    set_group_timeout,
)

CHECK = "11 hangs"
BUSY_S = 5.0
LAUNCHES = 3000
"""More than the launches that wait for a GPU in its queue, about 1,000: the next one then waits on the host."""
MOST_GAP_S = 1.0
"""Of a thread that wakes up each PULSE_S: heartbeats that stop for longer would say that the rank hangs."""
PULSE_S = 0.02
TIMEOUT_S = 5.0
HANG_S = 25.0
LOOK_AFTER_S = 2.0
LIMIT_S = 60.0
LAUNCHER = "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER"
WAITS_FOR_RECORDS = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000"}
"""NCCL's watchdog ends a process four times as long after the timeout: 60 s by default, longer than HANG_S."""


def check(emit: Emit, setup: Setup) -> None:
    for launcher, is_static in (("Triton's launcher", False), ("the static launcher", True)):
        name = f"a thread beside a full queue, {launcher}"
        emit(run_case(CHECK, name, partial(thread_runs, setup, is_static)))
    emit(run_case(CHECK, "the timeout of NCCL", partial(nccl_ends, setup)))


def run_one(setup: Setup, call: Call) -> Outcome:
    if setup.device_type == "cpu":
        raise SkippedError("needs CUDA")
    (outcome,) = run_calls([call], setup.device_type, LIMIT_S)
    return outcome


def thread_runs(setup: Setup, is_static: bool) -> Found:
    outcome = run_one(setup, Call(launch_beside, (setup,), {LAUNCHER: str(int(is_static))}))
    if outcome.failure is not None:
        raise WrongError(outcome.failure.strip().splitlines()[-1])
    return judge_thread(outcome.sent[0], is_static)


def launch_beside(send: Send, setup: Setup) -> None:
    """Launch a compiled function while the GPU is busy; sends the longest time without a pulse of a thread."""
    x = torch.zeros(1024, device=setup.device)
    function: Callable[[torch.Tensor], torch.Tensor] = torch.compile(lambda x: x.sin() + 1)
    for _ in range(3):
        function(x)
    occupied(0.1)
    setup.synchronize()
    gaps, ends = [0.0], threading.Event()

    def pulse() -> None:
        last = time.monotonic()
        while not ends.wait(PULSE_S):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=pulse)
    thread.start()
    occupied(BUSY_S)
    begin = time.monotonic()
    for _ in range(LAUNCHES):
        function(x)
    launches_s = time.monotonic() - begin
    time.sleep(2 * PULSE_S)
    ends.set()
    thread.join()
    setup.synchronize()
    send({"gap s": max(gaps), "launches s": launches_s, "is static": has_static_launcher()})


def judge_thread(found: dict[str, Any], is_static: bool) -> Found:
    """That a thread stops by the static launcher is known: the process of the node sees such a rank. It must not stop
    by the other one."""
    if found["is static"] != is_static:
        raise WrongError(f"{LAUNCHER} has no effect")
    text = f"at most {found['gap s']:.2f} s without a pulse; {LAUNCHES} launches took {found['launches s']:.1f} s"
    if found["launches s"] < BUSY_S / 2:
        raise WrongError(f"{text}: they did not wait, so nothing is tested")
    if found["gap s"] > MOST_GAP_S and not is_static:
        raise WrongError(f"{text}: launches hold Python's lock (bound {MOST_GAP_S:g} s)")
    return Found(text, found, measured=is_static)


def nccl_ends(setup: Setup) -> Found:
    folder = Path(setup.folder, "nccl")
    begin = time.monotonic()
    outcome = run_one(setup, Call(wait_in_vain, (setup, str(folder)), WAITS_FOR_RECORDS))
    log = folder / "output"
    output = log.read_text(errors="replace") if log.exists() else ""
    return judge_end(outcome, time.monotonic() - begin, output, sorted(path.name for path in folder.glob("*")))


def wait_in_vain(send: Send, setup: Setup, folder: str) -> None:
    """A collective behind work that takes longer than its timeout. Sends what the flight recorder says meanwhile, and
    at the end its result, which should not come."""
    enable_flight_recorder()
    keep_nccl_records(Path(folder))
    with Path(folder, "output").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    world = World(0, 0, 1, setup.device_type)
    group = init_process_group(world, connect(world, CommConfig()), CommConfig())
    value = torch.ones(1, device=setup.device)
    dist.all_reduce(value, group=group)
    setup.synchronize()
    set_group_timeout(group, timedelta(seconds=TIMEOUT_S), timedelta(seconds=TIMEOUT_S))
    occupied(HANG_S)
    dist.all_reduce(value, group=group)
    time.sleep(LOOK_AFTER_S)
    begin, numbers = time.monotonic(), numbers_of_collectives()
    timeout_s = timeout_of_waiting(recorded_collectives()["nccl"].encode())
    send({"numbers": numbers != "", "timeout s": timeout_s, "answer s": time.monotonic() - begin})
    send({"value": value.item()})


def judge_end(outcome: Outcome, seconds: float, output: str, files: list[str]) -> Found:
    """The watchdog ends the process, with torch's message and records; before that, the flight recorder has a
    collective that has not ended, by which titanlite explains a hang."""
    if not outcome.sent:
        raise WrongError(f"the process failed before: {outcome.failure or 'it sent nothing'}; {last_line(output)}")
    seen = outcome.sent[0]
    if not seen["numbers"] or seen["timeout s"] != TIMEOUT_S:
        raise WrongError(f"the flight recorder has {seen}, not a wait with a timeout of {TIMEOUT_S:g} s")
    if seen["answer s"] > MOST_GAP_S:
        raise WrongError(f"the flight recorder answers after {seen['answer s']:.1f} s, with Python's lock held")
    if len(outcome.sent) > 1 or outcome.failure is None:
        raise WrongError(f"the process waited for {HANG_S:g} s: NCCL's timeout of {TIMEOUT_S:g} s did not end it")
    lines = [line for line in output.splitlines() if "atchdog" in line and "time" in line.lower()]
    if not lines:
        raise WrongError(f"{outcome.failure.strip()}, without a word about the timeout: {last_line(output)}")
    if not any(name.startswith(NCCL_FILE) for name in files):
        raise WrongError(f"{outcome.failure.strip()}; no file {NCCL_FILE}* but {', '.join(files) or 'none'}")
    return Found(f"{outcome.failure.strip()} after {seconds:.0f} s with its start: {lines[0][:160]}", {"s": seconds})


def last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:160] if lines else "no output"
