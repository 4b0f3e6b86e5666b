"""A launch on one node: its options, and where its store listens."""

import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.run import parse_args

from titanlite.ranks import network
from titanlite.ranks.distributed import CommConfig, World
from titanlite.ranks.network import connect, listens_everywhere, loopback_store
from titanlite.runtime.errors import UserError
from titanlite.torchrun import one_node
from titanlite.torchrun.nodes import has_meeting
from titanlite.torchrun.one_node import BACKEND, stay_on_node


@pytest.mark.parametrize(
    ("options", "run_id"),
    [
        ([], ""),
        (["--standalone"], ""),
        (["--standalone", "--rdzv-id=a"], ""),  # torch ignores the name, too
        (["--nnodes=1:1", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500", "--rdzv-id=a"], "a"),
        (["--master-port=29501", "--rdzv-id=a"], "a"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=/tmp/file", "--rdzv-conf=store_type=file", "--rdzv-id=a"], "a"),
    ],
)
def test_one_node_needs_no_port(options: list[str], run_id: str) -> None:
    arguments = parse_args([*options, "script.py"])
    stay_on_node(arguments)
    assert (arguments.rdzv_backend, arguments.standalone) == (BACKEND, False)
    assert arguments.rdzv_id == run_id if run_id else len(arguments.rdzv_id) == 36
    assert not has_meeting(arguments)


@pytest.mark.parametrize(
    "options", [["--nnodes=2"], ["--nnodes=1:2", "--rdzv-backend=c10d"], ["--rdzv-backend=etcd-v2"]]
)
def test_other_launches_are_torchs(options: list[str]) -> None:
    arguments = parse_args([*options, "script.py"])
    before = vars(arguments).copy()
    stay_on_node(arguments)
    assert vars(arguments) == before


def handler() -> one_node.OneNode:
    found = rendezvous_handler_registry.create_handler(RendezvousParameters(BACKEND, "127.0.0.1:0", "a", 1, 1))
    assert isinstance(found, one_node.OneNode)
    return found


def test_the_ranks_of_each_attempt_find_one_store_on_loopback() -> None:
    node = handler()
    first, second = node.next_rendezvous(), node.next_rendezvous()
    address = first.bootstrap_store_info
    assert address is not None
    assert (first.rank, first.world_size, node.num_nodes_waiting(), node.is_closed()) == (0, 1, 0, False)
    assert second.bootstrap_store_info == address
    first.store.set("left by the first attempt", "")
    assert not second.store.check(["left by the first attempt"])
    ranks = dist.TCPStore(address.master_addr, address.master_port)
    ranks.set("a", "b")
    assert ranks.get("a") == b"b"
    assert address.master_addr == "127.0.0.1"
    assert not listens_everywhere(address.master_port)


def test_a_loopback_interface_that_is_down_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*_arguments: object, **_settings: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", create)
    with pytest.raises(
        UserError, match=r"^the ranks cannot connect at 127\.0\.0\.1: Cannot assign .*ip link set lo up"
    ):
        handler()


def test_torchs_own_store_listens_everywhere() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert listens_everywhere(store.port)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of rank 0 of two, without a launcher that has the store. Restored afterwards."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.update(MASTER_ADDR="localhost", LOCAL_WORLD_SIZE="2", RANK="0", WORLD_SIZE="2")
    monkeypatch.setattr(network, "agree_on_attempt", lambda *_arguments: "a")
    return os.environ  # type: ignore[return-value]


def open_store(monkeypatch: pytest.MonkeyPatch) -> tuple[int, object]:
    """(port of the store that rank 0 hosts, its connection)"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ["MASTER_PORT"] = str(port)
    host = loopback_store
    monkeypatch.setattr(network, "loopback_store", lambda address, port, _size, limit: host(address, port, None, limit))
    return port, connect(World(0, 0, 2, "cpu", 2), CommConfig())


def test_a_rank_hosts_the_store_on_loopback(launched: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """MASTER_ADDR says that all ranks are on this host."""
    port, _store = open_store(monkeypatch)
    assert network.unreachable("127.0.0.1", port) == ""
    assert not listens_everywhere(port)
    assert launched["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(("variable", "value"), [("GLOO_SOCKET_IFNAME", "eth0"), ("LOCAL_WORLD_SIZE", "1")])
def test_gloo_takes_the_interface_of_the_user_or_of_several_hosts(
    variable: str, value: str, launched: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched[variable] = value
    monkeypatch.setattr(network, "require_gloo_address", lambda *_arguments: None)
    _port, _store = open_store(monkeypatch)
    assert launched.get("GLOO_SOCKET_IFNAME") == (value if variable == "GLOO_SOCKET_IFNAME" else None)


@pytest.mark.usefixtures("propagating_log")
@pytest.mark.parametrize("is_open", [True, False])
def test_torchrun_is_told_that_its_port_is_open(
    is_open: bool, launched: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """If it is so, and by rank 0 only."""
    store = (
        dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if is_open else loopback_store("127.0.0.1", 0)
    )
    launched |= {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    os.environ.update(launched)
    for rank in range(2):
        os.environ["RANK"] = str(rank)
        connect(World(rank, rank, 2, "cpu", 2), CommConfig())
    assert caplog.messages == [network.OPEN_TO_ALL] * is_open
    assert "python -P -m titanlite.torchrun" in network.OPEN_TO_ALL


def test_the_system_may_not_say_who_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network, "read_system", lambda path: "" if path else str(tmp_path))
    assert not listens_everywhere(29500)
