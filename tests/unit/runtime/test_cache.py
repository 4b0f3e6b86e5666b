"""Verified files: hashed once, by one process at a time."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from titanlite.runtime import cache
from titanlite.runtime.cache import has_hash, hash_of

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
    path.write_bytes(b"tokens" * 1000)
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
