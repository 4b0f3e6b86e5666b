"""Test that ~ is the home folder in all paths of users: keys, options, files that extend others, Python."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from titanlite.config.arguments import option_values, split
from titanlite.config.fields import SECTIONS, columns_of, keys_of
from titanlite.config.load import check_and_resolve, load_config, parse
from titanlite.config.value_types import is_text, row_type
from titanlite.tools.command import command_options
from titanlite.tools.completion.__main__ import OPTIONS

KEYS = {f"{section}.{name}": key for section in SECTIONS for name, key in keys_of(section, None).items()}
ROWS = {name: columns_of(row) for name, key in KEYS.items() if (row := row_type(key.type))}
KEYS |= {f"{name}.0.{column}": key for name, row in ROWS.items() for column, key in row.items()}
TEXT_KEYS = {name: key for name, key in KEYS.items() if key.type in (str, tuple[str, ...])}
NO_PATHS = {
    *("job.description", "model.flavor", "tokenizer.bos", "tokenizer.eos", "parallelism.pp_split", "compile.backend"),
    "float8.exclude",
    *("optimizer.weight_decay_skip", "optimizer.groups.0.parameters", "metrics.project", "metrics.group"),
    *("storage.endpoint", "storage.region", "storage.profile"),
    *("metrics.tags", "metrics.columns", "metrics.statistics", "samples.prompts", "loss.terms"),
    *(f"{of}.sources.0.{key}" for of in ("data", "validation")
      for key in ("field", "name", "split", "subset", "revision")),
}  # fmt: skip
PATHS = sorted(TEXT_KEYS.keys() - NO_PATHS)

COMMANDS = {
    f"{command} {kind.__name__}": kind
    for command, kinds in OPTIONS.items()
    if command != "train"  # its options are keys
    for kind in ([get_args(each)[0] for each in get_args(kinds)] or [kinds])
}
NO_PATH_OPTIONS = {"special_tokens", "shard_size", "prompt", "system", "layouts", "dtypes"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def value_at(config: Any, key: str) -> str:
    for name in key.split("."):
        config = config[int(name)] if name.isdecimal() else getattr(config, name)
    return config[0] if isinstance(config, tuple) else config


@pytest.mark.parametrize("key", PATHS)
def test_every_key_that_is_a_path(key: str, home: Path) -> None:
    (home / "it.py").touch()  # of job.plugins
    several = TEXT_KEYS[key].type is not str
    parsed = parse([f"--{key}=" + ('["~/it.py"]' if several else "~/it.py")])
    assert parsed.problems == []
    assert value_at(parsed.config, key).partition("@")[0] == f"{home}/it.py"
    assert parse([], {key: [Path("~/it.py")] if several else Path("~/it.py")}).config == parsed.config
    (problem,) = parse([f"--{key}=" + ('["~nobodyhere/it.py"]' if several else "~nobodyhere/it.py")]).problems
    assert (problem.key.startswith(key), problem.remedy) == (True, "write the path without ~")
    for path in ("$HOME/it.py", "/it/${USER}"):
        (problem,) = parse([f"--{key}=" + (f'["{path}"]' if several else path)]).problems
        assert (problem.key.startswith(key), problem.remedy) == (True, "write their values")


def test_every_other_text_is_kept() -> None:
    """A new key of text is a path, or is listed here."""
    assert {key for key in TEXT_KEYS if not TEXT_KEYS[key].setting.is_path} == NO_PATHS
    kept = [("metrics.group", text) for text in ("~/it", "$HOME")]
    kept += [("job.dump_folder", path) for path in ("$/it", "/it/$1.50 a", "/a$HOME/it", "./~/it")]
    assert [value_at(parse([f"--{key}={text}"]).config, key) for key, text in kept] == [text for _, text in kept]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_that_is_a_path(command: str, home: Path) -> None:
    options = command_options(COMMANDS[command])
    names = {name for name, option in options.items() if is_text(option.key.type) and option.key.type is str}
    for name in names - NO_PATH_OPTIONS - {"config"}:
        argv = ["~/it"] if options[name].position else [f"--{name}=~/it"]
        values, _ = option_values(options, split(argv, options), "titanlite")
        value = values[name][0] if options[name].is_several else values[name]
        assert str(value) == f"{home}/it", name
        for wrong, remedy in (("~nobodyhere", "write the path without ~"), ("$HOME", "write their values")):
            wrong_argv = [each.replace("~", wrong) for each in argv]
            values, problems = option_values(options, split(wrong_argv, options), "titanlite")
            assert name not in values
            assert remedy in [problem.remedy for problem in problems]


def test_files_that_extend_and_hf_folders(home: Path) -> None:
    (home / "base.toml").write_text("[training]\nsteps = 7\n")
    (home / "c.toml").write_text('extends = "~/base.toml"\n[checkpoint]\ninitial_load_path = "hf:~/model"\n')
    config = parse(["~/c.toml"]).config
    assert (config.training.steps, config.checkpoint.initial_load_path) == (7, f"hf:{home}/model")


def test_a_configuration_of_python(home: Path) -> None:
    config = load_config(["quickstart"], world_size=1, device_type="cpu")
    config = replace(config, job=replace(config.job, dump_folder="~/out"))
    assert check_and_resolve(config, world_size=1, device_type="cpu").job.dump_folder == f"{home}/out"
