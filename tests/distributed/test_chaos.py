"""A run with faults of all kinds matches the undisturbed run."""

import sys
from pathlib import Path
from random import Random

import pytest

from tests.distributed.chaos import FAULTS, FULL_DISK, REPLICA, Chaos, Mesh, assert_resumed_each_time, survive
from tests.distributed.program import Starter
from tests.distributed.recovered import (
    Undisturbed,
    assert_matches_undisturbed,
    audited,
    numbers_on_any_mesh,
    start_saving,
)
from titanlite.checkpoint.folder import step_folder
from titanlite.checkpoint.manifest import read_manifest

TWO_RANKS = (Mesh(2, ()),)
BITS = (
    *("--training.bit_equal", "true", "--training.dtype", "float32", "--training.local_batch_size", "2"),
    *("--parallelism.pp_microbatch_size", "2"),
)
MESHES = tuple(
    Mesh(ranks, (*BITS, *(f"--parallelism.{setting}" for setting in settings.split())))
    for ranks, settings in (
        (2, "dp_shard=2"),
        (1, "dp_shard=1"),
        (2, "pp=2 dp_shard=1 pp_schedule=ZBVZeroBubble"),
        (3, "dp_shard=3 gradient_sync=every"),
        (4, "dp_replicate=2 dp_shard=2"),
        (4, "pp=2 dp_replicate=2 dp_shard=1"),
        (3, "dp_replicate=3 dp_shard=1 gradient_sync=last"),
    )
)
SHORT = ["a killed rank", "SIGUSR1 to a rank", FULL_DISK, "a flipped bit"]
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


@LONG
def test_bit_equal_run_with_faults_on_changing_meshes_keeps_its_bits(tmp_path: Path, start: Starter) -> None:
    steps, folder = 300, tmp_path / "alone"
    folder.mkdir()
    alone = start_saving(start, folder, *BITS, "--training.steps", str(steps), ranks=1)
    random = Random(5)
    chaos = Chaos(start, tmp_path, steps, random, MESHES)
    names = [name for name in EACH_TWICE if name not in (REPLICA, FULL_DISK)]  # not on each mesh: shards may be small
    survive(chaos, random.sample(names, len(names)))
    assert_resumed_each_time(chaos)
    assert alone.wait() == 0, alone.output
    found, expected = (numbers_on_any_mesh(each / "out") for each in (tmp_path, folder))
    assert found == expected
    assert len({row["digest"] for row in found}) == len(found) == steps
    saved = (read_manifest(step_folder(each / "out" / "checkpoint", steps)) for each in (tmp_path, folder))
    assert {manifest.digest for manifest in saved} == {found[-1]["digest"]}
    assert any(", then " in result.recorded["mesh"] for result in audited(tmp_path / "out"))
