"""A key is added by the lines of CONTRIBUTING.md, and by nothing else."""

import dataclasses
import re
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from tests.configuration import parse_config
from titanlite.assembly.facts import config_values
from titanlite.config import fields, values
from titanlite.config.describe import describe_config
from titanlite.config.ineffective import ineffective
from titanlite.config.json_schema import json_schema
from titanlite.config.load import parse, resolve
from titanlite.config.schema import TrainingConfig
from titanlite.config.toml import COMMAND_LINE, dump_config

KEY = "training.prefetch_steps"
MODULE = """
from dataclasses import dataclass

from titanlite.config import schema
from titanlite.runtime.settings import Needs, setting

_TRAINS = Needs("training.steps above 1", lambda section: section.steps > 1)


@dataclass(frozen=True)
class TrainingConfig(schema.TrainingConfig):
    \"\"\"Length, batches and precision of the training.\"\"\"

"""


@pytest.fixture(autouse=True)
def _with_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    page = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text("utf-8")
    (lines,) = re.findall(r"```python syntax\n(prefetch_steps.*?)```", page, re.DOTALL)
    file = tmp_path / "with_a_key.py"
    file.write_text(MODULE + "".join(f"    {line}\n" for line in lines.splitlines()))
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, file.stem, module)  # its source is read
    spec.loader.exec_module(module)
    assert issubclass(module.TrainingConfig, TrainingConfig)
    values._adapter.cache_clear()
    monkeypatch.setitem(fields.SECTIONS, "training", module.TrainingConfig)  # type: ignore[arg-type]
    yield
    values._adapter.cache_clear()


def test_values_are_read_checked_and_written(tmp_path: Path) -> None:
    config, problems = parse_config(["--training.prefetch_steps", "3", "--data.seed", "1"])
    assert problems == []
    assert dict(config_values(config))[KEY] == 3
    (tmp_path / "written.toml").write_text(dump_config(config))
    assert parse_config([str(tmp_path / "written.toml")]) == (config, [])
    for text, rule in (("65", "from 1 to 64"), ("much", "an integer")):
        (problem,) = parse_config([f"--{KEY}={text}"])[1]
        assert (problem.key, problem.rule) == (KEY, rule)
    (problem,) = parse_config(["--training.prefetch_step=3"])[1]
    assert problem.remedy == f"did you mean {KEY}?"


def test_help_and_schema_have_it() -> None:
    (training,) = (section for section in describe_config(parse([]).config) if section.name == "training")
    (line,) = (line for line in training.keys if f"training.{line.name}" == KEY)
    text = "Steps whose batches are prepared ahead."
    assert (line.label, line.value, line.text) == ("INT", "2", text)
    expected: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 64, "default": 2}
    assert json_schema()["$defs"]["training"]["properties"]["prefetch_steps"] == expected | {"description": text}


def test_what_it_affects_is_known_everywhere() -> None:
    assert KEY not in fields.keys_that_affect("numbers", "reports"), "a resume logs its change"
    assert KEY not in fields.keys_that_affect("search"), "a search may choose it"
    assert fields.setting_of(KEY).affects == "layout", "a sweep takes runs that differ in it for others"
    assert not fields.setting_of(KEY).per_node, "ranks may differ"


def test_it_is_named_without_effect() -> None:
    for steps, keys in ((1, [KEY]), (2, [])):
        parsed = parse([f"--{KEY}=5", f"--training.steps={steps}"])
        config = resolve(parsed, world_size=1, device_type="cpu", checks_files=False)
        found = ineffective(parsed.config, config, {KEY: COMMAND_LINE}, 1)
        assert [problem.key for problem in found] == keys
    assert dataclasses.is_dataclass(config.training)
