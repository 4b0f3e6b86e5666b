"""Programs as a user starts them: what run_train.sh imports, errors before a rank starts, a sweep, too large models."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.program import (
    CONFIG,
    PYTHON,
    REPOSITORY,
    clean_environment,
    own_tracebacks,
    start_command,
    start_program,
    write_text,
)
from titanlite.config.schema import JobConfig
from titanlite.data.processes import WorkerProcess
from titanlite.runtime.errors import UserError
from titanlite.tools.sweep.combinations import Run, combinations
from titanlite.tools.sweep.training import start_run, state_of, wait_for


def run(*command: str | Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.toml").write_text(CONFIG)
    settings = {"PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "DEVICE": "cpu"}
    settings["TITANLITE_CACHE"] = str(folder / "cache")
    environment = clean_environment() | settings | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_wrong_config_ends_run_train_before_torchrun(tmp_path: Path) -> None:
    """One message, exit code 2."""
    done = run(REPOSITORY / "run_train.sh", "config.toml", "--training.step", "10", folder=tmp_path, NGPU="2")
    assert (done.returncode, done.stdout) == (2, "")
    message = [
        *["titanlite: the configuration has 1 problem:", "", "  training.step = '10'"],
        *["    rule:   a key of [training]", "    remedy: did you mean training.steps?"],
    ]
    assert done.stderr.splitlines() == message
    assert os.listdir(tmp_path) == ["config.toml"]


@pytest.mark.slow
def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        nodes = {"NGPU": "1", "NNODES": "2", "NODE_RANK": "0", "RDZV_ENDPOINT": endpoint}
        done = run(REPOSITORY / "run_train.sh", "config.toml", folder=tmp_path, **nodes)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"titanlite: the port of {endpoint}, where the nodes connect, is in use: end the program that uses it, or "
        "choose another port, the same on all nodes\n"
    )


UNUSED = [
    *["torch._dynamo", "torch._inductor", "torch.distributed.pipelining", "torch.distributed.run"],
    *["tyro", "pyarrow", "datasets", "transformers", "tensorboard", "huggingface_hub", "lm_eval", "yaml"],
]
REPORT = f"""
import os, sys
from titanlite.torchrun import launcher
end = os._exit
def report(code):
    hidden = os.environ.get("TORCH_CPP_LOG_LEVEL")  # torch's warnings after a lost connection
    print("imported:", sorted(set({UNUSED}) & sys.modules.keys()), "torch" in sys.modules, hidden, flush=True)
    end(code)
os._exit = report
launcher.main()
"""


@pytest.mark.slow
def test_one_process_imports_only_what_it_uses(tmp_path: Path) -> None:
    """It trains without torchrun, and without torch._dynamo, half a second of CPU time, if nothing is compiled."""
    arguments = ["config.toml", "--training.steps", "1", "--training.dtype", "float32"]
    done = run(sys.executable, "-c", REPORT, "--", *arguments, folder=tmp_path, NGPU="1", RANK="0")
    assert done.returncode == 0, done.stderr
    assert "Done: 1 steps" in done.stdout
    assert done.stdout.splitlines()[-1] == "imported: [] True ERROR"


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


HOSTILE = ("socket", "selectors", "json", "subprocess", "numpy", "xxhash", "tomli", "tyro", "torch", "titanlite")
"""Modules that children import, of the standard library, of others and of titanlite."""


def hostile_folder(folder: Path) -> Path:
    """Write modules whose import creates `pwned`; return that path."""
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'pwned')!r}, 'w').close()\n")
    return folder / "pwned"


def console_script(folder: Path, statements: str) -> tuple[str]:
    """A program whose own folder is first on Python's path, as `titanlite` has."""
    folder.mkdir()
    (folder / "console").write_text(statements)
    return (str(folder / "console"),)


@pytest.mark.slow
def test_two_processes_listen_on_loopback_only_and_import_nothing_of_their_folder(tmp_path: Path) -> None:
    """Also their data workers. The launcher does not: it is a console script."""
    pwned = hostile_folder(tmp_path)
    program = start_program(
        tmp_path,
        *(*write_text(tmp_path), "--data.num_workers", "1", "--training.steps", "100000"),
        program=(*console_script(tmp_path / "bin", "from titanlite.torchrun.launcher import main\nmain()\n"), "--"),
        launcher=PYTHON,
        environment={"NGPU": "2", "DEVICE": "cpu", "PYTHONSAFEPATH": ""},
    )
    program.wait_for(r" 1/100000 ")
    assert len(program.processes()) >= 5
    addresses = program.listeners()
    program.close()
    assert program.wait() == 128 + signal.SIGTERM
    assert addresses.count("127.0.0.1") >= 3, "the store, and gloo of each rank"
    assert set(addresses) <= {"127.0.0.1", "::1"}
    assert "listens on all addresses" not in program.output
    assert not pwned.exists(), program.output


@pytest.mark.slow
def test_children_import_nothing_of_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainings of sweep, ladder, critical-batch, compare and audit; workers; the fork server of parity."""
    pwned = hostile_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    assert wait_for(start_run(Run("a", {}, ("x.toml",), JobConfig()), 0)) == 2, "NGPU=0 is refused"
    worker = WorkerProcess("titanlite.data.workers", {"x": 1}, "")
    with pytest.raises(UserError, match="ended with exit code 1"):
        worker.receive()
    worker.close()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "forks.py").write_text(
        "from multiprocessing import get_context\n"
        "child = get_context('forkserver').Process(target=print)\nchild.start()\nchild.join()\n"
    )
    start = "from titanlite import __main__ as it\nit.COMMANDS['forks'] = ('forks', '')\nit.main()\n"
    (tmp_path / "bin" / "console").write_text(start)
    done = run(sys.executable, tmp_path / "bin" / "console", "forks", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not pwned.exists()


TOO_LARGE = ("--model.dim", str(2**20), "--model.ffn_dim", str(2**30))
"""4 PiB for each matrix: above the address space, so that the allocation fails on any machine."""


@pytest.mark.slow
def test_the_memory_of_a_run_on_two_ranks(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("refused", "failed", "fitted")]
    for folder in folders:
        folder.mkdir()
    fits = ("--training.local_batch_size", "-1", "--training.global_batch_size", "8", "--training.steps", "2")
    refused, failed, fitted = (
        start_program(folders[0], *TOO_LARGE, ranks=2),
        start_program(folders[1], *TOO_LARGE, "--memory.check", "off", ranks=2),
        start_program(folders[2], *fits, ranks=2),
    )
    for program, text in (
        (refused, "titanlite: the model does not fit: ranks 0 to 1 on "),
        (failed, " is out of memory "),
    ):
        assert program.wait() != 0
        assert program.output.count(text) == program.output.count("titanlite: ") == 1, program.output
        assert "largest items of the plan" in program.output
        assert program.output.count("  remedy: ") == 3
        assert own_tracebacks(program.output) == 0
    assert "; nothing was allocated" in refused.output
    assert "before the first step: planned " in failed.output
    assert "can't allocate memory" in failed.output
    assert fitted.wait() == 0, fitted.output
    assert "training.local_batch_size = -1: 4 sequences per microbatch, accumulation 1; planned peak" in fitted.output
    assert "Batch: local 4, global 8, accumulation 1" in fitted.output
    assert "local_batch_size = 4" in (folders[2] / "out" / "config.toml").read_text()
