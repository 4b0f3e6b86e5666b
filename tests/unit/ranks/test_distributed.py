"""The world from the launcher's environment variables, the rendezvous of an attempt's ranks, addresses of hosts."""

import errno
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
import torch.distributed as dist

from titanlite.ranks import network
from titanlite.ranks.distributed import CommConfig, World, note_finished, wait_until_finished, world_from_environment
from titanlite.ranks.network import agree_on_attempt, connect
from titanlite.runtime.errors import UsageError, UserError

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
COMPLETE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def world(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> World:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return world_from_environment()


def test_without_a_launcher_the_world_has_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world(monkeypatch, {}) == World(0, 0, 1, "cpu")


def test_with_a_launcher_the_world_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world(monkeypatch, COMPLETE | {"LOCAL_WORLD_SIZE": "2"}) == World(1, 1, 2, "cpu", 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": ""}, "must be integers"),
        ({"RANK": "one"}, "RANK=one"),
        ({"RANK": "2"}, "RANK must be below WORLD_SIZE"),
        ({"MASTER_PORT": ""}, "but not MASTER_PORT"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT=abc: set an integer from 1 to 65535, or unset MASTER_PORT"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: "),
        ({"LOCAL_WORLD_SIZE": "abc"}, "LOCAL_WORLD_SIZE=abc: set an integer from 2 to 2,"),
        ({"LOCAL_WORLD_SIZE": "1"}, "LOCAL_WORLD_SIZE=1: "),
        ({"LOCAL_WORLD_SIZE": "9" * 5000}, "LOCAL_WORLD_SIZE=9{100}: "),
    ],
)
def test_invalid_environments_are_reported(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        world(monkeypatch, COMPLETE | change)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "the environment sets RANK but not LOCAL_RANK, WORLD_SIZE.*torchrun"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "the environment sets LOCAL_RANK, WORLD_SIZE but not RANK"),
    ],
)
def test_partial_environments_are_reported(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        world(monkeypatch, environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "cause"), [("127.0.0.1", "no program listens on port"), ("no.such.host.invalid", "cannot resolve")]
)
def test_an_address_where_rank_0_does_not_listen(monkeypatch: pytest.MonkeyPatch, address: str, cause: str) -> None:
    with socket.socket() as bound:  # but not listening
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        found = world(monkeypatch, COMPLETE | {"MASTER_ADDR": address, "MASTER_PORT": str(port)})
        message = rf"^rank 1 cannot connect .* at {address}:{port}, .* = 1: {cause} .*; start all ranks, or check MAST"
        with pytest.raises(UserError, match=message):
            connect(found, CommConfig(init_timeout_s=1))


def join(port: int, rank: int, size: int = 3, after_s: float = 0.0) -> str:
    """Join an attempt like a rank in its own process."""
    time.sleep(after_s)
    return agree_on_attempt(client(port), rank, size, timeout_s=60)


def client(port: int) -> dist.Store:
    return dist.PrefixStore("titanlite", dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60)))


@pytest.mark.parametrize("first", [1, *(pytest.param(first, marks=pytest.mark.slow) for first in (0, 2))])
def test_ranks_of_an_attempt_share_a_unique_name(first: int) -> None:
    """All attempts use one store, as with torchrun; it has a request of a killed rank of an earlier attempt."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    client(server.port).set("asks/2", uuid4().hex)
    names = []
    with ThreadPoolExecutor(3) as threads:
        for _ in range(4):
            ranks = [threads.submit(join, server.port, rank, 3, 0.1 * (rank != first)) for rank in range(3)]
            shared = {rank.result() for rank in ranks}
            assert len(shared) == 1
            names += shared
    assert len(set(names)) == 4


@pytest.mark.slow
def test_rank_0_waits_for_the_ranks_of_its_attempt() -> None:
    """Even if all ranks of the previous attempt have joined on the same store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    with ThreadPoolExecutor(2) as threads:
        for rank in [threads.submit(join, server.port, rank, 2) for rank in range(2)]:
            rank.result()
    with pytest.raises(
        UserError, match=r"comm.init_timeout_s = 1: 1 of 2 ranks did not connect in time, for example rank 1"
    ):
        agree_on_attempt(client(server.port), 0, 2, timeout_s=1)
    with pytest.raises(UserError, match=r"comm.init_timeout_s = 1: rank 0 did not answer in time"):
        agree_on_attempt(client(server.port), 1, 2, timeout_s=1)


@pytest.mark.parametrize(
    ("networks", "address", "interface", "cause"),
    [
        ("ab", "127.0.1.1", "", r"reach 127\.0\.1\.1, the address of this host's name\. On"),
        ("ab", "127.0.1.1", "eth0", ""),
        ("ab", "10.9.0.1", "", ""),
        (
            "ab",
            "10.9.0.1",
            "lo",
            r"reach GLOO_SOCKET_IFNAME=lo\. On each such host, export GLOO_SOCKET_IFNAME=eth0 \(for",
        ),
        (
            "ab",
            "10.9.0.1",
            "eth0,eth7",
            r"this host has no interface GLOO_SOCKET_IFNAME=eth7; those that are up: eth0$",
        ),
        ("aa", "127.0.1.1", "", ""),  # two launchers of one host
    ],
)
def test_an_address_that_ranks_of_other_hosts_cannot_reach(
    networks: str, address: str, interface: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    store = dist.HashStore()
    store.set("network/1", networks[1])
    monkeypatch.setattr(network, "network_name", lambda: networks[0])
    monkeypatch.setattr(network, "gloo_address", lambda: address)
    monkeypatch.setattr(network, "is_loopback_interface", lambda name: name == "lo")
    monkeypatch.setattr(network, "interfaces", lambda: ["eth0"])
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    with pytest.raises(UsageError, match=rf"^rank 0 on .* {cause}") if cause else nullcontext():
        network.require_gloo_address(World(0, 0, 2, "cpu", 1), store)
    if "eth7" not in interface:
        network.require_gloo_address(World(0, 0, 2, "cpu", 2), store)  # one launcher


def test_the_world_of_the_first_ranks() -> None:
    second_node = World(rank=4, local_rank=1, size=9, device_type="cpu", local_size=3)
    assert second_node.first(5) == World(4, 1, 5, "cpu", local_size=2)
    assert second_node.first(8).local_ranks == range(3, 6)


def test_an_idle_rank_waits_until_the_run_is_finished() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    with ThreadPoolExecutor(1) as threads:
        idle = threads.submit(wait_until_finished, client(server.port))
        time.sleep(0.2)
        assert not idle.done()
        note_finished(client(server.port))
        idle.result(timeout=10)


def test_an_idle_rank_ends_if_the_store_is_lost() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store = client(server.port)
    with ThreadPoolExecutor(1) as threads:
        idle = threads.submit(wait_until_finished, store)
        time.sleep(0.2)
        del server
        with pytest.raises(UserError, match="a rank that waits idle has lost the store of the launcher"):
            idle.result(timeout=10)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (socket.gaierror(socket.EAI_NONAME, "not known"), "cannot resolve w0: correct the name"),
        (ConnectionRefusedError(), "no program listens on port 7 of w0: it has not started"),
        (TimeoutError(), "w0 does not answer: a wrong address, a host that is down, or a firewall"),
        (OSError(errno.EHOSTUNREACH, "no route"), "w0 does not answer: a wrong address"),
    ],
)
def test_each_cause_is_named(error: OSError, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", connect)
    assert network.unreachable("w0", 7).startswith(cause)


def test_a_port_that_accepts_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert network.unreachable("127.0.0.1", server.getsockname()[1]) == ""


def test_addresses_of_this_host() -> None:
    assert network.own_address("127.0.0.1") == "127.0.0.1"
    assert network.own_address("192.0.2.250") == network.own_address("nowhere.invalid") == ""
    assert [network.is_loopback(text) for text in ("127.0.1.1", "::1", "localhost", "10.0.0.1", "w0")] == [
        *[True, True, True],
        *[False, False],
    ]
    assert network.network_name() == network.network_name() != ""


@pytest.mark.parametrize(("address", "found"), [("127.0.1.1", "127.0.1.1"), ("192.0.2.250", "127.0.0.1")])
def test_the_address_of_gloo_is_that_of_the_name(address: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or of the loopback interface, if the name has none of this host."""
    monkeypatch.setattr(socket, "gethostname", lambda: address)
    assert network.gloo_address() == found


def test_interfaces_that_are_up(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"lo": "unknown", "ib0": "up", "docker0": "down", "eth0": "up"}
    monkeypatch.setattr(Path, "glob", lambda _folder, _pattern: [Path(f"/sys/{name}/operstate") for name in files])
    monkeypatch.setattr(network, "read_system", lambda path: files[Path(path).parent.name])
    assert network.interfaces() == ["eth0", "ib0"]
