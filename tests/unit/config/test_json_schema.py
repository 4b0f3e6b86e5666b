"""The JSON schema: the shipped file, and that it accepts valid values and refuses others."""

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from titanlite.config.files import SHIPPED, shipped_names
from titanlite.config.json_schema import json_schema
from titanlite.config.load import load_config
from titanlite.config.toml import dump_config
from titanlite.runtime.errors import ConfigError
from titanlite.tools import schema


@cache
def validator() -> Any:
    return jsonschema.Draft7Validator(json_schema())


def paths_of(text: str) -> list[str]:
    """The places of the errors, without repetition."""
    errors = validator().iter_errors(tomllib.loads(text))
    return list(dict.fromkeys(".".join(map(str, error.absolute_path)) for error in errors))


def test_it_is_a_valid_schema_and_the_shipped_one() -> None:
    jsonschema.Draft7Validator.check_schema(validator().schema)
    shipped = json.loads((SHIPPED / "schema.json").read_text())
    assert shipped == validator().schema, "run: python -m titanlite schema --out titanlite/configs/schema.json"


@pytest.mark.parametrize("name", shipped_names())
def test_it_accepts_the_shipped_configurations_which_name_it(name: str) -> None:
    text = (SHIPPED / f"{name}.toml").read_text()
    assert paths_of(text) == []
    assert text.startswith("#:schema ./schema.json\n")


def test_it_accepts_a_written_configuration() -> None:
    assert paths_of(dump_config(load_config(["quickstart"], world_size=1, device_type="cpu"))) == []


GOOD = [
    *('extends = "base.toml"', 'extends = ["base.toml", "quickstart"]\n[model]\nrope_beta_fast = 31.0'),
    *("training.tokens = -1", "lr_schedule.warmup_steps = 0", "lr_schedule.warmup_steps = '2_000_000 tokens'"),
    *("lr_schedule.decay_steps = '2.5 %'", 'loss.chunk_tokens = "auto"', "loss.chunk_tokens = 5", "optimizer.lr = 1"),
    *("faults.spike_factor = 0.0", "[[optimizer.groups]]\nparameters = ['a']\nbeta2 = -1"),
]
BAD = [
    ("training.stepz = 5", "training"),
    ("steps = 5", ""),
    ("trainings.steps = 5", ""),
    ('training.steps = "5"', "training.steps"),
    ("training.steps = 1.5", "training.steps"),
    ("training.steps = 0", "training.steps"),
    ("training.tokens = -2", "training.tokens"),
    ("optimizer.lr = 0.0", "optimizer.lr"),
    ("lr_schedule.warmup_steps = '5 epochs'", "lr_schedule.warmup_steps"),
    ("optimizer.beta1 = 1.0", "optimizer.beta1"),
    ('optimizer.name = "Adam"', "optimizer.name"),
    ('loss.chunk_tokens = "all"', "loss.chunk_tokens"),
    ('metrics.loggers = ["csv"]', "metrics.loggers.0"),
    ("[[data.sources]]\nkind = 'txt'\nfolder = 'x'", "data.sources.0 data.sources.0.kind"),
    ('job.config_file = "x"', "job"),
    ("extends = 3", "extends"),
    ("model.family = 'qwen3'\nmodel.flavor = '1B'", "model.flavor"),
    ("model.family = 'llama3'\nmodel.rope_beta_fast = 3.0", "model"),
    ("model.dims = 3", "model"),
]


@pytest.mark.parametrize("toml", GOOD)
def test_valid_values(toml: str) -> None:
    assert paths_of(toml) == []


@pytest.mark.parametrize(("toml", "places"), BAD)
def test_invalid_values(toml: str, places: str) -> None:
    assert sorted(paths_of(toml)) == places.split(" ")


def test_each_key_has_its_description_and_default() -> None:
    schema = validator().schema
    training = schema["$defs"]["training"]
    assert training["properties"]["seq_len"] == {
        "description": "Tokens per sequence.",
        "type": "integer",
        "minimum": 1,
        "maximum": 2**63 - 1,
        "default": 2048,
    }

    def described(part: dict[str, Any]) -> bool:
        return all(key["description"] for key in part["properties"].values())

    assert described(schema)
    assert all(described(table) for table in schema["$defs"].values())


def test_the_command_prints_or_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema.main([])
    assert json.loads(capsys.readouterr().out) == validator().schema
    schema.main(["--out", str(tmp_path / "schema.json")])
    assert json.loads((tmp_path / "schema.json").read_text()) == validator().schema
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("registries")
def test_the_command_adds_what_plugins_register(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[3] / "examples" / "plugins.toml"
    registered = ["model.family", "loss.name", "optimizer.name", "lr_schedule.decay", "metrics.loggers.2"]
    assert paths_of(example.read_text()) == registered
    schema.main([str(example)])
    validator = jsonschema.Draft7Validator(json.loads(capsys.readouterr().out))
    assert list(validator.iter_errors(tomllib.loads(example.read_text()))) == []
    with pytest.raises(ConfigError, match=r"job\.config_file"):
        schema.main(["nowhere.toml"])
