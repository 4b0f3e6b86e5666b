"""The exponential moving average of the weights (Polyak, Juditsky, "Acceleration of Stochastic Approximation by
Averaging", 1992, with constant decay)."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from titanlite.runtime.dtensors import local_part


class WeightAverage:
    """An average of each of this rank's parameters: average <- decay * average + (1 - decay) * weights.

    parameters: by name. tensors: the averages, by name, placed as the parameters, in `average_dtype`; none if the decay
    is 0. They start at the present weights.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self._decay = decay
        self._parameters = parameters if decay else {}
        self.tensors = {
            name: torch.empty_like(parameter, dtype=average_dtype(parameter))
            for name, parameter in self._parameters.items()
        }
        self.restart()

    def restart(self) -> None:
        """Start at the present weights."""
        for average, weights in self._local():
            average.copy_(weights)

    def update_if(self, ok: Tensor) -> None:
        """Include the present weights if `ok`, a bool scalar on the device; otherwise change nothing, bit for bit."""
        for average, weights in self._local():
            updated = weights.to(average.dtype, copy=True)
            torch.lerp(average, updated, 1 - self._decay, out=updated)
            torch.where(ok, updated, average, out=average)

    def _local(self) -> Iterable[tuple[Tensor, Tensor]]:
        """This rank's shards of (average, weights)."""
        for name, parameter in self._parameters.items():
            yield local_part(self.tensors[name]), local_part(parameter)


NO_AVERAGE = WeightAverage({}, 0.0)


def average_dtype(parameter: Tensor) -> torch.dtype:
    """At least float32: an update changes the average by a fraction 1 - decay, which bfloat16 would round away."""
    return torch.promote_types(parameter.dtype, torch.float32)


def average_bytes(decay: float, shards: Iterable[Tensor]) -> tuple[int, int]:
    """Bytes of the averages of these shards, and temporary bytes of an update: of one average at a time."""
    sizes = [shard.numel() * average_dtype(shard).itemsize for shard in shards] if decay else []
    return sum(sizes), max(sizes, default=0)
