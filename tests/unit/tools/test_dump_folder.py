"""Copies of dump folders in stores: a stranger's names of objects write nothing outside of the copy."""

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from titanlite.metrics.config import METRICS_FILE
from titanlite.runtime.errors import UserError
from titanlite.storage import store as store_module
from titanlite.storage.address import Address
from titanlite.storage.store import Facts, Store
from titanlite.tools.dump_folder import local_dump_folder

NAMES = ("faults/../../../pwned", "faults/../../pwned", "faults//pwned", "faults/./pwned", "faults/a\\pwned")
"""pwned would be beside the temporary folder, in it, or in a folder of its own."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    (tmp_path / "deep/temporary").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "deep/temporary"))
    stored = Store(Address.parse(f"memory://{uuid4().hex}/run"))
    stored.write(METRICS_FILE, b"")
    stored.write("faults/rank-0.txt", b"x")
    return stored


@pytest.mark.parametrize("listing_is_trusted", [False, True])
def test_names_lead_nowhere_else(
    run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing_is_trusted: bool
) -> None:
    """Also if the listing had let the names pass: they are checked again where they become paths."""
    for name in NAMES:
        run.write(name, b"stranger")
    if listing_is_trusted:
        monkeypatch.setattr(store_module, "is_safe_name", lambda _: True)
        with pytest.raises(UserError, match=r"is not the name of a file below .*: it is neither read nor written"):
            local_dump_folder(run.address, "faults").__enter__()
    else:
        with local_dump_folder(run.address, "faults") as folder:
            found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
            assert found == {METRICS_FILE, "faults/rank-0.txt"}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_name_that_no_file_system_takes(run: Store) -> None:
    run.write(f"faults/{'x' * 300}", b"x")
    with pytest.raises(UserError, match=r"cannot copy the files of memory://.* to .*, or copy the run into a folder"):
        local_dump_folder(run.address, "faults").__enter__()


def test_a_file_that_is_deleted_meanwhile(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    list_all = store_module.Store.list
    monkeypatch.setattr(Store, "list", lambda self, name: list_all(self, name) | {"faults/gone": Facts(1)})
    with pytest.raises(UserError, match=r"run/faults/gone was deleted while it was copied: run the command again"):
        local_dump_folder(run.address, "faults").__enter__()


def test_a_copy_fills_no_disk(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than half of the free space is not used."""
    run.write("faults/large", bytes(1000))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2000))
    with pytest.raises(UserError, match=r"have 0\.0 GiB, and .* has 0\.0 GiB of free space: set .* TMPDIR"):
        local_dump_folder(run.address, "faults").__enter__()


def test_a_large_file_is_copied_by_ranges(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "COPIED_BYTES", 7)
    content = bytes(range(250))
    run.write("faults/large", content)
    with local_dump_folder(run.address, "faults") as folder:
        assert (folder / "faults/large").read_bytes() == content
