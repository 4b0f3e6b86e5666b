"""Ranks exit with their launcher. Each case kills a process that has started another one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)

# Like torchrun, starts its process in a new session.
LAUNCHER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(100)
"""
WORKER = """
import os, sys, time
from pathlib import Path
from titanlite.ranks import signals
Path("{folder}/pid.new").write_text(str(os.getpid()))
Path("{folder}/pid.new").rename("{folder}/pid")
{before}
signals.TICK_S = 0.05
signals.end_with_launcher()
signals.end_with_launcher()
Path("{folder}/ready").touch()
time.sleep(1000)
"""
WITHOUT_LAUNCHER = "while not Path('{folder}/killed').exists(): time.sleep(0.01)"
NO_PRCTL = "sys.platform = 'darwin'"
UNDER_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def outlives_its_launcher(folder: Path, before: str, environment: dict[str, str], within_s: float = 10.0) -> bool:
    """Whether a worker is ready and still runs `within_s` seconds after its launcher was killed."""
    worker = WORKER.format(folder=folder, before=before.format(folder=folder))
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, worker], env=environment) as launcher:
        wait_for(folder / ("pid" if before == WITHOUT_LAUNCHER else "ready"))
        launcher.kill()
    pid = int((folder / "pid").read_text())
    try:
        (folder / "killed").touch()
        end = time.monotonic() + within_s
        while time.monotonic() < end and runs(pid):
            time.sleep(0.05)
        return runs(pid) and (folder / "ready").exists()
    finally:
        if runs(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("before", ["", NO_PRCTL], ids=["kernel", "watched"])
def test_a_rank_is_killed_with_its_torchrun(before: str, tmp_path: Path) -> None:
    assert not outlives_its_launcher(tmp_path, before, UNDER_TORCHRUN)


@pytest.mark.skipif(b"python" in Path("/proc/1/cmdline").read_bytes(), reason="process 1 could be a torchrun")
def test_a_rank_whose_torchrun_ended_before_prctl_is_killed(tmp_path: Path) -> None:
    assert not outlives_its_launcher(tmp_path, WITHOUT_LAUNCHER, UNDER_TORCHRUN)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", NO_PRCTL])
def test_a_process_without_torchrun_outlives_its_shell(before: str, tmp_path: Path) -> None:
    assert outlives_its_launcher(tmp_path, before, {}, within_s=1.0)
