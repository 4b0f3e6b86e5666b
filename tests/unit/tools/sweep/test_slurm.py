"""Scripts of Slurm arrays for paths and values with line ends: no part of them is a command."""

import subprocess
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from titanlite.runtime.errors import UserError
from titanlite.tools.audit import intervals
from titanlite.tools.sweep.combinations import Run
from titanlite.tools.sweep.slurm import array_script
from titanlite.tools.tokenize.slurm import write_script

EVIL = "a'\ntouch pwned\n#\r$(touch pwned)\x1b"


def run_until(text: str, end: str, then: str, folder: Path) -> str:
    """The output of the script, in which `then` is in place of the line that begins with `end` and all later ones."""
    script = folder / "script.sh"
    script.write_text(text[: text.index(f"\n{end}")] + f"\n{then}\n")
    script.chmod(0o700)
    done = subprocess.run(
        ["bash", script], cwd=folder, env={"SLURM_ARRAY_TASK_ID": "0"}, capture_output=True, check=True
    )
    assert not list(folder.rglob("pwned"))
    return done.stdout.decode()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    inner = tmp_path / EVIL.replace("/", "")
    inner.mkdir()
    monkeypatch.chdir(inner)
    return inner


def test_the_array_of_a_sweep(folder: Path) -> None:
    run = Run("name", {"job.description": EVIL}, [f"--job.config_file={EVIL}", "--x"], MagicMock())
    text = array_script([run], script=EVIL, processes=1)
    assert run_until(text, "export PROCESSES", 'printf "%s|" "${run[@]}"', folder) == f"--job.config_file={EVIL}|--x|"


def test_the_array_of_tokenize(folder: Path) -> None:
    script = folder / f"{EVIL}.sbatch"
    write_script(script, out=EVIL, parts=3, tasks=2, arguments=[EVIL])
    assert run_until(script.read_bytes().decode(), "exec ", "pwd", folder).rstrip("\n") == str(folder)


def test_the_command_in_the_configuration_of_an_audit_is_one_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_recomputed", "tables_of", "config_from_values", "check_and_resolve"):
        monkeypatch.setattr(intervals, name, MagicMock())
    monkeypatch.setattr(intervals, "dump_config", lambda _: "[training]\n")
    interval = intervals.Interval(None, MagicMock(manifest=MagicMock(step=2)))
    command = "titanlite audit 'x\n[job]\nplugins = [\"evil\"]'"
    intervals.recomputation(interval, tmp_path, [], command, processes=1, device_type="cpu")
    (file,) = tmp_path.iterdir()
    assert file.read_text() == "# titanlite audit 'x\\n[job]\\nplugins = [\"evil\"]'\n[training]\n"


def test_an_odd_configuration_of_an_audit_has_a_command_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "steps-1-2.toml"
    file.write_bytes(b"# titanlite \xff audit\n[job]\n")
    assert intervals.command_in(file) == "titanlite \ufffd audit"
    file.write_bytes(bytes(2**20))
    assert len(intervals.command_in(file)) == intervals.MAX_COMMAND_BYTES
    with pytest.raises(UserError, match="cannot read"):
        intervals.command_in(tmp_path / "none.toml")
