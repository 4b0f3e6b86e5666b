"""Dropped keys: unknown in a file of one's own, without effect in a stored run that has their defaults."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.configuration import parse_config
from tests.unit.checkpoint.making import make
from titanlite.checkpoint.dropped import DROPPED, remove_dropped
from titanlite.config.load import config_from_values, load_config
from titanlite.config.schema import JobConfig
from titanlite.config.value_types import literal
from titanlite.config.values import full_keys
from titanlite.runtime.errors import ConfigError, Problem

OTHERS: dict[str, Any] = {key: "x" if default is None else [default] for key, (default, _) in DROPPED.items()}
"""Values that are no defaults."""


def with_keys(values: dict[str, Any]) -> dict[str, Any]:
    """The stored values of a run of an earlier version, with these keys."""
    sections: dict[str, Any] = json.loads(json.dumps(asdict(JobConfig())))
    sections["optimizer"]["groups"] = [{"parameters": ["a"]}, {"parameters": ["b"]}]
    for full_key, value in values.items():
        section, *array, name = full_key.split(".")
        for row in sections[section][array[0]] if array else [sections[section]]:
            row[name] = value
    return sections


DEFAULTS = {key: default for key, (default, _) in DROPPED.items()}


def test_no_key_is_dropped_and_there() -> None:
    assert not {key.replace(".0.", ".") for key in full_keys("llama3")} & DROPPED.keys()


@pytest.mark.parametrize("key", DROPPED)
def test_a_file_of_ones_own_gets_the_remedy(key: str, tmp_path: Path) -> None:
    section, *array, name = key.split(".")
    value = literal(DROPPED[key].default or "a.toml")
    file = tmp_path / "config.toml"
    file.write_text(f"{f'[[{section}.{array[0]}]]' if array else f'[{section}]'}\n{name} = {value}")
    _, (problem,) = parse_config([str(file)])
    assert problem.key.replace(".0.", ".") == key
    assert problem.rule.startswith("a key of ")
    assert problem.remedy == DROPPED[key].remedy


def test_stored_values_with_the_defaults_are_read() -> None:
    stored = with_keys(DEFAULTS)
    assert [group.parameters for group in config_from_values(stored).optimizer.groups] == [("a",), ("b",)]
    assert stored["optimizer"]["groups"][0].keys() == {"parameters", "beta1", "momentum"}  # not changed


def problems_of_manifest(values: dict[str, Any]) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        config_from_values(with_keys(values))
    return list(caught.value.problems)


@pytest.mark.parametrize("key", [key for key, dropped in DROPPED.items() if dropped.default is not None])
def test_another_value_in_a_manifest_is_named(key: str) -> None:
    problems = problems_of_manifest(DEFAULTS | {key: OTHERS[key]})
    assert {problem.key for problem in problems} == {key}
    assert problems[0].rule.startswith(repr(DROPPED[key].default))
    assert "use that version, or start a new run from the weights" in problems[0].remedy


@pytest.mark.parametrize("value", [True, False])
def test_a_run_resumes_only_from_the_default(value: bool, tmp_path: Path) -> None:
    make(tmp_path / "checkpoint", 5, config=with_keys(DEFAULTS | {"optimizer.nesterov": value}))
    argv = ["--checkpoint.enable", "--job.dump_folder", str(tmp_path)]
    if value:
        assert load_config(argv, world_size=1, device_type="cpu").checkpoint.enable
        return
    with pytest.raises(ConfigError) as caught:
        load_config(argv, world_size=1, device_type="cpu")
    assert [problem.key for problem in caught.value.problems] == ["optimizer.nesterov"]


def test_a_written_config_toml_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    (tmp_path / "run.json").touch()  # else it is a file of one's own
    file.write_text("[training]\nsteps = 5\nnorm_type = '2'\ngc_freq = 50\n[optimizer]\nnesterov = true")
    config, problems = parse_config([str(file)])
    assert (config.training.steps, problems) == (5, [])
    file.write_text("[training]\nsteps = 5\nnorm_type = 'inf'\n")
    config, problems = parse_config([str(file)])
    assert [problem.key for problem in problems] == ["training.norm_type"]


def test_sections_that_are_no_tables_of_keys_are_left_to_the_reader() -> None:
    sections: dict[str, Any] = {"optimizer": {"groups": 5}}
    assert remove_dropped(sections) == []
    assert sections == {"optimizer": {"groups": 5}}
