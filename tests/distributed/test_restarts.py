"""Killed ranks and torchruns: after a restart by torchrun or a user, training resumes from the latest checkpoint and
ends like the undisturbed run."""

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
    assert_matches_undisturbed,
    saved_steps,
    start_saving,
    starts,
    trained_steps,
)
from titanlite.checkpoint.folder import published_steps

LOOP = (str(Path(__file__).with_name("stopping_loop.py")),)
START = "Job: "
"""First log line of rank 0 at each start."""
GONE_S = 5.0
RESTARTED_S = 60.0
"""Far below comm.init_timeout_s, after which ranks that missed each other would try again."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def wait_until(condition: Callable[[], bool], program: Program, within_s: float) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert program.process.poll() is None, program.output
        assert time.monotonic() < end, program.output
        time.sleep(0.01)


def wait_for_steps(program: Program, number: int, starts: int = 1) -> None:
    """Wait until the program has started `starts` times and then trained `number` steps."""

    def trains() -> bool:
        parts = program.output.split(START)
        return len(parts) > starts and len(re.findall(r":\d\d +\d+/\d+ ", parts[-1])) >= number

    wait_until(trains, program, PATIENCE_S)


def wait_for_save(program: Program) -> None:
    """Wait until a save is running."""
    folder = program.workplace / "out" / "checkpoint"
    wait_until(lambda: any(folder.glob(".step-*.writing")), program, PATIENCE_S)


def wait_for_any_moment(program: Program, random: Random, starts: int = 1) -> None:
    """Wait for a random time in the first steps of start number `starts`; in half of the cases, during a save.

    At least two checkpoints exist then.
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


def assert_resumed_each_time(output: str, kills: int) -> None:
    """Check that each start resumes from the latest checkpoint, which a killed rank may not have logged."""
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
    """Kill ranks of a program under --max-restarts, one after another, each in the first steps of a start."""
    for kill in range(kills):
        wait_for_any_moment(program, random, starts=kill + 1)
        os.kill(program.ranks()[random.randrange(2)], signal.SIGKILL)
        wait_until(lambda starts=kill + 2: program.output.count(START) == starts, program, RESTARTED_S)
    assert_finished(program)
    assert_resumed_each_time(program.output, kills)


def survive_killed_launchers(start: Callable[[str], Program], kills: int, random: Random) -> None:
    """Start the program with `start(output name)` and kill it `kills` times, as a user or a scheduler restarts it.

    The last start, named "output", is not killed.
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
    assert_resumed_each_time(output + program.output, kills)
    assert (output + program.output).count("has ended without releasing the folder; taken over") == kills


def files_in(folder: Path) -> dict[Path, tuple[int, int]]:
    """(size, modification time) of all paths below a folder"""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def steps(kills: int) -> int:
    """Number of steps: enough that every kill comes before the end, for any start step."""
    return 10 * kills + 10


def settings(kills: int) -> list[str]:
    """Settings with a save at every other step, so that a save is running most of the time."""
    return ["--training.steps", str(steps(kills)), "--checkpoint.interval", "2"]


KILLS_OF_A_RANK = [
    pytest.param(1, marks=pytest.mark.soak),  # default suite: tests/distributed/test_elastic.py
    pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
]
KILLS_OF_TORCHRUN = [
    pytest.param(1, marks=pytest.mark.soak),
    pytest.param(10, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
]


@pytest.mark.parametrize("kills", KILLS_OF_A_RANK)
def test_run_recovers_from_killed_ranks(kills: int, tmp_path: Path, start: Starter, undisturbed: Undisturbed) -> None:
    restarts = (*TORCHRUN, "--max-restarts", str(kills))
    program = start_saving(start, tmp_path, *settings(kills), launcher=restarts)
    survive_killed_ranks(program, kills, Random(4))
    assert_matches_undisturbed(tmp_path / "out", steps(kills), undisturbed(steps(kills)))


@pytest.mark.parametrize("kills", KILLS_OF_TORCHRUN)
def test_run_recovers_from_killed_torchruns(
    kills: int, tmp_path: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    command = [*settings(kills), "--checkpoint.async_mode", "async"]

    def begin(name: str) -> Program:
        launcher = None if name == "output" else TORCHRUN
        return start_saving(start, tmp_path, *command, launcher=launcher, name=name)

    survive_killed_launchers(begin, kills, Random(4))
    assert_matches_undisturbed(tmp_path / "out", steps(kills), undisturbed(steps(kills)))


def start_nodes(start: Starter, workplace: Path, *arguments: str, kills: int, **options: Any) -> list[Program]:
    """Start two torchruns with a rank each, as on two nodes. options: arguments of start_program."""
    rendezvous = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    launcher = (*TORCHRUN[:-1], *rendezvous, "--rdzv-id", "two-nodes", "--max-restarts", str(kills))
    return [
        start(workplace, *arguments, ranks=1, launcher=launcher, name=f"node{node}", **options) for node in range(2)
    ]


def node_of_rank_0(nodes: list[Program], text_of_rank_0: str) -> Program:
    """Node of rank 0, which the rendezvous selects by the PIDs of the torchruns."""
    while not any(text_of_rank_0 in node.output for node in nodes):
        assert all(node.process.poll() is None for node in nodes), nodes[0].output + nodes[1].output
        time.sleep(0.01)
    return next(node for node in nodes if text_of_rank_0 in node.output)


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([0], marks=pytest.mark.soak),
        pytest.param([0, 1, 1, 0, 1, 1, 1, 0], marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_run_on_two_nodes_recovers_from_killed_ranks(
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
    assert_resumed_each_time(first.output, len(ranks))
    assert_matches_undisturbed(tmp_path / "out", steps(len(ranks)), undisturbed(steps(len(ranks))))


@pytest.mark.soak  # default suite: tests/distributed/test_elastic.py
def test_node_without_a_killed_rank_restarts_with_the_other_node(tmp_path: Path, start: Starter) -> None:
    """Its rank is in a long step meanwhile. torchrun counts the restart only on the node of the killed rank."""
    nodes = start_nodes(start, tmp_path, kills=1, program=LOOP, environment={"STEP_S": "4"})
    step = "step 1/ of rank 0"
    first = node_of_rank_0(nodes, step)
    os.kill(first.ranks()[1], signal.SIGKILL)
    wait_until(lambda: first.output.count(step) == 2, first, RESTARTED_S)
    os.kill(first.ranks()[1], signal.SIGUSR1)
    assert [node.wait() for node in nodes] == [0, 0], "\n".join(node.output for node in nodes)
