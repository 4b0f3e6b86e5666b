"""Checkpoints with GRID.json, as of very many shards, do what others do: runs resume from them on any mesh, commands
read them, and their damage is found."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed.forked import on_ranks
from tests.distributed.resuming import Start, numbers, start_runs
from tests.distributed.standin import start_in, train_run
from tests.distributed.test_checkpoint_damage import flip
from tests.golden.record import RECIPES
from tests.golden.test_runs import require_recorded
from tests.golden.use import results_of, workplace
from titanlite.checkpoint import planning
from titanlite.checkpoint.folder import published_steps
from titanlite.checkpoint.manifest import GRID_FILE, GRID_FORMAT_VERSION, METADATA_FILE, read_manifest, write_manifest
from titanlite.checkpoint.storage import load_tensors, read_shapes, save_tensors

pytestmark = pytest.mark.slow


FOUR = ("parallelism.dp_shard=2", "parallelism.tp=2")


@contextmanager
def always_grids() -> Iterator[None]:
    """As if each checkpoint had very many shards, in the process of a rank."""
    with patch.object(planning, "MOST_LISTED", 0):
        yield


@pytest.mark.parametrize("sharded", [("parallelism.tp=2",), pytest.param(FOUR, marks=pytest.mark.soak)], ids=len)
def test_a_run_with_grids_equals_one_without(sharded: tuple[str, ...], tmp_path: Path) -> None:
    settings = ("training.steps=8", "optimizer.ema_decay=0.9")
    ranks = 2 ** len(sharded)
    saves = (*settings, "checkpoint.async_mode=async")
    outcomes = start_runs(
        tmp_path,
        [
            Start((*settings, *sharded), ranks, (5, 0), "listed"),
            Start(settings, 2, None, "listed"),
            Start((*saves, *sharded), ranks, (5, 0), "grid", always_grids),
            Start(saves, 2, (7, 0), "grid", always_grids),
            Start(settings, 1, None, "grid"),
        ],
    )
    assert [outcome.error for outcome in outcomes] == [""] * 5
    assert [outcome.step for outcome in outcomes] == [0, 4, 0, 4, 6]
    _, listed, _, again, last = outcomes
    assert again.begin == listed.begin
    assert [row["step"] for row in numbers(tmp_path / "grid")] == [row["step"] for row in numbers(tmp_path / "listed")]
    losses = [[row["loss"] for row in numbers(tmp_path / name)] for name in ("grid", "listed")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12, abs=0)
    files = {name for name in last.files if name.endswith((GRID_FILE, METADATA_FILE))}
    assert files == {f"checkpoint/step-{step}/{name}" for step, name in FORMS.items()}


FORMS = {2: GRID_FILE, 4: GRID_FILE, 6: GRID_FILE, 8: METADATA_FILE}


def save_with_grids(folder: Path, steps: int) -> None:
    with always_grids():
        train_run(folder, "a", steps)


def test_damage_of_a_grid_is_reported_and_the_previous_checkpoint_is_loaded(tmp_path: Path) -> None:
    on_ranks(save_with_grids, 2, tmp_path / "model", 3)
    damages = {"flipped": flip, "gone": Path.unlink, "cut": partial(os.truncate, length=30)}
    folders = [tmp_path / name for name in damages]
    for folder, damage in zip(folders, damages.values(), strict=True):
        shutil.copytree(tmp_path / "model", folder)
        damage(folder / "step-3" / GRID_FILE)
    for folder, ranks in zip(folders, start_in(folders), strict=True):
        assert [answer.get("step") for answer in ranks] == [2] * 2, ranks
        (line,) = [line for line in ranks[0]["lines"] if "corrupted" in line]
        assert re.match(r"Checkpoint step-3 is corrupted: GRID\.json \(written by rank 0\) (has|is) ", line)
        assert next(folder.glob("step-3.invalid-*/GRID.json"), None) is not None or folder.name == "gone"


def give_grid(folder: Path) -> None:
    """Write a checkpoint again, with a grid."""
    manifest, old = read_manifest(folder), folder.with_name("old")
    folder.rename(old)
    tensors = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, (shape, dtype) in read_shapes(old).items()
    }
    load_tensors(old, tensors, None)
    with always_grids():
        records = save_tensors(folder, tensors, tensors, dist.group.WORLD)
    for name in manifest.files.keys() - {METADATA_FILE, *records}:
        shutil.copy(old / name, folder)
        records[name] = manifest.files[name]
    write_manifest(folder, replace(manifest, files=records, format=GRID_FORMAT_VERSION))
    shutil.rmtree(old)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "muon" else pytest.mark.soak) for name in RECIPES]
)
def test_commands_read_a_grid(name: str, tmp_path: Path) -> None:
    """Digest, export, evaluation, audit, replay and resume of a stored run, with the results of its listed form."""
    folder = workplace(name, tmp_path) / "run" / "checkpoint"
    for step in published_steps(folder):
        on_ranks(give_grid, 1, folder / f"step-{step}")
        assert {GRID_FILE} == {GRID_FILE, METADATA_FILE} & {path.name for path in (folder / f"step-{step}").iterdir()}
    require_recorded(name, results_of(tmp_path))
