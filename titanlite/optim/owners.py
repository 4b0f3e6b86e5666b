"""Matrices whose parts are on several ranks: assembled on one rank each, its owner, and given back to all.

One all-to-all brings the parts to the owners, another one the results back; with replicas of the parameters, each one
broadcasts the results of its owners. A rank sends and receives at most the bytes of its own parts, of the matrices that
it owns, and with replicas of its own parts once more, however many ranks there are.
Matrices are sorted by cost and dealt out in rounds of one per rank, so that those of a round cost about the same, and a
rank holds one full matrix at a time.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.parallel.mesh import ShardGroups
from titanlite.runtime.torch_internals import is_dtensor, local_part

Part = tuple[slice, ...]
"""Where a rank's part of a tensor is in the full one, by dimension."""


@dataclass(frozen=True)
class Division:
    """The division of a matrix. parts: rows and columns of each rank of the shards; None: no part. senders: the ranks
    whose parts make up the matrix; the others have copies."""

    parts: tuple[Part | None, ...]
    senders: tuple[int, ...]

    def size(self, rank: int, extra: int = 0) -> int:
        """Elements of a rank's part, with `extra` further columns."""
        part = self.parts[rank]
        return 0 if part is None else _elements(part) + extra * (part[0].stop - part[0].start)


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix: a parameter of two dimensions, or one of a stack.

    parameter: its number. index: of the matrix in this rank's stack; None: no stack. owner: rank of the shards, in the
    replica `replica`.
    """

    parameter: int
    index: int | None
    shape: tuple[int, int]
    division: Division
    replica: int
    owner: int

    def part_of(self, local: Tensor) -> Tensor:
        """This rank's part of the matrix; shares the memory of `local`, its part of the parameter."""
        return local if self.index is None else local[self.index]


class Owners:
    """Owners of all matrices of some parameters. A collective: the same parameters in the same order on all ranks.

    cost: of a matrix of (rows, columns), in any unit. extra: columns that each part has behind its own ones, of numbers
    of its rows: those of parts with the same rows are equal.
    """

    def __init__(
        self, parameters: Sequence[Tensor], groups: ShardGroups, cost: Callable[[int, int], float], extra: int = 0
    ) -> None:
        self._groups = groups
        self.extra = extra
        self._device = local_part(parameters[0]).device
        self.rank, self.replica, self.size, self.replicas = 0, 0, 1, 1
        ranks = [dist.get_rank() if dist.is_initialized() else 0]
        if groups.shards is not None:
            ranks = dist.get_process_group_ranks(groups.shards)
            self.rank, self.size = groups.shards.rank(), len(ranks)
        if groups.replicas is not None:
            self.replica, self.replicas = groups.replicas.rank(), groups.replicas.size()
        self.rounds = deal(
            parameters, divisions(parameters, ranks), cost, rank=self.rank, size=self.size, replicas=self.replicas
        )

    def apply(
        self,
        part: Callable[[Matrix], Tensor],
        function: Callable[[Tensor], Tensor],
        use: Callable[[Matrix, Tensor], None],
        dtype: torch.dtype,
    ) -> None:
        """Call `use` with this rank's part of function(matrix), for each matrix of which it has a part.

        part: returns this rank's part of a matrix, in `dtype`; called once for each. function: keeps shape and dtype;
        called by owners only. All of them with the extra columns.
        """
        nothing = torch.empty(0, dtype=dtype, device=self._device)
        for matrices in self.rounds:
            computed = self._computed(self._own(matrices, part), matrices, function, nothing)
            for replica in range(self.replicas):
                self._use([m for m in matrices if m.replica == replica], computed, use)
            del computed

    def _own(self, matrices: Sequence[Matrix], part: Callable[[Matrix], Tensor]) -> dict[Matrix, Tensor]:
        """This rank's parts of the matrices that its replica owns. Calls `part` for all that it has parts of."""
        own = {}
        for matrix in matrices:
            if matrix.division.parts[self.rank] is not None:
                value = part(matrix)
                if matrix.replica == self.replica:  # other replicas have the same parts
                    own[matrix] = value
        return own

    def _use(self, matrices: Sequence[Matrix], computed: Tensor, use: Callable[[Matrix, Tensor], None]) -> None:
        """Pass the results of one replica to all, and use them. computed: those of this rank's replica."""
        sizes = [matrix.division.size(self.rank, self.extra) for matrix in matrices]
        if not sum(sizes):  # the same for this rank in all replicas
            return
        results, replica = computed, matrices[0].replica
        if self._groups.replicas is not None:
            results = computed if replica == self.replica else computed.new_empty(sum(sizes))
            dist.broadcast(results, group=self._groups.replicas, group_src=replica)
        for matrix, piece in zip(matrices, results.split(sizes), strict=True):
            if (place := matrix.division.parts[self.rank]) is not None:
                use(matrix, piece.view(place[0].stop - place[0].start, -1))

    def _computed(
        self,
        own: Mapping[Matrix, Tensor],
        matrices: Sequence[Matrix],
        function: Callable[[Tensor], Tensor],
        nothing: Tensor,
    ) -> Tensor:
        """This rank's parts of the results of its replica, flat, in the order of the matrices. matrices: of a round.
        own: this rank's parts of them. nothing: no elements."""
        matrices = [matrix for matrix in matrices if matrix.replica == self.replica]
        if not matrices:  # the same for all ranks of the shards
            return nothing
        here = {matrix.owner: matrix.division for matrix in matrices}
        sent = [nothing] * self.size
        for matrix, value in own.items():
            if self.rank in matrix.division.senders:
                sent[matrix.owner] = value.reshape(-1)
        back, owned = [nothing] * self.size, next((m for m in matrices if m.owner == self.rank), None)
        if owned is None:
            self._exchange(sent, [0] * self.size)
        else:
            back = self._parts(function(self._assembled(owned, sent, nothing)), owned.division, nothing)
        sizes = [here[o].size(self.rank, self.extra) if o in here else 0 for o in range(self.size)]
        return torch.cat(self._exchange(back, sizes))

    def _assembled(self, owned: Matrix, sent: Sequence[Tensor], nothing: Tensor) -> Tensor:
        """The matrix that this rank owns."""
        division, sizes = owned.division, [0] * self.size
        for sender in division.senders:
            sizes[sender] = division.size(sender, self.extra)
        received = self._exchange(sent, sizes)
        rows, columns = owned.shape
        full = nothing.new_empty(rows, columns + self.extra)
        for sender in division.senders:
            part = division.parts[sender]
            assert part is not None, "a sender without a part"
            place = full[part]
            piece = received[sender].view(len(place), -1)
            place.copy_(piece[:, : place.shape[1]])
            full[part[0], columns:] = piece[:, place.shape[1] :]
        return full

    def _parts(self, result: Tensor, division: Division, nothing: Tensor) -> list[Tensor]:
        """The parts of all ranks, flat."""
        columns = result.shape[1] - self.extra
        found = []
        for part in division.parts:
            own = nothing if part is None else result[part]
            if part is not None and self.extra:
                own = torch.cat((own, result[part[0], columns:]), 1)
            found.append(own.reshape(-1))
        return found

    def _exchange(self, sent: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """All-to-all over the shards. sizes: elements from each rank."""
        if self._groups.shards is None:
            return list(sent)
        received = sent[0].new_empty(sum(sizes))
        lengths = [len(each) for each in sent]
        dist.all_to_all_single(received, torch.cat(list(sent)), list(sizes), lengths, group=self._groups.shards)
        return list(received.split(list(sizes)))


def deal(
    parameters: Sequence[Tensor],
    divided: Sequence[Sequence[Division]],
    cost: Callable[[int, int], float],
    *,
    rank: int,
    size: int,
    replicas: int,
) -> list[list[Matrix]]:
    """Deal out the matrices, in rounds of one per rank; in each, by replica and owner. The same on all ranks, except
    for Matrix.index. divided: of the matrices of each parameter, see `divisions`."""
    found = [
        (cost(*parameter.shape[-2:]), number, index)
        for number, (parameter, of_parameter) in enumerate(zip(parameters, divided, strict=True))
        for index in range(len(of_parameter))
    ]
    found.sort(key=lambda each: -each[0])  # stable
    firsts = [_first(of_parameter, rank) for of_parameter in divided]
    rounds: list[list[Matrix]] = []
    for place, (_, number, index) in enumerate(found):
        replica, owner = divmod(place % (size * replicas), size)
        if replica == owner == 0:
            rounds.append([])
        parameter, division = parameters[number], divided[number][index]
        rows, columns = parameter.shape[-2:]
        own_index = index - firsts[number] if parameter.dim() > 2 else None
        rounds[-1].append(Matrix(number, own_index, (rows, columns), division, replica, owner))
    return rounds


def _first(of_parameter: Sequence[Division], rank: int) -> int:
    """The index of the first matrix of which a rank has a part."""
    return next((index for index, each in enumerate(of_parameter) if each.parts[rank] is not None), 0)


def divisions(parameters: Sequence[Tensor], ranks: Sequence[int]) -> list[list[Division]]:
    """The divisions of the matrices of each parameter over `ranks` of the default group."""
    known: dict[object, list[Division]] = {}
    coordinates: dict[object, dict[int, tuple[int, ...]]] = {}
    found = []
    for parameter in parameters:
        if not is_dtensor(parameter):
            found.append(divisions_of(parameter.shape, [()] * len(ranks)))
            continue
        mesh, placements = parameter.device_mesh, parameter.placements
        if mesh not in coordinates:
            places = itertools.product(*map(range, mesh.shape))
            coordinates[mesh] = dict(zip(mesh.mesh.flatten().tolist(), places, strict=True))
        key = mesh, placements, parameter.shape
        if key not in known:
            cuts = [
                # tp and ep divide the full parameter, the data axes what is left
                [
                    (placement.dim, degree, place)  # type: ignore[attr-defined]
                    for placement, degree, place in zip(placements, mesh.shape, coordinates[mesh][rank], strict=True)
                    if not placement.is_replicate()
                ][::-1]
                for rank in ranks
            ]
            known[key] = divisions_of(parameter.shape, cuts)
        found.append(known[key])
    return found


def divisions_of(shape: Sequence[int], cuts: Sequence[Sequence[tuple[int, int, int]]]) -> list[Division]:
    """The divisions of the matrices of a parameter. cuts: of each rank, in order: (dimension, number of equal parts as
    torch.chunk makes them, which of them)."""
    boxes = [_box(shape, own) for own in cuts]
    if len(shape) == 2:
        return [_division(boxes)]
    return [
        _division([box[1:] if box[0].start <= index < box[0].stop else None for box in boxes])
        for index in range(shape[0])
    ]


def _box(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> Part:
    starts, sizes = [0] * len(shape), list(shape)
    for dimension, number, place in cuts:
        step = -(-sizes[dimension] // number)
        first = min(place * step, sizes[dimension])
        starts[dimension] += first
        sizes[dimension] = min(step, sizes[dimension] - first)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _division(boxes: Iterable[Part | None]) -> Division:
    parts = tuple(box if box is not None and _elements(box) else None for box in boxes)
    first = dict[tuple[int, ...], int]()
    for rank, part in enumerate(parts):
        if part is not None:
            first.setdefault(tuple(bound for each in part for bound in (each.start, each.stop)), rank)
    return Division(parts, tuple(first.values()))


def _elements(part: Part) -> int:
    return math.prod(each.stop - each.start for each in part)
