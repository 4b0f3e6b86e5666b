"""The command line as words."""

import pytest

from titanlite.config.load import split_arguments


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


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--a.b", "1", "-h"], ["--a.b", "--help"], ["--a.b", "-h"]])
def test_help_is_never_a_value(argv: list[str]) -> None:
    assert split_arguments(argv).wants_help


def test_every_stray_word_is_a_problem() -> None:
    arguments = split_arguments(["x", "--a.b", "1", "y", "--", "z"])
    assert [problem.value for problem in arguments.problems] == ["x", "y", "--", "z"]
    assert arguments.texts == {"a.b": "1"}


def test_repeated_key_is_one_problem_and_has_no_text() -> None:
    arguments = split_arguments(["--a.b", "1", "--a.b=2", "--a.b"])
    assert [(problem.key, problem.value) for problem in arguments.problems] == [("a.b", ["1", "2", ""])]
    assert arguments.texts == {}
