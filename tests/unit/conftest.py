"""Fixtures of all unit tests: small corpora in temporary folders, and one cache folder per test."""

import gc
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from titanlite.data.bpe import train_bpe
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime import plugins
from titanlite.runtime.logging import logging_restored

SENTENCE = "the model reads a few words and learns which of them follow the others in a text"


@pytest.fixture(scope="session")
def one_file_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stdlib")
    (folder / "module.py").write_text("# the only module\n")
    return folder


@pytest.fixture(autouse=True)
def small_standard_library(one_file_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink python-stdlib, the default source, to one file: every configuration check lists its files."""
    get_paths = sysconfig.get_paths

    def small(*scheme: Any, **options: Any) -> dict[str, str]:
        return get_paths(*scheme, **options) | ({} if scheme or options else {"stdlib": str(one_file_library)})

    monkeypatch.setattr(sysconfig, "get_paths", small)


@pytest.fixture(autouse=True)
def restored_log() -> Iterator[None]:
    """Commands that a test calls in this process set up the log, with the streams that pytest captures."""
    with logging_restored():
        yield


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registries that are open, as in a program that has read no configuration; restored after the test."""
    monkeypatch.setattr(plugins, "_state", plugins._State())
    yield
    plugins._undo(0)
    for name in [name for name in sys.modules if name.startswith(plugins.MODULE_PREFIX)]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A gloo process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_collection() -> Iterator[None]:
    """Collect the garbage of all runs of a file once: each collection visits all modules, 0.4 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)
        yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TITANLITE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(iter([SENTENCE] * 4), 300, folder)
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder / "tokenizer.json")


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """write_jsonl(rows, name): text rows are written as {"text": row}, bytes rows unchanged."""

    def write(rows: list[str | bytes], name: str = "rows.jsonl") -> Path:
        file = tmp_path / name
        lines = [row if isinstance(row, bytes) else json.dumps({"text": row}).encode() for row in rows]
        file.write_bytes(b"\n".join(lines) + b"\n")
        return file

    return write


@pytest.fixture
def stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of 45 usable files, and files that are not part of the corpus."""
    root = tmp_path / "lib"
    for n in range(45):
        file = root / f"package{n % 3}" / f"module{n:02}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# module {n}: the words of a text\nvalue = {n}\n" * (1 + n % 4))
    for name in ("site-packages", "dist-packages", "test", "__pycache__", "package0/test"):
        (root / name).mkdir()
        (root / name / "left_out.py").write_text("left_out = True\n")
    (root / "empty.py").touch()
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    (root / "data.txt").write_text("no Python")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root
