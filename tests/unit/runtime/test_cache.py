"""Verified files: large ones are hashed once, by one process at a time. Folders of the cache with damaged files."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from titanlite.runtime import cache
from titanlite.runtime.cache import HASHES, built_once, cache_folder, has_hash, hash_of
from titanlite.runtime.errors import UserError

SLOW_HASH = """
import sys, time
from pathlib import Path
from titanlite.runtime import cache
def hash_of(path):
    print("hashing", flush=True)
    time.sleep(600)
cache.hash_of = hash_of
cache.has_hash(Path(sys.argv[1]), sys.argv[2])
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tokens.npy"
    path.write_bytes(b"tokens" * 200_000)
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are hashed, each of which takes 0.1 s."""
    paths: list[Path] = []

    def slow(path: Path) -> str:
        paths.append(path)
        time.sleep(0.1)
        return hash_of(path)

    monkeypatch.setattr(cache, "hash_of", slow)
    return paths


def at_once(check: Callable[[], bool]) -> list[bool]:
    """The results of 8 concurrent calls. Locks exclude threads as they do processes."""
    barrier = threading.Barrier(8)

    def call(_: int) -> bool:
        barrier.wait()
        return check()

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(call, range(8)))


def test_a_file_is_hashed_once_by_all_ranks_of_a_node(file: Path, hashed: list[Path]) -> None:
    digest = hash_of(file)
    assert at_once(lambda: has_hash(file, digest)) == [True] * 8
    assert hashed == [file]
    assert not has_hash(file, "0" * 32)
    os.utime(file, ns=(0, 0))
    assert has_hash(file, digest)
    assert len(hashed) == 3


def test_a_wrong_hash_is_not_remembered(file: Path, hashed: list[Path]) -> None:
    assert not has_hash(file, "0" * 32)
    assert not has_hash(file, "0" * 32)
    assert len(hashed) == 2


def test_small_files_are_hashed_at_each_use(file: Path) -> None:
    file.write_bytes(b"tokens")
    digest, facts = hash_of(file), file.stat()
    assert has_hash(file, digest)
    file.write_bytes(b"tokenS")
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert not has_hash(file, digest)


def build(folder: Path) -> None:
    (folder / "one").write_text("1")
    (folder / "two").write_text("2")


def replace_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "two").write_text("3"),
        lambda folder: (folder / "two").write_text(""),
        lambda folder: (folder / "two").unlink(),
        lambda folder: replace_by_pipe(folder / "two"),
        lambda folder: replace_by_pipe(folder / HASHES),
        lambda folder: (folder / HASHES).write_text(""),
        lambda folder: (folder / HASHES).write_text((folder / HASHES).read_text()[:-2]),
        lambda folder: (folder / HASHES).write_text((folder / HASHES).read_text().partition("\n")[0]),
        lambda folder: (folder / HASHES).write_bytes(b"\xff"),
        lambda folder: (folder / HASHES).unlink(),
    ],
)
def test_a_folder_with_a_damaged_file_is_built_again(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = built_once(tmp_path / "thing", "a thing", build)
    damage(folder)
    for _ in range(2):
        assert built_once(folder, "a thing", build) == folder
        assert [(folder / name).read_text() for name in ("one", "two")] == ["1", "2"]
        assert caplog.messages == [f"a thing in {folder} is damaged and is built again"]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "one"))

    with pytest.raises(UserError, match=r"No space left on device: '.*one'; set .* TITANLITE_CACHE to .* more space"):
        built_once(tmp_path / "thing", "a thing", fail)


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_lock_does_not_block(file: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "thing.lock")
    with pytest.raises(UserError, match=r"cannot build a thing in .*thing\.lock is not a regular file but a pipe; set"):
        built_once(tmp_path / "thing", "a thing", build)
    digest = hash_of(file)
    assert has_hash(file, digest)
    (marker,) = (tmp_path / "cache" / "verified").iterdir()
    replace_by_pipe(marker)
    assert has_hash(file, digest)
    assert not has_hash(file, "0" * 32)


@pytest.mark.parametrize("fault", ["no folder", "no locks"])
def test_files_are_verified_without_a_cache_that_can_be_written(
    fault: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no locks available")

    if fault == "no folder":
        (tmp_path / "cache").touch()
    else:
        monkeypatch.setattr(cache.fcntl, "flock", fail)
    assert has_hash(file, hash_of(file))
    assert not has_hash(file, "0" * 32)


@pytest.mark.timeout(60)
def test_an_unknown_home_folder_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITANLITE_CACHE", "~/caches")
    assert cache_folder() == Path.home() / "caches"
    monkeypatch.setenv("TITANLITE_CACHE", "~nobodyhere/caches")
    with pytest.raises(UserError, match=r"^TITANLITE_CACHE=~nobodyhere/caches: this home folder is unknown"):
        cache_folder()


def test_a_killed_process_does_not_block_the_others(file: Path) -> None:
    digest = hash_of(file)
    with subprocess.Popen([sys.executable, "-c", SLOW_HASH, str(file), digest], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"hashing\n"
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(has_hash, file, digest)
            time.sleep(0.2)
            assert not waiting.done()
            process.send_signal(signal.SIGKILL)
            assert waiting.result(timeout=10)


@pytest.mark.parametrize(("mode", "other", "group", "said"), [
    (0o755, 0, "team", ""), (0o775, 0, "me", ""), (0o770, 0, "team", "may be written to by other users"),
    (0o702, 0, "me", "may be written to by other users"), (0o700, 1, "me", "belongs to another user"),
])  # fmt: skip
def test_a_cache_that_others_may_write_to_is_named_once(
    mode: int, other: int, group: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path))
    user = 1000 + other
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(cache.pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="me"))
    monkeypatch.setattr(cache.grp, "getgrgid", lambda _: SimpleNamespace(gr_name=group, gr_mem=[]))
    found = SimpleNamespace(st_uid=1000, st_gid=1000, st_mode=mode)
    monkeypatch.setattr(cache.Path, "stat", lambda _: found)
    warnings: list[str] = []
    monkeypatch.setattr(cache.log, "warning", lambda text, *values: warnings.append(text % values))
    assert cache_folder() == cache_folder() == tmp_path
    assert len(warnings) == bool(said)
    assert all(said in each for each in warnings)
