"""Plan saves of very many shards, as tables: see grid.py. A rank sends the list of its tensors, packed, and its few
distinct parts of a grid, not one item per tensor; rank 0 works with each list and each grid once."""

import json
import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from titanlite.checkpoint.grid import GridFile, GridTensor, Tables

MOST_WRITERS = 64
"""Replicas of a block among which the tensors are dealt. Each writes other tensors, and so has a table of places."""

Ints = npt.NDArray[np.int64]
Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Shape of a tensor, and offset and sizes of the part that a rank has."""


class Described(NamedTuple):
    """The tensors of a rank. tensors: (name, dtype, number in `boxes`) of each, packed: the same on many ranks."""

    tensors: bytes
    boxes: list[Box]


class Written(NamedTuple):
    """A written file. places: position among the rank's tensors, first byte and bytes of each shard, packed: the same
    on many ranks."""

    name: str
    places: bytes


def described(tensors: Sequence[tuple[str, str, Box]]) -> Described:
    """Describe a rank's tensors: name, dtype, and part of each."""
    boxes: dict[Box, int] = {}
    rows = [(name, dtype, boxes.setdefault(box, len(boxes))) for name, dtype, box in tensors]
    return Described(zlib.compress(json.dumps(rows).encode()), list(boxes))


def packed_places(rows: Sequence[tuple[int, int, int]]) -> bytes:
    """Pack rows of Written.places. As differences, in the order of the file, they repeat each other."""
    table = np.array(sorted(rows, key=lambda row: row[1]), dtype=np.int64).reshape(-1, 3)
    return zlib.compress(np.diff(table, axis=0, prepend=0).tobytes())


def _unpacked(places: bytes) -> Ints:
    differences = np.frombuffer(zlib.decompress(places), dtype=np.int64).reshape(-1, 3)
    return np.cumsum(differences, axis=0)


class _Blocks:
    """The blocks of all tensors that are cut in the same way by the same ranks."""

    def __init__(self, parts: Sequence[tuple[int, Box]]) -> None:
        """parts: (rank, its part). Raises ValueError if they are not the blocks of a grid."""
        self.shape = parts[0][1][0]
        dims = len(self.shape)
        kept = [(rank, box) for rank, box in parts if 0 not in box[2]]
        if 0 in self.shape:  # no rank has any element: the first one writes it
            kept = [(parts[0][0], (self.shape, (0,) * dims, self.shape))]
        ranks = np.array([rank for rank, _ in kept], dtype=np.int64)
        offsets = np.array([offset for _, (_, offset, _) in kept], dtype=np.int64).reshape(len(kept), dims)
        sizes = np.array([size for _, (_, _, size) in kept], dtype=np.int64).reshape(len(kept), dims)
        self.cuts = [np.unique(offsets[:, dim]) for dim in range(dims)]
        self.number = math.prod(map(len, self.cuts))
        block = np.zeros(len(kept), dtype=np.int64)
        is_grid = 0 < self.number <= len(kept) and all(shape == self.shape for _, (shape, _, _) in parts)
        for dim, starts in enumerate(self.cuts):
            place = np.searchsorted(starts, offsets[:, dim])
            extents = np.diff(starts, append=self.shape[dim])
            is_grid = is_grid and starts[0] == 0 and bool((extents[place] == sizes[:, dim]).all())
            block = block * len(starts) + place
        counts = np.bincount(block, minlength=self.number) if is_grid else np.zeros(1, dtype=np.int64)
        if not counts.all():
            raise ValueError(f"the {len(kept)} shards of a tensor of shape {self.shape} are not the blocks of a grid")
        self._ranks = ranks[np.lexsort((ranks, block))]
        self._counts = counts
        self._first = np.cumsum(counts) - counts
        self._turn = 0

    def next_writers(self) -> Ints:
        """The rank that writes each block of the next tensor: the replicas of a block take turns."""
        writers: Ints = self._ranks[self._first + self._turn % np.minimum(self._counts, MOST_WRITERS)]
        self._turn += 1
        return writers


class GridPlan:
    """The plan on rank 0."""

    def __init__(self, ranks: Sequence[Described]) -> None:
        """ranks: the tensors of each. Raises ValueError if a tensor is not cut into a grid, or a part is missing."""
        kinds: dict[bytes, list[int]] = {}
        for rank, each in enumerate(ranks):
            kinds.setdefault(each.tensors, []).append(rank)
        self._kind, self._row = np.zeros(len(ranks), dtype=np.int64), np.zeros(len(ranks), dtype=np.int64)
        for kind, members in enumerate(kinds.values()):
            self._kind[members], self._row[members] = kind, range(len(members))
        lists: list[list[tuple[str, str, int]]] = [json.loads(zlib.decompress(packed)) for packed in kinds]
        self._own = [
            np.zeros((len(members), len(rows)), dtype=np.bool_)
            for members, rows in zip(kinds.values(), lists, strict=True)
        ]
        """Per list of tensors: whether each rank with this list writes each tensor of it."""
        self._numbers = [np.zeros(len(rows), dtype=np.int64) for rows in lists]
        self._tensors: list[GridTensor] = []
        self._cuts, self._writers = _Table(), _Table()
        self._written: list[Written | None] = [None] * len(ranks)
        self._plan(ranks, [*kinds.values()], lists)

    def _plan(
        self, ranks: Sequence[Described], members: list[list[int]], lists: list[list[tuple[str, str, int]]]
    ) -> None:
        having: dict[str, list[tuple[int, int]]] = {}
        for kind, rows in enumerate(lists):
            for position, (name, _, _) in enumerate(rows):
                having.setdefault(name, []).append((kind, position))
        found: dict[tuple[tuple[int, int], ...], _Blocks] = {}
        for name, places in having.items():
            key = tuple((kind, lists[kind][position][2]) for kind, position in places)
            if (blocks := found.get(key)) is None:
                parts = [(rank, ranks[rank].boxes[box]) for kind, box in key for rank in members[kind]]
                blocks = found[key] = _Blocks(parts)
            (dtype,) = {lists[kind][position][1] for kind, position in places}
            writers = blocks.next_writers()
            for kind, position in places:
                self._own[kind][self._row[writers[self._kind[writers] == kind]], position] = True
                self._numbers[kind][position] = len(self._tensors)
            cuts, writer = self._cuts.add(*blocks.cuts), self._writers.add(writers)
            self._tensors.append(
                {"name": name, "dtype": dtype, "shape": list(blocks.shape), "cuts": cuts, "writers": writer}
            )

    def share_of(self, rank: int) -> bytes:
        """Whether the rank writes each of its tensors, as bits."""
        return np.packbits(self._own[self._kind[rank]][self._row[rank]]).tobytes()

    def put(self, rank: int, written: Written) -> None:
        """Note where the rank has written its shards."""
        self._written[rank] = written

    def tables(self) -> Tables:
        """The metadata, once all ranks have written."""
        places: dict[tuple[int, bytes], int] = {}
        files: list[GridFile] = []
        number = np.zeros(len(self._written), dtype=np.int64)
        for rank, written in enumerate(self._written):
            if written is not None:
                number[rank] = len(files)
                table = places.setdefault((int(self._kind[rank]), written.places), len(places))
                files.append({"name": written.name, "places": table})
        return {
            "tensors": self._tensors,
            "cuts": [[starts.tolist() for starts in cuts] for cuts in self._cuts.rows],
            "writers": [number[ranks].tolist() for (ranks,) in self._writers.rows],
            "files": files,
            "places": [self._rows(kind, packed) for kind, packed in places],
        }

    def _rows(self, kind: int, packed: bytes) -> list[tuple[int, int, int]]:
        rows = _unpacked(packed)
        numbers = self._numbers[kind][rows[:, 0]]
        return [*zip(numbers.tolist(), rows[:, 1].tolist(), rows[:, 2].tolist(), strict=True)]


class _Table:
    """Distinct rows of arrays, by number."""

    def __init__(self) -> None:
        self.rows: list[tuple[Ints, ...]] = []
        self._numbers: dict[tuple[bytes, ...], int] = {}

    def add(self, *row: Ints) -> int:
        key = tuple(each.tobytes() for each in row)
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            self.rows.append(row)
        return self._numbers[key]
