"""Several runs in one program, on one process and on the ranks of torchrun: each has the numbers of a new process."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.program import Starter, rows, start_command
from tests.distributed.python_runs import MESHES
from titanlite.config.value_types import text_of

pytestmark = pytest.mark.slow

PROGRAM = (str(Path(__file__).with_name("python_runs.py")),)


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(folder)]


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_runs_of_one_program_have_the_numbers_of_commands(ranks: int, tmp_path: Path, start: Starter) -> None:
    names = MESHES if ranks else {"fsdp": MESHES["fsdp"]}
    for name, settings in names.items():
        arguments = [f"--{key}={text_of(value)}" for key, value in settings.items()]
        start(tmp_path, *arguments, "--job.dump_folder", str(tmp_path / f"new-{name}"), ranks=ranks).succeed()
    program = start_command(tmp_path, str(ranks), ranks=ranks, program=PROGRAM).succeed()
    for name in names:
        assert numbers(tmp_path / name) == numbers(tmp_path / f"new-{name}"), name
    assert numbers(tmp_path / "again") == numbers(tmp_path / "new-fsdp")
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "new-fsdp")
    output = program.output
    assert output.count("error: planted on all ranks") == max(ranks, 1)
    assert output.count("stopped after step ") == max(ranks, 1)
    assert output.count("groups: False") == max(ranks, 1)
