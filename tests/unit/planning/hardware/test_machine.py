"""Hardware profiles: interpolation, formulas of collectives, files, and the numbers of the shipped ones."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import tomli

from titanlite.planning.hardware.machine import PROFILES, Grid, Link, Profile, dump_profile, load_profile, profile_names
from titanlite.runtime.errors import UsageError
from titanlite.runtime.peak_flops import peak_flops

TILE = 128
PROCESSORS = {"h100": 132, "h100_500w": 132, "h200": 132, "a100": 108, "b200": 148, "mi300x": 304}
DEVICES = {
    "h100": "NVIDIA H100 80GB HBM3",
    "h100_500w": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "a100": "NVIDIA A100-SXM4-80GB",
    "b200": "NVIDIA B200",
    "mi300x": "AMD Instinct MI300X",
}
REACHED = {"h100": 717e12, "h100_500w": 641e12, "h200": 755e12, "a100": 267.9e12, "b200": 1429e12, "mi300x": 781.9e12}
"""FLOP/s of large bfloat16 products, as the sources of the profiles say."""


def test_a_grid_interpolates_between_its_points() -> None:
    grid = Grid({"m": (10.0, 100.0), "n": (1.0, 4.0)}, (1.0, 2.0, 4.0, 16.0))
    assert grid.at(m=10, n=1) == pytest.approx(1.0)
    assert grid.at(m=100, n=4) == pytest.approx(16.0)
    assert grid.at(m=math.sqrt(1000), n=1) == pytest.approx(2.0)  # half of the way, in logarithms
    assert grid.at(m=100, n=2) == pytest.approx(8.0)
    assert grid.at(m=1, n=100) == pytest.approx(2.0)  # the nearest point at the edge
    assert Grid({"bytes": (5.0,)}, (3.0,)).at(bytes=1e9) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("sizes", "values"), [({"m": (2.0, 1.0)}, (1.0, 1.0)), ({"m": (1.0, 2.0)}, (1.0,)), ({"m": (1.0,)}, (0.0,))]
)
def test_a_grid_that_is_no_function_is_refused(sizes: dict[str, tuple[float, ...]], values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Grid(sizes, values)


def with_links(node: Link, cluster: Link) -> Profile:
    names = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send")
    return replace(
        load_profile("h100"), network={"node": dict.fromkeys(names, node), "cluster": dict.fromkeys(names, cluster)}
    )


def test_collectives_take_the_time_of_ring_algorithms() -> None:
    profile = with_links(Link(1e-6, 100.0e9), Link(5e-6, 10.0e9))
    size = 8e9
    # Thakur, Rabenseifner and Gropp (2005): n - 1 steps of 1/n of the data, an all-reduce twice as many
    inside = 7 * (1e-6 + size / 8 / 100e9)
    assert profile.collective_s("all-gather", size, 8, 8) == pytest.approx(inside)
    assert profile.collective_s("all-reduce", size, 8, 8) == pytest.approx(2 * inside)
    # over two nodes, 8 ranks send to the other node together: 80 GB/s, one step with the latency between nodes
    over_nodes = 14 * 1e-6 + 5e-6 + 15 * size / 16 / 80e9
    assert profile.collective_s("reduce-scatter", size, 16, 8) == pytest.approx(over_nodes)
    # one rank per node
    assert profile.collective_s("all-gather", size, 4, 1) == pytest.approx(3 * (5e-6 + size / 4 / 10e9))
    # half of the messages of an all-to-all stay inside; those to the other node take longer
    exchange = 3 * 1e-6 + 4 * 5e-6 + 4 * size / 8 / 10e9
    assert profile.collective_s("all-to-all", size, 8, 4) == pytest.approx(exchange)
    assert profile.collective_s("send", size, 4, 1) == pytest.approx(5e-6 + size / 10e9)
    assert profile.collective_s("all-reduce", size, 1, 1) == 0.0


def test_a_missing_network_is_named() -> None:
    alone = replace(load_profile("h100"), network={})
    with pytest.raises(UsageError, match="no network inside a node: calibrate on several processes"):
        alone.collective_s("all-gather", 1.0, 2, 2)


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_have_a_source_for_each_number(name: str) -> None:
    profile = load_profile(name)
    assert tomli.loads(dump_profile(profile)) == tomli.loads((PROFILES / f"{name}.toml").read_text("utf-8"))
    assert {*profile.sources} == {
        *("memory_gib", "peak_flops", "matmul", "attention", "memory", "operation_s", "unit_s", "network")
    }
    assert profile.peak_flops["bfloat16"] == pytest.approx(_peak(name), rel=1e-3)
    assert {*profile.network} == {"node", "cluster"}


def _peak(name: str) -> float:
    import torch

    found = peak_flops(DEVICES[name], torch.bfloat16)
    assert found is not None
    return found


@pytest.mark.parametrize("name", profile_names())
def test_rates_of_shipped_profiles_follow_from_tiles_and_memory(name: str) -> None:
    """As their sources say: tiles of 128 x 128, complete waves of them over the processors, and the speed of memory."""
    profile, count = load_profile(name), PROCESSORS[name]
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        reached = REACHED[name] * profile.peak_flops[dtype] / profile.peak_flops["bfloat16"]
        for m in (256, 1024, 16_384):
            for k in (256, 4096):
                for n in (256, 1024, 4096):
                    tiles = math.ceil(m / TILE) * math.ceil(n / TILE)
                    share = tiles / (math.ceil(tiles / count) * count)
                    flops = 2 * m * k * n
                    moved = size * (m * k + k * n + m * n)
                    seconds = max(flops / reached / share, moved / profile.memory.at(bytes=moved))
                    assert profile.matmul[dtype].at(m=m, k=k, n=n) == pytest.approx(flops / seconds, rel=0.01)


def test_problems_of_a_file_name_the_key(tmp_path: Path) -> None:
    text = (PROFILES / "a100.toml").read_text("utf-8")
    cases = {
        "memory_gib: Input should be greater than 0, not -1": text.replace("memory_gib = 80", "memory_gib = -1"),
        "computing: Input should be a valid integer, not True": text.replace("computing = 8", "computing = true"),
        "memory_gib: is missing; memory_gb: unknown key": text.replace("memory_gib = 80", "memory_gb = 80"),
        "peak_tflops.float32: Input should be a valid number, not 'x'": text.replace("float32 = 19.5", 'float32 = "x"'),
        "network.node.sent: String should match pattern": text.replace("send = {", "sent = {", 1),
        "network.node: Dictionary should have at least 5 items": text.replace("send = {", "# {", 1),
        "network.node.send.gb_per_s: is missing": text.replace("gb_per_s = 240 }\n\n", "gb = 240 }\n\n", 1),
        "matmul.bfloat16: Value error, 48 positive values": text.replace("k = [256, 1024,", "k = [256,", 1),
        "attention.float32.forward.m: unknown key": text.replace("seq_len = [8192]", "m = [8192]"),
        "attention.bfloat16: Dictionary should have at least 2": text.replace("bfloat16.backward", "b.backward"),
        "attention.bfloat16.back: String should match pattern": text.replace("bfloat16.backward", "bfloat16.back"),
        "device: Input should be 'cuda' or 'cpu', not 'tpu'": text.replace('"cuda"', '"tpu"'),
    }
    for message, content in cases.items():
        file = tmp_path / "profile.toml"
        file.write_text(content)
        with pytest.raises(UsageError, match=r"profile\.toml: ") as raised:
            load_profile(str(file))
        assert message in str(raised.value)
    with pytest.raises(UsageError, match="'h900' does not exist: give a TOML file, or one of a100, b200, h100"):
        load_profile("h900")
