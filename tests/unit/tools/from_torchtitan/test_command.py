"""titanlite from-torchtitan: output, files and exit codes."""

import sys
from pathlib import Path

import pytest

from titanlite.config.load import parse_config
from titanlite.tools.command import run_command
from titanlite.tools.from_torchtitan.__main__ import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["from-torchtitan", *arguments])
    with pytest.raises(SystemExit) as caught:
        run_command(main)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_prints_or_writes_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "theirs.toml", tmp_path / "ours.toml"
    source.write_text(
        '[training]\nlocal_batch_size = 2\nenable_cpu_offload = true\nstepz = 1\n[model]\nflavor = "8B"\n'
    )
    assert run(monkeypatch, str(source)) == 0
    printed = capsys.readouterr()
    assert printed.err == (
        "titanlite: 2 values to fill in, 1 key without counterpart, 1 key that torchtitan 0.2 does not have: see the "
        "comments at the top\n"
    )
    assert run(monkeypatch, str(source), "--out", str(out)) == 0
    assert capsys.readouterr().out == f"Configuration: {out}\n"
    assert out.read_text() == printed.out
    config, problems = parse_config(["--job.config_file", str(out)])
    assert (config.model.flavor, config.training.local_batch_size, problems) == ("8B", 2, [])
    assert run(monkeypatch, str(source), "--out", str(out)) == 1
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), (b"[training", "is not valid TOML"), (b"\xff\xfe", "is not valid TOML")],
)
def test_input_that_cannot_be_read(
    content: bytes | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "theirs.toml"
    if content is not None:
        file.write_bytes(content)
    assert run(monkeypatch, str(file)) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("titanlite: ")
    assert message in printed.err
    assert run(monkeypatch, "--help") == 0
