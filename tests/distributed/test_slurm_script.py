"""scripts/slurm.sbatch with stubs of srun, scontrol and the launchers of two nodes. tests/cluster has a real Slurm."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.program import REPOSITORY, Program, clean_environment
from titanlite.config.load import read_command_line
from titanlite.runtime.errors import UserError
from titanlite.tools.plan.preview import preview

pytestmark = pytest.mark.slow

SCRIPT = REPOSITORY / "scripts" / "slurm.sbatch"
NODES = 2

# Like Slurm's srun: one task per node; forwards SIGUSR1, kills tasks on SIGTERM, exits with the largest exit code.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
start = sys.argv.index("bash")
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
import os, signal, sys, time
from pathlib import Path
if "-c" in sys.argv:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
signals, end = [], Path("end")
def say(*words):
    os.write(1, " ".join(["node", *words, "\\n"]).encode())  # at once: the nodes share the file
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: signals.append(signal.Signals(number).name))
say("started:", *sys.argv[1:])
while not signals and not end.exists():
    time.sleep(0.02)
time.sleep(0.3)
code = int(end.read_text()) if end.exists() else 3
say("ended:", *signals, str(code))
sys.exit(code)
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
"show hostnames") printf '%s\\n' 127.0.0.1 node1 ;;
"show job") echo "JobId=$4 JobName=titanlite $(cat "$FACTS") Partition=all" ;;
*) echo "$*" >>"$REQUEUES" ;;
esac
"""
NOT_PREEMPTED = "JobState=RUNNING Reason=None PreemptTime=None"
PREEMPTED = "JobState=RUNNING Reason=None PreemptTime=2026-03-01T12:00:00"
CANCELLED = "JobState=COMPLETING Reason=None PreemptTime=None"


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


Start = Callable[..., Program]


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Start]:
    """Starts the script with arguments, and ends what is left; tmp_path / "requeues" has the job's requeues."""
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "srun", SRUN)
    executable(tmp_path / "bin" / "scontrol", SCONTROL)
    executable(tmp_path / "bin" / "node", NODE)
    (tmp_path / "titanlite").symlink_to(REPOSITORY / "titanlite")  # as in a checkout
    output = tmp_path / "output"
    started: list[Program] = []

    def start(*arguments: str, facts: str = NOT_PREEMPTED, script: Path = SCRIPT, **variables: str) -> Program:
        (tmp_path / "facts").write_text(facts)
        environment = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHON": str(tmp_path / "bin" / "node"),
            "FACTS": str(tmp_path / "facts"),
            "REQUEUES": str(tmp_path / "requeues"),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_NUM_NODES": str(NODES),
            "SLURMD_NODENAME": "node1",
            "TITANLITE_CACHE": str(tmp_path / "cache"),
        }
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", str(script), *arguments],
                cwd=tmp_path,
                env=clean_environment() | environment | variables,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        program = Program(process, tmp_path, output)
        started.append(program)
        program.wait_until(lambda: len(nodes(program, "started")) == NODES)
        return program

    yield start
    for program in started:
        for pid in program.processes():
            os.kill(pid, signal.SIGKILL)
        program.process.wait()


def nodes(program: Program, event: str) -> list[str]:
    return re.findall(f"^node {event}: (.*) $", program.output, re.MULTILINE)


def requeues(job: Program) -> list[str]:
    file = job.workplace / "requeues"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("has_checkout", [True, False])
def test_each_node_starts_torchrun_and_the_job_ends_with_them(
    start_job: Start, tmp_path: Path, has_checkout: bool
) -> None:
    """Also from a folder that has no checkout: titanlite is installed."""
    if not has_checkout:
        (tmp_path / "titanlite").unlink()
    job = start_job("my.toml", "--training.steps", "9", SLURM_GPUS_ON_NODE="4")
    for command in nodes(job, "started"):
        assert command.startswith(f"-m titanlite.torchrun --nnodes={NODES} --nproc-per-node=4 --rdzv-backend=c10d ")
        assert command.endswith(" -m titanlite.train my.toml --training.steps 9")
    (job.workplace / "end").write_text("0")
    assert job.wait() == 0
    assert requeues(job) == []


def test_a_script_that_titanlite_has_written(
    start_job: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """sbatch copies it: it names all it needs by absolute paths, and trains in the folder where it was written."""
    (tmp_path / "titanlite").unlink()
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "node"))
    words = ["quickstart", "--training.global_batch_size", "24", "--job.description", "it's one"]
    parsed = read_command_line([*words, "--write-slurm", "job.sbatch", "--world-size", "12"])
    with pytest.raises(SystemExit):
        preview(parsed, [1], 1)
    assert capsys.readouterr().out.startswith("Script: job.sbatch; see its first lines\nquickstart is valid for 12")
    script = Path("job.sbatch").read_text()
    assert "\n#SBATCH --nodes=2\n" in script
    assert "\n#SBATCH --gpus-per-node=6\n" in script
    with pytest.raises(UserError, match=r"job\.sbatch already exists"):
        preview(parsed, [1], 1)
    with pytest.raises(UserError, match="--write-slurm needs the number of GPUs of the job: add --world-size 16"):
        preview(read_command_line([*words, "--write-slurm", "other.sbatch"]), [1], 1)
    copy = shutil.copy("job.sbatch", tmp_path / "copy")
    job = start_job(script=copy, SLURM_GPUS_ON_NODE="6")
    for command in nodes(job, "started"):
        assert command.startswith(f"-m titanlite.torchrun --nnodes={NODES} --nproc-per-node=6 ")
        given = "--training.global_batch_size=24 --job.description=it's one --job.config_file=quickstart"
        assert command.endswith(f" -m titanlite.train {given}")
    (tmp_path / "a b" / "end").write_text("0")
    assert job.wait() == 0


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "slurm: Slurm gave this job no GPUs, so each node starts one process (sbatch --gpus-per-node=N)"),
        ({"PROCESSES": "2", "SLURM_GPUS_ON_NODE": "4"}, "slurm: node1 has 4 GPUs, of which 2 are used"),
    ],
)
def test_unused_gpus_are_named(start_job: Start, variables: dict[str, str], message: str) -> None:
    job = start_job(**variables)
    (job.workplace / "end").write_text("0")
    assert job.wait() == 0
    assert message in job.output


WARN, TERMINATE = signal.SIGUSR1, signal.SIGTERM


@pytest.mark.parametrize(
    ("facts", "signals", "code", "requeued"),
    [
        pytest.param(NOT_PREEMPTED, (), 2, False, id="a failure"),
        pytest.param(NOT_PREEMPTED, (WARN,), 3, True, id="time limit"),
        pytest.param(NOT_PREEMPTED, (WARN,), 0, False, id="finished after the warning"),
        pytest.param(PREEMPTED, (), 3, True, id="preemption with GraceTime, of which the script hears nothing"),
        pytest.param(PREEMPTED, (TERMINATE,), 3, True, id="preemption without"),
        pytest.param(PREEMPTED, (), 0, False, id="finished in the GraceTime"),
        pytest.param(CANCELLED, (WARN,), 3, False, id="cancelled during the save"),
        pytest.param("", (WARN,), 3, False, id="unknown to Slurm"),
    ],
)
def test_a_job_is_requeued_if_slurm_stopped_it(
    start_job: Start, facts: str, signals: tuple[int, ...], code: int, requeued: bool
) -> None:
    """The script waits for its nodes, which a signal does not end at once."""
    job = start_job(facts=facts)
    for number in signals:
        job.process.send_signal(number)
    if WARN not in signals or code == 0:
        (job.workplace / "end").write_text(str(code))
    assert job.wait() == code
    assert [ended.split()[-1] for ended in nodes(job, "ended")] == [str(code)] * NODES
    assert requeues(job) == ["requeue 77"] * requeued


def test_a_task_of_an_array_is_requeued_alone(start_job: Start) -> None:
    job = start_job(facts=PREEMPTED, SLURM_ARRAY_JOB_ID="77", SLURM_ARRAY_TASK_ID="5")
    (job.workplace / "end").write_text("3")
    assert job.wait() == 3
    assert requeues(job) == ["requeue 77_5"]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_shellcheck_finds_nothing() -> None:
    scripts = [
        SCRIPT,
        REPOSITORY / "titanlite" / "ranks" / "slurm.sh",
        REPOSITORY / "run_train.sh",
        REPOSITORY / ".ci" / "run",
        *(REPOSITORY / "scripts").glob("*.sh"),
    ]
    done = subprocess.run(["shellcheck", "-x", *scripts], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == 0
