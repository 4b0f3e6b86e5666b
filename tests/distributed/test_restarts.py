"""Ranks and torchruns that are killed: training starts again, by torchrun or by hand, and goes on from its newest
checkpoint to the end of a run that nothing has happened to."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.distributed.program import PATIENCE_S, TORCHRUN, Program, Starter, free_port
from tests.distributed.recovered import (
    SETTINGS,
    Undisturbed,
    assert_as_undisturbed,
    saved_steps,
    start_saving,
    starts,
    trained_steps,
)
from titanlite.checkpoint.folder import published_steps

LOOP = (str(Path(__file__).with_name("stopping_loop.py")),)
START = "Job: "
"""What rank 0 says first, at each start."""
GONE_S = 5.0
RESTARTED_S = 60.0
"""Far below comm.init_timeout_s, after which ranks that have missed each other would try again."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def wait_until(condition: Callable[[], bool], program: Program, within_s: float) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert program.process.poll() is None, program.output
        assert time.monotonic() < end, program.output
        time.sleep(0.01)


def wait_for_steps(program: Program, number: int, starts: int = 1) -> None:
    """Until it has started so many times, and then come so many steps far."""

    def trains() -> bool:
        parts = program.output.split(START)
        return len(parts) > starts and len(re.findall(r" step +\d+/", parts[-1])) >= number

    wait_until(trains, program, PATIENCE_S)


def wait_for_save(program: Program) -> None:
    """Until it is in the middle of one."""
    folder = program.workplace / "out" / "checkpoint"
    wait_until(lambda: any(folder.glob(".step-*.writing")), program, PATIENCE_S)


def wait_for_any_moment(program: Program, random: Random, starts: int = 1) -> None:
    """After one of the first steps of the start that is the last of so many; every other time in a save.

    Never before there is something to go on from, and to choose from.
    """
    wait_for_steps(program, random.randint(1, 4), starts)
    folder = program.workplace / "out" / "checkpoint"
    wait_until(lambda: len(published_steps(folder)) >= 2, program, PATIENCE_S)
    if random.random() < 0.5:
        wait_for_save(program)
    time.sleep(random.uniform(0.0, 0.2))


def assert_finished(program: Program) -> None:
    assert program.wait() == 0, program.output
    assert program.output.count("Done: ") == 1
    assert program.processes() == []


def assert_gone_on_each_time(output: str, kills: int) -> None:
    """Each start from the newest checkpoint, which a killed rank may not have come to tell about."""
    parts = output.split(START)[1:]
    assert len(parts) == kills + 1
    saved, trained = 0, 0
    for part in parts:
        (begin,) = starts(part)
        assert saved <= begin <= trained, output
        assert (begin > 0) == (part is not parts[0]), output
        assert trained_steps(part)[:1] == [begin + 1], output
        saved, trained = max([begin, *saved_steps(part)]), max([begin, *trained_steps(part)])
    assert saved == trained


def survive_killed_ranks(program: Program, kills: int, random: Random) -> None:
    """Kills ranks of a program under --max-restarts, one after the other, at any of its first steps."""
    for kill in range(kills):
        wait_for_any_moment(program, random, starts=kill + 1)
        os.kill(program.ranks()[random.randrange(2)], signal.SIGKILL)
        wait_until(lambda starts=kill + 2: program.output.count(START) == starts, program, RESTARTED_S)
    assert_finished(program)
    assert_gone_on_each_time(program.output, kills)


def survive_killed_launchers(start: Callable[[str], Program], kills: int, random: Random) -> None:
    """`start(name of its output)` starts the program again and again, as a person or a scheduler does.

    The start named "output" is the last one, which nothing happens to.
    """
    output = ""
    for kill in range(kills):
        program = start(f"output{kill}")
        wait_for_any_moment(program, random)
        program.process.kill()
        end = time.monotonic() + GONE_S
        while program.processes():
            assert time.monotonic() < end
            time.sleep(0.02)
        left = files_in(program.workplace / "out")
        program.wait()
        time.sleep(0.5)
        assert files_in(program.workplace / "out") == left
        output += program.output
    program = start("output")
    assert_finished(program)
    assert_gone_on_each_time(output + program.output, kills)
    assert (output + program.output).count("has ended without leaving its folder; taken over") == kills


def files_in(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of the last change of all that is there."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def steps(kills: int) -> int:
    """Enough of them that each kill comes before the end, wherever each start begins."""
    return 10 * kills + 10


def settings(kills: int) -> list[str]:
    """Saves at every other step, so that most of the time a save is under way."""
    return ["--training.steps", str(steps(kills)), "--checkpoint.interval", "2"]


KILLS_OF_A_RANK = [
    pytest.param(1, marks=pytest.mark.soak),  # by default: tests/distributed/test_slurm_script.py
    pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
]
KILLS_OF_TORCHRUN = [
    pytest.param(1, marks=pytest.mark.slow),
    pytest.param(10, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
]


@pytest.mark.parametrize("kills", KILLS_OF_A_RANK)
def test_every_killed_rank_is_recovered_from(
    kills: int, tmp_path: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    restarts = (*TORCHRUN, "--max-restarts", str(kills))
    program = start_saving(start, tmp_path, *settings(kills), launcher=restarts)
    survive_killed_ranks(program, kills, Random(4))
    assert_as_undisturbed(tmp_path / "out", steps(kills), undisturbed(steps(kills)))


@pytest.mark.parametrize("kills", KILLS_OF_TORCHRUN)
def test_every_killed_torchrun_is_recovered_from(
    kills: int, tmp_path: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    command = [*settings(kills), "--checkpoint.async_mode", "async"]

    def begin(name: str) -> Program:
        launcher = None if name == "output" else TORCHRUN
        return start_saving(start, tmp_path, *command, launcher=launcher, name=name)

    survive_killed_launchers(begin, kills, Random(4))
    assert_as_undisturbed(tmp_path / "out", steps(kills), undisturbed(steps(kills)))


def start_nodes(start: Starter, workplace: Path, *arguments: str, kills: int, **options: Any) -> list[Program]:
    """Two torchruns with a rank each, as on two nodes; options: of start_program."""
    rendezvous = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    launcher = (*TORCHRUN[:-1], *rendezvous, "--rdzv-id", "two-nodes", "--max-restarts", str(kills))
    return [
        start(workplace, *arguments, ranks=1, launcher=launcher, name=f"node{node}", **options) for node in range(2)
    ]


def node_of_rank_0(nodes: list[Program], said_by_it: str) -> Program:
    """The rendezvous decides on that, by the torchruns' process numbers."""
    while not any(said_by_it in node.output for node in nodes):
        assert all(node.process.poll() is None for node in nodes), nodes[0].output + nodes[1].output
        time.sleep(0.01)
    return next(node for node in nodes if said_by_it in node.output)


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([0], marks=pytest.mark.soak),
        pytest.param([0, 1, 1, 0, 1, 1, 1, 0], marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_killed_ranks_of_two_nodes_are_recovered_from(
    ranks: list[int], tmp_path: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    nodes = start_nodes(start, tmp_path, *SETTINGS, *settings(len(ranks)), kills=len(ranks))
    first, random = node_of_rank_0(nodes, START), Random(4)
    for kill, rank in enumerate(ranks):
        wait_for_any_moment(first, random, starts=kill + 1)
        os.kill(first.ranks()[rank], signal.SIGKILL)
        wait_until(lambda starts=kill + 2: first.output.count(START) == starts, first, RESTARTED_S)
    assert [node.wait() for node in nodes] == [0, 0], "\n".join(node.output for node in nodes)
    assert first.processes() == []
    assert_gone_on_each_time(first.output, len(ranks))
    assert_as_undisturbed(tmp_path / "out", steps(len(ranks)), undisturbed(steps(len(ranks))))


@pytest.mark.soak  # two nodes by default: tests/distributed/test_slurm_script.py
def test_a_node_that_has_lost_no_rank_starts_again_along_with_the_other(tmp_path: Path, start: Starter) -> None:
    """Its rank notices nothing in its long step. torchrun counts the restart on the node of the killed one only."""
    nodes = start_nodes(start, tmp_path, kills=1, program=LOOP, environment={"STEP_S": "4"})
    step = "step 1/ of rank 0"
    first = node_of_rank_0(nodes, step)
    os.kill(first.ranks()[1], signal.SIGKILL)
    wait_until(lambda: first.output.count(step) == 2, first, RESTARTED_S)
    os.kill(first.ranks()[1], signal.SIGUSR1)
    assert [node.wait() for node in nodes] == [0, 0], "\n".join(node.output for node in nodes)
