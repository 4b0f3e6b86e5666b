"""Hardware profiles: the rates of a machine, from data sheets or from `titanlite calibrate`, as TOML files.

All rates are those of one rank while the other ranks of its node compute, too. FLOPs count as in MFU: 2 m k n for a
matrix product, and the full T x T products of causal attention. Files have TFLOP/s, GB/s and us, classes FLOP/s, bytes
per second and seconds.
"""

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import tomli
import tomli_w
import torch
from pydantic import ConfigDict, Field, GetCoreSchemaHandler, Strict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, core_schema

from titanlite.runtime.errors import UsageError

PROFILES = Path(__file__).parent / "profiles"
Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]
Scope = Literal["node", "cluster"]
Pass = Literal["forward", "backward"]
TERA, GIGA, MICRO = 1e12, 1e9, 1e-6
DIGITS = 4
"""Of the numbers that dump_profile writes."""


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
class In:
    """Marks a positive number, which files have in multiples of `unit`."""

    unit: float = 1

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(
            lambda value: value * self.unit,
            core_schema.float_schema(gt=0, allow_inf_nan=False, strict=True),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: _rounded(value / self.unit)),
        )


@dataclass(frozen=True)
class Table:
    """Marks a Grid, which files have as a table: a key for each axis, and `rate` with values in multiples of `unit`."""

    axes: tuple[str, ...]
    rate: str
    unit: float

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        numbers = {**dict.fromkeys(self.axes, In()), self.rate: In(self.unit)}
        columns = {key: handler.generate_schema(tuple[Annotated[float, each], ...]) for key, each in numbers.items()}
        fields = {key: core_schema.typed_dict_field(column) for key, column in columns.items()}
        return core_schema.no_info_after_validator_function(
            lambda table: Grid({axis: table[axis] for axis in self.axes}, table[self.rate]),
            core_schema.typed_dict_schema(fields, extra_behavior="forbid"),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda grid: {
                    **{axis: [*map(int, sizes)] for axis, sizes in grid.sizes.items()},
                    self.rate: [_rounded(value / self.unit) for value in grid.values],
                }
            ),
        )


def _rounded(value: float) -> float:
    number = float(f"{value:.{DIGITS}g}")
    return int(number) if number.is_integer() else number


@dataclass(frozen=True)
class Link:
    """The network between ranks: seconds per message, and bytes per second that a rank sends."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    latency_s: Annotated[float, In(MICRO), Field(alias="latency_us")]
    bytes_per_s: Annotated[float, In(GIGA), Field(alias="gb_per_s")]


def one_of(choices: Any) -> Any:
    """Marks a key of a table that is one of a Literal's choices."""
    return Field(pattern=f"^({'|'.join(get_args(choices))})$")


Count = Annotated[int, Strict(), Field(gt=0)]
Attention = Annotated[Grid, Table(("seq_len", "head_dim"), "tflops", TERA)]
Passes = Annotated[Mapping[Annotated[str, one_of(Pass)], Attention], Field(min_length=len(get_args(Pass)))]
Links = Annotated[Mapping[Annotated[str, one_of(Collective)], Link], Field(min_length=len(get_args(Collective)))]


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

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str
    device: Literal["cuda", "cpu"]
    ranks_per_node: Count
    computing: Count
    memory_gib: Annotated[float, In()]
    peak_flops: Annotated[Mapping[str, Annotated[float, In(TERA)]], Field(alias="peak_tflops")]
    matmul: Mapping[str, Annotated[Grid, Table(("m", "k", "n"), "tflops", TERA)]]
    attention: Mapping[str, Passes]
    memory: Annotated[Grid, Table(("bytes",), "gb_per_s", GIGA)]
    operation_s: Annotated[float, In(MICRO), Field(alias="operation_us")]
    unit_s: Annotated[float, In(MICRO), Field(alias="unit_us")]
    network: Mapping[Annotated[str, one_of(Scope)], Links] = field(default_factory=dict)
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
        return FILE.validate_python(table)
    except ValidationError as error:
        problems = "; ".join(map(_problem, error.errors()))
        raise UsageError(f"hardware profile {path}: {problems}") from None


FILE = TypeAdapter(Profile)


def _problem(error: ErrorDetails) -> str:
    rules = {"missing": "is missing", "unexpected_keyword_argument": "unknown key", "extra_forbidden": "unknown key"}
    rule, value = rules.get(error["type"]), error["input"]
    given = f", not {value!r}" if rule is None and isinstance(value, int | float | str) else ""
    return f"{'.'.join(map(str, error['loc'])).removesuffix('.[key]')}: {rule or error['msg']}{given}"


def dump_profile(profile: Profile) -> str:
    """TOML that reads back as `profile`, up to DIGITS digits."""
    text = tomli_w.dumps(FILE.dump_python(profile, by_alias=True))

    def array(match: re.Match[str]) -> str:
        numbers = " ".join(match[0].split()).replace("[ ", "[").replace(", ]", "]")
        return textwrap.fill(numbers, 100, subsequent_indent="    ")

    return re.sub(r"\[\n[^]]*\n\]", array, text)
