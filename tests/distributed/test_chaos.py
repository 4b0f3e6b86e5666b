"""A run with faults of all kinds matches the undisturbed run."""

import sys
from pathlib import Path
from random import Random

import pytest

from tests.distributed.chaos import FAULTS, REPLICA, Chaos, Mesh, assert_resumed_each_time, survive
from tests.distributed.program import Starter
from tests.distributed.recovered import Undisturbed, assert_matches_undisturbed
from tests.distributed.resuming import numbers

TWO_RANKS = (Mesh(2, ()),)
MESHES = (
    Mesh(2, ("--parallelism.dp_shard", "2")),
    Mesh(1, ()),
    Mesh(2, ("--parallelism.tp", "2")),
    Mesh(2, ("--parallelism.dp_replicate", "2")),
    Mesh(2, ("--parallelism.pp", "2")),
    Mesh(2, ("--parallelism.cp", "2")),
)
SHORT = ["a killed rank", "SIGUSR1 to a rank", "a full disk", "a flipped bit"]
KILLS = ["a killed rank"] * 20 + ["a killed torchrun"] * 10
EACH_TWICE = [*FAULTS, *FAULTS]
LONG = pytest.mark.timeout(7200)

pytestmark = [pytest.mark.soak, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.mark.parametrize(
    ("steps", "names"),
    [
        pytest.param(30, SHORT, id="short"),
        pytest.param(300, KILLS, id="kills", marks=LONG),
        pytest.param(300, EACH_TWICE, id="each twice", marks=LONG),
    ],
)
def test_run_with_faults_matches_the_undisturbed_run_bit_for_bit(
    steps: int, names: list[str], tmp_path: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    random = Random(4)
    chaos = Chaos(start, tmp_path, steps, random, TWO_RANKS)
    survive(chaos, random.sample(names, len(names)))
    assert_resumed_each_time(chaos)
    assert_matches_undisturbed(tmp_path / "out", steps, undisturbed(steps))


@pytest.mark.timeout(7200)
def test_run_with_faults_on_changing_meshes_has_the_same_losses(
    tmp_path: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    random = Random(5)
    chaos = Chaos(start, tmp_path, 300, random, MESHES)
    names = [name for name in EACH_TWICE if name != REPLICA]  # one rank and a pipeline have no replicas
    survive(chaos, random.sample(names, len(names)))
    assert_resumed_each_time(chaos)
    found, expected = numbers(tmp_path / "out"), numbers(undisturbed(300))[:300]
    assert [row["step"] for row in found] == [row["step"] for row in expected] == list(range(1, 301))
    assert [row["lr"] for row in found] == [row["lr"] for row in expected]
    for row, expected_row in zip(found, expected, strict=True):
        assert row["loss"] == pytest.approx(expected_row["loss"], rel=1e-12, abs=0), row["step"]
