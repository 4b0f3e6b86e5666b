"""A stored run resumes and exports with the recorded results.

`expected.json` contains the steps after the checkpoint, of an earlier version, and the exported folder.
For model.safetensors it contains the names, dtypes, shapes and bytes of all tensors instead of the bytes of the file,
because the safetensors library chooses the order of the tensors and the padding of the header.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.distributed.program import rows, start_command
from tests.golden.use import tensors_of
from titanlite.tools.convert.__main__ import main as convert

FOLDER = Path(__file__).parent
EXPECTED = json.loads((FOLDER / "saved_run" / "expected.json").read_text())


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with the run in "run", its configuration and its data."""
    shutil.copytree(FOLDER / "saved_run", tmp_path, dirs_exist_ok=True)
    shutil.copy(FOLDER / "tokens.npy", tmp_path)
    return tmp_path


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_it_resumes_with_the_recorded_losses(ranks: int, workplace: Path) -> None:
    """On one process, and sharded over two."""
    before = rows(workplace / "run")
    start_command(workplace, "--job.config_file", "config.toml", "--job.dump_folder", "run", ranks=ranks).succeed()
    found = rows(workplace / "run")
    assert found[:4] == before
    steps = [{key: row[key] for key in ("step", "loss", "grad_norm")} for row in found[4:]]
    for step, expected in zip(steps, EXPECTED["steps"]["two ranks" if ranks else "one process"], strict=True):
        # Bitwise equal on the original processor. Others round differently in float64; wrong numerics differ far more.
        assert step == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.slow
def test_it_is_exported_to_the_same_tensors(workplace: Path) -> None:
    convert(["export", str(workplace / "run"), "--out", str(workplace / "out")])
    assert tensors_of(workplace / "out" / "model.safetensors") == EXPECTED["export"]["tensors"]
    assert json.loads((workplace / "out" / "config.json").read_text()) == EXPECTED["export"]["config.json"]
