"""Texts of strangers in messages: they control no terminal, begin no line, and turn no text around."""

import io
import os
import pty
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from titanlite.config.plugins import import_plugins_of
from titanlite.ranks.agreement import RanksError
from titanlite.ranks.failure import FailureReport
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.runtime.logging import log, setup_logging, warn_in_lines
from titanlite.runtime.text import aligned, for_stdout, visible, visible_lines
from titanlite.tools.command import print_lines, print_text, run_command

HOSTILE = "x\ntitanlite: verified\r\x1b[2K\x9b2J\u202e\u2066\u2028\udc9b\U000e0041\tend"
SHOWN = r"x\ntitanlite: verified\r\x1b[2K\x9b2J\u202e\u2066\u2028\udc9b\U000e0041\tend"


def test_every_character_that_controls_a_terminal_or_the_direction_is_shown() -> None:
    every = [chr(code) for code in range(0x10000)]
    found = [c for c in every if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")]
    assert len(found) == 65 + 2048 + 2
    turning = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    found += [c for c in every if unicodedata.bidirectional(c) in turning]
    assert len(found) == 65 + 2048 + 2 + 9
    assert all(visible(c).isascii() and visible(c).isprintable() for c in found)


def test_other_texts_are_unchanged() -> None:
    for text in ("", "loss 1.25 \\x1b", "é ©  ▁中文 🏳️\u200d🌈", "שלום\u200f", "a\u00a0b"):
        assert visible(text) is text
    assert visible(HOSTILE) == SHOWN
    assert visible(SHOWN) is SHOWN
    assert visible_lines("a\n\tb\r") == "a\n\tb\\r"
    assert aligned([["a\nb", "1"], ["c", "22"]], left=1) == ["a\\nb   1", "c     22"]


@pytest.mark.usefixtures("own_log")
def test_arguments_of_a_log_line_begin_no_line() -> None:
    stream = io.StringIO()
    setup_logging(0, stream)
    log.warning("two\nlines of %s (%r), %s, %d, %.1f", HOSTILE, "\x1b", Path("a\nb"), 3, 0.5)
    log.warning("%s: next", UserError("first", f"second {HOSTILE}"))
    warn_in_lines(["100 %s", HOSTILE])
    lines = stream.getvalue().split("\n")
    assert lines[0].endswith(" warning: two")
    assert lines[1] == rf"lines of {SHOWN} ('\x1b'), a\nb, 3, 0.5"
    assert lines[2].endswith(" warning: first")
    assert lines[3] == f"second {SHOWN}: next"
    assert lines[4].endswith(" warning: 100 %s")
    assert lines[5:] == [SHOWN, ""]


@pytest.mark.usefixtures("own_log")
def test_colors_remain_and_tracebacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    setup_logging(0, stream)
    try:
        raise ValueError("\x1b[2J\u202e")
    except ValueError:
        log.warning("failed", exc_info=True)
    assert "\x1b[33mwarning:\x1b[0m failed\nTraceback" in stream.getvalue()
    assert r"ValueError: \x1b[2J\u202e" in stream.getvalue()
    assert "\x1b[2J" not in stream.getvalue()


def test_each_argument_of_a_user_error_is_a_line() -> None:
    assert str(UserError(f"tensor {HOSTILE}", "  remedy: none")) == f"tensor {SHOWN}\n  remedy: none"
    assert str(RanksError(*str(UserError("a", HOSTILE)).split("\n"))) == f"a\n{SHOWN}"
    problem = Problem(f"data.{HOSTILE}", HOSTILE, f"of {HOSTILE}", f"write {HOSTILE}", file=HOSTILE)
    assert str(ConfigError([problem, problem])).count("\n") == 1 + 2 * 3 + 1


def test_the_question_for_permission_quotes_each_name_on_one_line(tmp_path: Path) -> None:
    names = ["x\ntitanlite: verified, add --allow-import", "y\x1b[8m"]
    with pytest.raises(UserError) as caught:
        import_plugins_of({"job": {"plugins": names}}, tmp_path, allowed=False)
    (line,) = str(caught.value).split("\n")
    assert r"names: 'x\ntitanlite: verified, add --allow-import', 'y\x1b[8m'; to import it, if you trust it" in line


def test_commands_print_no_control_character(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(_: object) -> None:
        print_lines("first", HOSTILE)
        print_text("a\n\tb\x1b")
        raise UserError(HOSTILE)

    monkeypatch.setattr("titanlite.tools.command.raise_on_interrupt", lambda: None)
    monkeypatch.setattr("titanlite.tools.command.signal.signal", lambda *_: None)
    with pytest.raises(SystemExit):
        run_command(main)
    out, errors = capsys.readouterr()
    assert out == f"first\n{SHOWN}\na\n\tb\\x1b\n"
    assert errors == f"titanlite: {SHOWN}\n"


def test_a_rank_prints_and_records_no_control_character(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    FailureReport()._print("rank 0 failed: \x1b[2J\u202e", "full")
    assert capsys.readouterr().err == "titanlite: rank 0 failed: \\x1b[2J\\u202e\n"
    assert "\\u001b" not in (tmp_path / "error.json").read_text()


def test_a_traceback_of_a_program_has_no_control_character() -> None:
    program = (
        "from titanlite.ranks.failure import prepare_streams; prepare_streams(); raise ValueError('\\x1b[2J\\u202e')"
    )
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(b"Traceback (most recent call last):\n")
    assert ended.stderr.endswith(b"\nValueError: \\x1b[2J\\u202e\n")


def test_the_text_of_a_model_is_exact_unless_stdout_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = ["a\t\x1b", "]0;title\x07", "\x9b2J", "\u202e", "\n"]  # a sequence in several tokens
    with io.StringIO() as file:
        monkeypatch.setattr("sys.stdout", file)
        assert [*map(for_stdout, pieces)] == pieces
    own, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        assert "".join(map(for_stdout, pieces)) == "a\t\\x1b]0;title\\x07\\x9b2J\\u202e\n"
    os.close(own)
