"""Which modules count as code, and which paths as content, that must be equal on all ranks."""

import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from tests.distributed.reference import TOKENS
from tests.unit.data.ranks import build
from titanlite.assembly.facts import code_facts, content_facts, program_facts
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.config.schema import JobConfig
from titanlite.data.config import DataConfig
from titanlite.data.loader import Loader
from titanlite.data.sources.config import SourceConfig
from titanlite.ranks.distributed import World

FILES = ("bytes", "content", "files")
"""Facts about the files of a source."""


def test_modules_that_python_imports_by_itself_count_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As facts that no rank may lack, unlike other modules."""
    installed = tmp_path / "site-packages"
    get_path = sysconfig.get_path
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(installed) if name == "purelib" else get_path(name))
    for folder, name in (
        (installed, "usercustomize"),
        (tmp_path, "sitecustomize"),
        (tmp_path, "own"),
        (installed, "b"),
    ):
        folder.mkdir(exist_ok=True)
        module = ModuleType(name)
        module.__file__ = str(folder / f"{name}.py")
        Path(module.__file__).write_text(name)
        monkeypatch.setitem(sys.modules, name, module)
    facts = code_facts({})
    assert {"usercustomize", "sitecustomize", "module own"} <= facts.keys()
    assert not {"module usercustomize", "module sitecustomize", "module b"} & facts.keys()


def test_a_rank_that_opens_a_folder_when_it_has_grown_differs(tmp_path: Path) -> None:
    section = DataConfig(num_streams=8, sources=(SourceConfig(kind="tokens", path=str(tmp_path / "data")),))
    config = JobConfig(data=section)

    def opened() -> Loader:
        return build(section, vocab_size=131)

    def facts(data: Loader, validation: Loader) -> dict[str, str]:
        return content_facts(config, None, data.sources, validation.sources, [], [])

    (tmp_path / "data").mkdir()
    shutil.copyfile(TOKENS, tmp_path / "data/first.npy")
    early = opened(), opened()
    shutil.copyfile(TOKENS, tmp_path / "data/second.npy")
    late = opened(), opened()
    assert facts(*late) == facts(opened(), opened())
    keys = {key for key, value in facts(*early).items() if facts(*late)[key] != value}
    assert keys == {f"{part}.sources.0: {fact}" for part in ("data", "validation") for fact in FILES}
    for loader in (*early, *late):
        loader.close()


def test_ways_to_start_are_compared_and_paths_that_may_mean_the_same_are_not() -> None:
    """Ranks that start in different ways would wait for each other in different collectives."""

    def way(path: str) -> str:
        config = JobConfig(checkpoint=CheckpointConfig(initial_load_path=path))
        return program_facts(config, World(0, 0, 2, "cpu"), {})["checkpoint.initial_load_path"]

    ways = [way(path) for path in ("", "runs/a/checkpoint", "hf:model")]
    assert len(set(ways)) == 3
    assert [way(path) for path in ("", "/copy/of/step-3", "hf:/copy/of/model")] == ways
