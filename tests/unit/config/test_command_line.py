"""The command line of a run: its help, and what is missing."""

import sys

import pytest

from titanlite.config.load import read_command_line
from titanlite.runtime.errors import UsageError


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
