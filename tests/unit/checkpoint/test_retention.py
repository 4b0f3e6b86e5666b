"""Retention over random histories: there is always a checkpoint to resume from, and foreign folders are not touched.

The expected content comes from a model of the history that never reads a manifest. The model records inode, size and
time of the files of each published checkpoint and which checkpoints it has damaged, and computes as sets of steps which
must be kept and which deleted. After an operation that was not killed, the folder has exactly the names and files of
the model. After a kill, all checkpoints to be kept exist; those to be deleted are unchanged or removed at the next
start.
"""

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.unit.checkpoint.making import KILLER, write_unpublished
from titanlite.checkpoint.folder import (
    clear_leftovers,
    complete_manifest,
    ever_published,
    invalid_kind,
    publish,
    published_steps,
    quarantine,
    retain,
    step_folder,
    supersede_after,
)
from titanlite.checkpoint.manifest import MANIFEST_FILE, METADATA_FILE, Branch, InvalidCheckpointError

FOREIGN = ["my-step-50-gold", "step-007", "step-20.gold", "step-10x", "step--1", ".step-30.written", "notes"]
INTERVAL = 10

Files = tuple[tuple[str, int, int, int], ...]


def files_of(path: str) -> Files:
    """Return (name, inode, size, time) of each entry of a folder."""
    with os.scandir(path) as entries:
        stats = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    return tuple(sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats))


class History:
    """A random history of one run's starts, saves, kills and damage, with the expected content of its folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.choose = random.Random(seed)
        self.complete: dict[int, Files] = {}
        """Complete full checkpoints by step, as published."""
        self.stays: dict[str, Files] = {}
        """Other folders that must be kept: corrupted, model-only, quarantined, superseded, foreign."""
        self.ever = False
        self.branch = 0
        self.step = self.source = 0
        self.latest = self.every = 0
        self.saves = self.kills = self.deletions = 0
        folder.mkdir()

    def contents(self) -> dict[str, Files]:
        with os.scandir(self.folder) as entries:
            return {entry.name: files_of(entry.path) for entry in entries}

    def expected(self) -> dict[str, Files]:
        return {f"step-{step}": files for step, files in self.complete.items()} | self.stays

    def look(self, *, exactly: bool) -> dict[str, Files]:
        """Check the invariants and return the content. exactly: no other folders may exist."""
        present, expected = self.contents(), self.expected()
        assert {name: present.get(name) for name in expected} == expected
        assert not exactly or present.keys() == expected.keys()
        assert bool(self.complete) or not self.ever, "no checkpoint is left to resume from"
        return present

    def killed(self, work: Callable[[], None], likely: float) -> bool:
        """Run `work`, with probability `likely` killed at a random operation; returns whether it was killed."""
        if self.choose.random() >= likely:
            work()
            return False
        with KILLER.at(self.choose.randrange(25)) as killed:
            work()
        self.kills += bool(killed)
        return bool(killed)

    def start(self) -> None:
        """Start a process: resume from the latest valid checkpoint, or go back to an earlier one."""
        self.latest = self.choose.choice([0, 1, 1, 2, 3])
        self.every = self.choose.choice([0, 0, 0, 20, 30])
        back = self.choose.choice(sorted(self.complete)) if self.complete and self.choose.random() < 0.25 else None
        found: list[int] = []
        while self.killed(partial(self.resume, back, found), 0.2):
            self.follow_renames(0, all_of_them=False)
            self.look(exactly=False)
            if back not in self.complete:
                back = None
            found.clear()
        self.source = self.step = max(self.complete, default=0) if back is None else back
        self.branch += back is not None
        assert found == ([self.source] if self.complete else [])
        self.follow_renames(self.source, all_of_them=True)
        self.look(exactly=True)
        assert ever_published(self.folder) == self.ever

    def resume(self, back: int | None, found: list[int]) -> None:
        """Append the step to resume from to `found`, as a run finds it."""
        clear_leftovers(self.folder)
        for step in reversed(published_steps(self.folder)) if back is None else [back]:
            try:
                manifest = complete_manifest(self.folder, step)
            except InvalidCheckpointError:
                quarantine(self.folder, step, invalid_kind())
                continue
            if manifest.content == "full":
                supersede_after(self.folder, step)
                found.append(step)
                return

    def follow_renames(self, source: int, *, all_of_them: bool) -> None:
        """Check that checkpoints after `source` were renamed with unchanged files. all_of_them: none may be left."""
        present = self.contents()
        names = {files: name for name, files in present.items()}
        for name, files in self.expected().items():
            number = re.fullmatch(r"step-(0|[1-9][0-9]*)", name)
            if number is None or int(number[1]) <= source:
                continue
            if present.get(name) == files:
                assert not all_of_them, f"{name} is still in the way"
                continue
            assert re.match(rf"{name}\.(superseded|invalid)-\w+", names[files])
            self.complete.pop(int(number[1]), None)
            self.stays.pop(name, None)
            self.stays[names[files]] = files

    def save(self, *, model_only: bool = False) -> bool:
        """Save; returns False if the process was killed."""
        self.step += INTERVAL
        new, before = self.step, dict(self.complete)
        deleted: list[int] = []

        def work() -> None:
            lineage = (Branch(f"b{self.branch}", 0),)
            write_unpublished(self.folder, new, content="model" if model_only else "full", lineage=lineage)
            publish(self.folder, new)
            deleted.extend(
                retain(self.folder, keep_latest_k=self.latest, keep_every=self.every, keep=frozenset({self.source}))
            )

        killed = self.killed(work, 0.3)
        present = self.contents()
        published = f"step-{new}" in present
        assert published or killed
        if published:
            self.ever = self.ever or not model_only
            files = present[f"step-{new}"]
            assert [name for name, *_ in files] == sorted([METADATA_FILE, MANIFEST_FILE])
            if model_only:
                self.stays[f"step-{new}"] = files
            else:
                self.complete[new] = files
            for step in self.may_go():
                if not killed or present.get(f"step-{step}") != before[step]:
                    del self.complete[step]
                    self.deletions += 1
        self.look(exactly=not killed)
        assert killed or sorted(deleted) == sorted(before.keys() - self.complete.keys())
        self.saves += 1
        return not killed

    def may_go(self) -> set[int]:
        """Return the steps that retention deletes, by its settings."""
        if self.latest == 0:
            return set()
        latest = set(sorted(self.complete)[-self.latest :])
        kept = {step for step in self.complete if step == self.source or (self.every and step % self.every == 0)}
        return self.complete.keys() - latest - kept

    def damage(self) -> None:
        """Damage one of at least two complete checkpoints."""
        if len(self.complete) < 2:
            return
        step = self.choose.choice(sorted(self.complete))
        path = step_folder(self.folder, step)
        kind = self.choose.randrange(5)
        if kind == 0:
            (path / MANIFEST_FILE).unlink()
        elif kind == 1:
            (path / METADATA_FILE).unlink()
        elif kind == 2:
            os.truncate(path / METADATA_FILE, 1)
        elif kind == 3:
            data = bytearray((path / MANIFEST_FILE).read_bytes())
            data[self.choose.randrange(len(data))] ^= 1 << self.choose.randrange(8)
            (path / MANIFEST_FILE).write_bytes(data)
        else:
            other = self.choose.choice([other for other in self.complete if other != step])
            shutil.copy(step_folder(self.folder, other) / MANIFEST_FILE, path / MANIFEST_FILE)
        del self.complete[step]
        self.stays[f"step-{step}"] = files_of(str(path))

    def add_foreign(self) -> None:
        name = self.choose.choice(FOREIGN)
        path = self.folder / name
        if not path.exists():
            write_unpublished(self.folder, 999).rename(path)
            self.stays[name] = files_of(str(path))

    def play(self) -> None:
        for _ in range(self.choose.randint(1, 4)):
            self.start()
            alive = True
            for _ in range(self.choose.randint(0, 4)):
                if self.choose.random() < 0.2:
                    self.damage()
                if self.choose.random() < 0.1:
                    self.add_foreign()
                alive = self.save()
                if not alive:
                    break
            if alive and self.complete and self.choose.random() < 0.15:
                self.save(model_only=True)
        self.start()


@pytest.fixture
def in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in memory if available, without fsync, for speed."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def play_all(folder: Path, seeds: range) -> tuple[int, int, int]:
    """Play a history per seed; returns the total (saves, kills, deletions)."""
    counts = (0, 0, 0)
    for seed in seeds:
        history = History(folder / str(seed), seed)
        try:
            history.play()
        except BaseException as error:
            error.add_note(f"in the history of seed {seed}")
            raise
        counts = (counts[0] + history.saves, counts[1] + history.kills, counts[2] + history.deletions)
        shutil.rmtree(history.folder)
    return counts


@pytest.mark.slow
def test_random_histories(in_memory: Path) -> None:
    saves, kills, deletions = play_all(in_memory, range(250))
    assert saves > 625
    assert kills > 125
    assert deletions > 125


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_histories(in_memory: Path) -> None:
    play_all(in_memory, range(500, 45_500))
