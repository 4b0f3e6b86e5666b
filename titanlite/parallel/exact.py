"""Gradients and their norm that are equal bit for bit on any number of data ranks and pipeline stages.

The sum of float64 numbers depends on their order, unless all are multiples of a power of two, q, and all partial sums
are at most 2^53 q: then each addition is exact. So the gradient of each microbatch is rounded to multiples of a q that
all ranks share, before anything is added to it, and is added in float64. The sum is rounded once, to the dtype of the
parameter. (Source of the idea: Demmel, Nguyen, "Fast Reproducible Floating-Point Summation", 2013.)

Each row of a parameter, along all dimensions but the last one, has a q of its own. It follows from the largest
magnitude that the row has had in a microbatch, with head room for the next ones: state of the run, see
ExactGradients.largest. A row with a larger gradient becomes NaN, so the step is skipped like other steps whose norm is
not finite; the next step has the head room.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.parallel.mesh import Mesh
from titanlite.runtime.torch_internals import is_dtensor, local_part, mixed_precision_policy, shape_and_offset

HEAD_ROOM = 10
"""A row's gradient may be 2^HEAD_ROOM times as large as its largest one so far."""
ROWS_DIFFER = 6
"""A row is taken to be at least 2^-ROWS_DIFFER times as large as the largest one of its tensor: the row of a rare token
in the output layer may grow far more than 2^HEAD_ROOM when the token is a label."""
MAX_SUMMANDS = 2**12
"""Microbatches of a step on all ranks: 53 bits are 12 for their sum, 10 of head room, and 31 of the row's largest."""
DECAY = 0.99
"""Factor per step of a largest magnitude that the step did not reach."""
MOST_LOSS = 2**13
"""Mean loss of a token up to which sums of losses are exact."""
SHARE_GRID = MOST_LOSS * 2.0**-53
"""Grid of shares of a mean loss."""
BYTES_PER_ROW = 5 * 8
_ALIGNMENT = 64
"""Rows of each tensor begin at multiples of this: on GPUs, the order of a sum depends on the alignment."""


class ExactGradients:
    """Rounds the gradient of each microbatch, computes their norm, and keeps what later steps round by.

    model_parts: this rank's, allocated, and wrapped by `fully_shard` or `replicate`, which reduce in float64. mesh:
    connected. summands: microbatches of a step on all ranks.

    largest: by name of the parameter, float64, of the shape of its rows: the largest magnitude of a microbatch's
    gradient, which decays; 0 for a row without a gradient so far. The same on all ranks of a stage. is_known: whether
    it has the magnitudes of earlier steps. parameters: of this rank's stages. names: of the parameters of all stages.
    digest: of the weights after the last step, once it has been computed.
    """

    def __init__(self, model_parts: Sequence[nn.Module], mesh: Mesh, summands: int) -> None:
        self.parameters = {name: each for part in model_parts for name, each in part.named_parameters()}
        self._rows = _Rows(self.parameters)
        self.is_known = False
        self._tp = mesh.degrees["tp"]
        self.set_summands(summands)
        self._largest, self._seen, self._bounds, self._shifts = (self._rows.new_vector() for _ in range(4))
        self.largest = self._rows.of_each(self._largest)
        self.digest: str | None = None
        axes = {axis: mesh.group(axis) for axis in ("tp", "dp_shard", "dp_replicate")}
        groups = {axis: group for axis, group in axes.items() if group.size() > 1}
        self._stage_groups = list(groups.values())
        self._shard_groups = [group for axis, group in groups.items() if axis != "dp_replicate"]
        self._pp_group = mesh.group("pp")
        self._owned = [_is_first_copy(parameter, mesh) for parameter in self.parameters.values()]
        of_stages: list[list[str]] = [[]] * self._pp_group.size()
        dist.all_gather_object(of_stages, list(self.parameters), group=self._pp_group)
        self.names = sorted({name for names in of_stages for name in names})
        for part in model_parts:
            self._register(part)

    def set_summands(self, summands: int) -> None:
        """Round by `largest` for another number of summands."""
        # Each rank of tp may have a part of the sum of a row.
        self._sum_bits = 1 + (summands * self._tp - 1).bit_length()
        if self.is_known:
            self.resume()

    def _register(self, part: nn.Module) -> None:
        """Round the gradients of the gathered parameters, which are the same tensors in every step."""
        sharded, registered = dict(part.named_parameters()), set()
        for module in (each for each in part.modules() if isinstance(each, FSDPModule)):
            assert mixed_precision_policy(module).reduce_dtype == torch.float64, "reductions would round"
            module.unshard()
            for name, parameter in part.named_parameters():
                if parameter is not sharded[name] and name not in registered:
                    registered.add(name)
                    assert parameter.dtype != torch.float64, "a gradient would be no cast, and may not be changed"
                    parameter.grad_dtype = torch.float64
                    parameter.register_hook(self._rounding(name, parameter))
            module.reshard()
        assert registered == sharded.keys(), "a parameter is not wrapped"

    def _rounding(self, name: str, parameter: Tensor) -> Callable[[Tensor], Tensor]:
        """The hook that rounds a gradient, and notes the largest magnitudes of its rows.

        It gets a gradient that autograd has cast to float64, or one in the parameter's dtype: since torch 2.15, FSDP
        leaves the cast to its reduction, or to the addition to earlier gradients. The result has the dtype of what it
        gets, which does not round it again: in binary, a multiple of a power of two has no more digits than the
        number from which it has been rounded.
        """
        box = _row_box(parameter)
        seen, bounds, shifts = (
            self._rows.of_each(each)[name][box] for each in (self._seen, self._bounds, self._shifts)
        )

        def rounded(gradient: Tensor) -> Tensor:
            wide = gradient.to(torch.float64)  # itself, if it has been cast: nothing else refers to it
            local = local_part(wide)
            rows = local.unsqueeze(-1) if local.dim() == 1 else local
            # The 20th part of the time of an infinity norm on a CPU.
            magnitudes = torch.maximum(rows.amax(-1), -rows.amin(-1))
            # A row that is not finite counts as 0: a maximum with NaN depends on the order of the ranks.
            torch.maximum(seen, magnitudes.nan_to_num(nan=0.0, posinf=0.0), out=seen)
            shift = torch.where(magnitudes <= bounds, shifts, torch.nan).unsqueeze(-1)
            rows.add_(shift).sub_(shift)
            return wide.to(gradient.dtype)

        return rounded

    def end_step(self) -> None:
        """Find what the next step rounds by. A collective over all ranks of the stage."""
        for group in self._stage_groups:
            dist.all_reduce(self._seen, op=dist.ReduceOp.MAX, group=group)
        updated = torch.maximum(self._seen, self._largest * DECAY)
        self._largest.copy_(torch.where(self._seen > 0, updated, self._largest))
        self._seen.zero_()
        self.resume()

    def resume(self) -> None:
        """Round by `largest`."""
        self.digest = None  # of the weights before this step, or before they were loaded
        of_tensor = self._rows.largest_of_tensor(self._largest)
        reference = torch.maximum(self._largest, of_tensor * 2.0**-ROWS_DIFFER)
        # A tensor whose gradients have all been 0 gets those of a reference of 1.
        exponents = torch.frexp(reference).exponent + HEAD_ROOM
        self._bounds.copy_(power_of_two(exponents))
        # Beside 1.5 * 2^52 q, float64 has no other numbers than multiples of q = bound * 2^(sum_bits - 53).
        self._shifts.copy_(1.5 * power_of_two(exponents + self._sum_bits - 1))
        self.is_known = True

    def squares(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """(squared global norm, squared norm of this rank's shard of each gradient, (parameters,)), float64.

        gradients: this rank's shards, in the order of the parameters. The sums of squares of rows are exact, see
        squares_of_rows; then rows, and tensors by name, are added up in an order that all meshes have. A collective.
        """
        vector, own = self._rows.new_vector(), []
        rows = self._rows.of_each(vector)
        for (name, parameter), gradient, owned in zip(self.parameters.items(), gradients, self._owned, strict=True):
            squares = vector.new_zeros(0) if gradient is None else squares_of_rows(gradient.to(torch.float64))
            own.append(squares.sum())
            if owned and squares.numel():
                rows[name][_row_box(parameter)] = squares
        for group in self._shard_groups:
            dist.all_reduce(vector, group=group)  # with zeros, except for tp ranks that share rows
        totals = self._of_all_stages({name: each.sum() for name, each in rows.items()})
        return totals.sum(), torch.stack(own)

    def totals(self, own: Mapping[str, Tensor]) -> Tensor:
        """The sum over the shards of each parameter, in the order of `names`. own: of this rank's, scalars."""
        sums = torch.stack([own[name] * owned for name, owned in zip(self.parameters, self._owned, strict=True)])
        for group in self._shard_groups:
            dist.all_reduce(sums, group=group)
        return self._of_all_stages(dict(zip(self.parameters, sums.unbind(), strict=True)))

    def _of_all_stages(self, own: Mapping[str, Tensor]) -> Tensor:
        """The scalars of the parameters of all stages, in the order of their names. A collective."""
        zero = torch.zeros_like(next(iter(own.values())))
        every = torch.stack([own.get(name, zero) for name in self.names])
        if self._pp_group.size() > 1:
            dist.all_reduce(every, group=self._pp_group)
        return every


class _Rows:
    """The rows of all parameters of a stage in one vector."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._shapes = {name: _of_rows(each.shape) for name, each in parameters.items()}
        self._sizes = [padded_rows(each.shape) for each in parameters.values()]
        device = next(iter(parameters.values())).device
        sizes = torch.tensor(self._sizes, device=device)
        self._tensors = torch.repeat_interleave(sizes, output_size=sum(self._sizes))

    def new_vector(self) -> Tensor:
        return torch.zeros(len(self._tensors), dtype=torch.float64, device=self._tensors.device)

    def of_each(self, vector: Tensor) -> dict[str, Tensor]:
        """The rows of each parameter, by name; views of the vector."""
        parts = zip(self._shapes.items(), vector.split(self._sizes), strict=True)
        return {name: part[: prod(shape)].view(shape) for (name, shape), part in parts}

    def largest_of_tensor(self, vector: Tensor) -> Tensor:
        """At each row the largest number of its tensor."""
        largest = vector.new_zeros(len(self._sizes)).scatter_reduce(0, self._tensors, vector, "amax")
        return largest[self._tensors]


def padded_rows(shape: Sequence[int]) -> int:
    """Rows of a parameter of this shape, up to the first one of the next parameter."""
    return -(-prod(_of_rows(shape)) // _ALIGNMENT) * _ALIGNMENT


def _of_rows(shape: Sequence[int]) -> Sequence[int]:
    return shape[: max(len(shape) - 1, 1)]


def _row_box(parameter: Tensor) -> tuple[slice, ...]:
    """The rows of the global tensor that this rank's part has elements of."""
    shape, offset = shape_and_offset(parameter) if is_dtensor(parameter) else (parameter.shape, [0] * parameter.dim())
    return tuple(slice(begin, begin + size) for begin, size in zip(offset, _of_rows(shape), strict=False))


def _is_first_copy(parameter: Tensor, mesh: Mesh) -> bool:
    """Whether no earlier rank of tp or dp_shard has the same part of the parameter."""
    copies = {"tp", "dp_shard", "cp"}
    if not is_dtensor(parameter):
        return mesh.is_first(copies)
    names, coordinate = parameter.device_mesh.mesh_dim_names, parameter.device_mesh.get_coordinate()
    assert names is not None
    assert coordinate is not None
    places = dict(zip(names, zip(coordinate, parameter.placements, strict=True), strict=True))
    of_mesh = [place for name, (place, kind) in places.items() if name != "dp_replicate" and kind.is_replicate()]
    return not any(of_mesh) and ("tp" in places or mesh.is_first(["tp"]))


def squares_of_rows(rows: Tensor) -> Tensor:
    """The sum of squares of each row, along the last dimension, or the squares of a vector. rows: float64.

    Squares are rounded to multiples of a power of two of at most 2^-52 of the largest sum that the row may have, so
    that the order of their sum does not matter, which depends on the number of rows on GPUs.
    """
    squares = rows.square()
    if rows.dim() == 1:
        return squares
    largest = squares.amax(-1, keepdim=True)
    exponents = torch.frexp(largest).exponent + (rows.shape[-1] - 1).bit_length()
    shift = torch.where(largest.isfinite(), 1.5 * power_of_two(exponents), torch.nan)
    return squares.add_(shift).sub_(shift).sum(-1)


def on_grid(values: Tensor, grid: float) -> Tensor:
    """The values rounded to multiples of the grid, a power of two, float64: sums up to 2^53 grid do not depend on their
    order."""
    return (values.to(torch.float64) / grid).round() * grid


def loss_grid(tokens: int) -> float:
    """The grid of summed losses of this many tokens."""
    return float(2.0 ** ((tokens * MOST_LOSS - 1).bit_length() - 53))


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponents, float64, exact."""
    return ((exponents.to(torch.int64).clamp(-1000, 1000) + 1023) << 52).view(torch.float64)
