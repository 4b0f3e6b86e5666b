"""Settings of all unit tests."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist


@pytest.fixture(scope="session")
def one_file_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stdlib")
    (folder / "module.py").write_text("# the only module\n")
    return folder


@pytest.fixture(autouse=True)
def small_standard_library(one_file_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for python-stdlib, the default source: each check of a configuration lists its files."""
    get_paths = sysconfig.get_paths

    def small(*scheme: Any, **options: Any) -> dict[str, str]:
        return get_paths(*scheme, **options) | ({} if scheme or options else {"stdlib": str(one_file_library)})

    monkeypatch.setattr(sysconfig, "get_paths", small)


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """Of this process alone, on gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
