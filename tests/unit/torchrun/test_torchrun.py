"""torchrun with the checks and messages of titanlite.torchrun: exit codes, and errors in one line."""

import os
import signal
import sys
from argparse import Namespace
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server import api as agent
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.run import parse_args

from titanlite.ranks.distributed import ELASTIC
from titanlite.ranks.failure import REFUSED, write_error_file
from titanlite.runtime.errors import ConfigError, UsageError, UserError
from titanlite.tools.sweep.training import error_in
from titanlite.torchrun import __main__ as torchrun
from titanlite.torchrun.nodes import Meeting


def failed(*exit_codes: int) -> ChildFailedError:
    """torchrun's error for ranks that have failed, the first one first."""
    failures = {}
    for place, code in enumerate(exit_codes):
        failures[7 - place] = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="<N/A>")
        failures[7 - place].timestamp = place
    return ChildFailedError("titanlite.train", failures)


SIGTERM, SIGINT = 15, 2
ENDS = [
    (failed(2, 1), 2, "titanlite: rank 7 failed: its error is above, or in the log of a rank of any node\n"),
    (failed(REFUSED), 1, "titanlite: rank 7 failed: its error is above, or in the log of a rank of any node\n"),
    (failed(-9, 1), 1, "titanlite: rank 7 was killed by SIGKILL\n"),
    (SignalException("", torchrun.signal.SIGTERM), 128 + SIGTERM, ""),
    (KeyboardInterrupt(), 128 + SIGINT, ""),
]


@pytest.mark.parametrize(("error", "code", "message"), ENDS)
def test_exit_codes(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(error, monkeypatch, code)
    assert capsys.readouterr().err == message


def test_the_error_of_a_rank_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the error file of the launcher, if it has one."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "rank.json"))
    write_error_file("titanlite: its words")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "launcher.json"))
    for file, code, message in (("rank.json", 1, "its words"), ("none", -9, "rank 7 was killed by SIGKILL")):
        error = ChildFailedError("titanlite.train", {7: ProcessFailure(0, 1, code, str(tmp_path / file))})
        launch(error, monkeypatch, 1)
        assert error_in(tmp_path / "launcher.json") == message


def test_a_launcher_waits_only_briefly_for_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that has received SIGTERM leaves without the others, which torch would let wait for 5 minutes."""
    found = []

    def make(**settings: object) -> None:
        found.append(settings["exit_barrier_timeout"])
        raise RuntimeError

    monkeypatch.setattr(torchrun, "Agent", make)
    with pytest.raises(RuntimeError):
        torchrun.launch(parse_args(["--standalone", "-m", "titanlite.train"]), {})
    assert found == [torchrun.EXIT_BARRIER_S]


@pytest.mark.parametrize(
    ("handler", "options", "expected"),
    [
        (signal.SIG_DFL, [], "SIGTERM,SIGINT,SIGUSR1,SIGHUP"),
        (signal.SIG_IGN, [], "SIGTERM,SIGINT,SIGUSR1"),  # under nohup
        (signal.SIG_DFL, ["--signals-to-handle", "SIGTERM"], "SIGTERM"),
    ],
)
def test_signals_are_forwarded(
    handler: signal.Handlers, options: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(signal, "getsignal", lambda _number: handler)
    monkeypatch.setattr(torchrun, "launch", lambda arguments, _facts: found.append(arguments.signals_to_handle))
    monkeypatch.setattr(torchrun, "raise_on_interrupt", lambda: None)
    monkeypatch.setattr(sys, "argv", ["torchrun", "--standalone", *options, "script.py"])
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    torchrun.main()
    assert found == [expected]
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True", "for the ranks"


def test_a_launcher_that_ends_last_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(_arguments: Namespace) -> None:
        agent.logger.warning("Received 15 death signal")
        agent.logger.error("Error waiting on exit barrier. Elapsed: %s seconds", 1.5)

    monkeypatch.setattr(torchrun, "run", run)
    torchrun.launch(parse_args(["--standalone", "-m", "titanlite.train"]), {})
    assert caplog.messages == ["Received 15 death signal"]


def launch(error: BaseException, monkeypatch: pytest.MonkeyPatch, code: int | None = None) -> None:
    """Launch by a torchrun that raises `error`, and check the exit code."""

    def run(_arguments: Namespace) -> None:
        raise error

    def end(found: int) -> None:
        raise SystemExit(found)

    monkeypatch.setattr(torchrun, "run", run)
    monkeypatch.setattr(torchrun, "end_process", end)
    monkeypatch.setattr(torchrun, "Meeting", lambda _arguments, _facts: None)
    arguments = parse_args(["--nnodes=2", "--rdzv-endpoint=node0:29500", "-m", "titanlite.train"])
    if code is None:
        torchrun.launch(arguments, {})
    with pytest.raises(SystemExit) as caught:
        torchrun.launch(arguments, {})
    assert caught.value.code == code


UNREACHABLE = [
    (DistNetworkError("no route to host\nframe #0"), "no route to host"),
    (DistStoreError("1/2 clients joined"), "1/2 clients joined"),
]


@pytest.mark.parametrize(("error", "cause"), UNREACHABLE)
def test_unreachable_nodes(error: Exception, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=f"^the nodes cannot connect at node0:29500: {cause}$"):
        launch(error, monkeypatch)


def test_connected_nodes_that_lose_the_store_name_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is not to blame: the store ends with the launcher of node 0, which has printed the cause."""
    monkeypatch.setattr(torchrun.Agent, "has_met", True)
    lost = r"the launcher of node 0, which hosts the store of the nodes at node0:29500, has ended, .* in its log"
    with pytest.raises(UserError, match=f"^{lost}$"):
        launch(RendezvousConnectionError("Broken pipe"), monkeypatch)


ONE_OF_2 = r"1 of 2 nodes have come \(w0\); here --nnodes 2 --rdzv-id a: equal on all nodes\?"


@pytest.mark.parametrize(
    ("before", "is_elastic", "error", "limit_s", "cause"),
    [
        ([], False, RendezvousTimeoutError, 600, f" within 600 s: {ONE_OF_2}"),
        (
            ["w0", "w1"],
            False,
            RendezvousTimeoutError,
            50,
            " .* 50 s: w1 has not come back to restart the ranks: see .*",
        ),
        (["w0", "w0"], False, RendezvousTimeoutError, 50, " .* w0 has not come back .*"),  # two launchers of one host
        (["w0", "w1"], True, RendezvousTimeoutError, 600, " .* w1 has not come back .*"),  # it may be replaced
        ([], False, RendezvousConnectionError, 600, f": the launcher that has the store .*; before that, {ONE_OF_2}"),
        ([], False, RendezvousClosedError, 600, ": another launcher .*; or the run of --rdzv-id a has ended .*"),
    ],
)
def test_nodes_that_do_not_come(
    *,
    before: list[str],
    is_elastic: bool,
    error: type[Exception],
    limit_s: int,
    cause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ELASTIC, raising=False)
    monkeypatch.setattr(torchrun.Agent, "has_met", False)
    if is_elastic:
        monkeypatch.setenv(ELASTIC, str(tmp_path / "connected"))
    launcher, handler = agent_of(dynamic_rendezvous(max_nodes=2))
    launcher._meeting = meeting = Meeting.__new__(Meeting)
    meeting.endpoint, meeting._nodes, meeting._id, meeting._host, meeting.patience_s = "w0:1", "2", "a", "w0", 600
    launcher._hosts = Counter(before)
    monkeypatch.setattr(meeting, "watch", lambda _is_needed, _end: None)

    def fail(_agent: object, _group: object) -> None:
        raise error

    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", fail)
    with pytest.raises(UserError, match=rf"^the nodes cannot connect at w0:1{cause}$"):
        launcher._rendezvous(launcher._worker_group)
    assert handler.settings.timeout.join.total_seconds() == limit_s


def dynamic_rendezvous(max_nodes: int) -> DynamicRendezvousHandler:
    """The rendezvous of a node on host w0, to which no other one has come."""
    store = dist.HashStore()
    backend = C10dRendezvousBackend(store, "a")
    return DynamicRendezvousHandler.from_backend("a", store, backend, max_nodes, max_nodes, local_addr="w0")


def test_a_node_for_which_a_run_has_no_place() -> None:
    meeting = Meeting.__new__(Meeting)
    meeting._nodes, meeting._id = "1:2", "a"
    full = "the run of --rdzv-id a has all of its nodes; this one waits until one is lost: for another run, choose "
    assert meeting.describe(["w0", "w1", "w2"]).startswith(full)


def test_a_launcher_that_ends_after_the_nodes_have_met_is_named() -> None:
    """They were connected: the network is not to blame."""
    error = Meeting.__new__(Meeting).closed(has_met=True)
    assert str(error) == "the launcher of another node has ended, so the ranks are not restarted: see its log"


def test_options_that_torchrun_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"^torchrun refuses its options: The rendezvous backend 'nope'"):
        launch(ValueError("The rendezvous backend 'nope' is not registered"), monkeypatch)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        *(([f"--nnodes={value}"], ["--nnodes"]) for value in ("abc", "0", "-1", "2:1", "0:2", "1:2:3")),
        *(([f"--nproc-per-node={value}"], ["--nproc-per-node"]) for value in ("abc", "0", "-1")),
        (["--nnodes=0", "--nproc-per-node=x"], ["--nnodes", "--nproc-per-node"]),
        *((["--nnodes=2", f"--node-rank={value}"], ["--node-rank"]) for value in ("2", "-1")),
        (["--nnodes=2", "--node-rank=1"], []),
        (["--nnodes=2", "--node-rank=2", "--rdzv-backend=c10d"], []),  # not used
        (["--standalone", "--node-rank=2"], []),
        (["--nnodes=1:2"], ["--rdzv-backend"]),
        (["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=w0:0"], ["--rdzv-endpoint"]),
        (["--nnodes=1:2", "--rdzv-backend=c10d", "--node-rank=3"], []),
    ],
)
def test_the_number_of_ranks_is_checked(options: list[str], keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ELASTIC, raising=False)
    with pytest.raises(ConfigError) if keys else nullcontext() as caught:
        torchrun.check(parse_args([*options, "script.py"]))
    assert caught is None or [problem.key for problem in caught.value.problems] == keys


def test_a_layout_is_checked_for_the_ranks_that_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """3 of 4 or 6 ranks, if their number may change."""
    monkeypatch.delenv(ELASTIC, raising=False)
    training = ["quickstart", "--job.dump_folder", str(tmp_path), "--parallelism.dp_shard"]
    ranks = ["--nproc-per-node=2", "-m", "titanlite.train", *training]
    with pytest.raises(ConfigError, match=r"parallelism\.dp_shard = 3\n +rule: +world size 4 must"):
        torchrun.check(parse_args(["--nnodes=2", *ranks, "3"]))
    assert ELASTIC not in os.environ
    elastic = ["--nnodes=2:3", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500", "--max-restarts=3"]
    arguments = parse_args([*elastic, "--rdzv-conf=keep_alive_interval=1", *ranks, "3"])
    torchrun.check(arguments)
    connected = Path(os.environ[ELASTIC])
    assert os.access(connected.parent, os.W_OK)
    assert not connected.exists()
    assert arguments.rdzv_conf == "keep_alive_interval=1,last_call_timeout=5,keep_alive_max_attempt=5"
    assert f"2:3 nodes; rendezvous at node0:29500, {arguments.rdzv_conf}; at most 3 restarts" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"parallelism\.dp_shard = 5\n +rule: +world size 4 must"):  # on two nodes
        torchrun.check(parse_args([*elastic, *ranks, "5"]))


@pytest.mark.parametrize(
    ("participants", "waiting", "is_connected", "restarts", "state"),
    [
        (1, 0, False, 1, WorkerState.UNHEALTHY),
        (2, 0, False, 1, WorkerState.HEALTHY),  # none is lost
        (1, 1, False, 1, WorkerState.HEALTHY),  # all restart with those that wait, which is not counted
        (1, 0, True, 1, WorkerState.HEALTHY),  # the ranks notice
        (1, 0, False, 0, WorkerState.HEALTHY),
    ],
)
def test_a_node_that_is_lost_before_the_ranks_are_connected(
    *,
    participants: int,
    waiting: int,
    is_connected: bool,
    restarts: int,
    state: WorkerState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ELASTIC, str(tmp_path / "connected"))
    if is_connected:
        (tmp_path / "connected").touch()
    healthy = agent.RunResult(state=WorkerState.HEALTHY)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda _agent, _group: healthy)
    nodes = [DynamicRendezvousHandler._node_desc_generator.generate("w0") for _ in range(participants)]
    present = SimpleNamespace(state=SimpleNamespace(participants=nodes))
    handler = SimpleNamespace(num_nodes_waiting=lambda: waiting, _state_holder=present, _this_node=nodes[0])
    group: Any = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler), group_world_size=2)
    launcher = torchrun.Agent.__new__(torchrun.Agent)
    launcher._remaining_restarts = restarts
    assert launcher._monitor_workers(group).state == state


@pytest.mark.parametrize("is_elastic", [False, True])
@pytest.mark.parametrize(("code", "restarts"), [(1, 7), (2, 0), (REFUSED, 0)])
def test_a_rank_that_refuses_to_start_is_not_restarted(
    *, code: int, restarts: int, is_elastic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ELASTIC, raising=False)
    if is_elastic:
        monkeypatch.setenv(ELASTIC, str(tmp_path / "connected"))
    failures = failed(code).failures
    found = agent.RunResult(state=WorkerState.FAILED, failures=failures)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda _agent, _group: found)
    launcher, handler = agent_of(SimpleNamespace())
    launcher._remaining_restarts = 7
    assert launcher._monitor_workers(launcher._worker_group) is found
    assert launcher._remaining_restarts == restarts
    assert hasattr(handler, "shutdown") == (is_elastic and restarts == 0)  # the other nodes may continue


def agent_of(handler: Any) -> tuple[torchrun.Agent, Any]:
    """An agent with this rendezvous handler, and the handler."""
    launcher = torchrun.Agent.__new__(torchrun.Agent)
    launcher._worker_group = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler))  # type: ignore[assignment]
    return launcher, handler


def test_other_programs_are_not_checked() -> None:
    torchrun.check(parse_args(["--nproc-per-node=2", "titanlite/train.py", "--other", "words"]))
