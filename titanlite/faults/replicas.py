"""Comparison of replicas: weights, their average and optimizer state that several ranks hold must be equal, bit for
bit."""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from titanlite.models.family import saved_tensors
from titanlite.optim.optimizer import NO_AVERAGE, GatedOptimizer, WeightAverage
from titanlite.parallel.mesh import EXPERT_AXES, PARAMETER_AXES, Mesh
from titanlite.parallel.pipeline import exchanged, holders_in
from titanlite.ranks.agreement import RanksError, run_on_all_ranks
from titanlite.runtime.torch_internals import is_dtensor, local_part

DIGEST_BITS = 62
"""Bits of a digest: its negative is an int64, too."""

MAX_TENSORS = 5
"""Tensors that a message lists; it counts the others."""


class ReplicasError(RanksError):
    """Ranks that must hold the same values hold different ones."""


class Replicas:
    """Compares replicas every `every` steps (0: never), at the start, before each save, and after the last step. All
    methods are collectives."""

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        optimizer: GatedOptimizer,
        mesh: Mesh,
        every: int,
        average: WeightAverage = NO_AVERAGE,
    ) -> None:
        self._model_parts = model_parts
        self._optimizer = optimizer
        self._average = average
        self._mesh = mesh
        self._every = every
        self._axes = [axis for axis in PARAMETER_AXES if axis != "pp" and mesh.degrees[axis] > 1]
        self._holders = {name: ranks for name, ranks in holders_in(model_parts).items() if len(ranks) > 1}
        self._compared = -1

    def after_step(self, step: int, last: bool) -> None:
        """Compare if the step is due or the last one. Raises ReplicasError on all ranks."""
        if self._every and (last or step % self._every == 0):
            self.compare(step)

    def compare(self, step: int) -> None:
        """Compare the state after this step, unless that has been done. Raises ReplicasError on all ranks.

        One all-reduce of two integers per tensor over each mesh axis, and one of a flag over all ranks; the host reads
        the flag. Ranks with copies of a parameter that pipeline stages share send each other an integer per tensor.
        """
        if not self._every or self._compared == step or self._mesh.world.size == 1:
            return
        self._compared = step
        tensors = dict(self._optimizer.named_state())
        tensors |= {f"{name}/ema": tensor for name, tensor in self._average.tensors.items()}
        for part in self._model_parts:
            tensors |= saved_tensors(part)
        device = self._mesh.world.device
        replicated = {
            axis: [name for name, tensor in tensors.items() if is_replicated(tensor, axis)] for axis in self._axes
        }
        of_copies = {name: [each for each in sorted(tensors) if _is_of(each, name)] for name in self._holders}
        compared = dict.fromkeys(chain(*replicated.values(), *of_copies.values()))
        digests = {name: digest(local_part(tensors[name]), device) for name in compared}
        any_differs = torch.zeros((), dtype=torch.int64, device=device)
        for axis, names in replicated.items():
            if names:
                own = torch.stack([digests[name] for name in names])
                extremes = torch.cat([own, -own])
                dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._mesh.group(axis))
                highest, lowest = extremes[: len(names)], -extremes[len(names) :]
                any_differs |= (highest != lowest).any()
        for name, names in of_copies.items():
            own = torch.stack([digests[each] for each in names])
            copies = exchanged(own, self._holders[name], self._mesh.group("pp"))
            any_differs |= (torch.stack(copies) != own).any()
        dist.all_reduce(any_differs, dist.ReduceOp.MAX)
        if any_differs.item():
            values = {name: int(value) for name, value in digests.items()}
            replicas = {
                tuple(dist.get_process_group_ranks(self._mesh.group(axis))): {name: values[name] for name in names}
                for axis, names in replicated.items()
            }
            for name, names in of_copies.items():
                ranks = dist.get_process_group_ranks(self._mesh.group("pp"))
                holders = tuple(ranks[each] for each in self._holders[name])
                replicas.setdefault(holders, {}).update({each: values[each] for each in names})
            assert dist.group.WORLD is not None
            found = run_on_all_ranks(lambda: replicas, dist.group.WORLD)
            raise ReplicasError(*_explain(step, found))


def _explain(step: int, found: Sequence[Mapping[tuple[int, ...], Mapping[str, int]]]) -> list[str]:
    """The lines of the message. found: by rank, the digests of the tensors that it shares with each group of ranks."""
    lines = []
    for group in dict.fromkeys(group for replicas in found for group in replicas):
        for name in found[group[0]][group]:
            holders: dict[int, list[int]] = {}
            for rank in group:
                holders.setdefault(found[rank][group][name], []).append(rank)
            if len(holders) > 1:
                ranks = sorted(holders.values(), key=len, reverse=True)
                lines.append(f"  {name}: {' differs from '.join(map(_ranks, reversed(ranks)))}")
    more = [f"  and {len(lines) - MAX_TENSORS} more"] if len(lines) > MAX_TENSORS else []
    return [
        f"after step {step}, ranks that must hold the same values hold different ones:",
        *lines[:MAX_TENSORS],
        *more,
        "a fault of memory, a device or the network is likely; nothing is saved from this state. Check these ranks "
        "and start again: the run resumes from its latest checkpoint",
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _is_of(tensor: str, parameter: str) -> bool:
    """Whether a tensor, by name, is the parameter, its average or a part of its state."""
    return tensor == parameter or tensor.startswith(f"{parameter}/")


def is_replicated(tensor: Tensor, axis: str) -> bool:
    """Whether all ranks of a mesh axis hold the same values of the tensor."""
    if not is_dtensor(tensor):
        return True
    placements = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
    axes = EXPERT_AXES if axis == "dp_shard" and "ep" in placements else (axis,)
    return all(name not in placements or placements[name].is_replicate() for name in axes)


def has_fast_hash(local: Tensor) -> bool:
    return local.device.type == "cpu"


def digest(local: Tensor, device: torch.device) -> Tensor:
    """A digest of the bits of a plain tensor: int64 scalar of DIGEST_BITS bits on `device`.

    Changes with every single bit. On a CPU an xxh3 hash, which is as fast as memory; on an accelerator the sum of the
    bits as integers of up to 32 bits, without a host read.
    """
    mask = 2**DIGEST_BITS - 1
    flat = local.contiguous().reshape(-1)
    if has_fast_hash(local):
        hashed = xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data) & mask
        return torch.tensor(hashed, dtype=torch.int64, device=device)
    integers = {1: torch.uint8, 2: torch.int16}.get(local.element_size(), torch.int32)
    return flat.view(integers).sum(dtype=torch.int64).bitwise_and(mask)
