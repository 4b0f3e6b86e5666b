"""Training stopped by signals at different times: it saves once, and the next start resumes bit for bit."""

import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.program import FAULTY, PATIENCE_S, TORCHRUN, Program, Starter, rows
from tests.distributed.recovered import (
    Undisturbed,
    assert_matches_undisturbed,
    saved_steps,
    start_saving,
    starts,
    stopped,
)
from titanlite.checkpoint.folder import published_steps
from titanlite.ranks.job_lock import JOB_LOCK_FILE
from titanlite.tools.report import __main__ as report

FORWARDING = (*TORCHRUN, "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
STEPS = 40
ASYNC = ("--checkpoint.async_mode", "async")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@dataclass(frozen=True)
class Stop:
    """slow: operation during which the signal is sent. to: a rank, or None for torchrun.

    ranks: number of ranks with the operation.
    """

    signal: str
    to: int | None
    slow: str
    ranks: int
    arguments: tuple[str, ...]


STOPS = [
    Stop("SIGTERM", 1, "step", 2, ("--checkpoint.interval", "100")),
    Stop("SIGINT", 1, "data", 1, ("--checkpoint.interval", "100")),
    Stop("SIGTERM", None, "save", 2, ("--checkpoint.interval", "3")),
    Stop("SIGUSR1", 0, "save", 2, ("--checkpoint.interval", "3", *ASYNC)),
]


def stop_at(start: Starter, workplace: Path, stop: Stop, number: int) -> Program:
    program: Program = start_saving(
        start,
        workplace,
        *stop.arguments,
        "--training.steps",
        str(STEPS),
        program=FAULTY,
        launcher=FORWARDING if stop.to is None else None,
        name=f"output{number}",
        environment={"FAULT": f"slow-{stop.slow}", "FAULTY_RANK": "all" if stop.ranks == 2 else "1"},
    )
    program.wait_for(rf"(?s)(?:^slow {stop.slow} on rank.*){{{stop.ranks}}}")
    os.kill(program.process.pid if stop.to is None else program.ranks()[stop.to], signal.Signals[stop.signal])
    code = program.wait()
    assert code == (1 if stop.to is None else 0), program.output
    return program


@pytest.mark.parametrize("stops", [STOPS[3:], pytest.param(STOPS, marks=pytest.mark.soak)], ids=len)
def test_signal_saves_once_and_the_next_start_resumes_bit_for_bit(
    stops: list[Stop], tmp_path: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    """In the first step, while one rank waits for data, during a save, and during a background save."""
    last = 0
    for number, stop in enumerate(stops):
        program = stop_at(start, tmp_path, stop, number)
        output = program.output
        assert starts(output) == [last], output
        ((name, step),) = stopped(output)
        assert name == stop.signal
        ends = {rank: int(end) for rank, end in re.findall(r"^rank (\d) ended after step (\d+)$", output, re.MULTILINE)}
        assert ends == {"0": step, "1": step}, output
        assert saved_steps(output).count(step) == 1
        in_between = [s for s in saved_steps(output) if s != step]
        assert in_between == ([] if stop.slow != "save" else [s for s in range(last + 1, step) if s % 3 == 0]), output
        if stop.slow == "save":
            events = re.findall("slow save on rank 0|Saved step", output)
            assert events == ["slow save on rank 0", "Saved step"] * len(saved_steps(output)), output  # one at a time
        assert published_steps(tmp_path / "out" / "checkpoint")[-1] == step
        assert [path.name for path in (tmp_path / "out" / "checkpoint").iterdir() if path.name.startswith(".")] == []
        assert [row["step"] for row in rows(tmp_path / "out")] == list(range(1, step + 1))
        assert not (tmp_path / "out" / JOB_LOCK_FILE).exists()
        program.wait_until_gone(PATIENCE_S)
        last = step
    program = start_saving(start, tmp_path, "--training.steps", str(STEPS), name="output").succeed()
    assert starts(program.output) == [last]
    assert_matches_undisturbed(tmp_path / "out", STEPS, undisturbed(STEPS))
    report.main([str(tmp_path / "out"), "--out", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text()
    assert page.count("resumed from step ") == len(stops)
    assert f"resumed from step {last}, " in page
    assert f"<dd>{STEPS} of {STEPS}</dd>" in page
