"""Disks that are full or read-only, as real file systems: one message, and a start that cannot work is not repeated."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.program import Starter, rows

pytestmark = [pytest.mark.soak, pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems: needs root")]

LAUNCHER = ("-m", "titanlite.torchrun", "--standalone", "--max-restarts", "3")
KEYS = (
    *("--training.steps", "200", "--lr_schedule.decay_steps", "1000", "--checkpoint.enable", "true"),
    *("--checkpoint.interval", "10", "--checkpoint.keep_latest_k", "2", "--job.dump_folder"),
)
LEFT_BYTES = 100_000
"""Less than a checkpoint, and enough for the rows of metrics.jsonl until the next save."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB and 60 inodes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=60", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--recursive", folder], check=True)


def fill(disk: Path, left: int) -> None:
    (disk / "of another program").write_bytes(bytes(shutil.disk_usage(disk).free - left))


def use_inodes(disk: Path) -> None:
    for number in range(os.statvfs(disk).f_favail):
        (disk / f"of another program {number}").touch()


def make_read_only(folder: Path) -> None:
    folder.mkdir(parents=True)
    for options in (["--bind", str(folder)], ["-o", "remount,bind,ro"]):
        subprocess.run(["mount", *options, str(folder)], check=True)


FULL = r"No space left on device.*\n\(the disk is full, or has no inodes left for further files: see df -h and df -i\)"
STARTS = {
    "full": rf"job\.dump_folder: cannot read or write .*/job\.lock: {FULL}",
    "almost full": r"checkpoint\.folder: .* has 0\.1 MiB of free space, but a checkpoint of this run needs ",
    "no inodes": rf"job\.dump_folder: cannot create .*: {FULL}",
    "read-only": r"checkpoint\.folder: .* cannot be written: rank 0: .*Read-only file system; fix this",
}


@pytest.mark.parametrize("fault", STARTS)
def test_a_start_that_cannot_write_is_not_repeated(fault: str, disk: Path, tmp_path: Path, start: Starter) -> None:
    out = disk / "out"
    if fault == "no inodes":
        use_inodes(disk)
    elif fault == "read-only":
        make_read_only(out / "checkpoint")
    else:
        fill(disk, LEFT_BYTES if fault == "almost full" else 0)
    program = start(tmp_path, *KEYS, str(out), ranks=2, launcher=LAUNCHER)
    assert program.wait() == 1
    messages = re.findall(rf"^titanlite: {STARTS[fault]}", program.output, re.MULTILINE)
    assert len(messages) == 1, program.output
    assert len(re.findall("^titanlite: ", program.output, re.MULTILINE)) == 2, "the rank's, and the launcher's"


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_disk_that_another_program_fills_ends_the_run_at_the_next_save(
    mode: str, disk: Path, tmp_path: Path, start: Starter
) -> None:
    """The launcher repeats the run, which has begun, once: it is then refused at its start. Later, it resumes."""
    keys = (*KEYS, str(disk / "out"), "--checkpoint.async_mode", mode)
    program = start(tmp_path, *keys, ranks=2, launcher=LAUNCHER)
    program.wait_for("Saved step 10 ")
    fill(disk, LEFT_BYTES)
    assert program.wait() == 1
    assert len(re.findall(rf"^titanlite: cannot save step \d+: .*{FULL}", program.output, re.MULTILINE)) == 1
    assert len(re.findall(rf"^titanlite: {STARTS['almost full']}", program.output, re.MULTILINE)) == 1, program.output
    (disk / "of another program").unlink()
    again = start(tmp_path, *keys, ranks=2, launcher=LAUNCHER, name="again").succeed()
    assert re.search(r"Start: step \d+0, ", again.output)
    assert [row["step"] for row in rows(disk / "out")] == [*range(1, 201)]
