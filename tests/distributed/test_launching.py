"""run_train.sh and titanlite.torchrun as a user starts them: what they import, and errors before any rank starts."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.program import CONFIG, REPOSITORY, clean_environment


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
    *["tyro", "pyarrow", "datasets", "transformers", "tensorboard"],
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
