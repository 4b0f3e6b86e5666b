"""Addresses of this host and of others."""

import errno
import socket
from pathlib import Path

import pytest

from titanlite.ranks import network


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
