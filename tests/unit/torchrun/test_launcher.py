"""What run_train.sh's Python starts, and with which variables."""

import os
import re
import signal
import sys
from unittest.mock import Mock

import pytest

from titanlite.ranks import failure
from titanlite.torchrun import launcher

NODES = ["--nnodes=2", "--node-rank=1", "--rdzv-backend=static", "--rdzv-endpoint=node0:29500"]


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("NGPU", "DEVICE", "OMP_NUM_THREADS", "RANK"):
        os.environ.pop(name, None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(16))
    monkeypatch.setattr(sys, "platform", "linux")


def started(monkeypatch: pytest.MonkeyPatch, *argv: str, gpus: int = 0, **variables: str) -> tuple[str, list[str]]:
    """(module, arguments) that the launcher starts."""
    found: list[tuple[str, list[str]]] = []
    os.environ.update(variables)
    monkeypatch.setattr(launcher, "usable_gpus", lambda _device: gpus)
    monkeypatch.setattr(launcher, "run_module", lambda *call: found.append(call))
    monkeypatch.setattr(sys, "argv", ["launcher", *argv])
    launcher.main()
    (call,) = found
    return call


def test_one_process_trains_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    call = started(monkeypatch, "--", "my.toml", "--training.steps", "5", RANK="3", WORLD_SIZE="4")
    assert call == ("titanlite.train", ["my.toml", "--training.steps", "5"])
    assert {"RANK", "WORLD_SIZE", "OMP_NUM_THREADS"} & os.environ.keys() == set()


@pytest.mark.parametrize(
    ("options", "processes", "gpus", "expected"),
    [
        ([], "2", 0, ["--standalone", "--nproc-per-node=2"]),
        ([], "", 3, ["--standalone", "--nproc-per-node=3"]),
        (NODES, "1", 0, [*NODES, "--nproc-per-node=1"]),
    ],
)
def test_several_processes_start_with_torchrun(
    options: list[str], processes: str, gpus: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = started(monkeypatch, *options, "--", "my.toml", "--", "x", gpus=gpus, NGPU=processes)
    assert call == ("titanlite.torchrun", [*expected, "-m", "titanlite.train", "my.toml", "--", "x"])


@pytest.mark.parametrize(
    ("argv", "processes", "message"),
    [
        (["--", "my.toml"], "abc", r"NGPU=abc: set an integer from 1 to 1024, or unset NGPU\n"),
        (["--", "my.toml"], "0", "NGPU=0: "),
        (["my.toml"], "1", r'write "--" before the configuration: .* -- CONFIG\n'),
    ],
)
def test_wrong_usage_is_one_message(
    argv: list[str], processes: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(failure, "end_process", end)
    monkeypatch.setattr(signal, "alarm", Mock())
    with pytest.raises(SystemExit) as ended:
        started(monkeypatch, *argv, NGPU=processes)
    assert ended.value.code == 2
    assert re.match(f"titanlite: (the environment sets )?{message}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("variables", "threads"),
    [({"NGPU": "4"}, "4"), ({"NGPU": "32"}, "1"), ({"NGPU": "2", "OMP_NUM_THREADS": "7"}, "7")],
)
def test_threads_of_each_process(
    variables: dict[str, str], threads: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started(monkeypatch, "--", **variables)
    assert os.environ["OMP_NUM_THREADS"] == threads
    said = (
        ""
        if len(variables) > 1
        else f"titanlite: OMP_NUM_THREADS={threads} (16 cores, {variables['NGPU']} processes)\n"
    )
    assert capsys.readouterr().err == said
