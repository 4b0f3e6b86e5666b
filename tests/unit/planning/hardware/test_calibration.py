"""The measurement of a machine: complete, and read back from its file. Sizes are small here."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.pool import run_ranks
from titanlite.planning.hardware import calibration
from titanlite.planning.hardware.calibration import Clock, line, links
from titanlite.planning.hardware.machine import dump_profile, load_profile
from titanlite.ranks.distributed import World


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "SIZES", {"cpu": (16, 64)})
    monkeypatch.setattr(calibration, "SEQ_LENS", {"cpu": (16, 32)})
    monkeypatch.setattr(calibration, "HEAD_DIMS", (8,))
    monkeypatch.setattr(calibration, "ELEMENTWISE_BYTES", {"cpu": (2**10, 2**16)})
    monkeypatch.setattr(calibration, "LEAST_S", 0.001)


@pytest.mark.usefixtures("small")
def test_one_process_measures_all_but_the_network(tmp_path: Path) -> None:
    profile = calibration.calibrate(World(0, 0, 1, "cpu"), dist.HashStore(), ["bfloat16"])
    assert profile is not None
    assert {*profile.matmul} == {"bfloat16", "float32"}  # routers compute in float32
    assert (profile.device, profile.ranks_per_node, profile.computing, dict(profile.network)) == ("cpu", 1, 1, {})
    assert profile.matmul["float32"].at(m=64, k=64, n=64) > 1e6
    assert 1e-7 < profile.operation_s < 1e-2
    file = tmp_path / "profile.toml"
    file.write_text(dump_profile(profile))
    found = load_profile(str(file))
    assert dump_profile(found) == dump_profile(profile)
    assert found.memory.values == pytest.approx(profile.memory.values, rel=1e-3)


def test_a_line_has_the_latency_and_the_rate_of_its_points() -> None:
    found = line([(n, n * size, n * (1e-5 + size / 1e9)) for n in (1.0, 3.0) for size in (1e3, 1e6)])
    assert (found.latency_s, found.bytes_per_s) == pytest.approx((1e-5, 1e9))


def test_a_disturbed_time_of_a_small_message_leaves_a_rate() -> None:
    found = line([(1.0, 1e3, 2e-3), (1.0, 1e6, 1e-3)])
    assert found.bytes_per_s == pytest.approx(2e9)


def links_of_a_pair() -> dict[str, tuple[float, float]]:
    calibration.MESSAGE_BYTES["cpu"] = (2**10, 2**20)
    found = links([Clock(World(dist.get_rank(), 0, 2, "cpu").device, dist.group.WORLD)])
    return {name: (link.latency_s, link.bytes_per_s) for name, link in found.items()}


@pytest.mark.slow
def test_links_have_a_latency_and_a_rate() -> None:
    first, second = run_ranks(links_of_a_pair, 2)
    for name, numbers in first.items():  # all ranks have the times of the slowest one
        assert numbers == pytest.approx(second[name])
    assert {*first} == {"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"}
    for latency_s, bytes_per_s in first.values():
        assert 1e-9 <= latency_s < 0.1
        assert 1e6 < bytes_per_s < 1e12
