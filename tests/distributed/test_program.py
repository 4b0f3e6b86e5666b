"""Forked programs match real programs in output, exit code and files, and leave no process behind."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.program import (
    PATIENCE_S,
    PYTHON,
    REPOSITORY,
    TORCHRUN,
    ForkedProcesses,
    Program,
    Starter,
    clean_environment,
    rows,
    start_program,
)

SCRIPT = """
import os, signal, sys, time
mode = sys.argv[-1]
if mode == "imports":
    print([name for name in ("datasets", "huggingface_hub", "transformers") if name in sys.modules])
elif mode == "raises":
    raise ValueError("planted")
elif mode == "leaves" or os.environ["RANK"] == "1":
    while mode == "stays" and not os.path.exists("staying"):
        time.sleep(0.01)
    print("not flushed")
    sys.exit(3)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("stays", flush=True)
    open("staying", "w").close()
    time.sleep(1000)
"""


@pytest.fixture
def script(tmp_path: Path) -> tuple[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    return (str(tmp_path / "script.py"),)


def log_lines(program: Program) -> list[str]:
    """Output lines without times, speeds, folder names and torchrun's messages."""
    text = program.output.replace(str(program.workplace), "FOLDER")
    lines = re.split(r"^[WE]\d{4} .*torch/distributed/elastic", text, maxsplit=1, flags=re.MULTILINE)[0]
    lines = re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", lines, flags=re.MULTILINE)
    return re.sub(r"[\d,]+ tokens/s.*", "", lines).splitlines()


def files(program: Program) -> list[str]:
    return sorted(str(path.relative_to(program.workplace)) for path in program.workplace.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        pytest.param(2, ["--training.steps", "2"], marks=pytest.mark.soak),
        (0, ["--training.steps", "0", "--model.dim", "7"]),
        pytest.param(0, ["--training.steps", "2"], marks=pytest.mark.soak),
        pytest.param(2, ["--training.steps", "0", "--model.dim", "7"], marks=pytest.mark.soak),
    ],
)
def test_forked_program_matches_real_program(ranks: int, arguments: list[str], tmp_path: Path, start: Starter) -> None:
    programs = []
    for launcher in (None, TORCHRUN if ranks else PYTHON):
        workplace = tmp_path / str(len(programs))
        workplace.mkdir()
        programs.append(start(workplace, *arguments, ranks=ranks, launcher=launcher))
    forked, real = programs
    assert forked.wait() == real.wait()
    assert log_lines(forked) == log_lines(real)
    assert files(forked) == files(real)
    if forked.wait() == 0:
        assert any(line.startswith("Done: 2 steps") for line in log_lines(real))
        numbers = [[(row["loss"], row["grad_norm"]) for row in rows(program.workplace / "out")] for program in programs]
        assert numbers[0] == numbers[1]


def test_exit_codes_and_output_of_forked_processes(script: tuple[str], tmp_path: Path, start: Starter) -> None:
    codes = {"imports": 0, "raises": 1, "leaves": 3}
    programs = {name: start(tmp_path, name, program=script, name=name) for name in codes}
    assert {name: program.wait() for name, program in programs.items()} == codes
    # These libraries read the environment when they are imported, so each program must import them itself.
    assert programs["imports"].output == "[]\n"
    assert programs["leaves"].output == "not flushed\n"
    assert programs["raises"].output.endswith("\nValueError: planted\n")


def test_first_failing_rank_stops_the_others(
    script: tuple[str], tmp_path: Path, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForkedProcesses, "KILL_S", 0.2)
    program = start(tmp_path, "stays", ranks=2, program=script)
    assert program.wait() == 1
    assert sorted(program.output.split("\n")) == ["", "not flushed", "stays"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_closed_program_leaves_no_process(script: tuple[str], tmp_path: Path) -> None:
    program = start_program(tmp_path, "stays", program=script, environment={"RANK": "0"})
    program.wait_for("stays")
    assert program.processes() == [program.process.pid]
    program.process.send_signal(signal.SIGTERM)
    program.close()
    assert program.wait() == -signal.SIGKILL
    end = time.monotonic() + PATIENCE_S
    while program.processes():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_commands_report_errors_on_stderr(tmp_path: Path) -> None:
    """Forked programs write stdout and stderr to one file, so this test starts a subprocess."""
    command = (sys.executable, "-m", "titanlite.tools.ledger")  # it does not import torch
    environment = clean_environment() | {"PYTHONPATH": str(REPOSITORY)}
    refused = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "titanlite ledger --help" in refused.stderr
