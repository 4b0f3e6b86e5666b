"""Nodes that meet or do not: who has the store, and the message of each cause; what run_train.sh starts."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from torch.distributed.run import parse_args

from titanlite.ranks import failure
from titanlite.runtime.environment import chooses_threads
from titanlite.runtime.errors import UsageError, UserError
from titanlite.runtime.waiting import NoAnswerError
from titanlite.torchrun import launcher, nodes
from titanlite.torchrun.__main__ import has_ended
from titanlite.torchrun.nodes import Meeting, has_meeting


@pytest.fixture
def port() -> int:
    """A port on which no program listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "POLL_S", 0.02)


def meet(*options: str, **facts: str) -> Meeting:
    return Meeting(parse_args([*options, "script.py"]), facts)


def c10d(port: int, host: str = "127.0.0.1", conf: str = "join_timeout=0") -> tuple[str, ...]:
    return "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}", "--rdzv-id=a", f"--rdzv-conf={conf}"


def static(port: int, rank: int, conf: str = "timeout=0", nnodes: int = 2) -> tuple[str, ...]:
    return f"--nnodes={nnodes}", f"--node-rank={rank}", f"--master-port={port}", f"--rdzv-conf={conf}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--standalone", "--nnodes=2"], False),
        (["--nnodes=1"], False),
        (["--nnodes=2"], True),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"], False),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500"], True),  # another node may have --nnodes 2
        (["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=/a", "--rdzv-conf=store_type=file"], False),
        (["--nnodes=2", "--rdzv-backend=etcd"], False),
    ],
)
def test_launches_that_other_nodes_may_join(options: list[str], *, expected: bool) -> None:
    assert has_meeting(parse_args([*options, "script.py"])) == expected


def test_an_endpoint_that_cannot_be_reached(port: int) -> None:
    head = rf"^the nodes cannot connect at 127.0.0.1:{port} within 0 s: "
    nobody = f"{head}no program listens on port {port} of 127.0.0.1: it has not started, or uses another port$"
    with pytest.raises(UserError, match=nobody):
        meet(*c10d(port, conf="join_timeout=0,is_host=false"))
    with pytest.raises(UserError, match=nobody):
        meet(*static(port, rank=1))
    with pytest.raises(UserError, match=r" at nowhere.invalid:\d+ within 0 s: cannot resolve nowhere.invalid: "):
        meet(*c10d(port, "nowhere.invalid"))


@pytest.mark.parametrize(
    ("options", "endpoint"),
    [(("--nnodes=2", "--node-rank=1"), "127.0.0.1:29500"), (("--rdzv-backend=c10d",), "localhost:29400")],
)
def test_the_default_ports_are_those_of_torch(
    options: tuple[str, ...], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "unreachable", lambda _host, port: f"not port {port}")
    with pytest.raises(UserError, match=rf" at {endpoint} within 0 s: not port {endpoint[-5:]}$"):
        meet(*options, "--rdzv-conf=timeout=0,join_timeout=0,is_host=false")


def test_a_time_that_is_not_a_number(port: int) -> None:
    with pytest.raises(UsageError, match=r"^--rdzv-conf join_timeout=1m: give a number of seconds$"):
        meet(*c10d(port, conf="join_timeout=1m"))


def test_another_program_at_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "STORE_S", 0.1)
    cause = "a program listens there that does not answer as a launcher: choose another port"
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(UserError, match=f" within 0 s: {cause}"):
        meet(*c10d(server.getsockname()[1]))


@pytest.mark.parametrize(("host", "own_name", "is_host"), [("127.0.0.1", "other", True), ("192.0.2.7", "w1", False)])
def test_the_host_with_the_address_of_the_endpoint_has_the_store(
    host: str, own_name: str, port: int, monkeypatch: pytest.MonkeyPatch, *, is_host: bool
) -> None:
    """Whatever address its name has: torch would compare that one."""
    monkeypatch.setattr(socket, "gethostname", lambda: own_name)
    monkeypatch.setattr(nodes, "unreachable", lambda host, _port: "" if is_host else f"{host} is far away")
    arguments = parse_args([*c10d(port, host), "script.py"])
    if is_host:
        Meeting(arguments, {})
    else:
        with pytest.raises(UserError, match=r"192.0.2.7 is far away$"):
            Meeting(arguments, {})
    assert arguments.rdzv_conf == f"join_timeout=0,is_host={is_host}"


def test_launchers_of_one_host_share_the_store(port: int) -> None:
    first = meet(*c10d(port), lr="1")
    arguments = parse_args([*c10d(port), "script.py"])
    second = Meeting(arguments, {"lr": "1", "module plot": "sha256 1"})
    assert first._server is not None  # in this process, torch gives both the same server
    assert second._store.check(["titanlite/a/facts"])


def test_a_node_that_differs_does_not_join(port: int) -> None:
    first = meet(*c10d(port), **{"--nnodes": "2", "lr": "1.0"})
    with pytest.raises(UsageError, match=r"does not join.*\n    --nnodes: 3; on the first node: 2\n    lr: 2.0; on"):
        meet(*c10d(port), **{"--nnodes": "3", "lr": "2.0"})
    with pytest.raises(UsageError, match=rf"^the store at 127.0.0.1:{port} is that of --rdzv-id a, here b: give all"):
        meet(*c10d(port)[:-2], "--rdzv-id=b", c10d(port)[-1])
    del first


def test_static_nodes_wait_for_each_rank(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda rank: meet(*static(port, rank, "timeout=60")), range(2)))
    monkeypatch.setattr(nodes, "network_name", lambda: "another host")
    with pytest.raises(UsageError, match=rf"^two nodes have --node-rank 1: {socket.gethostname()} and .*; number the"):
        meet(*static(port, 1))
    assert [meeting._server is not None for meeting in found] == [True, False]


def test_a_static_node_that_does_not_come(port: int) -> None:
    come = rf"2 of 4 nodes have come \({socket.gethostname()}, {socket.gethostname()}\); 127.0.0.1 is another host"
    first: list[UserError] = []

    def start() -> None:
        with pytest.raises(UserError) as caught:
            meet(*static(port, 0, "timeout=1", nnodes=4))
        first.append(caught.value)

    thread = threading.Thread(target=start)
    thread.start()
    with pytest.raises(UserError, match=rf"^.* within 1 s: {come}.* --node-rank 1, 2 has not come$"):
        meet(*static(port, 3, "timeout=1", nnodes=4))
    thread.join()
    assert len(first) == 1


def test_a_static_node_that_loses_the_store(port: int) -> None:
    server = dist.TCPStore("localhost", port, None, True, wait_for_workers=False)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(meet, *static(port, 1, "timeout=60", nnodes=3))
        while not server.check(["titanlite/none/node/1"]):
            time.sleep(0.01)
        time.sleep(0.2)
        del server
        with pytest.raises(
            UserError, match=r": the launcher that has the store has ended, .*; before that, 1 of 3 nodes"
        ):
            waiting.result()


def test_a_node_without_the_store_ends_after_its_ranks(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    messages: list[str] = []

    def call(_seconds: float, _call: Callable[[], object]) -> None:
        if not ended.is_set():
            messages.append("asked while the ranks run, which decide how long they wait")
        raise NoAnswerError

    meeting = meet(*c10d(port))
    monkeypatch.setattr(nodes, "call_within", call)
    meeting.watch(ended.is_set, messages.append)
    time.sleep(0.1)
    assert messages == []
    ended.set()
    while not messages:
        time.sleep(0.01)
    assert messages == [f"the store of the nodes at 127.0.0.1:{port} does not answer: node 0 or the network is lost"]


def test_a_process_that_has_ended_keeps_its_exit_code() -> None:
    with subprocess.Popen([sys.executable, "-c", "input(); exit(3)"], stdin=subprocess.PIPE) as process:
        assert not has_ended(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        while not has_ended(process.pid):
            time.sleep(0.01)
        assert process.wait() != 0
        assert has_ended(process.pid)


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
    assert chooses_threads(os.environ) == (len(variables) > 1)
    said = (
        ""
        if len(variables) > 1
        else f"titanlite: OMP_NUM_THREADS={threads} (16 cores, {variables['NGPU']} processes)\n"
    )
    assert capsys.readouterr().err == said
