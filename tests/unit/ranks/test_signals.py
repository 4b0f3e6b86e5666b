"""Signals before and after StopRequest.activate. Each case runs in its own process."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from subprocess import PIPE, Popen

import pytest

LATER_S = 0.6
BEGIN = """
import ctypes, os, signal, threading, time
from titanlite.ranks import signals
from titanlite.ranks.failure import end_on_interrupt
from titanlite.ranks.signals import StopRequest
end_on_interrupt()
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # even if the tests run under nohup
request = StopRequest()
def end(number, message):
    os.write(2, message.encode())
    os._exit(128 + number)
assert request.signal is None and request.number == 0
"""
# The main thread blocks inside a library, where Python's handlers do not run; a thread prints the request twice.
WAIT = """
def report():
    while request.signal is None:
        time.sleep(0.01)
    for _ in range(2):
        print(request.signal, request.number, flush=True)
        time.sleep(0.5)
threading.Thread(target=report, daemon=True).start()
print("ready", flush=True)
libc = ctypes.CDLL(None)
until = time.monotonic() + 60
while time.monotonic() < until:
    libc.sleep(60)
"""
ACTIVE = f"{BEGIN}request.activate(lambda: None, end){WAIT}"
QUICK = ACTIVE.replace("request.activate", f"signals.SAME_SIGNAL_S = {LATER_S / 2}; request.activate")
"""Like ACTIVE, with signals LATER_S apart counted as separate requests."""

Start = Callable[..., Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(program): a process that has printed "ready"."""
    started: list[Popen[str]] = []

    def start_program(program: str) -> Popen[str]:
        process = Popen([sys.executable, "-c", program], stdout=PIPE, stderr=PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start_program
    for process in started:
        process.kill()
        process.communicate()


def read_line(process: Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize(
    ("then", "line"),
    [("", "\ntitanlite: interrupted\n"), ("from titanlite.ranks import failure; failure.raise_on_interrupt()", "")],
)
def test_sigterm_ends_process_1_of_a_container_while_it_starts(start: Start, then: str, line: str) -> None:
    """Without a handler, the kernel would drop the signal."""
    handler = "assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL"
    # a signal that arrives just before the main thread enters the library is handled when it returns
    wait = WAIT.replace("libc.sleep(60)", "libc.sleep(1)")
    process = start(f"import os; os.getpid = lambda: 1\n{BEGIN}{then}\n{handler}\n{wait}")
    process.send_signal(signal.SIGTERM)
    assert (process.wait(10), process.communicate()[1]) == (143, line)


def test_a_signal_while_a_line_is_written_ends_the_process() -> None:
    program = """
import sys
from titanlite.ranks.failure import end_process
class Busy:
    def flush(self):
        raise RuntimeError("reentrant call")
sys.stdout = Busy()
end_process(143)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 143


@pytest.mark.slow
def test_the_first_signal_is_recorded_while_the_main_thread_is_in_a_library(start: Start) -> None:
    processes = {signal.Signals[name]: start(ACTIVE) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")}
    for number, process in processes.items():
        process.send_signal(number)
    for number, process in processes.items():
        assert read_line(process) == f"{number.name} {number.value}\n"
    time.sleep(0.7)
    assert [process.poll() for process in processes.values()] == [None] * 4


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once(start: Start) -> None:
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143}
    processes = {second: start(QUICK) for second in codes}
    for process in processes.values():
        process.send_signal(signal.SIGINT)
    time.sleep(LATER_S)
    assert [process.poll() for process in processes.values()] == [None] * 2
    begin = time.monotonic()
    for second, process in processes.items():
        process.send_signal(second)
    for second, process in processes.items():
        _, errors = process.communicate(timeout=30)
        assert process.returncode == codes[second]
        assert errors == f"second {second.name}: exiting at once"
    assert time.monotonic() - begin < 5


@pytest.mark.slow
def test_the_same_signal_received_twice_counts_once(start: Start) -> None:
    process = start(ACTIVE)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.05)
    assert [read_line(process), read_line(process)] == ["SIGINT 2\n"] * 2
    time.sleep(0.7)
    assert process.poll() is None


@pytest.mark.slow
def test_sigusr1_neither_ends_the_process_nor_counts_as_the_first_sigterm(start: Start) -> None:
    """Nor does SIGHUP."""
    process = start(QUICK)
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        process.send_signal(number)
        time.sleep(LATER_S)
    assert read_line(process) == f"SIGUSR1 {signal.SIGUSR1.value}\n"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143


def test_an_ignored_sighup_stays_ignored(start: Start) -> None:
    """As under nohup, which ignores it."""
    process = start(ACTIVE.replace("signal.SIG_DFL", "signal.SIG_IGN"))
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    process.send_signal(signal.SIGUSR1)
    assert read_line(process) == f"SIGUSR1 {signal.SIGUSR1.value}\n"


def test_before_activation_signals_keep_their_effect(start: Start) -> None:
    codes = {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM}
    processes = {number: start(BEGIN + WAIT) for number in codes}
    for number, process in processes.items():
        process.send_signal(number)
    assert {number: process.wait(30) for number, process in processes.items()} == codes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_signal_during_activation_ends_the_process_or_is_recorded(number: signal.Signals, code: int) -> None:
    """A tracer sends the signal before the n-th line of the activation, for each n."""
    program = f"""{BEGIN}
import signal, sys
number, line = int(os.environ["NUMBER"]), int(os.environ["LINE"])
lines = 0
def trace(frame, event, argument):
    global lines
    if event == "line" and frame.f_code.co_name in ("activate", "receive_signals", "leave_to_thread"):
        lines += 1
        if lines == line:
            os.kill(os.getpid(), number)
    return trace
sys.settrace(trace)
request.activate(lambda: None, end)
sys.settrace(None)
until = time.monotonic() + 10
while request.signal is None and lines >= line and time.monotonic() < until:
    time.sleep(0.01)
os._exit(9 if lines < line else 5 if request.signal is None else 7)
"""
    codes = []
    while 9 not in codes:
        environment = {"NUMBER": str(number.value), "LINE": str(len(codes) + 1)}
        codes.append(subprocess.run([sys.executable, "-c", program], env=environment, stderr=PIPE).returncode)
    assert codes == sorted(codes, key=[code, 7, 9].index)
    assert codes.count(7) >= 1
    assert codes.count(code) >= 4
