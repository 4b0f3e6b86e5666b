"""Before a run: its dump folder, the attention kernel in the log, and the code and paths that ranks compare."""

import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.distributed.reference import TOKENS
from tests.unit.data.ranks import build
from titanlite.assembly import model
from titanlite.assembly.facts import code_facts, content_facts, program_facts
from titanlite.assembly.model import describe_attention
from titanlite.assembly.run import prepare_outputs, require_no_checkpoints
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.start import Start
from titanlite.config.load import CONFIG_COPY, load_config
from titanlite.config.schema import JobConfig, JobSection
from titanlite.data.config import DataConfig
from titanlite.data.loader import Loader
from titanlite.data.sources.config import SourceConfig
from titanlite.ranks.distributed import World
from titanlite.runtime.errors import UserError


def start(dump_folder: Path, folder: str, *, enable: bool = True) -> None:
    section = CheckpointConfig(enable=enable, folder=folder)
    require_no_checkpoints(JobConfig(job=JobSection(dump_folder=str(dump_folder)), checkpoint=section))


@pytest.mark.parametrize(
    ("earlier", "now"),
    [("checkpoint", "other"), ("checkpoint", "checkpoint/x"), ("a/b", "checkpoint"), ("a/b", "a"), ("a/b", "a/b/c")],
)
def test_a_run_beside_the_checkpoints_of_another_is_refused(tmp_path: Path, earlier: str, now: str) -> None:
    start(tmp_path / "missing", now)
    (tmp_path / earlier / "step-6").mkdir(parents=True)
    (tmp_path / CONFIG_COPY).write_text(f'checkpoint.folder = "{earlier}"')
    start(tmp_path, earlier)
    message = f"but {tmp_path / earlier} holds .* resume it with --checkpoint.folder {earlier},"
    with pytest.raises(UserError, match=message):
        start(tmp_path, now)
    with pytest.raises(UserError, match=r"checkpoint\.enable = false, but"):
        start(tmp_path, earlier, enable=False)


def test_traces_are_not_taken_for_checkpoints(tmp_path: Path) -> None:
    for name in ("traces", "traces.1", "memory_snapshots"):
        (tmp_path / name / "step-6").mkdir(parents=True)
    start(tmp_path, "checkpoint")


def test_a_folder_in_place_of_the_configuration_is_an_error(tmp_path: Path) -> None:
    (tmp_path / CONFIG_COPY / "x").mkdir(parents=True)
    config = JobConfig(job=JobSection(dump_folder=str(tmp_path)))
    message = f"job.dump_folder: cannot write {tmp_path / CONFIG_COPY}: Is a directory; fix this, or give another"
    with pytest.raises(UserError, match=message):
        prepare_outputs(config, World(0, 0, 1, "cpu"), Start(5, (), {}, resumes=True), None, [])


@pytest.mark.parametrize(
    ("device_type", "settings", "expected"),
    [
        ("cpu", [], None),
        ("cuda", [], "bfloat16 32 8 128"),
        ("cuda", ["--parallelism.tp", "2"], "bfloat16 16 4 128"),
        ("cuda", ["--data.document_mask", "true"], "FlexAttention"),
        ("cuda", ["--data.document_mask", "true", "--training.dtype", "float64"], "float64 32 8 128"),
    ],
)
def test_the_kernel_for_this_rank(
    device_type: str, settings: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shape(_device: torch.device, dtype: torch.dtype, *heads: int) -> str:
        return " ".join(map(str, (str(dtype).removeprefix("torch."), *heads)))

    monkeypatch.setattr(model, "chosen_kernel", shape)
    config = load_config(["--model.flavor", "8B", *settings], world_size=2, device_type=device_type)
    assert describe_attention(config, torch.device(device_type)) == expected


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
    (tmp_path / "own.py").write_text("changed")  # since files that have not changed are read once
    assert {name for name, value in code_facts({}).items() if value != facts[name]} == {"module own"}


def test_a_rank_that_opens_a_folder_when_it_has_grown_differs(tmp_path: Path) -> None:
    section = DataConfig(num_streams=8, sources=(SourceConfig(kind="tokens", path=str(tmp_path / "data")),))
    config = JobConfig(data=section)

    def opened() -> Loader:
        return build(section, vocab_size=131)

    def facts(data: Loader, validation: Loader) -> dict[str, str]:
        return content_facts(config, None, data.sources, validation.sources, [])

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
