"""The connection of the ranks and their process group, and the addresses of hosts: why one cannot be reached."""

import os
import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.ranks.distributed import CommConfig, ConnectError, World, enable_flight_recorder
from titanlite.ranks.message import UNREACHED
from titanlite.runtime.environment import read_system
from titanlite.runtime.errors import UsageError
from titanlite.runtime.logging import log
from titanlite.runtime.waiting import ANSWER_S, NoAnswerError, call_within, parse_value, waiting

LOOPBACK = "772"
"""Linux's type of a loopback interface."""
LOOPBACK_ADDRESS = "127.0.0.1"
LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""
OPEN_TO_ALL = (
    "torchrun listens on all addresses of this host, and a program that connects can run code in it: "
    "python -P -m titanlite.torchrun, with the same options, listens on 127.0.0.1 only"
)
MAX_CONNECTED = 256
"""With more ranks, the gloo groups connect two ranks when they first exchange something. Else each group connects all
pairs at its start, and each rank reads the addresses of all: bytes from the store grow with the cube of the ranks."""
JOIN_POLL_S = 0.02
POLLED = 64
"""Missing ranks up to which rank 0 looks for them each JOIN_POLL_S; with more, less often in proportion."""
REACH_POLL_S = 0.2


def unreachable(host: str, port: int) -> str:
    """Why no connection to this port can be opened; "" if it can."""
    try:
        socket.create_connection((host, port), ANSWER_S).close()
    except socket.gaierror:
        remedy = "write [ADDRESS]:PORT" if ":" in host else "correct the name, or add it to DNS or /etc/hosts"
        return f"cannot resolve {host}: {remedy}"
    except ConnectionRefusedError:
        return f"no program listens on port {port} of {host}: it has not started, or uses another port"
    except OSError:
        return f"{host} does not answer: a wrong address, a host that is down, or a firewall"
    return ""


def own_address(host: str) -> str:
    """The first address of this name that belongs to this host, so that a socket can be bound to it; "" for none."""
    with suppress(socket.gaierror):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                probe.bind(address)
                return str(address[0])
    return ""


def gloo_address() -> str:
    """The address on which gloo accepts connections if GLOO_SOCKET_IFNAME is not set: that of the host's name."""
    return own_address(socket.gethostname()) or "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Whether an address, or "localhost", means the host itself on every host."""
    with suppress(ValueError):
        return ip_address(address).is_loopback
    return address == "localhost"


def loopback_store(
    address: str, port: int, size: int | None = None, timeout: timedelta = timedelta(seconds=300)
) -> dist.TCPStore:
    """A store that this process hosts on a loopback address only: torch's own listens on all addresses.

    port: 0 for a free one. size: number of processes, for which this one then waits. Raises OSError if the port is in
    use, or the loopback interface is down.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    return dist.TCPStore(address, port, size, True, timeout, size is not None, master_listen_fd=listener.detach())


def listens_everywhere(port: int) -> bool:
    """Whether a program of this host listens on the port on all addresses. False where the system cannot say."""
    everywhere = [f"{address}:{port:04X}" for address in ("0" * 8, "0" * 32)]
    lines = [line.split() for name in ("tcp", "tcp6") for line in read_system(f"/proc/net/{name}").splitlines()]
    return any(line[1] in everywhere and line[3] == LISTENS for line in lines)


def is_loopback_interface(name: str) -> bool:
    return read_system(f"/sys/class/net/{name}/type") == LOOPBACK


def network_name() -> str:
    """Equal for the processes that share loopback addresses: those of one host, or of one container."""
    boot, namespace = read_system("/proc/sys/kernel/random/boot_id"), read_system("/proc/self/ns/net")
    return f"{boot}, {namespace}" if boot and namespace else socket.gethostname()


def interfaces() -> list[str]:
    """Names of the interfaces that are up, except the loopback interface."""
    states = {path.parent.name: read_system(str(path)) for path in Path("/sys/class/net").glob("*/operstate")}
    return sorted(name for name, state in states.items() if state == "up")


def connect(world: World, section: CommConfig) -> dist.Store:
    """Wait for all ranks; returns the store for their process groups. Allocates no device memory. Raises UserError."""
    if world.size == 1:
        return dist.HashStore()
    timeout_s = section.init_timeout_s
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address, end = f"{host}:{port}", time.monotonic() + timeout_s
    has_store = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    check = "start all ranks, or check MASTER_ADDR and MASTER_PORT"
    remedy = f"{check}; for a run in one process, unset RANK, LOCAL_RANK, WORLD_SIZE"
    others = f"the other ranks at {address} (RANK={world.rank} of WORLD_SIZE={world.size})"
    found: dist.Store | None = None
    cause = ""
    with waiting(lambda: f"{others}: {cause and f'{cause}; '}{remedy}"):
        while not has_store and (cause := unreachable(host, port)) and time.monotonic() < end:
            time.sleep(REACH_POLL_S)  # torch would print its retries, with their C++ frames
        try:
            if not cause:
                limit = timedelta(seconds=timeout_s)
                found = call_within(timeout_s + ANSWER_S, lambda: _ranks_store(world, host, port, limit, has_store))
        except (dist.DistNetworkError, dist.DistStoreError, NoAnswerError) as error:
            cause = f"{error}".partition("\n")[0]
    if found is None:
        raise ConnectError(
            f"rank {world.rank} cannot connect to the other ranks at {address}, the address of rank 0, within "
            f"comm.init_timeout_s = {timeout_s}: {cause}; {remedy}"
        )
    store = dist.PrefixStore("titanlite", found)
    store = dist.PrefixStore(agree_on_attempt(store, world.rank, world.size, timeout_s), store)
    if is_one_node(world):
        use_loopback()
        if world.rank == 0 and "TORCHELASTIC_RUN_ID" in os.environ and listens_everywhere(port):
            log.warning("%s", OPEN_TO_ALL)
    require_gloo_address(world, store)
    return store


def _ranks_store(world: World, host: str, port: int, timeout: timedelta, is_host: bool) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT. is_host: whether this rank has it."""
    if is_host and is_loopback(host):
        with suppress(OSError):  # in use: torch shares it with an earlier run of this process, or raises the error
            return loopback_store(LOOPBACK_ADDRESS if host == "localhost" else host, port, world.size, timeout)
    store: dist.Store = next(dist.rendezvous("env://", timeout=timeout))[0]
    return store


def is_one_node(world: World) -> bool:
    """Whether all ranks are on this host, by what their launcher says."""
    return os.environ.get("LOCAL_WORLD_SIZE") == str(world.size)


def use_loopback() -> None:
    """Let gloo accept connections on the loopback interface only, unless the user has chosen an interface. For ranks
    that are all on this host."""
    names = [name for _, name in socket.if_nameindex() if is_loopback_interface(name)]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def require_gloo_address(world: World, store: dist.Store) -> None:
    """Raise UsageError if gloo would give ranks of other hosts an address of this one that means their own host.

    Many systems give the host's own name the address 127.0.1.1. gloo's error would blame the network. Also if this host
    has no interface of a name in GLOO_SOCKET_IFNAME.
    """
    store.set(f"network/{world.rank}", network_name())
    place, up = f"rank {world.rank} on {socket.gethostname()}", interfaces()
    chosen = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    known = [name for _, name in socket.if_nameindex()]
    if absent := [name for name in chosen if name not in known]:
        has = ", ".join(up)
        raise UsageError(
            f"{place}: this host has no interface GLOO_SOCKET_IFNAME={absent[0]}; those that are up: {has}"
        )
    if world.size == world.local_size:
        return
    if chosen:
        address, is_own = f"GLOO_SOCKET_IFNAME={chosen[0]}", all(map(is_loopback_interface, chosen))
    else:
        address, is_own = f"{gloo_address()}, the address of this host's name", is_loopback(gloo_address())
    if not is_own:
        return
    names = store.multi_get([f"network/{rank}" for rank in range(world.size)])
    if set(names) != {network_name().encode()}:
        name = up[0] if len(up) == 1 else f"NAME, the one of {', '.join(up) or 'ip address'} that the others reach"
        raise UsageError(
            f"{place}: ranks of other hosts cannot reach {address}. On each such host, export "
            f"GLOO_SOCKET_IFNAME={name} (for GPUs also NCCL_SOCKET_IFNAME), or give the host's name another address in "
            "/etc/hosts"
        )


def init_process_group(world: World, store: dist.Store, section: CommConfig) -> dist.ProcessGroup:
    """Initialize torch's default group with all ranks and the start-up timeout."""
    enable_flight_recorder()
    if world.size > MAX_CONNECTED:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if world.device_type == "cuda":
        torch.cuda.set_device(world.device)
    with waiting(lambda: f"the connections between {world.size} ranks: one that still starts, or {UNREACHED}"):
        dist.init_process_group(
            world.backend,
            store=dist.PrefixStore("default", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=section.init_timeout_s),
        )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _parse_name(value: bytes) -> str:
    """A name that a rank has drawn."""
    return uuid.UUID(value.decode()).hex


def agree_on_attempt(store: dist.Store, rank: int, size: int, timeout_s: int) -> str:
    """Return a name that is unique to this attempt and equal on all its ranks. Waits for all ranks. Raises UserError.

    torchrun's store outlives the ranks: after a restart it still has the keys of earlier attempts. No environment
    variable identifies the attempt on all nodes: MASTER_PORT does not change, and TORCHELASTIC_RESTART_COUNT increases
    on the node of a failed rank, but not on a node whose ranks are only restarted with it (rdzv-backend c10d). So rank
    0 draws the name, and each other rank requests it under a random key of its own, which no earlier attempt can have
    answered. Answers to requests of earlier attempts are never read.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"asks/{rank}", own)
        try:
            with waiting(lambda: "the answer of rank 0, which may still start: see its log"):
                store.wait([f"answer/{own}"], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            raise ConnectError(
                f"comm.init_timeout_s = {timeout_s}: rank 0 did not answer in time. Check its log, or increase "
                "comm.init_timeout_s if it starts slowly"
            ) from None
        attempt = parse_value(store.get(f"answer/{own}"), _parse_name)
        if attempt is None:
            raise ConnectError("rank 0 did not answer: another program has written into the store of the ranks")
        store.set(f"{attempt}/joined/{rank}", "")
        return attempt
    missing = list(range(1, size))
    deadline = time.monotonic() + timeout_s
    with waiting(lambda: f"{len(missing)} of {size} ranks to connect, such as {missing[:1]}: see their logs"):
        while missing:
            for other in missing:
                if store.check([f"asks/{other}"]) and (name := parse_value(store.get(f"asks/{other}"), _parse_name)):
                    store.set(f"answer/{name}", own)
            missing = [other for other in missing if not store.check([f"{own}/joined/{other}"])]
            if missing and time.monotonic() > deadline:
                raise ConnectError(
                    f"comm.init_timeout_s = {timeout_s}: {len(missing)} of {size} ranks did not connect in time, for "
                    f"example rank {missing[0]}. Check the logs of these ranks, or increase comm.init_timeout_s if "
                    "they start slowly"
                )
            # Each poll asks the store about all missing ranks.
            time.sleep(JOIN_POLL_S * max(1, len(missing) / POLLED) if missing else 0)
    return own
