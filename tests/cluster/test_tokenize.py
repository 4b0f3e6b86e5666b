"""`titanlite tokenize` on a real Ray and a real Slurm: the files of one machine, also after a worker was killed.

Ray runs in namespaces of its own: it listens on all interfaces, and its processes end with the first one. That needs
root and the extra ray; Slurm needs what test_slurm.py needs.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from json import dumps
from pathlib import Path

import pytest

from tests.cluster import slurm
from tests.cluster.slurm import Job, Slurm, processes, wait_for
from tests.distributed.program import REPOSITORY, clean_environment, read
from titanlite.data.bpe import train_bpe
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.python_stdlib import PythonStdlib

RAY = "needs root" if os.geteuid() else "" if find_spec("ray") else "needs ray"
PART_BYTES, PARTS = 2**20, 12
COMMAND = [sys.executable, "-m", "titanlite", "tokenize", "my.toml", "--part-bytes", str(PART_BYTES)]

pytestmark = pytest.mark.soak
needs_ray = pytest.mark.skipif(bool(RAY), reason=f"a real Ray {RAY}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose parts take about a second, and its token files in `local`."""
    folder = tmp_path_factory.mktemp("tokenize")
    texts = [file.read_text("utf-8") for file in PythonStdlib(SourceConfig()).split_files()]
    (folder / "tokenizer").mkdir()
    train_bpe(iter(texts[:200]), 2048, folder / "tokenizer")
    rows = "".join(dumps({"text": text}) + "\n" for text in texts)[: PARTS * PART_BYTES]
    (folder / "rows.jsonl").write_text(rows.rpartition("\n")[0])
    (folder / "my.toml").write_text(
        '[tokenizer]\npath = "tokenizer"\n[[data.sources]]\nkind = "jsonl"\npath = "rows.jsonl"\n'
    )
    subprocess.run([*COMMAND, "--out", "local"], cwd=folder, env=environment(folder), check=True)
    assert len(list(folder.glob("local/*.npy"))) == PARTS
    return folder


def environment(folder: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return clean_environment() | {"PYTHONPATH": paths, "TITANLITE_CACHE": str(folder / "cache")}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def entries(folder: Path) -> list[Path]:
    return list(folder.glob("tokens-*.json"))


@contextmanager
def own_network(folder: Path, script: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script in a network and processes of its own, which end with it."""
    command = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-euc"]
    with subprocess.Popen(
        [*command, f"ip link set lo up; {script}"],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def workers_of(running: subprocess.Popen[str]) -> list[int]:
    """The processes of Ray that write parts in the network of a program."""
    network = os.stat(f"/proc/{running.pid}/ns/net").st_ino
    titles = {pid: read(Path(f"/proc/{pid}/cmdline")) for pid in processes()}
    writing = [pid for pid, title in titles.items() if title.startswith("ray::write_part")]
    return [pid for pid in writing if os.stat(f"/proc/{pid}/ns/net").st_ino == network]


@needs_ray
@pytest.mark.parametrize("workers", [1, 3])
def test_ray_of_this_machine(folder: Path, workers: int) -> None:
    words = f"--out ray-{workers} --engine ray --workers {workers}"
    with own_network(folder, f"{' '.join(COMMAND)} {words}") as running:
        output, _ = running.communicate(timeout=300)
    assert running.returncode == 0, output
    assert contents(folder / f"ray-{workers}") == contents(folder / "local")


@needs_ray
def test_a_killed_worker_of_a_ray_cluster(folder: Path) -> None:
    """Its part is written by another one."""
    start = f"{sys.executable} -m ray.scripts.scripts start --head --port=6379 --num-cpus=2 --include-dashboard=false"
    variables = "export RAY_AUTH_MODE=disabled RAY_ADDRESS=127.0.0.1:6379"
    script = f"{variables}; env -u RAY_ADDRESS {start}; {' '.join(COMMAND)} --out killed --engine ray"
    with own_network(folder, script) as running:
        wait_for(lambda: bool(entries(folder / "killed")) or running.poll() is not None, 120)
        assert running.poll() is None, running.communicate()[0]
        os.kill(workers_of(running)[0], signal.SIGKILL)
        output, _ = running.communicate(timeout=300)
    assert running.returncode == 0, output
    assert contents(folder / "killed") == contents(folder / "local")


@pytest.mark.skipif(bool(slurm.missing()), reason=f"a real Slurm {slurm.missing()}")
def test_tasks_of_a_slurm_array(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One of them is killed: the folder is complete when the script was submitted again."""
    running = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        words = ["--out", "slurm", "--engine", "slurm", "--workers", "3", "--submit"]
        variables = environment(folder) | running.environment
        done = subprocess.run([*COMMAND, *words], cwd=folder, env=variables, check=True, capture_output=True, text=True)
        first = Job(running, done.stdout.split()[-1], folder)
        tasks = [Job(running, f"{first.id}_{number}", folder) for number in range(3)]
        wait_for(lambda: bool(entries(folder / "slurm")), 60)
        running.run("scancel", "--signal=KILL", "--full", tasks[1].id)
        for task in tasks:
            task.wait_for_state("COMPLETED", "FAILED", "CANCELLED")
        assert not (folder / "slurm" / "tokens.json").exists()
        again = running.submit(folder, "tokenize.sbatch", variables=environment(folder))
        for number in range(3):
            task = Job(running, f"{again.id}_{number}", folder)
            assert task.wait_for_state("COMPLETED", "FAILED") == "COMPLETED"
        assert contents(folder / "slurm") == contents(folder / "local")
    finally:
        running.close()
