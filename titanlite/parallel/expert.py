"""Expert parallelism: each rank of the ep axis holds some of the experts, and the rows of each choice travel to them.

The hidden features of the experts are sharded over tp. Rows travel by all-to-all (Lepikhin et al., "GShard", 2020);
none is dropped or padded, so the host reads once per layer how many rows each rank sends and receives.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from titanlite.models.experts import Experts, feed_forward, inverse_permutation, permuted
from titanlite.models.family import LanguageModel
from titanlite.parallel.collectives import all_to_all
from titanlite.parallel.tensor import local_weight, summed_part

FEATURES = {"w1": 1, "w2": 2, "w3": 1, "w1_bias": 1, "w2_bias": None, "w3_bias": 1}
"""Dimension of the hidden features of each weight, (experts, features, features) or (experts, features); None: it has
none."""


def apply_expert_parallel(model: LanguageModel, mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> list[str]:
    """Shard all experts over ep, and their hidden features over tp, in place; return descriptions for the start log.

    mesh: with the axis tp. expert_mesh: with the axes ep and tp; None: without ep. Parameters become DTensors of these
    axes. A rank's gradient of its experts is the sum over all rows of the ranks of ep.
    """
    tp = mesh["tp"].size() > 1
    if not tp and expert_mesh is None:
        return []
    axes = (("ep",) if expert_mesh is not None else ()) + (("tp",) if tp else ())
    over = (mesh if expert_mesh is None else expert_mesh)[axes]
    found = [module for module in model.modules() if isinstance(module, Experts)]
    for experts in found:
        for name, weight in experts.weights().items():
            features = FEATURES[name]
            over_tp = Replicate() if features is None else Shard(features)
            placements = [Shard(0) if axis == "ep" else over_tp for axis in axes]
            setattr(experts, name, nn.Parameter(distribute_tensor(weight, over, placements)))
        if expert_mesh is not None:
            experts.feed_forward = partial(exchanged_feed_forward, group=expert_mesh.get_group("ep"))
        experts.forward = partial(_forward, experts, mesh.get_group("tp") if tp else None)  # type: ignore[method-assign]
    return [f"expert parallel ({expert_mesh['ep'].size()})"] if found and expert_mesh is not None else []


def _forward(
    experts: Experts,
    tp: dist.ProcessGroup | None,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    shared: Tensor | None = None,
) -> Tensor:
    own = (_own_part(name, weight, tp) for name, weight in experts.weights().items())
    result = experts.weighted(x, chosen, weights, *own)
    if shared is not None:  # with tp, both are parts of a sum
        result = result + shared
    return result if tp is None else summed_part(result, tp)


def _own_part(name: str, weight: Tensor, tp: dist.ProcessGroup | None) -> Tensor:
    if tp is None or FEATURES[name] is not None:
        return local_weight(weight)
    # The results are parts of a sum over tp, of which one rank adds the bias. So is its gradient.
    assert isinstance(weight, DTensor)
    local: Tensor = weight.to_local(grad_placements=[*weight.placements[:-1], Partial()])
    return local * float(tp.rank() == 0)


def exchanged_feed_forward(
    rows: Tensor, counts: Tensor, *weights: Tensor, group: dist.ProcessGroup, **options: Any
) -> Tensor:
    """The ExpertsFunction of experts of which each rank of `group` has an equal number, in the order of the ranks.

    weights: those of this rank. options: see feed_forward. Results return in the order of `rows`.
    """
    size = group.size()
    sent = counts.view(size, -1)  # (ep, experts of each)
    received = all_to_all(sent, [1] * size, [1] * size, group)  # (ep, own experts): of the rows of each rank
    to, origin = torch.stack((sent.sum(dim=1), received.sum(dim=1))).tolist()  # the host waits for the device
    arrived = _exchanged(rows, to, origin, group)  # by rank, then by expert
    experts = torch.arange(received.shape[1], device=rows.device).repeat(size)
    experts = experts.repeat_interleave(received.flatten(), output_size=sum(origin))
    order = experts.argsort(stable=True)
    inverse = inverse_permutation(order)
    results = feed_forward(permuted(arrived, order, inverse), received.sum(dim=0), *weights, **options)
    return _exchanged(permuted(results, inverse, order), origin, to, group)


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """The rows that all ranks have for this one. sent, received: numbers of rows for and from each rank."""
    result: Tensor = _ExchangeRows.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return result


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = received, sent, group
        return all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(gradient, *ctx.arguments), None, None, None
