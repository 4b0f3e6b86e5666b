"""The help and docs/config.md are complete and current."""

from pathlib import Path

import pytest

from titanlite.config.describe import describe_config
from titanlite.config.help import print_help
from titanlite.config.schema import JobConfig
from titanlite.config.values import full_keys
from titanlite.models.family import ModelConfig
from titanlite.models.registry import FAMILIES
from titanlite.tools.config_page import document

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_is_documented(family: str) -> None:
    config = JobConfig(model=ModelConfig(family))
    described = {f"{section.name}.{key.name}": key.text for section in describe_config(config) for key in section.keys}
    assert sorted(described) == sorted(full_keys(family))
    assert [key for key, text in described.items() if not text] == []


def test_the_documentation_is_current() -> None:
    current = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert current == document(), "run: python -m titanlite.tools.config_page > docs/config.md"


def shown_help(capsys: pytest.CaptureFixture[str], *argv: str, flag: str = "--help") -> list[str]:
    """The words of the help, without the lines of its boxes."""
    with pytest.raises(SystemExit) as caught:
        print_help([*argv, flag])
    assert not caught.value.code
    return capsys.readouterr().out.replace("│", " ").split()


@pytest.mark.slow
def test_help_names_a_configuration_that_cannot_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        print_help(["missing.toml", "--help"])
    assert capsys.readouterr().err == (
        "titanlite: missing.toml cannot be read: the defaults below are the built-in ones\n\n"
    )
    (tmp_path / "bad.toml").write_text("training.steps = ")
    with pytest.raises(SystemExit):
        print_help([str(tmp_path / "bad.toml"), "--help"])
    assert "bad.toml cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        print_help(["quickstart", "--help"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("family", ["llama3", "deepseek_v3"])
def test_help_shows_every_key_with_underscores(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = set(shown_help(capsys, "--model.family", family))
    assert [key for key in full_keys(family) if f"--{key}" not in words] == []


def test_help_shows_the_values_in_force(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # the list of kinds is one line
    argv = ["--model.flavor", "8B", "--model.dim", "64", "--data.shuffle", "false", "--data.sources.1.kind", "jsonl"]
    shown = " ".join(shown_help(capsys, *argv, "--training.stesp", "5", flag="-h"))
    assert "usage: titanlite train" in shown
    assert "Total optimizer steps of the run. (default: 1000)" in shown
    assert "--model.dim INT Width of the residual stream. (default: 64)" in shown
    assert "--model.n_layers INT Number of transformer blocks. (default: 32)" in shown
    assert "--data.shuffle {true,false}" in shown
    assert f"--model.family{{{','.join(FAMILIES)}}}" in shown.replace(" ", "")  # wrapped
    assert "differently in each epoch. (default: false)" in shown
    assert "--data.sources.1.kind {text,jsonl,chat,parquet,csv,arrow,hf,tokens,python-stdlib}" in shown
