"""The processes of a sweep: their order, failures, states and end; the table; the script of a Slurm array."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from titanlite.config.load import load_config
from titanlite.config.toml import dump_config
from titanlite.runtime.errors import UserError
from titanlite.tools.command import run_command
from titanlite.tools.sweep import __main__ as sweep
from titanlite.tools.sweep import command as command_module
from titanlite.tools.sweep import training
from titanlite.tools.sweep.__main__ import main
from titanlite.tools.sweep.combinations import Run, combinations
from titanlite.tools.sweep.training import results, state_of, stop, train_all, wait_for


class FakeProcess:
    """waits: what each call of wait returns or raises."""

    def __init__(self, *waits: int | BaseException) -> None:
        self.waits, self.calls = list(waits), list[str]()

    def wait(self, timeout: float | None = None) -> int:
        self.calls.append("wait" if timeout is None else f"wait {timeout}")
        found = self.waits.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    def send_signal(self, sig: int) -> None:
        self.calls.append(signal.Signals(sig).name)

    def kill(self) -> None:
        self.calls.append("kill")


def runs_of(folder: Path, *overrides: str) -> list[Run]:
    steps = [] if any("training.steps" in word for word in overrides) else ["--training.steps=4"]
    given = ["--optimizer.lr=1e-3,3e-4,1e-4", *steps, f"--job.dump_folder={folder}", *overrides]
    return combinations("quickstart", given, world_size=1, device_type="cpu")


def log_steps(run: Run, steps: int) -> None:
    """Write the rows that a run logs. Each of its later rows has 100 tokens/s more."""
    run.folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, "loss": 9.0 - step, "tokens_per_second": 100.0 * step} for step in range(1, steps + 1)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


PLAIN = ("--checkpoint.enable=false", "--validation.enable=false")


def test_runs_are_trained_in_order_and_a_failure_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = runs_of(tmp_path, *PLAIN)
    started: list[str] = []

    def start(run: Run) -> FakeProcess:
        started.append(run.values["optimizer.lr"])
        fails = run is runs[1] and len(started) == 2
        log_steps(run, 2 if fails else 4)
        return FakeProcess(7 if fails else 0)

    codes = train_all(runs, start)
    assert (started, list(codes.values())) == (["0.001", "0.0003", "0.0001"], [0, 7, 0])
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1] == f"Run 2 of 3, optimizer.lr = 0.0003: in {runs[1].folder}"
    assert printed.err == "titanlite: run 2 of 3, optimizer.lr = 0.0003, failed (7)\n"
    lines = results(runs, codes)
    assert [line.split() for line in lines[:4]] == [
        ["lr", "step", "loss", "validation", "loss", "tokens/s", "state"],
        ["0.001", "4", "5.0000", "-", "300", "finished"],
        ["0.0003", "2", "7.0000", "-", "200", "failed", "(7)"],
        ["0.0001", "4", "5.0000", "-", "300", "finished"],
    ]
    assert lines[5].endswith(f"report {' '.join(str(run.folder) for run in runs)} --out {tmp_path / 'report.html'}")
    assert list(train_all(runs, start)) == [runs[1].name]
    assert started[3:] == ["0.0003"]
    assert "Run 1 of 3, optimizer.lr = 0.001: finished before, skipped\n" in capsys.readouterr().out
    assert [state_of(run) for run in runs] == ["finished"] * 3


def test_states(tmp_path: Path) -> None:
    run = runs_of(tmp_path, *PLAIN)[0]
    assert state_of(run) == "new"
    log_steps(run, 3)
    assert state_of(run) == "interrupted"
    log_steps(run, 4)
    assert state_of(run) == "finished"
    assert state_of(runs_of(tmp_path, *PLAIN, "--training.steps=5")[0]) == "interrupted"
    saving = runs_of(tmp_path, "--checkpoint.enable=true", "--validation.enable=false")[0]
    assert state_of(saving) == "interrupted"  # the last step was logged, but not saved
    validated = runs_of(tmp_path, "--checkpoint.enable=false", "--validation.enable=true")[0]
    assert state_of(validated) == "interrupted"  # a kill has prevented the last validation
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "validation/loss": 5.5}\n')
    assert state_of(validated) == "finished"
    assert results([validated], {})[1].split()[3] == "5.5000"


@pytest.mark.parametrize(
    ("end", "number"), [(KeyboardInterrupt(), "SIGINT"), (SystemExit(128 + signal.SIGTERM), "SIGTERM")]
)
def test_an_interrupt_stops_the_run_first(end: BaseException, number: str) -> None:
    process = FakeProcess(end, 0)
    with pytest.raises(type(end)):
        wait_for(process)
    assert process.calls == ["wait", number, "wait"]


def test_a_second_interrupt_ends_the_run_at_once() -> None:
    process = FakeProcess(KeyboardInterrupt(), 0)
    stop(process, signal.SIGINT)
    assert process.calls == ["SIGINT", "wait", "SIGINT", f"wait {training.KILL_S}"]
    process = FakeProcess(KeyboardInterrupt(), TimeoutError())
    stop(process, signal.SIGINT)
    assert process.calls[-1] == "kill"


def test_exit_code_and_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(fails: str) -> Callable[..., FakeProcess]:
        def started(run: Run, processes: int) -> FakeProcess:
            assert processes == 2
            log_steps(run, 2 if run.values["optimizer.lr"] == fails else 4)
            (run.folder / "config.toml").write_text(dump_config(run.config))
            return FakeProcess(1 if run.values["optimizer.lr"] == fails else 0)

        return started

    def command(*more: str) -> int | str | None:
        given = ["quickstart", "--optimizer.lr", "1e-3,3e-4", "--training.steps", "4", *PLAIN, "--nproc", "2", *more]
        monkeypatch.setattr(sys, "argv", ["sweep", *given, f"--job.dump_folder={tmp_path}"])
        with pytest.raises(SystemExit) as caught:
            run_command(sweep.main)
        return caught.value.code

    monkeypatch.setattr(command_module, "start_run", start("0.0003"))
    assert command("--results") == 0
    assert "not started" in capsys.readouterr().out
    assert command() == 1
    assert "titanlite: 1 of 2 runs failed: lr-0.0003 (1); the same command starts them again" in capsys.readouterr().err
    monkeypatch.setattr(command_module, "start_run", start("none"))
    assert command() == 0
    assert command("--optimizer.beta1=0.5") == 2
    assert command("--nproc=0") == 2


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
