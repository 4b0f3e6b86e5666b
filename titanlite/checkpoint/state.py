"""The tensors of a checkpoint, under names that do not depend on the mesh."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.models.family import saved_tensors
from titanlite.optim.optimizer import NO_AVERAGE, GatedOptimizer, WeightAverage
from titanlite.parallel.digest import weights_digest
from titanlite.parallel.exact import ExactGradients
from titanlite.parallel.mesh import AXES, Mesh
from titanlite.runtime.errors import UserError
from titanlite.runtime.torch_internals import pin_in_place

MODEL, AVERAGE, OPTIMIZER, STREAMS = "model/", "ema/", "optimizer/", "data/streams"
GRAD_NORMS = "faults/grad_norms"
LARGEST = "exact/"


class StreamsState(Protocol):
    """The part of titanlite.data.loader.Loader that is saved; not imported, since its import chain is long."""

    num_streams: int
    stream_ids: Sequence[int]

    def state(self) -> Tensor: ...

    def load_state(self, state: Tensor, step: int) -> None: ...

    def describe(self, state: Tensor) -> str: ...


class RunState:
    """The state of one run on this rank.

    Named tensors, DTensors or plain: model/<parameter or persistent buffer>; ema/<parameter>, if the weights are
    averaged; optimizer/<parameter>/<state>; data/streams, int64 (num_streams, fields of SourceState of each source),
    replicated; faults/grad_norms, replicated, if spikes are detected, see SpikeGate; exact/<parameter>, replicated,
    with training.bit_equal, see ExactGradients. A tied parameter is saved once, under its first name, also if several
    pipeline stages have it. Learning rate and random numbers follow from step and seed, so they have no state.
    """

    def __init__(
        self,
        model_parts: Iterable[nn.Module],
        optimizer: GatedOptimizer,
        loader: StreamsState,
        mesh: Mesh,
        grad_norms: Tensor | None = None,
        average: WeightAverage = NO_AVERAGE,
        exact: ExactGradients | None = None,
    ) -> None:
        model_parts = list(model_parts)
        self._model = {MODEL + name: tensor for part in model_parts for name, tensor in saved_tensors(part).items()}
        parameters = {MODEL + name for part in model_parts for name, _ in part.named_parameters()}
        self.buffers = self._model.keys() - parameters
        """Names of the tensors of the model that other weights may lack: persistent buffers, which then begin at 0."""
        self._optimizer = optimizer
        self._loader = loader
        self._grad_norms = grad_norms
        self._average = average
        self._exact = exact
        self._is_data_leader = mesh.is_data_leader
        self._is_stage_leader = mesh.is_first(axis for axis in AXES if axis != "pp")

    def model(self) -> dict[str, Tensor]:
        return dict(self._model)

    def average(self) -> dict[str, Tensor]:
        """The average of the weights; empty without one."""
        return {AVERAGE + name: tensor for name, tensor in self._average.tensors.items()}

    def restart_average(self) -> None:
        """Start the average at the present weights."""
        self._average.restart()

    def model_and_optimizer(self) -> dict[str, Tensor]:
        """The run's own tensors: writing into them changes the run. Initializes the optimizer's state if absent."""
        self._optimizer.init_state()
        return self.model() | {OPTIMIZER + name: tensor for name, tensor in self._optimizer.named_state()}

    def recent(self) -> dict[str, Tensor]:
        """The run's own tensors that an earlier checkpoint may lack."""
        norms = {} if self._grad_norms is None else {GRAD_NORMS: self._grad_norms}
        largest = {} if self._exact is None else self._exact.largest
        return self.average() | norms | {LARGEST + name: tensor for name, tensor in largest.items()}

    def resume_exact(self) -> None:
        """Round the gradients by the magnitudes that were loaded."""
        if self._exact is not None:
            self._exact.resume()

    def digest(self) -> str:
        """The digest of the weights, with training.bit_equal; else "". A collective."""
        return "" if self._exact is None else weights_digest(self._exact)

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

    def load_streams(self, state: Tensor, step: int) -> str:
        """Continue from the `state` after a step; returns the position in the data, for the log. Raises UserError if it
        does not fit."""
        self._loader.load_state(state, step)
        return self._loader.describe(state)

    def num_bytes(self, group: dist.ProcessGroup) -> int:
        """Approximate size of a checkpoint. A collective over all ranks, on gloo."""
        tensors = self.model_and_optimizer() | self.average()
        own = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
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
    """Copies of tensors in one arena of host memory, which is allocated for the first copy and kept.

    pinned: page-lock the arena; a GPU then copies on a stream of its own, while it computes.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._arena: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def begin(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy the tensors, the same ones in each call; the copies are valid until the next call.

        They are complete after `wait`, and without `pinned` at once. The tensors must not change before `hold`. Raises
        UserError if the memory cannot be page-locked.
        """
        copies = self._places(local)
        if not self._pinned:
            for name, tensor in local.items():
                copies[name].copy_(tensor)
            return copies
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, tensor in local.items():
                copies[name].copy_(tensor, non_blocking=True)
            self._copied = self._stream.record_event()
        return copies

    def hold(self) -> None:
        """Let the GPU finish the copies before anything that is launched after this call; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def _places(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A place in the arena for each tensor, with its shape and dtype."""
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in local.values()]
        if self._arena is None:
            self._arena = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
            if self._pinned:
                # torch's own allocator of page-locked memory would round the size up to a power of two.
                _page_lock(self._arena)
        parts = self._arena.split(sizes)  # raises if these are not the tensors of the first call
        return {
            name: part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), part in zip(local.items(), parts, strict=True)
        }


_ALIGNMENT = 64


def _page_lock(arena: Tensor) -> None:
    """Page-lock the memory of `arena` until the process ends. Raises UserError."""
    try:
        pin_in_place(arena.data_ptr(), arena.nbytes)
    except RuntimeError as error:
        raise UserError(
            f"checkpoint.async_mode: cannot page-lock {arena.nbytes / 2**30:,.1f} GiB of host memory ({error}): free "
            'memory, or write checkpoint.async_mode = "async"'
        ) from None
