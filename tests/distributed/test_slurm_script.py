"""scripts/slurm.sbatch as Slurm runs it, with two nodes on this machine: srun and scontrol are stubs."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.program import CONFIG, PATIENCE_S, REPOSITORY, Program, clean_environment, free_port, read
from tests.distributed.recovered import SETTINGS, SHORT_STEPS, Undisturbed, assert_matches_undisturbed, starts
from tests.distributed.test_restarts import wait_until

SCRIPT = REPOSITORY / "scripts" / "slurm.sbatch"
NODES = 2

# Like Slurm's srun: one task per node; forwards SIGUSR1, kills tasks on SIGTERM, exits with the largest exit code.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
start = sys.argv.index(os.environ["PYTHON"])
tasks = []
def forward(number):
    for task in tasks:
        task.send_signal(number)
signal.signal(signal.SIGUSR1, lambda number, frame: forward(number))
signal.signal(signal.SIGTERM, lambda number, frame: forward(signal.SIGKILL))
tasks += [subprocess.Popen(sys.argv[start:], start_new_session=True) for _ in range({NODES})]
sys.exit(max(abs(task.wait()) for task in tasks))
"""
# Instead of titanlite.torchrun: runs until the file "end" exists or a signal comes, then takes its time, as for a save.
NODE = f"""#!{sys.executable}
import signal, sys, time
from pathlib import Path
signals, end = [], Path("end")
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: signals.append(signal.Signals(number).name))
print("node started:", *sys.argv[1:], flush=True)
while not signals and not end.exists():
    time.sleep(0.02)
time.sleep(0.3)
code = int(end.read_text()) if end.exists() else 3
print("node ended:", *signals, code, flush=True)
sys.exit(code)
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$SCONTROL_LOG"
[[ "$1 $2" != "show hostnames" ]] || printf '%s\\n' 127.0.0.1 node1
"""


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


Start = Callable[..., Program]


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Start]:
    """Starts the script with arguments, and ends what is left; tmp_path / "scontrol" lists its calls of scontrol."""
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "srun", SRUN)
    executable(tmp_path / "bin" / "scontrol", SCONTROL)
    executable(tmp_path / "bin" / "node", NODE)
    output = tmp_path / "output"
    started: list[Program] = []

    def start(*arguments: str, python: str = str(tmp_path / "bin" / "node")) -> Program:
        environment = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHON": python,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "SCONTROL_LOG": str(tmp_path / "scontrol"),
            "SLURM_JOB_ID": str(free_port()),  # unlikely to be used by another test at the same time
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_NUM_NODES": str(NODES),
            "TITANLITE_CACHE": str(tmp_path / "cache"),
        }
        with output.open("wb") as file:
            command = ["bash", str(SCRIPT), *arguments]
            process = subprocess.Popen(
                command, cwd=tmp_path, env=clean_environment() | environment, stdout=file, stderr=subprocess.STDOUT
            )
        started.append(Program(process, tmp_path, output))
        return started[-1]

    yield start
    for program in started:
        for pid in program.processes():
            os.kill(pid, signal.SIGKILL)
        program.process.wait()


@pytest.fixture
def job(tmp_path: Path, start_job: Start) -> Program:
    """A training of SHORT_STEPS steps."""
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    arguments = ["--job.config_file", str(config), "--job.dump_folder", str(tmp_path / "out"), *SETTINGS]
    arguments += ["--training.steps", str(SHORT_STEPS), "--checkpoint.interval", "2"]
    return start_job(*arguments, python=sys.executable)


def nodes(program: Program, event: str) -> list[str]:
    return re.findall(f"^node {event}: (.*)$", program.output, re.MULTILINE)


def terminate_nodes(job: Program) -> None:
    for pid in job.processes():
        command = read(Path(f"/proc/{pid}/cmdline"))  # srun's arguments include those of torchrun
        if "titanlite.torchrun" in command and "/srun" not in command and pid not in job.ranks().values():
            os.kill(pid, signal.SIGTERM)


@pytest.fixture
def running(start_job: Start) -> Program:
    """A job whose nodes have started."""
    program = start_job("my.toml", "--training.steps", "9")
    wait_until(lambda: len(nodes(program, "started")) == NODES, program, PATIENCE_S)
    return program


def requeues(job: Program) -> list[str]:
    calls = (job.workplace / "scontrol").read_text().splitlines()
    return [call for call in calls if not call.startswith("scontrol show hostnames node[0-1]")]


def wait_until_all_gone(job: Program) -> None:
    end = time.monotonic() + PATIENCE_S
    while job.processes():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_each_node_starts_torchrun_and_the_job_ends_with_them(running: Program) -> None:
    for command in nodes(running, "started"):
        assert command.startswith(f"-m titanlite.torchrun --nnodes={NODES} --nproc-per-node=1 --rdzv-backend=c10d ")
        assert command.endswith(" -m titanlite.train my.toml --training.steps 9")
    (running.workplace / "end").write_text("0")
    assert running.wait() == 0
    assert requeues(running) == []


def test_a_failed_job_ends_with_its_exit_code_and_is_not_requeued(running: Program) -> None:
    (running.workplace / "end").write_text("2")
    assert running.wait() == 2
    assert requeues(running) == []


def test_a_warned_job_is_requeued_after_its_nodes_have_ended(running: Program) -> None:
    running.process.send_signal(signal.SIGUSR1)
    assert running.wait() == 3
    assert nodes(running, "ended") == ["SIGUSR1 3"] * NODES
    assert running.output.endswith(f"requeueing job {requeues(running)[0].removeprefix('scontrol requeue ')}\n")
    assert len(requeues(running)) == 1


def test_a_job_that_finishes_after_its_warning_is_not_requeued(running: Program) -> None:
    (running.workplace / "end").write_text("0")
    running.process.send_signal(signal.SIGUSR1)
    assert running.wait() == 0
    assert requeues(running) == []


def test_a_preempted_job_waits_for_its_nodes_and_is_not_requeued(running: Program) -> None:
    """Slurm sends the signal to the script and to the nodes."""
    running.process.send_signal(signal.SIGTERM)
    terminate_nodes(running)
    assert running.wait() == 3
    assert nodes(running, "ended") == ["SIGTERM 3"] * NODES
    assert requeues(running) == []


@pytest.mark.soak
def test_two_nodes_finish_training_after_a_killed_rank(job: Program, undisturbed: Undisturbed) -> None:
    job.wait_for(r" 3/\d")
    assert sorted(job.ranks()) == [0, 1]
    os.kill(job.ranks()[1], signal.SIGKILL)
    assert job.wait() == 0, job.output
    first, second = starts(job.output)
    assert first == 0 < second
    assert job.output.count(f"Done: {SHORT_STEPS} steps") == 1
    assert requeues(job) == []
    assert_matches_undisturbed(job.workplace / "out", SHORT_STEPS, undisturbed(SHORT_STEPS))


@pytest.mark.soak
def test_job_is_requeued_after_the_warning_and_the_end_of_its_ranks(job: Program) -> None:
    job.wait_for(r" 3/\d")
    job.process.send_signal(signal.SIGUSR1)
    assert job.wait() != 0
    (job_id,) = re.findall(r"requeueing job (\d+)", job.output)
    assert requeues(job) == [f"scontrol requeue {job_id}"]
    wait_until_all_gone(job)


@pytest.mark.soak
def test_preempted_job_waits_for_its_ranks_and_does_not_requeue(job: Program) -> None:
    job.wait_for(r" 3/\d")
    job.process.send_signal(signal.SIGTERM)
    terminate_nodes(job)
    assert job.wait() != 0
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in (job.workplace / "out" / "run.json").read_text()
    assert job.output.count("closing signal SIGTERM") == NODES
    assert requeues(job) == []
    wait_until_all_gone(job)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_shellcheck_finds_nothing() -> None:
    scripts = [SCRIPT, REPOSITORY / "run_train.sh", REPOSITORY / ".ci" / "run", *(REPOSITORY / "scripts").glob("*.sh")]
    done = subprocess.run(["shellcheck", "-x", *scripts], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == 0
