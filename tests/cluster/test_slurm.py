"""scripts/slurm.sbatch and arrays of sweeps on a real Slurm: what it requeues, and the numbers after that."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.slurm import NODES, PRIVATE, Job, Slurm, missing, wait_for
from tests.distributed.program import CONFIG, REPOSITORY, rows
from tests.distributed.recovered import starts
from tests.distributed.reference import TOKENS

pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(missing()), reason=f"a real Slurm {missing()}")]

STEPS = 300
VARIABLES = {"PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    running = Slurm(tmp_path_factory.mktemp("slurm"))
    yield running
    running.close()


def submit(
    slurm: Slurm,
    folder: Path,
    *options: str,
    steps: int = STEPS,
    config: str = "my.toml",
    dump_folder: str = "out",
    variables: dict[str, str] = VARIABLES,
) -> Job:
    """Submit a training with checkpoints."""
    folder.mkdir(exist_ok=True)
    (folder / "my.toml").write_text(CONFIG)
    (folder / "titanlite").symlink_to(REPOSITORY / "titanlite")  # as in a checkout
    words = ("--gpus-per-node=1", *options, str(REPOSITORY / "scripts" / "slurm.sbatch"), config)
    keys = ("--job.dump_folder", dump_folder, "--checkpoint.enable", "true", "--training.steps", str(steps))
    decay = ("--checkpoint.interval", "100", "--lr_schedule.decay_steps", "1000", "--validation.enable", "false")
    return slurm.submit(folder, *words, *keys, *decay, variables=variables)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows(folder / "out")]


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """(step, loss) of a job that nothing stops."""
    job = submit(slurm, tmp_path_factory.mktemp("undisturbed") / "job")
    assert job.wait_for_state("COMPLETED", "FAILED") == "COMPLETED", job.log
    found = losses(job.folder)
    assert len(found) == STEPS
    return found


def assert_resumed(job: Job, undisturbed: list[tuple[int, float]]) -> None:
    """Check that the job, requeued once, resumes from a checkpoint and ends as the undisturbed one."""
    job.start_now()
    assert job.wait_for_state("COMPLETED", "FAILED", within_s=180) == "COMPLETED", job.log
    first, second = starts(job.log)
    assert (first, job.fact("Restarts")) == (0, "1")
    assert second > 0
    assert losses(job.folder)[:STEPS] == undisturbed


@pytest.mark.parametrize(("partition", "stop"), [("all", "preempt"), ("nograce", "preempt"), ("nograce", "requeue")])
def test_a_preempted_job_is_requeued_and_resumes(
    slurm: Slurm, tmp_path: Path, undisturbed: list[tuple[int, float]], partition: str, stop: str
) -> None:
    """It saves first. With GraceTime, the script requeues it; without, and by scontrol, Slurm does."""
    job = submit(slurm, tmp_path / "job", f"--partition={partition}")
    job.wait_for_log(r" 12\d/")
    if stop == "preempt":
        slurm.preempt()
    else:
        slurm.run("scontrol", "requeue", job.id)
    assert_resumed(job, undisturbed)
    assert ("stopped by a preemption; requeueing" in job.log) == (partition == "all")
    assert "Stopped by SIGTERM after step" in job.log


def test_a_job_is_requeued_before_its_time_limit(
    slurm: Slurm, tmp_path: Path, undisturbed: list[tuple[int, float]]
) -> None:
    job = submit(slurm, tmp_path / "job")
    job.wait_for_log(r" 20/")
    job.signal("USR1")
    assert_resumed(job, undisturbed)
    assert "stopped before the time limit; requeueing" in job.log


def test_slurm_warns_before_the_time_limit(slurm: Slurm, tmp_path: Path) -> None:
    """Within the minute before the 60 s of --signal."""
    job = submit(slurm, tmp_path / "job", "--time=2", "--signal=B:USR1@60", steps=100_000)
    job.wait_for_log("stopped before the time limit; requeueing", within_s=180)
    job.start_now()
    job.wait_for_log(r"Start: step [1-9](.|\n)*Start: step|Start: new run(.|\n)*Start: step [1-9]")
    slurm.run("scancel", job.id)


@pytest.mark.parametrize("is_warned", [True, False])
def test_a_cancelled_job_stays_cancelled(slurm: Slurm, tmp_path: Path, *, is_warned: bool) -> None:
    """Also after the warning, while it saves."""
    job = submit(slurm, tmp_path / "job", steps=3000)
    job.wait_for_log(r" 20/")
    if is_warned:
        job.signal("USR1")
    slurm.run("scancel", job.id)
    job.wait_for_state("CANCELLED")
    time.sleep(3)
    assert (job.state, job.fact("Restarts")) == ("CANCELLED", "0")


def test_a_job_that_fails_is_not_requeued(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path / "job", steps=-3)
    assert job.wait_for_state("FAILED", "COMPLETED") == "FAILED"
    assert (job.fact("ExitCode"), job.fact("Restarts")) == ("2:0", "0")
    assert job.log.count("training.steps = -3") == len(NODES)


def test_a_start_that_its_folder_prevents_is_not_repeated(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path / "job", dump_folder=str(slurm.folder / PRIVATE / "out"))
    assert job.wait_for_state("FAILED", "COMPLETED") == "FAILED"
    assert (job.fact("ExitCode"), job.fact("Restarts")) == ("1:0", "0")
    assert job.log.count("is not the same folder for all ranks: rank 1: host ") == 1


@pytest.mark.parametrize("what", ["configuration", "data"])
def test_nodes_that_differ_are_named_before_the_first_step(slurm: Slurm, tmp_path: Path, what: str) -> None:
    tokens = np.load(TOKENS)
    config = CONFIG.replace(str(TOKENS), f"{slurm.folder}/{PRIVATE}/tokens.npy")
    for rank, node in enumerate(NODES):
        rate = f"1e-{2 + rank}" if what == "configuration" else "1e-2"
        slurm.write(node, "my.toml", config.replace("1e-2", rate).encode())
        content = io.BytesIO()
        np.save(content, np.roll(tokens, rank if what == "data" else 0))
        slurm.write(node, "tokens.npy", content.getvalue())
    job = submit(slurm, tmp_path / "job", config=str(slurm.folder / PRIVATE / "my.toml"))
    assert job.wait_for_state("FAILED", "COMPLETED") == "FAILED"
    assert (job.fact("ExitCode"), job.fact("Restarts")) == ("2:0", "0")
    (difference,) = re.findall(r"the ranks differ, so nothing was trained.*\n.*\n.* rank 1 on .*\n(.*)", job.log)
    assert ("optimizer.lr" in difference) == (what == "configuration"), job.log


@pytest.mark.parametrize("lost", [*NODES, "slurmd"])
def test_a_lost_node_requeues_the_job(
    slurm: Slurm, tmp_path: Path, undisturbed: list[tuple[int, float]], lost: str
) -> None:
    """Also if only its slurmd has ended, which Slurm notices later; until then, the job goes on."""
    job = submit(slurm, tmp_path / "job", steps=STEPS if lost in NODES else 900)
    job.wait_for_log(r" 12\d/")
    node = lost if lost in NODES else NODES[1]
    (slurm.lose_node if lost in NODES else slurm.kill_slurmd)(node)
    try:
        job.wait_for_state("PENDING")  # before the node comes back
    finally:
        slurm.start_node(node)
    assert_resumed(job, undisturbed)


def test_a_job_with_min_nodes_goes_on_without_a_lost_node(
    slurm: Slurm, tmp_path: Path, undisturbed: list[tuple[int, float]]
) -> None:
    job = submit(slurm, tmp_path / "job", "--no-kill", variables=VARIABLES | {"MIN_NODES": "1"})
    job.wait_for_log(r" 12\d/")
    slurm.lose_node(NODES[1])
    try:
        assert job.wait_for_state("COMPLETED", "FAILED", within_s=180) == "COMPLETED", job.log
    finally:
        slurm.start_node(NODES[1])
    assert job.fact("Restarts") == "0"
    assert [step for step, _ in losses(job.folder)] == [step for step, _ in undisturbed]
    assert [loss for _, loss in losses(job.folder)] == pytest.approx([loss for _, loss in undisturbed], rel=1e-9)


def test_the_job_ends_soon_after_a_killed_launcher(slurm: Slurm, tmp_path: Path) -> None:
    """The other launcher has the store and waits for the killed one."""
    job = submit(slurm, tmp_path / "job", steps=3000)
    job.wait_for_log(r" 20/")
    port = 10000 + int(job.id) % 20000
    listening = subprocess.run(["ss", "-ltnpH", f"sport = :{port}"], capture_output=True, text=True, check=True).stdout
    (killed,) = (pid for pid in job.launchers() if f"pid={pid}," not in listening)
    os.kill(killed, signal.SIGKILL)
    job.wait_for_state("FAILED", within_s=70)


def test_only_the_stopped_task_of_an_array_is_requeued(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm's number of one task is that of the array."""
    command = [sys.executable, "-m", "titanlite", "sweep", "my.toml", "--optimizer.lr", "1e-3,3e-4", "--nproc", "1"]
    keys = ["--checkpoint.enable", "true", "--training.steps", "900", "--write-slurm", "sweep.sbatch"]
    (tmp_path / "my.toml").write_text(CONFIG)
    subprocess.run([*command, *keys], cwd=tmp_path, env=slurm.environment | VARIABLES, check=True)
    array = slurm.submit(tmp_path, f"--output={tmp_path}/log-%a", "sweep.sbatch", variables=VARIABLES)
    tasks = [Job(slurm, f"{array.id}_{number}", tmp_path) for number in range(2)]
    logs = [tmp_path / f"log-{number}" for number in range(2)]
    wait_for(lambda: all(log.exists() and re.search(r" 20/", log.read_text()) for log in logs), 60)
    (first,) = (task for task in tasks if task.fact("JobId") == array.id)
    (other,) = (task for task in tasks if task is not first)
    first.signal("USR1")
    first.wait_for_state("PENDING")
    assert (other.state, other.fact("Restarts")) == ("RUNNING", "0")
