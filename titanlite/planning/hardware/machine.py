"""Hardware profiles: the rates of a machine, from data sheets or from `titanlite calibrate`, as TOML files.

All rates are those of one rank while the other ranks of its node compute, too. FLOPs count as in MFU: 2 m k n for a
matrix product, and the full T x T products of causal attention. Files have TFLOP/s, GB/s and us, classes FLOP/s, bytes
per second and seconds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import tomli
import tomli_w
import torch

from titanlite.runtime.errors import UsageError

PROFILES = Path(__file__).parent / "profiles"
Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]
Scope = Literal["node", "cluster"]


@dataclass(frozen=True)
class Grid:
    """A positive function of positive sizes, known at the points of a grid.

    sizes: increasing, by name of the axis. values: of all points, the last axis fastest. Between the points the
    logarithm of the value is interpolated linearly in the logarithms of the sizes; outside of the grid it is that of
    the nearest point at its edge. One point is a constant.
    """

    sizes: Mapping[str, tuple[float, ...]]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, axis in self.sizes.items():
            if not axis or min(axis) <= 0 or any(second <= first for first, second in pairwise(axis)):
                raise ValueError(f"{name}: positive and increasing numbers expected")
        points = math.prod(len(axis) for axis in self.sizes.values())
        if len(self.values) != points or min(self.values) <= 0:
            raise ValueError(f"{points} positive values expected, the last axis fastest: {', '.join(self.sizes)}")

    def at(self, **sizes: float) -> float:
        """The value for these sizes, one for each axis."""
        corners, stride = [(0, 1.0)], len(self.values)
        for name, axis in self.sizes.items():
            stride //= len(axis)
            corners = [
                (index + stride * step, weight * share)
                for index, weight in corners
                for step, share in _between(axis, sizes[name])
            ]
        return math.exp(sum(weight * math.log(self.values[index]) for index, weight in corners))


def _between(axis: Sequence[float], size: float) -> list[tuple[int, float]]:
    """(index, weight) of the points of the axis around `size`."""
    above = next((index for index, point in enumerate(axis) if point >= size), len(axis) - 1)
    if above == 0 or axis[above] <= size:
        return [(above, 1.0)]
    share = math.log(size / axis[above - 1]) / math.log(axis[above] / axis[above - 1])
    return [(above - 1, 1.0 - share), (above, share)]


@dataclass(frozen=True)
class Link:
    """The network between ranks: seconds per message, and bytes per second that a rank sends."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, eq=False)  # compared by identity: predictions are cached by profile
class Profile:
    """A machine. Each number of a shipped profile has its source in `sources`.

    ranks_per_node: usual number of processes. computing: how many ranks of a node compute at these rates at the same
    time; further ones share them, as with more processes than CPU cores. peak_flops: dense peak of a rank by dtype, as
    for MFU. matmul: FLOP/s by dtype, of (m, k) @ (k, n). attention: FLOP/s by dtype and pass, by seq_len and head_dim.
    memory: bytes read and written per second by elementwise operations, by bytes of one operation. operation_s: time of
    the host per operation. unit_s: time of the host per pass of an FSDP unit. network: by scope and collective; a
    machine of one node has no scope "cluster".
    """

    name: str
    device: Literal["cuda", "cpu"]
    ranks_per_node: int
    computing: int
    memory_gib: float
    peak_flops: Mapping[str, float]
    matmul: Mapping[str, Grid]
    attention: Mapping[str, Mapping[str, Grid]]
    memory: Grid
    operation_s: float
    unit_s: float
    network: Mapping[str, Mapping[str, Link]]
    sources: Mapping[str, str] = field(default_factory=dict)

    def collective_s(self, operation: Collective, full_bytes: float, ranks: int, ranks_inside: int) -> float:
        """Seconds of a collective over `ranks` ranks, of which `ranks_inside` are on each node.

        full_bytes: of the full tensor, as in Traffic. Ring algorithms: n - 1 messages of 1/n of the tensor one after
        the other, twice as many for an all-reduce (Thakur, Rabenseifner, Gropp, "Optimization of Collective
        Communication Operations in MPICH", 2005). A ring over nodes is as fast as its slowest part: the link of a
        rank, or those of all ranks of a node, which share the traffic between nodes; of its messages, one per node
        has the latency between nodes. An all-to-all sends each message over the link that it needs.
        """
        if ranks == 1:
            return 0.0
        inside = self._links("node")[operation] if ranks_inside > 1 else Link(0.0, math.inf)
        outside = self._links("cluster")[operation] if ranks > ranks_inside else Link(0.0, math.inf)
        if operation == "send":
            slower = outside if ranks > ranks_inside else inside
            return slower.latency_s + full_bytes / slower.bytes_per_s
        part, passes = full_bytes / ranks, 2 if operation == "all-reduce" else 1
        if operation == "all-to-all":
            near, far = ranks_inside - 1, ranks - ranks_inside
            sent = part * max(near / inside.bytes_per_s, far / outside.bytes_per_s)
        else:
            far = -(-ranks // ranks_inside) - 1
            near = ranks - 1 - far
            sent = part * (ranks - 1) / min(inside.bytes_per_s, outside.bytes_per_s * ranks_inside)
        return passes * (near * inside.latency_s + far * outside.latency_s + sent)

    def products(self, dtype: torch.dtype) -> Grid:
        """FLOP/s of matrix products. Raises UsageError."""
        return _rates(self, "matrix products", self.matmul, dtype)

    def scores(self, dtype: torch.dtype) -> Mapping[str, Grid]:
        """FLOP/s of attention, by pass. Raises UsageError."""
        return _rates(self, "attention", self.attention, dtype)

    def _links(self, scope: Scope) -> Mapping[str, Link]:
        if scope not in self.network:
            many = "several processes" if scope == "node" else "several nodes"
            where = "inside a node" if scope == "node" else "between nodes"
            raise UsageError(f"the hardware profile {self.name!r} has no network {where}: calibrate on {many}")
        return self.network[scope]


Rates = TypeVar("Rates")


def _rates(profile: Profile, what: str, by_dtype: Mapping[str, Rates], dtype: torch.dtype) -> Rates:
    name = str(dtype).removeprefix("torch.")
    if name not in by_dtype:
        raise UsageError(
            f"the hardware profile {profile.name!r} has no rates of {what} in {name}, only in {', '.join(by_dtype)}: "
            "plan with one of these dtypes, or without --hardware"
        )
    return by_dtype[name]


def profile_names() -> list[str]:
    """Names of the shipped profiles."""
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def load_profile(name: str) -> Profile:
    """Read a shipped profile by its name, or a TOML file. Raises UsageError, which names the file and key."""
    path = Path(name) if name.endswith(".toml") else PROFILES / f"{name}.toml"
    try:
        table = tomli.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        shipped = ", ".join(profile_names())
        raise UsageError(f"hardware profile {name!r} does not exist: give a TOML file, or one of {shipped}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"hardware profile {path}: {error}") from None
    try:
        return _profile(table)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        told = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"hardware profile {path}: {told}") from None


def _profile(table: dict[str, Any]) -> Profile:
    """The profile of a parsed file. Raises KeyError, TypeError or ValueError."""
    known = {IN_FILES.get(each.name, each.name) for each in fields(Profile)}
    if unknown := sorted(table.keys() - known):
        raise ValueError(f"unknown keys: {', '.join(unknown)}; a profile has {', '.join(sorted(known))}")
    if table["device"] not in ("cuda", "cpu"):
        raise ValueError('device: "cuda" or "cpu" expected')
    positive = ("ranks_per_node", "computing", "memory_gib", "operation_us", "unit_us")
    numbers = {f"{name}": table[name] for name in positive}
    numbers |= {f"peak_tflops.{dtype}": value for dtype, value in table["peak_tflops"].items()}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{name}: a positive number expected, not {value!r}")
    scopes = table.get("network", {})
    if unknown := sorted(scopes.keys() - {*get_args(Scope)}):
        raise ValueError(f"network: unknown keys: {', '.join(unknown)}; {' and '.join(get_args(Scope))} expected")
    network = {scope: _links(f"network.{scope}", links) for scope, links in scopes.items()}
    return Profile(
        name=str(table["name"]),
        device=table["device"],
        ranks_per_node=int(table["ranks_per_node"]),
        computing=int(table["computing"]),
        memory_gib=table["memory_gib"],
        peak_flops={dtype: value * TERA for dtype, value in table["peak_tflops"].items()},
        matmul={dtype: _grid(f"matmul.{dtype}", MATMUL, of) for dtype, of in table["matmul"].items()},
        attention={
            dtype: {name: _grid(f"attention.{dtype}.{name}", ATTENTION, of[name]) for name in PASSES}
            for dtype, of in table["attention"].items()
        },
        memory=_grid("memory", MEMORY, table["memory"]),
        operation_s=table["operation_us"] * MICRO,
        unit_s=table["unit_us"] * MICRO,
        network=network,
        sources=table.get("sources", {}),
    )


MATMUL, ATTENTION, MEMORY = ("m", "k", "n"), ("seq_len", "head_dim"), ("bytes",)
PASSES = ("forward", "backward")
TERA, GIGA, MICRO = 1e12, 1e9, 1e-6
RATES = {MATMUL: ("tflops", TERA), ATTENTION: ("tflops", TERA), MEMORY: ("gb_per_s", GIGA)}
"""Key of the values of a grid in files, and its unit."""
IN_FILES = {"peak_flops": "peak_tflops", "operation_s": "operation_us", "unit_s": "unit_us"}
"""Keys in files of fields of Profile that have another unit there."""


def _grid(key: str, axes: tuple[str, ...], table: dict[str, Any]) -> Grid:
    name, unit = RATES[axes]
    try:
        return Grid({axis: tuple(table[axis]) for axis in axes}, tuple(value * unit for value in table[name]))
    except (KeyError, TypeError, ValueError) as error:
        told = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{key}: {told}") from None


def _links(key: str, table: dict[str, Any]) -> dict[str, Link]:
    found = {}
    for operation in get_args(Collective):
        try:
            link = table[operation]
            found[operation] = Link(link["latency_us"] * MICRO, link["gb_per_s"] * GIGA)
            if unknown := sorted(link.keys() - {"latency_us", "gb_per_s"}):
                raise ValueError(f"unknown keys: {', '.join(unknown)}")
            if min(link["latency_us"], link["gb_per_s"]) <= 0:
                raise ValueError("positive numbers expected")
        except (KeyError, TypeError, ValueError) as error:
            told = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{key}.{operation}: {told}") from None
    return found


def dump_profile(profile: Profile) -> str:
    """TOML that reads back as `profile`, up to DIGITS digits."""
    facts = {name: getattr(profile, name) for name in ("name", "device", "ranks_per_node", "computing")}
    lines = tomli_w.dumps(facts).splitlines()
    lines += [f"memory_gib = {_rounded(profile.memory_gib)}"]
    lines += [
        f"operation_us = {_rounded(profile.operation_s / MICRO)}",
        f"unit_us = {_rounded(profile.unit_s / MICRO)}",
    ]
    lines += ["", "[peak_tflops]"]
    lines += [f"{dtype} = {_rounded(value / TERA)}" for dtype, value in profile.peak_flops.items()]
    grids: dict[str, tuple[tuple[str, ...], Grid]] = {}
    grids |= {f"matmul.{dtype}": (MATMUL, grid) for dtype, grid in profile.matmul.items()}
    grids |= {
        f"attention.{dtype}.{name}": (ATTENTION, grid)
        for dtype, of in profile.attention.items()
        for name, grid in of.items()
    }
    for key, (axes, grid) in {**grids, "memory": (MEMORY, profile.memory)}.items():
        rate, unit = RATES[axes]
        lines += ["", f"[{key}]", *(f"{axis} = {[*map(int, sizes)]}" for axis, sizes in grid.sizes.items())]
        row = len(grid.sizes[axes[-1]])  # a line for each value of the other axes
        rows = [
            _array([value / unit for value in grid.values[at : at + row]]) for at in range(0, len(grid.values), row)
        ]
        lines += [f"{rate} = {rows[0]}"] if len(rows) == 1 else [f"{rate} = ["]
        lines += [f"    {text[1:-1]}," for text in rows] + ["]"] if len(rows) > 1 else []
    for scope, links in profile.network.items():
        lines += ["", f"[network.{scope}]"]
        for operation, link in links.items():
            latency, rate = _rounded(link.latency_s / MICRO), _rounded(link.bytes_per_s / GIGA)
            lines += [f"{operation} = {{ latency_us = {latency}, gb_per_s = {rate} }}"]
    lines += ["", *tomli_w.dumps({"sources": profile.sources}).splitlines()]
    return "\n".join(lines) + "\n"


DIGITS = 4


def _rounded(value: float) -> str:
    number = float(f"{value:.{DIGITS}g}")
    return str(int(number)) if number.is_integer() else str(number)


def _array(values: Sequence[float]) -> str:
    return f"[{', '.join(map(_rounded, values))}]"
