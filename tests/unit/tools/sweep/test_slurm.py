"""The script of a Slurm array, run with stubs of Slurm's commands."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from titanlite.config.load import load_config
from titanlite.runtime.errors import UserError
from titanlite.tools.sweep.__main__ import main

STUBS = {"srun": 'printf "%s\\n" "$@" >"$CALLS"', "scontrol": "echo 127.0.0.1"}
SWEEP = ["quickstart", "--optimizer.lr", "1e-3,3e-4", "--job.description", '"it\'s a, b",c', "--nproc", "2"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    main([*SWEEP, "--write-slurm", "sweep.sbatch"])
    assert capsys.readouterr().out == "Script: sweep.sbatch (4 runs); see its first lines\n"
    assert [path.name for path in folder.iterdir()] == ["sweep.sbatch"]
    with pytest.raises(UserError, match=r"^sweep\.sbatch already exists .* choose another --write-slurm$"):
        main([*SWEEP, "--write-slurm", "sweep.sbatch"])
    return folder / "sweep.sbatch"


def run_task(script: Path, number: int) -> subprocess.CompletedProcess[str]:
    stubs = script.parents[1]
    variables = {
        "SLURM_ARRAY_JOB_ID": "77",
        "SLURM_ARRAY_TASK_ID": str(number),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NUM_NODES": "1",
    }
    variables |= {"PATH": f"{stubs}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n", "CALLS": str(stubs / "calls")}
    return subprocess.run(["bash", script], env=variables, cwd="/", capture_output=True, text=True, check=False)


def test_each_task_trains_one_run(script: Path) -> None:
    assert "#SBATCH --array=0-3\n" in script.read_text()
    found = []
    for number in range(4):
        assert run_task(script, number).returncode == 0
        words = (script.parents[1] / "calls").read_text().splitlines()
        assert words[words.index("-m") + 1] == "titanlite.torchrun"
        assert "--nproc-per-node=2" in words
        config = load_config(words[words.index("titanlite.train") + 1 :], world_size=2, device_type="cpu")
        found.append((config.optimizer.lr, config.job.description))
        assert Path(config.job.dump_folder).parent == Path("outputs/quickstart")
    assert found == [(1e-3, "it's a, b"), (1e-3, "c"), (3e-4, "it's a, b"), (3e-4, "c")]
    done = run_task(script, 4)
    assert (done.returncode, done.stderr) == (2, "no run has number 4\n")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_shellcheck_finds_nothing(script: Path) -> None:
    assert subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False).stdout == ""
