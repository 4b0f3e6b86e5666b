"""The tensors of a checkpoint, under names that do not depend on the mesh."""

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.optim.optimizer import GatedOptimizer
from titanlite.parallel.mesh import AXES, Mesh

MODEL, OPTIMIZER, STREAMS = "model/", "optimizer/", "data/streams"
GRAD_NORMS = "faults/grad_norms"


class StreamsState(Protocol):
    """The part of titanlite.data.loader.Loader that is saved; not imported, since its import chain is long."""

    num_streams: int
    stream_ids: tuple[int, ...]

    def state(self) -> Tensor: ...

    def load_state(self, state: Tensor) -> None: ...

    def describe(self, state: Tensor) -> str: ...


class RunState:
    """The state of one run on this rank.

    Named tensors, DTensors or plain: model/<parameter>; optimizer/<parameter>/<state>; data/streams, int64
    (num_streams, fields of SourceState of each source), replicated; faults/grad_norms, replicated, if spikes are
    detected, see SpikeGate. A tied parameter is saved once, under its first name. Learning rate and random numbers
    follow from step and seed, so they have no state.
    """

    def __init__(
        self,
        model_parts: Iterable[nn.Module],
        optimizer: GatedOptimizer,
        loader: StreamsState,
        mesh: Mesh,
        grad_norms: Tensor | None = None,
    ) -> None:
        self._parameters = {MODEL + name: p.data for part in model_parts for name, p in part.named_parameters()}
        self._optimizer = optimizer
        self._loader = loader
        self._grad_norms = grad_norms
        self._is_data_leader = mesh.is_data_leader
        self._is_stage_leader = mesh.is_first(axis for axis in AXES if axis != "pp")

    def model(self) -> dict[str, Tensor]:
        return dict(self._parameters)

    def model_and_optimizer(self) -> dict[str, Tensor]:
        """The run's own tensors: writing into them changes the run. Initializes the optimizer's state if absent."""
        self._optimizer.init_state()
        return self.model() | {OPTIMIZER + name: tensor for name, tensor in self._optimizer.named_state()}

    def recent(self) -> dict[str, Tensor]:
        """The run's own tensors that an earlier checkpoint may lack."""
        return {} if self._grad_norms is None else {GRAD_NORMS: self._grad_norms}

    def streams(self, group: dist.ProcessGroup) -> Tensor:
        """The state of all streams after the steps returned so far. A collective over all ranks, on gloo."""
        state = self.empty_streams()
        if self._is_data_leader:
            state[list(self._loader.stream_ids)] = self._loader.state()
        dist.all_reduce(state, group=group)
        return state

    def empty_streams(self, width: int | None = None) -> Tensor:
        """A tensor of the shape of `streams`, to load into. width: of a state with fewer sources; None: of all."""
        width = self._loader.state().shape[1] if width is None else width
        return torch.zeros(self._loader.num_streams, width, dtype=torch.int64)

    def load_streams(self, state: Tensor) -> str:
        """Continue from `state`; returns the position in the data, for the log. Raises UserError if it does not fit."""
        self._loader.load_state(state)
        return self._loader.describe(state)

    def num_bytes(self, group: dist.ProcessGroup) -> int:
        """Approximate size of a checkpoint. A collective over all ranks, on gloo."""
        own = sum(tensor.numel() * tensor.element_size() for tensor in self.model_and_optimizer().values())
        total = torch.tensor(own if self._is_stage_leader else 0)
        dist.all_reduce(total, group=group)
        return int(total)


def first_not_finite(local: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a NaN or an infinity, or None. Syncs with the device once if all are finite."""
    floating = {name: tensor for name, tensor in local.items() if tensor.is_floating_point() and tensor.numel()}
    if not floating:
        return None
    # The sum is not finite if an element is not. It may also overflow, so suspects are checked by element.
    sums = torch.stack(
        [tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)) for tensor in floating.values()]
    )
    suspects = (name for name, total in zip(floating, sums.tolist(), strict=True) if not math.isfinite(total))
    return next((name for name in suspects if not floating[name].isfinite().all()), None)


class HostCopy:
    """Copies of tensors in reusable host buffers.

    pinned: use page-locked memory, to which an accelerator copies asynchronously.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: dict[str, Tensor] = {}

    def take(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors; the copies are complete on return and valid until the next call."""
        for name, tensor in local.items():
            if name not in self._buffers:
                self._buffers[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._pinned
                )
            self._buffers[name].copy_(tensor, non_blocking=self._pinned)
        if self._pinned:
            torch.accelerator.synchronize()
        return {name: self._buffers[name] for name in local}
