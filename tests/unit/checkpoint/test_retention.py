"""Retention over random histories: there is always a checkpoint to go on from, and nothing else's is touched.

What is expected comes from a model that knows what the history has done, and never reads a manifest: it remembers
inode, size and time of the files of each checkpoint as it was published, what it has damaged itself, and works out by
sets of steps what must stay and what must go. After everything that was not killed, the names in the folder are exactly
those of the model, each with the very files that it remembers; after a kill, what had to stay is there, and what had to
go is there as it was or is gone at the next start.
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
    ever_published,
    invalid_kind,
    publish,
    published_steps,
    retain,
    set_aside,
    step_folder,
    supersede_after,
    whole_manifest,
)
from titanlite.checkpoint.manifest import MANIFEST_FILE, Branch
from titanlite.checkpoint.storage import METADATA_FILE, InvalidCheckpointError

FOREIGN = ["my-step-50-gold", "step-007", "step-20.gold", "step-10x", "step--1", ".step-30.written", "notes"]
INTERVAL = 10

Files = tuple[tuple[str, int, int, int], ...]


def files_of(path: str) -> Files:
    """Name, inode, size and time of what is in a folder."""
    with os.scandir(path) as entries:
        stats = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    return tuple(sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats))


class History:
    """One run's checkpoints through starts, saves, kills, damages; and what has to be there."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.choose = random.Random(seed)
        self.whole: dict[int, Files] = {}
        """The full checkpoints under their name, as they were published."""
        self.stays: dict[str, Files] = {}
        """All else that is there and must stay: damaged, of the model alone, set aside, superseded, foreign."""
        self.ever = False
        self.branch = 0
        self.step = self.source = 0
        self.latest = self.every = 0
        self.saves = self.kills = self.deletions = 0
        folder.mkdir()

    def there(self) -> dict[str, Files]:
        with os.scandir(self.folder) as entries:
            return {entry.name: files_of(entry.path) for entry in entries}

    def expected(self) -> dict[str, Files]:
        return {f"step-{step}": files for step, files in self.whole.items()} | self.stays

    def look(self, *, exactly: bool) -> dict[str, Files]:
        """What holds at any time. exactly: and nothing else is there."""
        there, expected = self.there(), self.expected()
        assert {name: there.get(name) for name in expected} == expected
        assert not exactly or there.keys() == expected.keys()
        assert bool(self.whole) or not self.ever, "nothing is left to go on from"
        return there

    def killed(self, work: Callable[[], None], likely: float) -> bool:
        """Does the work, or a part of it."""
        if self.choose.random() >= likely:
            work()
            return False
        with KILLER.at(self.choose.randrange(25)) as killed:
            work()
        self.kills += bool(killed)
        return bool(killed)

    def start(self) -> None:
        """Of a process: takes the newest whole checkpoint, or goes back to an earlier one."""
        self.latest = self.choose.choice([0, 1, 1, 2, 3])
        self.every = self.choose.choice([0, 0, 0, 20, 30])
        back = self.choose.choice(sorted(self.whole)) if self.whole and self.choose.random() < 0.25 else None
        found: list[int] = []
        while self.killed(partial(self.go_on, back, found), 0.2):
            self.follow_renames(0, all_of_them=False)
            self.look(exactly=False)
            if back not in self.whole:
                back = None
            found.clear()
        self.source = self.step = max(self.whole, default=0) if back is None else back
        self.branch += back is not None
        assert found == ([self.source] if self.whole else [])
        self.follow_renames(self.source, all_of_them=True)
        self.look(exactly=True)
        assert ever_published(self.folder) == self.ever

    def go_on(self, back: int | None, found: list[int]) -> None:
        """Notes the step to go on from, as a run finds it, if there is one."""
        clear_leftovers(self.folder)
        for step in reversed(published_steps(self.folder)) if back is None else [back]:
            try:
                manifest = whole_manifest(self.folder, step)
            except InvalidCheckpointError:
                set_aside(self.folder, step, invalid_kind())
                continue
            if manifest.content == "full":
                supersede_after(self.folder, step)
                found.append(step)
                return

    def follow_renames(self, source: int, *, all_of_them: bool) -> None:
        """What was published after `source` has another name now, with the same files in it."""
        there = self.there()
        names = {files: name for name, files in there.items()}
        for name, files in self.expected().items():
            number = re.fullmatch(r"step-(0|[1-9][0-9]*)", name)
            if number is None or int(number[1]) <= source:
                continue
            if there.get(name) == files:
                assert not all_of_them, f"{name} is still in the way"
                continue
            assert re.match(rf"{name}\.(superseded|invalid)-\w+", names[files])
            self.whole.pop(int(number[1]), None)
            self.stays.pop(name, None)
            self.stays[names[files]] = files

    def save(self, *, model_only: bool = False) -> bool:
        """Whether the process lives on."""
        self.step += INTERVAL
        new, before = self.step, dict(self.whole)
        deleted: list[int] = []

        def work() -> None:
            lineage = (Branch(f"b{self.branch}", 0),)
            write_unpublished(self.folder, new, content="model" if model_only else "full", lineage=lineage)
            publish(self.folder, new)
            deleted.extend(
                retain(self.folder, keep_latest_k=self.latest, keep_every=self.every, keep=frozenset({self.source}))
            )

        killed = self.killed(work, 0.3)
        there = self.there()
        published = f"step-{new}" in there
        assert published or killed
        if published:
            self.ever = self.ever or not model_only
            files = there[f"step-{new}"]
            assert [name for name, *_ in files] == sorted([METADATA_FILE, MANIFEST_FILE])
            if model_only:
                self.stays[f"step-{new}"] = files
            else:
                self.whole[new] = files
            for step in self.may_go():
                if not killed or there.get(f"step-{step}") != before[step]:
                    del self.whole[step]
                    self.deletions += 1
        self.look(exactly=not killed)
        assert killed or sorted(deleted) == sorted(before.keys() - self.whole.keys())
        self.saves += 1
        return not killed

    def may_go(self) -> set[int]:
        """By the settings."""
        if self.latest == 0:
            return set()
        newest = set(sorted(self.whole)[-self.latest :])
        kept = {step for step in self.whole if step == self.source or (self.every and step % self.every == 0)}
        return self.whole.keys() - newest - kept

    def damage(self) -> None:
        """One of several whole ones."""
        if len(self.whole) < 2:
            return
        step = self.choose.choice(sorted(self.whole))
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
            other = self.choose.choice([other for other in self.whole if other != step])
            shutil.copy(step_folder(self.folder, other) / MANIFEST_FILE, path / MANIFEST_FILE)
        del self.whole[step]
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
            lives = True
            for _ in range(self.choose.randint(0, 4)):
                if self.choose.random() < 0.2:
                    self.damage()
                if self.choose.random() < 0.1:
                    self.add_foreign()
                lives = self.save()
                if not lives:
                    break
            if lives and self.whole and self.choose.random() < 0.15:
                self.save(model_only=True)
        self.start()


@pytest.fixture
def in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that costs no time of a disk, where there is one; nothing here loses power."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def play_all(folder: Path, seeds: range) -> tuple[int, int, int]:
    """(saves, kills, deletions) of all of the histories."""
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
    saves, kills, deletions = play_all(in_memory, range(500))
    assert saves > 1250
    assert kills > 250
    assert deletions > 250


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_more_random_histories(in_memory: Path) -> None:
    play_all(in_memory, range(500, 45_500))
