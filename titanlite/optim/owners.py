"""Matrices whose parts are on several ranks: assembled on one rank each, its owner, and given back to all.

One all-to-all brings the parts to the owners, another one the results back; with replicas of the parameters, an
all-gather passes the results of each replica on to the others. Bytes per rank do not grow with the number of ranks.
Owners take turns: matrices are sorted by cost, and those of a round, one per rank, cost about the same.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.parallel.mesh import Sharing
from titanlite.runtime.dtensors import is_dtensor

Part = tuple[slice, ...]
"""Where a rank's part of a parameter is in the full one, by dimension."""


@dataclass(frozen=True)
class Matrix:
    """A matrix: a parameter of two dimensions, or one of a stack.

    parameter: its number. index: in the stack. parts: the rows and columns of each rank of the shards; None: no part.
    senders: the ranks whose parts make up the matrix; others have copies. owner: rank of the shards, in the replica
    `replica`.
    """

    parameter: int
    index: int | None
    shape: tuple[int, int]
    parts: tuple[Part | None, ...]
    senders: tuple[int, ...]
    replica: int
    owner: int

    def size(self, rank: int) -> int:
        """Elements of a rank's part."""
        part = self.parts[rank]
        return 0 if part is None else math.prod(each.stop - each.start for each in part)


class Owners:
    """Owners of all matrices of some parameters. A collective: the same parameters in the same order on all ranks.

    cost: of a matrix of (rows, columns), in any unit.
    """

    def __init__(self, parameters: Sequence[Tensor], sharing: Sharing, cost: Callable[[int, int], float]) -> None:
        self.sharing = sharing
        ranks = dist.get_process_group_ranks(sharing.shards) if sharing.shards is not None else [0]
        self.rank, self.size = (sharing.shards.rank(), len(ranks)) if sharing.shards is not None else (0, 1)
        self._first = [part_of(parameter, ranks[self.rank])[0].start for parameter in parameters]
        self.replica, self.replicas = 0, 1
        if sharing.replicas is not None:
            self.replica, self.replicas = sharing.replicas.rank(), sharing.replicas.size()
        found = [matrix for number, each in enumerate(parameters) for matrix in _matrices(number, each, ranks)]
        found.sort(key=lambda matrix: -cost(*matrix[2]))  # stable: the same on all ranks
        slots = self.size * self.replicas
        self.rounds: list[list[Matrix]] = []
        for place, (number, index, shape, parts) in enumerate(found):
            if place % slots == 0:
                self.rounds.append([])
            replica, owner = divmod(place % slots, self.size)
            first = dict[Part, int]()
            for rank, part in enumerate(parts):
                if part is not None:
                    first.setdefault(_key(part), rank)
            senders = tuple(first.values())
            self.rounds[-1].append(Matrix(number, index, shape, parts, senders, replica, owner))

    def apply(self, parts: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """This rank's parts of function(matrix) for each matrix. parts: of the parameters, in their order; results have
        their shapes and dtype. function: keeps the shape, and is called by owners only."""
        results = [torch.empty_like(part) for part in parts]
        for matrices in self.rounds:
            for matrix, result in self._round(matrices, parts, function):
                target = self._own(results, matrix)
                target.copy_(result.view_as(target))
        return results

    def _own(self, parts: Sequence[Tensor], matrix: Matrix) -> Tensor:
        """This rank's part of a matrix."""
        part = parts[matrix.parameter]
        return part if matrix.index is None else part[matrix.index - self._first[matrix.parameter]]

    def _round(
        self, matrices: Sequence[Matrix], parts: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[Matrix, Tensor]]:
        """(matrix, this rank's part of the result) of a round."""
        here = {matrix.owner: matrix for matrix in matrices if matrix.replica == self.replica}
        own = here.get(self.rank)
        sent = [
            self._own(parts, matrix).reshape(-1)
            if (matrix := here.get(rank)) is not None and self.rank in matrix.senders
            else parts[0].new_empty(0)
            for rank in range(self.size)
        ]
        sizes = [own.size(rank) if own is not None and rank in own.senders else 0 for rank in range(self.size)]
        received = self._exchange(sent, sizes)
        back = [parts[0].new_empty(0)] * self.size
        if own is not None:
            full = parts[0].new_empty(own.shape)
            for rank in own.senders:
                target = full[own.parts[rank]]
                target.copy_(received[rank].view_as(target))
            result = function(full)
            back = [parts[0].new_empty(0) if part is None else result[part].reshape(-1) for part in own.parts]
        sizes = [here[rank].size(self.rank) if rank in here else 0 for rank in range(self.size)]
        returned = torch.cat(self._exchange(back, sizes))
        for replica, flat in enumerate(self._replicated(returned, matrices)):
            of_replica = sorted((each for each in matrices if each.replica == replica), key=lambda each: each.owner)
            pieces = flat.split([matrix.size(self.rank) for matrix in of_replica])
            yield from ((matrix, piece) for matrix, piece in zip(of_replica, pieces, strict=True) if len(piece))

    def _exchange(self, sent: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
        """All-to-all over the shards. sizes: elements from each rank."""
        if self.sharing.shards is None:
            return sent
        received = sent[0].new_empty(sum(sizes))
        dist.all_to_all_single(
            received, torch.cat(list(sent)), list(sizes), [len(each) for each in sent], group=self.sharing.shards
        )
        return received.split(list(sizes))

    def _replicated(self, own: Tensor, matrices: Sequence[Matrix]) -> Sequence[Tensor]:
        """The results of all replicas, which have the parts of this rank."""
        if self.sharing.replicas is None:
            return [own]
        sizes = [
            sum(each.size(self.rank) for each in matrices if each.replica == replica)
            for replica in range(self.replicas)
        ]
        padded = own.new_zeros(max(sizes))
        padded[: len(own)] = own
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=self.sharing.replicas)
        return [each[:size] for each, size in zip(gathered, sizes, strict=True)]


def _matrices(
    number: int, parameter: Tensor, ranks: Sequence[int]
) -> Iterator[tuple[int, int | None, tuple[int, int], tuple[Part | None, ...]]]:
    """(number, index, shape, parts of all ranks) of the matrices of a parameter."""
    boxes = [part_of(parameter, rank) for rank in ranks]
    rows, columns = parameter.shape[-2:]
    if parameter.dim() == 2:
        yield number, None, (rows, columns), tuple(box if _elements(box) else None for box in boxes)
        return
    for index in range(parameter.shape[0]):
        parts = (box[1:] if box[0].start <= index < box[0].stop and _elements(box) else None for box in boxes)
        yield number, index, (rows, columns), tuple(parts)


def part_of(parameter: Tensor, rank: int) -> Part:
    """The part of a parameter that a rank of the default group holds. tp and ep divide the full parameter, the data axes
    what is left, each as torch.chunk does."""
    if not is_dtensor(parameter):
        return tuple(slice(0, size) for size in parameter.shape)
    mesh = parameter.device_mesh
    (coordinate,) = (mesh.mesh == rank).nonzero().tolist()
    start, size = [0] * parameter.dim(), list(parameter.shape)
    for placement, degree, place in reversed(list(zip(parameter.placements, mesh.shape, coordinate, strict=True))):
        if placement.is_replicate():
            continue
        dimension = placement.dim
        step = -(-size[dimension] // degree)
        first = min(place * step, size[dimension])
        start[dimension] += first
        size[dimension] = min(step, size[dimension] - first)
    return tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))


def _elements(part: Part) -> int:
    return math.prod(each.stop - each.start for each in part)


def _key(part: Part) -> tuple[int, ...]:
    return tuple(bound for each in part for bound in (each.start, each.stop))
