"""How the command line is split into keys and texts; its help, and what is missing."""

import sys
from pathlib import Path

import pytest

from titanlite.config.arguments import split_arguments
from titanlite.config.files import SHIPPED, config_path, shipped_names
from titanlite.config.load import read_command_line
from titanlite.runtime.errors import UsageError


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        ([], {}),
        (["--a.b", "1"], {"a.b": "1"}),
        (["--a.b=1"], {"a.b": "1"}),
        (["--a.b", "-1"], {"a.b": "-1"}),
        (["--a.b", ""], {"a.b": ""}),
        (["--a.b="], {"a.b": ""}),
        (["--a.b=c=d"], {"a.b": "c=d"}),
        (["--a.b=--c"], {"a.b": "--c"}),
        (["--a.b=-h"], {"a.b": "-h"}),
        (["--a-b.c-d-e", "f-g"], {"a_b.c_d_e": "f-g"}),
        (["--a.-1.b", "c"], {"a.-1.b": "c"}),
        (["--a.b", "c d", "--e.f", "g"], {"a.b": "c d", "e.f": "g"}),
        (["--a.b", "--c.d", "1"], {"a.b": None, "c.d": "1"}),
        (["--a.b"], {"a.b": None}),
    ],
)
def test_keys_and_texts(argv: list[str], texts: dict[str, str | None]) -> None:
    arguments = split_arguments(argv)
    assert arguments.texts == texts
    assert arguments.problems == ()
    assert not arguments.wants_help
    assert not arguments.has_config


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--a.b", "1", "-h"], ["--a.b", "--help"], ["--a.b", "-h"]])
def test_help_is_never_a_value(argv: list[str]) -> None:
    assert split_arguments(argv).wants_help


def test_every_unexpected_word_is_a_problem() -> None:
    arguments = split_arguments(["--a.b", "1", "y", "--", "z", "-c.d", "3", "e.f=1"])
    assert [problem.key for problem in arguments.problems] == [
        f"argument {word!r}" for word in ["y", "--", "z", "-c.d", "e.f=1"]
    ]
    assert arguments.texts == {"a.b": "1"}


@pytest.mark.parametrize(
    "argv",
    [
        ["my_run", "--a.b", "1"],
        ["run.toml", "--a.b", "1"],
        ["--a.b", "1", "run.toml"],
        ["--a.b", "1", "quickstart"],
        ["--a.b=1", "--job.config_file", "run.toml"],
    ],
)
def test_the_configuration_is_positional(argv: list[str]) -> None:
    arguments = split_arguments(argv)
    assert arguments.problems == ()
    assert arguments.has_config
    assert arguments.texts == {"a.b": "1", "job.config_file": next(word for word in argv if word[0] in "mrq")}


def test_two_configurations_are_one_problem() -> None:
    (problem,) = split_arguments(["a.toml", "--job.config_file=b.toml"]).problems
    assert (problem.key, problem.value) == ("job.config_file", ["a.toml", "b.toml"])


def test_a_value_that_ends_in_toml_is_a_value() -> None:
    arguments = split_arguments(["--job.description", "a.toml", "b.toml"])
    assert arguments.texts == {"job.description": "a.toml", "job.config_file": "b.toml"}


def test_shipped_configurations_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "quickstart" in shipped_names()
    assert config_path("quickstart") == SHIPPED / "quickstart.toml"
    assert config_path("other") == Path("other")
    Path("quickstart").mkdir()  # as in outputs/, where the quick start has its folder
    assert config_path("quickstart") == SHIPPED / "quickstart.toml"
    Path("quickstart").rmdir()
    Path("quickstart").touch()
    assert config_path("quickstart") == Path("quickstart")


def test_repeated_key_is_one_problem_and_has_no_text() -> None:
    arguments = split_arguments(["--a.b", "1", "--a.b=2", "--a.b"])
    assert [(problem.key, problem.value) for problem in arguments.problems] == [("a.b", ["1", "2", ""])]
    assert arguments.problems[0].remedy == "keep one: --a.b=1 or --a.b=2 or --a.b"
    assert arguments.texts == {}
    (problem,) = split_arguments(["--dry-run", "--dry-run"]).problems
    assert (problem.key, problem.value, problem.remedy) == ("--dry-run", None, "keep one: --dry-run")


@pytest.mark.parametrize(("rank", "printed"), [("0", True), ("1", False)])
def test_help_comes_from_the_first_rank_only(
    rank: str, printed: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["titanlite"])
    monkeypatch.delitem(sys.modules, "titanlite.config.help", raising=False)
    with pytest.raises(SystemExit) as caught:
        read_command_line(["quickstart", "--help"])
    assert not caught.value.code
    shown = capsys.readouterr()
    assert ("usage: titanlite train" in shown.out, shown.err) == (printed, "")


def test_a_command_line_without_a_configuration_is_refused() -> None:
    with pytest.raises(UsageError, match="a configuration is missing"):
        read_command_line(["--training.steps", "5"])
