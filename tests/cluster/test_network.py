"""What the nodes' network may do to a run without ending it: IPv6, and a link that is lost for a while."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.namespaces import Hosts, Launcher, missing
from tests.cluster.slurm import wait_for
from tests.distributed.program import rows

pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(missing()), reason=f"network namespaces {missing()}")]

HOSTS6 = "127.0.0.1 localhost\n::1 localhost\nfd00::1 w0\nfd00::2 w1\n"
BOTH = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "a", "--max-restarts", "3", "--rdzv-endpoint")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    created = Hosts(tmp_path)
    yield created
    created.close()


def trains(launchers: list[Launcher], folder: Path, steps: int) -> None:
    """Wait for further steps; fail if a rank was started again or a launcher has ended."""

    def step() -> int:
        return max((row["step"] for row in rows(folder)), default=0) if (folder / "metrics.jsonl").exists() else 0

    first = step()
    wait_for(lambda: step() >= first + steps, 120, lambda: "\n".join(each.log for each in launchers))
    assert sum(each.log.count("Run: ") for each in launchers) == 1
    assert [each.process.poll() for each in launchers] == [None, None]


@pytest.mark.parametrize("endpoint", ["[fd00::1]:29500", "w0:29500"])
def test_nodes_meet_over_ipv6(endpoint: str, hosts: Hosts, tmp_path: Path) -> None:
    hosts.add_ipv6()
    trains([hosts.launch(host, *BOTH, endpoint, hosts=HOSTS6) for host in range(2)], tmp_path / "out", 20)


def test_a_link_that_is_lost_for_5_s_disturbs_nothing(hosts: Hosts, tmp_path: Path) -> None:
    launchers = [hosts.launch(host, *BOTH, "w0:29500") for host in range(2)]
    trains(launchers, tmp_path / "out", 20)
    hosts.set_link("down")
    time.sleep(5)
    hosts.set_link("up")
    trains(launchers, tmp_path / "out", 20)
