"""Runs on a number of nodes that changes: torchruns on this machine are killed and join, and the numbers stay."""

import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.program import FAULTY, PATIENCE_S, Program, Starter, free_port, rows
from tests.distributed.recovered import assert_matches_undisturbed, audited, numbers_on_any_mesh, starts, trained_steps
from tests.distributed.resuming import numbers
from titanlite.checkpoint.folder import published_steps
from titanlite.data.ledger import read_ledger
from titanlite.metrics.timing import COLUMNS
from titanlite.ranks.job_lock import JOB_LOCK_FILE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

SETTINGS = (
    *("--checkpoint.enable", "true", "--checkpoint.interval", "10", "--data.ledger", "true"),
    *("--training.bit_equal", "true", "--training.dtype", "float32", "--data.num_streams", "10"),
    *("--training.local_batch_size", "2", "--parallelism.pp_microbatch_size", "2", "--optimizer.lr", "1e-3"),
)
STAGES = (
    *("--training.stages.0.from_step", "3", "--training.stages.0.global_batch_size", "24"),
    *("--training.stages.1.from_step", "14", "--training.stages.1.seq_len", "8"),
    *("--training.stages.1.rope_theta", "5e4"),
    *("--training.stages.2.from_step", "30", "--training.stages.2.seq_len", "64"),
)
"""Boundaries in each attempt; the second one is usually passed twice."""
QUICK = ("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=1")


class Nodes:
    """Torchruns that share a run, with one rank each. fewest, most: nodes of the run."""

    def __init__(self, start: Starter, workplace: Path, *arguments: str, fewest: int, most: int, restarts: int) -> None:
        self._start, self._workplace, self._arguments = start, workplace, arguments
        self._port = free_port()
        endpoint = f"127.0.0.1:{self._port}"
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "elastic", *QUICK)
        nodes = ("--nnodes", f"{fewest}:{most}", "--max-restarts", str(restarts))
        self._launcher = ("-m", "titanlite.torchrun", *nodes, *rendezvous)
        self.started: list[Program] = []
        self.running: list[Program] = []
        self._count = 0

    def join(self, *options: str) -> None:
        """Start a node. options: of torchrun."""
        self._count += 1
        self.started.append(
            self._start(
                *(self._workplace, *self._arguments),
                ranks=1,
                launcher=(*self._launcher, *options),
                program=FAULTY,
                name=f"node{self._count}",
                environment={"FAULT": "held", "FAULTY_RANK": "0"},
            )
        )
        self.running.append(self.started[-1])

    @property
    def first(self) -> Program:
        """The node of the rendezvous. Rank 0 may be on any node: torch orders them by pid."""
        return self.started[0]

    @property
    def output(self) -> str:
        """Of all nodes, one after the other."""
        return "".join(node.output for node in self.started)

    def wait_for_steps(self, number: int, attempts: int = 1) -> None:
        """Wait until the ranks have been started so often, and then trained `number` steps."""
        self.first.wait_until(
            lambda: len(starts(self.output)) == attempts, every_s=0.2
        )  # reads the output of all nodes
        before = len(trained_steps(self.output))
        self.first.wait_until(lambda: len(trained_steps(self.output)) >= before + number, every_s=0.2)

    def has_rendezvous(self) -> bool:
        """Whether a node, the first one, serves the rendezvous."""
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self._port)) == 0

    def lose(self, number: int) -> int:
        """Kill a node: its torchrun and its rank. Returns the number of this rank."""
        node = self.running.pop(number)
        (pid,) = self.ranks_of(node)
        (rank,) = [rank for rank, own in node.ranks().items() if own == pid]
        self.kill(node)
        return rank

    def kill(self, node: Program) -> None:
        for pid in (node.process.pid, *self.ranks_of(node)):
            os.kill(pid, signal.SIGKILL)
        node.process.wait(PATIENCE_S)

    @staticmethod
    def ranks_of(node: Program) -> list[int]:
        return [pid for pid in node.processes() if parent_of(pid) == node.process.pid]


def parent_of(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


def assert_same_run(found: Path, undisturbed: Program, steps: int) -> None:
    """The same bits: digests, metrics, final weights and optimizer state; each sequence once in the ledger."""
    assert undisturbed.wait() == 0, undisturbed.output
    expected = undisturbed.workplace / "out"
    assert_matches_undisturbed(found, steps, expected, numbers_on_any_mesh)
    assert len({row["digest"] for row in numbers(found)}) == steps
    assert list(read_ledger(found)) == list(read_ledger(expected))


def assert_time_is_accounted(found: list[dict[str, Any]]) -> None:
    """The seconds by cause are those that have passed since the first row, of all attempts."""
    first, last = ({key: row[key] for key in COLUMNS} for row in (found[0], found[-1]))
    passed = {key: last[key] - first[key] for key in COLUMNS}
    causes = [key for key in COLUMNS if key.startswith("time_s/")]
    assert sum(passed[key] for key in causes) == pytest.approx(passed["unix_time"], abs=0.5)
    assert passed["time_s/restart"] > 4  # a node that is lost leaves the rendezvous after 5 seconds
    assert passed["time_s/start"] == 0
    assert min(passed["time_s/saving"], passed["time_s/steps"]) > 0
    assert last["goodput"] == last["time_s/steps"] / sum(last[key] for key in causes)


def undisturbed(start: Starter, workplace: Path, *arguments: str, ranks: int) -> Program:
    """Start the run to compare with, which takes place beside the other."""
    folder = workplace / "undisturbed"
    folder.mkdir()
    return start(folder, *arguments, ranks=ranks)


@dataclass(frozen=True)
class Course:
    """Nodes of a run, and what happens to them: "join", "lose N" (torchrun and rank), or "kill N" (only its rank).

    begin, fewest, most: number of nodes. options: torchrun's, of the second node. settings: beside SETTINGS.
    """

    steps: int
    begin: int
    fewest: int
    most: int
    events: tuple[str, ...]
    layout: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


THREE_NODES = Course(60, 1, 1, 3, ("join", "join", "lose 1"))
COURSES = [
    pytest.param(Course(40, 1, 1, 2, ("join", "lose 1")), id="a node joins and is lost"),
    pytest.param(  # its launcher sees the join when its ranks have stopped with the others
        Course(60, 2, 1, 3, ("join", "lose 1"), options=("--monitor-interval", "3")),
        id="two nodes stay",
        marks=pytest.mark.soak,
    ),
    pytest.param(  # the torchrun of the other node does not count the restart
        Course(60, 2, 2, 2, tuple(f"kill {node}" for node in (0, 1, 1, 0, 1, 1, 1, 0))),
        id="killed ranks",
        marks=[pytest.mark.soak, pytest.mark.timeout(1800)],
    ),
    pytest.param(THREE_NODES, id="three nodes", marks=pytest.mark.soak),
    pytest.param(Course(40, 1, 1, 2, ("join", "lose 1"), settings=STAGES), id="stages", marks=pytest.mark.soak),
    *(
        pytest.param(  # two of three nodes are used; the loss of the third, which waits idle, does not stop the others
            Course(
                150, 3, 2, 3, ("lose 2", "join", "lose 1", "join", "lose 1", "join") * 2, (f"--parallelism.{axis}", "2")
            ),
            id=axis,
            marks=[pytest.mark.soak, pytest.mark.timeout(1800)],
        )
        for axis in ("tp", "pp", "dp_replicate")
    ),
]


@pytest.mark.parametrize("course", COURSES)
def test_a_run_whose_nodes_change_has_the_numbers_of_one_process(
    course: Course, tmp_path: Path, start: Starter
) -> None:
    """A join is not counted as a failure. Steps are slow until all has happened."""
    arguments = (*SETTINGS, *course.settings, "--training.steps", str(course.steps))
    tp = course.layout if "--parallelism.tp" in course.layout else ()  # which decides the bits
    expected = undisturbed(start, tmp_path, *arguments, *tp, ranks=2 if tp else 0)
    failures = sum(event != "join" for event in course.events)
    nodes = Nodes(
        *(start, tmp_path, *arguments, *course.layout), fewest=course.fewest, most=course.most, restarts=failures
    )
    nodes.join()
    nodes.first.wait_until(nodes.has_rendezvous)
    for _ in range(course.begin - 1):
        nodes.join(*course.options)
    used = 2 if course.layout else course.most
    attempts = 1
    for event in course.events:
        nodes.wait_for_steps(2, attempts=attempts)
        kind, _, number = event.partition(" ")
        if kind == "join":
            nodes.join()
        elif kind == "kill":
            (pid,) = nodes.ranks_of(nodes.running[int(number)])
            os.kill(pid, signal.SIGKILL)
        attempts += kind != "lose" or nodes.lose(int(number)) < used
    nodes.wait_for_steps(2, attempts=attempts)
    (tmp_path / "go").touch()
    assert [node.wait() for node in nodes.running] == [0] * len(nodes.running), nodes.output
    assert len(starts(nodes.output)) == attempts
    assert not course.layout or "Ranks: 2 of 3, the most that the layout fits; the others wait idle" in nodes.output
    assert_same_run(tmp_path / "out", expected, course.steps)
    if course.begin == 1:
        assert_time_is_accounted(rows(tmp_path / "out"))
    if course == THREE_NODES:
        audited(tmp_path / "out")


def test_a_run_whose_folder_was_taken_over_saves_nothing_more(tmp_path: Path, start: Starter) -> None:
    """As a node that is cut off, continues to run, and is taken as lost: another host has the folder."""
    program = start(
        *(tmp_path, *SETTINGS, "--training.steps", "20"),
        ranks=2,
        program=FAULTY,
        environment={"FAULT": "held", "FAULTY_RANK": "0"},
    )
    program.wait_until(lambda: len(trained_steps(program.output)) >= 2)
    lock = tmp_path / "out" / JOB_LOCK_FILE
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "host": "other"}))
    (tmp_path / "go").touch()
    assert program.wait() == 1
    assert program.output.count("was taken over by process") == 1
    assert not published_steps(tmp_path / "out" / "checkpoint")


@pytest.mark.soak  # default suite: tests/unit/torchrun/test_torchrun.py
@pytest.mark.parametrize("seconds", [4.5, 6.0, 7.5, 9.0])
def test_a_node_is_lost_while_the_ranks_start(seconds: float, tmp_path: Path, start: Starter) -> None:
    """After it has joined: in the imports of its rank, while it connects, and later."""
    nodes = Nodes(start, tmp_path, *SETTINGS, "--training.steps", "20", fewest=1, most=2, restarts=3)
    nodes.join()
    nodes.wait_for_steps(3)
    nodes.join()
    time.sleep(seconds)
    began, before = time.monotonic(), len(trained_steps(nodes.output))
    nodes.kill(nodes.running.pop(1))
    nodes.first.wait_until(lambda: len(trained_steps(nodes.output)) > before)
    assert time.monotonic() - began < 25
    (tmp_path / "go").touch()
    assert nodes.first.wait() == 0, nodes.output
