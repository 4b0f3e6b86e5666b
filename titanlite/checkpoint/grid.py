"""GRID.json: the metadata of a checkpoint of very many shards. It names each tensor once, with the grid of its blocks,
instead of each shard of each tensor.

All ranks of a mesh cut tensors of a shape in the same way, write the same tensors, and put them at the same places of
their files. So the grids, the writers of blocks and the places in files are tables, and tensors and files refer to them
by number.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise, product
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from typing_extensions import TypedDict

from titanlite.checkpoint.manifest import GRID_FILE, InvalidCheckpointError
from titanlite.runtime.json_files import JsonError, parse_json
from titanlite.storage.address import is_safe_name

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
"""Those of the tensors of a run."""
MAX_DIMS = 64
LEAST_BLOCK = 1024
"""Bytes of a file that the smallest block takes: torch stores it as an archive of at least 1,500 bytes."""
_Size = Annotated[int, Field(ge=0, lt=2**63)]


class GridTensor(TypedDict):
    """A tensor. cuts, writers: numbers of the tables of Tables that describe its blocks."""

    name: str
    dtype: str
    shape: Annotated[list[_Size], Field(max_length=MAX_DIMS)]
    cuts: _Size
    writers: _Size


class GridFile(TypedDict):
    """A file of shards. places: number of the table in Tables."""

    name: str
    places: _Size


class Tables(TypedDict):
    """The content of GRID.json.

    cuts: per dimension, where blocks begin. writers: the number of the file that has each block, in the order of the
    blocks (the last dimension varies fastest). places: (number of the tensor, first byte, bytes) of a file's shards.
    """

    tensors: list[GridTensor]
    cuts: list[list[Annotated[list[_Size], Field(min_length=1)]]]
    writers: list[list[_Size]]
    files: list[GridFile]
    places: list[list[tuple[_Size, _Size, _Size]]]


class Block(NamedTuple):
    """A block of a tensor. name, start, length: of the file that has it, and of its bytes there."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    name: str
    start: int
    length: int


class Grid:
    """A read GRID.json, of anybody."""

    def __init__(self, content: bytes) -> None:
        """Raises InvalidCheckpointError."""
        try:
            self._tables: Tables = parse_json(content, Tables)
        except JsonError as error:
            raise InvalidCheckpointError(f"{GRID_FILE} cannot be read: it {error}") from None
        self.tensors = {tensor["name"]: tensor for tensor in self._tables["tensors"]}
        self._check()

    def require_bytes(self, most: int) -> None:
        """Raise InvalidCheckpointError if the tensors have more bytes than the files, or more blocks than these can
        have: a table of a few bytes could make a reader look at any number."""
        blocks = sum(len(self._tables["writers"][tensor["writers"]]) for tensor in self.tensors.values())
        _require(blocks * LEAST_BLOCK <= most, f"has {blocks:,} blocks, too many for files of {most:,} bytes")
        stated = sum(math.prod(tensor["shape"]) * self.dtype(name).itemsize for name, tensor in self.tensors.items())
        shown = f"{stated:,}" if stated < 2**63 else "more than 2^63"  # it may have a thousand digits
        _require(stated <= most, f"has tensors of {shown} bytes, but its files have {most:,}")

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self.tensors[name]["dtype"]]

    def blocks(self, name: str, offset: Sequence[int], sizes: Sequence[int]) -> Iterator[Block]:
        """The blocks that have elements of a part of the tensor; sizes: of the part. Raises InvalidCheckpointError."""
        tensor = self.tensors[name]
        cuts, writers = self._tables["cuts"][tensor["cuts"]], self._tables["writers"][tensor["writers"]]
        if 0 in sizes:
            return
        touched = [
            range(bisect_right(starts, begin) - 1, bisect_right(starts, begin + size - 1))
            for starts, begin, size in zip(cuts, offset, sizes, strict=True)
        ]
        for place in product(*touched):
            number = 0
            for index, starts in zip(place, cuts, strict=True):
                number = number * len(starts) + index
            begin = tuple(starts[index] for index, starts in zip(place, cuts, strict=True))
            ends = (
                starts[index + 1] if index + 1 < len(starts) else size
                for index, starts, size in zip(place, cuts, tensor["shape"], strict=True)
            )
            file = self._tables["files"][writers[number]]
            found = self._places[file["places"]].get(self._numbers[name])
            if found is None:
                raise InvalidCheckpointError(f"{GRID_FILE} has no place of {name!r} in {file['name']!r}")
            yield Block(begin, tuple(end - first for end, first in zip(ends, begin, strict=True)), file["name"], *found)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.tensors)}

    @cached_property
    def _places(self) -> list[dict[int, tuple[int, int]]]:
        return [{number: (start, length) for number, start, length in table} for table in self._tables["places"]]

    def _check(self) -> None:
        """Raise InvalidCheckpointError unless all numbers fit together."""
        tables = self._tables
        _require(len(self.tensors) == len(tables["tensors"]), "names a tensor twice")
        for name in (file["name"] for file in tables["files"]):
            _require(is_safe_name(name) and "/" not in name, f"names {name!r}, outside the checkpoint")
        for file in tables["files"]:
            _require(file["places"] < len(tables["places"]), f"has no places of {file['name']!r}")
        for numbers in tables["writers"]:
            _require(max(numbers, default=0) < len(tables["files"]), "names the writer of a block, but not its file")
            _require(len({*numbers}) == len(numbers), "has two blocks of a tensor in one file")
        for cuts in tables["cuts"]:
            rising = all(starts[0] == 0 and all(a < b for a, b in pairwise(starts)) for starts in cuts)
            _require(rising, "has blocks that overlap or leave a gap")
        for tensor in tables["tensors"]:
            self._check_tensor(tensor)

    def _check_tensor(self, tensor: GridTensor) -> None:
        tables, name = self._tables, tensor["name"]
        _require(tensor["dtype"] in _DTYPES, f"has {name!r} of a dtype that no tensor of a run has")
        known = tensor["cuts"] < len(tables["cuts"]) and tensor["writers"] < len(tables["writers"])
        _require(known, f"has no blocks of {name!r}")
        cuts = tables["cuts"][tensor["cuts"]]
        fits = len(cuts) == len(tensor["shape"]) and all(
            starts[-1] < max(size, 1) for starts, size in zip(cuts, tensor["shape"], strict=True)
        )
        _require(fits, f"has blocks outside of {name!r}")
        blocks = math.prod(map(len, cuts))
        _require(blocks == len(tables["writers"][tensor["writers"]]), f"lacks writers of blocks of {name!r}")


def grid_content(tables: Tables) -> bytes:
    """The content of GRID.json."""
    return json.dumps(tables, separators=(",", ":")).encode()


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvalidCheckpointError(f"{GRID_FILE} {otherwise}")


_DTYPES = {str(dtype): dtype for dtype in DTYPES}
