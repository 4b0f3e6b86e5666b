"""Test how commands read their options, and how their processes end."""

import errno
import gc
import math
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from titanlite.ranks.failure import end_on_interrupt
from titanlite.runtime.errors import ConfigError, Problem, UsageError, UserError
from titanlite.runtime.settings import setting
from titanlite.tools.command import (
    EITHER,
    ConfigFile,
    Count,
    File,
    OptionalCount,
    check_options,
    check_output_file,
    read_options,
    read_options_and_overrides,
    run_command,
)
from titanlite.tools.convert.__main__ import ExportOptions
from titanlite.tools.convert.__main__ import Options as ConvertOptions


@dataclass(frozen=True)
class Options:
    """Options of a command."""

    config: ConfigFile
    """a file"""
    num_steps: Count = setting(3, "give a positive number", least=1)
    """steps"""
    rate: float = setting(0.5, least=0, below=math.inf)
    """a rate"""
    device: Literal["cpu", "cuda"] = "cpu"
    """a device"""
    all_of_it: bool = False
    """a flag"""
    limit: OptionalCount = None
    """a limit"""
    word: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """words"""
    words_of: Annotated[tuple[str, ...], EITHER] = ()
    """more words"""
    folder: Annotated[File, EITHER] = None
    """a folder"""


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("a.toml --num-steps 7 --all-of-it", Options("a.toml", 7, all_of_it=True)),
        ("a.toml --num_steps 7 --all_of_it", Options("a.toml", 7, all_of_it=True)),
        ("--num-steps=7 a.toml --all-of-it", Options("a.toml", 7, all_of_it=True)),
        ("a.toml --word b --word c", Options("a.toml", word=("b", "c"))),
        ("a.toml --rate 2 --word -x --word=--y", Options("a.toml", rate=2.0, word=("-x", "--y"))),
        ("a.toml --words-of b c --word d", Options("a.toml", words_of=("b", "c"), word=("d",))),
    ],
)
def test_options_are_read(arguments: str, options: Options) -> None:
    """With hyphens or underscores, before or after the configuration; repeated for several values."""
    assert read_options(Options, arguments.split(), "test") == options


def test_overrides_of_the_configuration_are_passed_on() -> None:
    argv = ["a.toml", "--training.steps", "5", "--num_steps", "7", "--data.sources.0.path=x", "--debug.deterministic"]
    for order in (argv, [*argv[1:6], "a.toml", argv[6]]):
        options, overrides, problems = read_options_and_overrides(Options, order, "test")
        assert (options, problems) == (Options("a.toml", 7), [])
        assert overrides == ["--training.steps=5", "--data.sources.0.path=x", "--debug.deterministic"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["argument CONFIG\n    rule:   must be given\n    remedy: see titanlite test --help"]),
        (["a.toml", "--num-steps"], ["--num-steps\n    rule:   needs a value\n    remedy: write --num-steps 3"]),
        (
            ["a.toml", "--word"],
            ["--word\n    rule:   needs a value", "for a value that starts with --, write --word=--"],
        ),
        (["a.toml", "--words-of"], ["--words-of\n    rule:   needs a value"]),
        (["a.toml", "--folder", ""], ["--folder = ''\n    rule:   a path"]),
        (["a.toml", "--folder="], ["--folder = ''\n    rule:   a path"]),
        (
            ["a.toml", "--folder", "s3://b/x"],
            ["rule:   a path on a disk, not the address of a store\n    remedy: write"],
        ),
        (["a.toml", "--folder", "b", "--words-of", "c"], ["--folder\n    rule:   not together with --words-of"]),
        (["a.toml", "--wrd", "x"], ["--wrd = 'x'", "remedy: did you mean --word?"]),
        (["a.toml", "--foo", "x"], ["rule:   an option of titanlite test\n    remedy: see titanlite test --help"]),
        (["a.toml", "--num-steps", "x"], ["--num-steps = 'x'\n    rule:   an integer"]),
        (["a.toml", "--num-steps", "1.5"], ["--num-steps = 1.5\n    rule:   an integer"]),
        (
            ["a.toml", "--num-steps", "0"],
            ["--num-steps = 0\n    rule:   at least 1\n    remedy: give a positive number"],
        ),
        (["a.toml", "--limit", "x"], ["--limit = 'x'\n    rule:   an integer"]),
        (["a.toml", "--rate", "x"], ["--rate = 'x'\n    rule:   a number"]),
        (["a.toml", "--num-steps", "7", "--num_steps=8"], ["remedy: keep one: --num-steps=7 or --num-steps=8"]),
        (["a.toml", "--device", "tpu"], ["--device = 'tpu'", 'one of "cpu", "cuda"']),
        (["a.toml", "--all-of-it=false"], ["a switch without a value\n    remedy: write --all-of-it"]),
        (["a.toml", "--num-stpes", "7"], ["--num-stpes = '7'", "did you mean --num-steps?"]),
        (["a.toml", "-num-steps", "7"], ["argument '-num-steps'", "argument '7'"]),
        (["--num-stpes", "7", "a.toml"], ["--num-stpes = '7'", "did you mean --num-steps?"]),
        (["a.toml", "b.toml"], ["argument 'b.toml'\n    rule:   every argument is an option of titanlite test"]),
        (["a.toml", "--training.steps", "3"], ["--training.steps = '3'\n    rule:   an option of titanlite test"]),
    ],
)
def test_a_problem_names_the_option_its_rule_and_a_remedy(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^the command line has ") as caught:
        read_options(Options, argv, "test")
    assert [word for word in words if word not in str(caught.value)] == []


def test_all_problems_of_a_command_line_are_reported_at_once() -> None:
    argv = ["--wrd", "--num-steps=0", "--rate=x", "--device=tpu", "--limit=1", "--limit=2", "-q", "a.toml", "--folder="]
    with pytest.raises(ConfigError) as caught:
        read_options(Options, argv, "test")
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["--wrd", "--num-steps", "--rate", "--device", "--limit", "--folder", "argument 'a.toml'"]


def test_help_is_printed_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_options(Options, ["--help"], "test")
    assert not caught.value.code
    shown = " ".join(capsys.readouterr().out.split())
    assert "usage: titanlite test " in shown
    assert "--num-steps N" in shown
    assert "(default: 3)" in shown


@pytest.mark.parametrize(("key", "value"), [("num_steps", 0), ("rate", -1.0), ("rate", math.inf), ("rate", math.nan)])
def test_a_number_out_of_range_is_a_problem_of_its_option(key: str, value: float) -> None:
    (problem,) = check_options(Options("a.toml", **{key: value}))
    assert problem.key == f"--{key.replace('_', '-')}"
    assert check_options(Options("a.toml")) == []


def test_subcommands() -> None:
    options = read_options(ConvertOptions, ["export", "run", "--out", "folder", "--dtype", "float16"], "convert")
    assert options == ExportOptions("run", Path("folder"), "float16")
    for argv, message in (
        ([], "a subcommand is missing: write export or import"),
        (["foo"], "unknown subcommand 'foo': write export or import"),
        (["export"], "argument RUN\n    rule:   must be given\n    remedy: see titanlite convert export --help"),
        (["import", "a", "--ou", "b"], "did you mean --out?"),
    ):
        with pytest.raises(UsageError) as caught:
            read_options(ConvertOptions, argv, "convert")
        assert message in str(caught.value)


def test_output_files(tmp_path: Path) -> None:
    assert check_output_file("--json", None) == []
    assert check_output_file("--json", tmp_path / "a.json") == []
    (tmp_path / "link").symlink_to(tmp_path / "missing" / "a.json")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a reader
    for path in (tmp_path, tmp_path / "missing" / "a.json", tmp_path / "link", tmp_path / "pipe", Path("/dev/zero")):
        (problem,) = check_output_file("--json", path)
        assert (problem.key, problem.value) == ("--json", str(path))


def test_ctrl_c_raises_once_a_command_has_started(capsys: pytest.CaptureFixture[str]) -> None:
    """It ends the process at once only while modules are imported: later, temporary files are removed."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    removed: list[str] = []

    def main(_: object) -> None:
        assert signal.set_wakeup_fd(-1) == -1, "the thread still receives signals"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            removed.append("a temporary file")

    try:
        end_on_interrupt()
        with pytest.raises(SystemExit) as caught:
            run_command(main)
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (caught.value.code, capsys.readouterr().err) == (130, "titanlite: interrupted\n")
    assert removed == ["a temporary file"]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (None, 0, ""),
        (UserError("no"), 1, "titanlite: no\n"),
        (UsageError("no"), 2, "titanlite: no\n"),
        (ConfigError([Problem("a.b", 1, "rule", "remedy")]), 2, "titanlite: the configuration has 1 problem"),
        (ConfigError([Problem("training", 5, "rule", "remedy")]), 2, "titanlite: the configuration has 1 problem"),
        (ConfigError([Problem("--a", 1, "rule", "remedy")]), 2, "titanlite: the command line has 1 problem"),
        (ConfigError([Problem("argument 'a.b'", None, "rule", "remedy")]), 2, "titanlite: the command line has 1"),
        (KeyboardInterrupt(), 130, "titanlite: interrupted\n"),
        (BrokenPipeError(), 1, ""),
        (OSError(errno.ENAMETOOLONG, "", "qq"), 1, "titanlite: the path qq is too long: choose a shorter one\n"),
        (
            UnicodeEncodeError("ascii", "\u65e5", 0, 1, ""),
            1,
            "titanlite: the path '\u65e5' cannot be written in this locale (ascii): set LC_ALL=C.UTF-8, or choose "
            "another path\n",
        ),
        (signal.SIGTERM, 143, ""),
        (signal.SIGHUP, 129, ""),
    ],
)
def test_exit_codes(
    error: BaseException | signal.Signals | None,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main(_: object) -> None:
        if isinstance(error, signal.Signals):
            os.kill(os.getpid(), error)
        elif error is not None:
            raise error

    monkeypatch.setattr(os, "dup2", lambda *_: None)  # would redirect the output of pytest
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # even if the tests run under nohup
    gc.disable()  # as during the imports
    try:
        with pytest.raises(SystemExit) as caught:
            run_command(main)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert caught.value.code == code
    assert capsys.readouterr().err.startswith(text)
    assert sys.exc_info()[0] is None
    assert gc.isenabled()
