"""Training that signals end, wherever it is at that moment: saved once, and gone on with as if nothing had happened."""

import json
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.program import TORCHRUN, Program, Starter, rows
from tests.distributed.recovered import (
    SETTINGS,
    Undisturbed,
    assert_as_undisturbed,
    saved_steps,
    start_saving,
    starts,
    stopped,
)
from titanlite.checkpoint.folder import published_steps
from titanlite.runtime.job_lock import JOB_LOCK_FILE

SLOW_TRAIN = (str(Path(__file__).with_name("slow_train.py")),)
PASSING_ON = (*TORCHRUN, "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
STEPS = 40
ASYNC = ("--checkpoint.async_mode", "async")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@dataclass(frozen=True)
class Stop:
    """slow: where the signal comes, see slow_train.py. to: a rank, or None for torchrun."""

    signal: str
    to: int | None
    slow: str
    pattern: str
    """What is said as it begins, on every rank that it begins on."""
    ranks: int
    arguments: tuple[str, ...]


STOPS = [
    Stop("SIGTERM", 1, "first_step", "^slow step on rank", 2, ("--checkpoint.interval", "100")),
    Stop("SIGINT", 1, "data", "^slow data on rank", 1, ("--checkpoint.interval", "100")),
    Stop("SIGTERM", None, "save", "^slow save on rank", 2, ("--checkpoint.interval", "3")),
    Stop("SIGUSR1", 0, "save", "^slow save on rank", 2, ("--checkpoint.interval", "3", *ASYNC)),
]


def stop_at(start: Starter, workplace: Path, stop: Stop, number: int) -> Program:
    program: Program = start_saving(
        start,
        workplace,
        *stop.arguments,
        "--training.steps",
        str(STEPS),
        program=SLOW_TRAIN,
        launcher=PASSING_ON if stop.to is None else None,
        name=f"output{number}",
        environment={"SLOW": stop.slow, "SLOW_S": "2"},
    )
    program.wait_for(rf"(?s)(?:{stop.pattern}.*){{{stop.ranks}}}")
    os.kill(program.process.pid if stop.to is None else program.ranks()[stop.to], signal.Signals[stop.signal])
    code = program.wait()
    assert code == (1 if stop.to is None else 0), program.output
    return program


def test_a_signal_saves_once_and_the_next_start_goes_on_bit_for_bit(
    tmp_path: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    """In the first step, while one rank waits for data, in a save, and beside a save in a thread."""
    last = 0
    for number, stop in enumerate(STOPS):
        program = stop_at(start, tmp_path, stop, number)
        said = program.output
        assert starts(said) == [last], said
        ((name, step),) = stopped(said)
        assert name == stop.signal
        ends = {rank: int(end) for rank, end in re.findall(r"^rank (\d) ended after step (\d+)$", said, re.MULTILINE)}
        assert ends == {"0": step, "1": step}, said
        assert saved_steps(said).count(step) == 1
        in_between = [s for s in saved_steps(said) if s != step]
        assert in_between == ([] if stop.slow != "save" else [s for s in range(last + 1, step) if s % 3 == 0]), said
        if stop.slow == "save":
            events = re.findall("slow save on rank 0|Saved step", said)
            assert events == ["slow save on rank 0", "Saved step"] * len(saved_steps(said)), said  # one at a time
        assert published_steps(tmp_path / "out" / "checkpoint")[-1] == step
        assert [path.name for path in (tmp_path / "out" / "checkpoint").iterdir() if path.name.startswith(".")] == []
        assert [row["step"] for row in rows(tmp_path / "out")] == list(range(1, step + 1))
        assert not (tmp_path / "out" / JOB_LOCK_FILE).exists()
        assert program.processes() == []
        last = step
    program = start_saving(start, tmp_path, "--training.steps", str(STEPS), name="output")
    assert program.wait() == 0, program.output
    assert starts(program.output) == [last]
    assert_as_undisturbed(tmp_path / "out", STEPS, undisturbed(STEPS))


@pytest.mark.soak
def test_a_second_job_is_refused_while_the_first_lives(tmp_path: Path, start: Starter) -> None:
    """Both without torchrun; the first is then ended by a signal to its only process."""
    first = start(tmp_path, *SETTINGS, "--training.steps", "1000000", name="first")
    first.wait_for("step +3/")
    second = start(tmp_path, *SETTINGS, "--training.steps", "1000000", name="second")
    assert second.wait() == 1, second.output
    (process, host) = re.findall(r"in use by another job: process (\d+) on host (\S+), since", second.output)[0]
    assert int(process) == first.process.pid
    assert host
    assert "step 1/" not in second.output
    assert json.loads((tmp_path / "out" / JOB_LOCK_FILE).read_text())["pid"] == first.process.pid
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 0, first.output
    ((name, step),) = stopped(first.output)
    assert name == "SIGTERM"
    assert [row["step"] for row in rows(tmp_path / "out")] == list(range(1, step + 1))
    third = start(tmp_path, *SETTINGS, "--training.steps", str(step + 1), name="third")
    assert third.wait() == 0, third.output
    assert starts(third.output) == [step]
