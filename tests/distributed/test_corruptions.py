"""Damage to a published checkpoint: found, named, set aside, and the next newest is taken."""

import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.forked import Parent, fork_ranks
from tests.distributed.standin import Run, saved, start_in
from titanlite.checkpoint import storage
from titanlite.checkpoint.manifest import MANIFEST_FILE
from titanlite.checkpoint.storage import METADATA_FILE

pytestmark = pytest.mark.slow

SHARDS = ("__0_0.distcp", "__1_0.distcp")
WRITTEN_BY = {"__0_0.distcp": 0, "__1_0.distcp": 1, METADATA_FILE: 0}
Damage = Callable[[Path, random.Random], str]
"""Damages the checkpoint of step 3, which stands beside those of steps 1 and 2; returns a pattern for the reason."""


def says(name: str, what: str) -> str:
    return f"{re.escape(name)} \\(written by rank {WRITTEN_BY[name]}\\) {what}"


def any_file(path: Path, chance: random.Random) -> Path:
    return path / chance.choice(sorted(WRITTEN_BY))


OTHER_CONTENT = "does not have the content that was written"
OTHER_SIZE = "has [0-9,]+ bytes instead of [0-9,]+"


def flip(path: Path, chance: random.Random) -> str:
    file = any_file(path, chance)
    flip_bit(file, chance.randrange(8 * file.stat().st_size))
    return says(file.name, OTHER_CONTENT)


def flip_bit(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def zero(path: Path, chance: random.Random) -> str:
    file = any_file(path, chance)
    data = bytearray(file.read_bytes())
    length = chance.choice([1, 16, 512])
    position = chance.choice([at for at in range(len(data)) if any(data[at : at + length])])
    data[position : position + length] = bytes(len(data[position : position + length]))
    file.write_bytes(data)
    return says(file.name, OTHER_CONTENT)


def truncate(path: Path, chance: random.Random) -> str:
    file = any_file(path, chance)
    os.truncate(file, chance.randrange(1, file.stat().st_size))
    return says(file.name, OTHER_SIZE)


def empty(path: Path, chance: random.Random) -> str:
    file = any_file(path, chance)
    os.truncate(file, 0)
    return says(file.name, OTHER_SIZE)


def lengthen(path: Path, chance: random.Random) -> str:
    file = any_file(path, chance)
    file.write_bytes(file.read_bytes() + b"\0")
    return says(file.name, OTHER_SIZE)


def remove(path: Path, chance: random.Random) -> str:
    file = any_file(path, chance)
    file.unlink()
    if chance.random() < 0.5:
        file.mkdir()
        return says(file.name, f"({OTHER_SIZE}|is missing)")
    return says(file.name, "is missing")


def swap(path: Path, chance: random.Random) -> str:  # noqa: ARG001
    one, other = (path / name for name in SHARDS)
    one.rename(path / "third")
    other.rename(one)
    (path / "third").rename(other)
    return f"({says(SHARDS[0], OTHER_SIZE)}|{says(SHARDS[1], OTHER_SIZE)})"


def older_shard(path: Path, chance: random.Random) -> str:
    """Of the same size, and good in its own place."""
    name = chance.choice(SHARDS)
    shutil.copy(path.with_name("step-2") / name, path / name)
    return says(name, OTHER_CONTENT)


def stale_manifest(path: Path, chance: random.Random) -> str:
    step = chance.choice([1, 2])
    shutil.copy(path.with_name(f"step-{step}") / MANIFEST_FILE, path)
    return f"{MANIFEST_FILE} is that of step {step}"


def flip_in_manifest(path: Path, chance: random.Random) -> str:
    file = path / MANIFEST_FILE
    flip_bit(file, chance.randrange(8 * file.stat().st_size))
    return f"{MANIFEST_FILE} (cannot be read|does not have the content|does not list)"


def truncate_manifest(path: Path, chance: random.Random) -> str:
    file = path / MANIFEST_FILE
    os.truncate(file, chance.randrange(file.stat().st_size))
    return f"{MANIFEST_FILE} cannot be read"


def remove_manifest(path: Path, chance: random.Random) -> str:  # noqa: ARG001
    (path / MANIFEST_FILE).unlink()
    return f"{MANIFEST_FILE} is missing"


DAMAGES: tuple[Damage, ...] = (
    *(flip, zero, truncate, empty, lengthen, remove, swap, older_shard),
    *(stale_manifest, flip_in_manifest, truncate_manifest, remove_manifest),
)


def damaged_starts(folder: Path, count: int) -> list[tuple[str, str, list[dict[str, Any]], list[str]]]:
    """For each corruption: its kind, the pattern for the reason, what each rank found, the names in the folder then."""
    saved(folder / "model", 3)
    kinds, patterns, folders = [], [], []
    for number in range(count):
        chance, damage = random.Random(number), DAMAGES[number % len(DAMAGES)]
        target = folder / f"{number}"
        shutil.copytree(folder / "model", target)
        kinds.append(damage.__name__)
        patterns.append(damage(target / "step-3", chance))
        folders.append(target)
    found = start_in(folders)
    names = [sorted(os.listdir(target)) for target in folders]
    return list(zip(kinds, patterns, found, names, strict=True))


def check_damaged_starts(parent: Parent, folder: Path, count: int) -> None:
    outcomes = parent(damaged_starts, folder, count)
    assert len(outcomes) == count
    for kind, pattern, ranks, names in outcomes:
        for answer in ranks:
            assert (answer.get("step"), answer.get("branch")) == (2, "a"), (kind, answer)
        lines = [[line for line in answer["lines"] if "damaged" in line] for answer in ranks]
        ((line,), *others) = lines
        assert others == [[] for _ in others]  # rank 0 says it for all
        reason = r"Checkpoint step-3 is damaged: " + pattern + r"[^\n]*\. Set aside as step-3\.invalid-\d{8}T\d{6}Z"
        assert re.fullmatch(reason, line), (kind, line)
        assert [name.split(".")[0] for name in names] == ["step-1", "step-2", "step-3"], (kind, names)
        assert line.endswith(names[2])


@pytest.mark.slow
def test_each_of_50_corruptions_is_found_and_named_and_the_next_newest_is_loaded(
    parent: Parent, tmp_path: Path
) -> None:
    check_damaged_starts(parent, tmp_path, 50)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_each_of_1000_corruptions_is_found(parent: Parent, tmp_path: Path) -> None:
    check_damaged_starts(parent, tmp_path, 1000)


def nothing_whole(folder: Path) -> list[list[dict[str, Any]]]:
    """Two starts one after the other in a folder in which all is damaged."""
    saved(folder, 3)
    for number, damage in enumerate((flip, remove, remove_manifest)):
        damage(folder / f"step-{number + 1}", random.Random(number))
    before = contents(folder)
    found = start_in([folder, folder])
    assert contents(folder) == before, "files were changed or deleted"
    return found


def contents(folder: Path) -> list[tuple[str, bytes]]:
    """Of the files, whatever the folders around them are called by now."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted((f"{path.parent.name.split('.')[0]}/{path.name}", path.read_bytes()) for path in files)


def test_where_every_checkpoint_is_damaged_no_run_starts_anew(parent: Parent, tmp_path: Path) -> None:
    for ranks in parent(nothing_whole, tmp_path):
        for answer in ranks:
            kind, text = answer["error"]
            assert kind == "UserError"
            for step in (1, 2, 3):
                assert re.search(rf"step-{step}\.invalid-\d{{8}}T\d{{6}}Z", text)
            assert "To start anew all the same" in text
    assert sorted(name.split(".")[0] for name in os.listdir(tmp_path)) == ["step-1", "step-2", "step-3"]


def hashed_files(folder: Path) -> list[str]:
    """Names of the files that this rank has hashed at a start."""
    names = []
    original = storage.hash_of

    def noted(path: Path) -> str:
        names.append(path.name)
        return original(path)

    storage.hash_of = noted
    Run(folder)
    return names


def hashed_by_ranks(folder: Path) -> list[list[list[str]]]:
    saved(folder, 2)
    return [[end.result for end in fork_ranks(hashed_files, world, folder)] for world in (1, 2, 3, 4)]


def test_each_file_is_verified_by_exactly_one_rank(parent: Parent, tmp_path: Path) -> None:
    for ranks in parent(hashed_by_ranks, tmp_path):
        assert Counter(name for names in ranks for name in names) == dict.fromkeys(WRITTEN_BY, 1)
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
