"""titanlite sweep as a user starts and interrupts it."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.distributed.program import CONFIG, start_command
from titanlite.tools.sweep.combinations import combinations
from titanlite.tools.sweep.training import state_of


@pytest.mark.slow
def test_an_interrupt_ends_the_sweep_and_its_run_which_saves(tmp_path: Path) -> None:
    config, out = tmp_path / "config.toml", tmp_path / "out"
    config.write_text(CONFIG)
    overrides = ["--optimizer.lr=1e-3,1e-2", "--training.steps=100000", f"--job.dump_folder={out}"]
    overrides += ["--checkpoint.enable=true"]
    arguments = [str(config), *overrides, "--nproc", "1"]
    program = start_command(tmp_path, *arguments, program=("-m", "titanlite.tools.sweep"))
    program.wait_for(r" 3/100000 ")
    trained = json.loads((out / "lr-0.001" / "job.lock").read_text())["pid"]
    start = time.monotonic()
    program.process.send_signal(signal.SIGINT)
    assert program.wait() == 130, program.output
    assert time.monotonic() - start < 20
    assert "titanlite: interrupted" in program.output
    with pytest.raises(ProcessLookupError):
        os.kill(trained, 0)
    runs = combinations(str(config), overrides, world_size=1, device_type="cpu")
    assert [state_of(run) for run in runs] == ["interrupted", "new"]
    (saved,) = (out / "lr-0.001" / "checkpoint").glob("step-*")
    assert int(saved.name.removeprefix("step-")) >= 3
