"""Stop signals to a rank or to torchrun: all ranks stop after the same step. No rank outlives its torchrun."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.program import TORCHRUN, Program, Starter

LOOP = (str(Path(__file__).with_name("stopping_loop.py")),)
FORWARDING = (*TORCHRUN, "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
SIGNALS = ["SIGTERM", "SIGINT", "SIGUSR1"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def start_loop(
    start: Starter, workplace: Path, launcher: tuple[str, ...] | None = FORWARDING, **environment: str
) -> Program:
    program: Program = start(workplace, ranks=2, program=LOOP, launcher=launcher, environment=environment)
    program.wait_for(r"^step 3/ of rank 0")
    program.wait_for(r"^step 3/ of rank 1")
    return program


def stops(program: Program) -> dict[int, tuple[str, int, str]]:
    """Rank -> (signal that it received, last step, signal on which all ranks agreed)."""
    found = re.findall(r"^rank (\d), received (\w+), stopped after step (\d+) by (\w+)$", program.output, re.MULTILINE)
    return {int(rank): (received, int(step), agreed) for rank, received, step, agreed in found}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank"), [("SIGTERM", 0), ("SIGINT", 1), ("SIGUSR1", 1)])
def test_signal_to_one_rank_stops_all_after_the_same_step(name: str, rank: int, tmp_path: Path, start: Starter) -> None:
    program = start_loop(start, tmp_path, launcher=None)
    os.kill(program.ranks()[rank], signal.Signals[name])
    assert program.wait() == 0, program.output
    found = stops(program)
    step = found[0][1]
    assert found == {rank: (name, step, name), 1 - rank: ("none", step, name)}, program.output
    assert program.output.count(f"step {step + 1}/") == 0
    assert program.processes() == []


@pytest.mark.soak  # default suite: test_second_signal_to_torchrun_stops_without_waiting_for_the_save
@pytest.mark.parametrize("name", SIGNALS)
def test_signal_to_torchrun_stops_all_after_the_same_step(name: str, tmp_path: Path, start: Starter) -> None:
    program = start_loop(start, tmp_path, SAVE_S="2")
    os.kill(program.process.pid, signal.Signals[name])
    program.wait()  # torchrun exits with an error code even if its ranks exit with 0
    found = stops(program)
    step = found[0][1]
    assert found == dict.fromkeys(range(2), (name, step, name)), program.output
    assert program.processes() == []


@pytest.mark.soak  # default suite: a second signal to one process, in tests/unit/runtime/test_signals.py
def test_second_signal_to_torchrun_stops_without_waiting_for_the_save(tmp_path: Path, start: Starter) -> None:
    program = start_loop(start, tmp_path, SAVE_S="100")
    program.process.send_signal(signal.SIGINT)
    program.wait_for("^rank 0, received SIGINT, stopped")
    program.wait_for("^rank 1, received SIGINT, stopped")
    found = stops(program)
    assert found == dict.fromkeys(range(2), ("SIGINT", found[0][1], "SIGINT")), program.output
    time.sleep(1.5)
    begin = time.monotonic()
    program.process.send_signal(signal.SIGINT)  # torchrun forwards the second signal as SIGTERM
    program.wait()
    assert time.monotonic() - begin < 15
    assert program.output.count("titanlite: second SIGTERM: exiting at once") == 1
    assert program.processes() == []


@pytest.mark.soak  # default suite: test_restarts.py kills torchruns
@pytest.mark.parametrize("killed", ["torchrun", "its process group"])
def test_ranks_end_with_a_killed_torchrun(killed: str, tmp_path: Path, start: Starter) -> None:
    program = start(tmp_path, "--training.steps", "1000000", ranks=2, launcher=TORCHRUN)
    program.wait_for(r" 3/\d")
    assert len(program.ranks()) == 2
    if killed == "torchrun":
        program.process.kill()
    else:
        os.killpg(program.process.pid, signal.SIGKILL)
    end = time.monotonic() + 5
    while program.processes():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert program.wait() == -signal.SIGKILL
    output = program.output
    time.sleep(0.5)
    assert program.output == output
