"""Numbers of one's own: code of a model, a loss or a statistic notes values, and log lines have their means."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.runtime.errors import UserError
from titanlite.runtime.torch_internals import is_dtensor, is_in_backward, local_part

Statistic = Callable[[Mapping[str, nn.Parameter]], AbstractContextManager[None]]
"""Called with the parameters of a rank by name, whose gradients are clipped: a context around their update."""
STATISTICS: dict[str, Statistic] = {}
"""Those of plugins, for metrics.statistics."""

_GRIDS = (32, 0, -32, -64, -96)
PARTS = len(_GRIDS)
"""Parts of a sum, see parts_of."""

_ORDER = torch.zeros(())
_noting: "Watched | None" = None
"""What collects the values now: inside a training step."""


def watch(
    name: str,
    values: Tensor,
    labels: Tensor | None = None,
    *,
    index: int | None = None,
    per: Tensor | None = None,
    root: bool = False,
) -> None:
    """Note values. The rows of metrics.jsonl have their mean since the last one, as watch/NAME.

    values: in a model one per position, (batch, seq_len): those of this rank, of entire rows where attention sees these
    ("heads"), or of the rank's part of a "gather" module. In a loss one per token, with its `labels`. In a Statistic
    any shape. The mean is over the positions whose label is valid, of all ranks and microbatches, without skipped
    steps. Ranks of tp and cp that have the same positions, for some of the heads for example, count equally.
    index: of a layer: watch/NAME/INDEX. An f-string would give each layer a compiled block of its own.
    per: the mean is the sum of the values by the sum of `per`, of the same shape. root: the square root of the mean.

    Does nothing outside of a training step, and in recomputations. Never waits for the device. Raises UserError for
    another shape.
    """
    if not isinstance(values, Tensor):
        raise UserError(f'watch("{name}"): takes a tensor of values, not {type(values).__name__}')
    if values.is_complex() or (index is not None and index < 0):
        raise UserError(f'watch("{name}"): takes real values, and an index of at least 0')
    if is_dtensor(values) and any(placement.is_partial() for placement in values.placements):
        raise UserError(f'watch("{name}"): takes values of elements, not the sum or norm of shards')
    key = -1 if index is None else index
    _note(name, key, local_part(values), labels, None if per is None else local_part(per), root, _ORDER)


@torch.library.custom_op("titanlite::watch", mutates_args=("order",))
def _note(
    name: str, index: int, values: Tensor, labels: Tensor | None, per: Tensor | None, root: bool, order: Tensor
) -> None:
    """An operation, so that compiled blocks call it when they run. `order`: they drop operations that write nothing."""
    del order
    if _noting is not None and not is_in_backward():
        _noting.add(name if index < 0 else f"{name}/{index}", values, labels, per, root)


class Watched:
    """The sums of this rank since the last log line.

    model_parts: see ModelOnMesh. row_group: the ranks that have the other positions of the same rows, if attention sees
    entire rows (context parallelism by heads). sequence: rank and degree of the axis tp.
    """

    def __init__(
        self, model_parts: Iterable[nn.Module], row_group: dist.ProcessGroup | None, sequence: tuple[int, int]
    ) -> None:
        self._row_group = row_group
        self._sequence = sequence
        self._labels: Tensor | None = None
        self._of_step: dict[str, list[Tensor]] = {}
        self._totals: dict[str, Tensor] = {}
        self._roots: set[str] = set()
        for part in model_parts:
            part.register_forward_pre_hook(self._note_labels, with_kwargs=True)

    def _note_labels(self, part: nn.Module, args: Any, keys: Mapping[str, Any]) -> None:
        del part, args
        self._labels = keys.get("labels")

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Inside, `watch` adds values to these sums."""
        global _noting
        _noting, self._labels = self, None
        try:
            yield
        finally:
            _noting = None

    def add(self, name: str, values: Tensor, labels: Tensor | None, per: Tensor | None, root: bool) -> None:
        """See `watch`."""
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*", name) is None:
            raise UserError(f'watch("{name}"): a name has letters, digits, _, -, . and / between them')
        if per is not None and per.shape != values.shape:
            raise UserError(f'watch("{name}"): per is {tuple(per.shape)}, and the values {tuple(values.shape)}')
        per = torch.ones_like(values) if per is None else per
        counted = self._labels_of(name, values, labels)
        both = torch.stack((values, per)).to(torch.float64)
        sums = (both if counted is None else both.where(counted >= 0, 0.0)).reshape(2, -1).sum(1)
        self._of_step.setdefault(name, []).append(sums)
        if root:
            self._roots.add(name)

    def _labels_of(self, name: str, values: Tensor, given: Tensor | None) -> Tensor | None:
        """The labels of the positions of the values; None: all values count."""
        labels = self._labels if given is None else given
        if labels is None or labels.shape == values.shape:
            return labels
        rank, tp = self._sequence
        if given is None and values.shape == (len(labels), labels.shape[1] // tp):
            return labels.chunk(tp, dim=1)[rank]
        cp = 1 if self._row_group is None else self._row_group.size()
        if given is None and values.shape == (len(labels), labels.shape[1] * cp):
            parts = [torch.empty_like(labels) for _ in range(cp)]
            dist.all_gather(parts, labels.contiguous(), group=self._row_group)
            return torch.cat(parts, dim=1)
        raise UserError(
            f'watch("{name}"): values of shape {tuple(values.shape)}, and there is one per position: '
            f"{tuple(labels.shape)}. Take the mean over other dimensions; values.expand(…) of a single number; in a "
            f"loss, pass its labels"
        )

    def end_step(self, ok: Tensor) -> None:
        """Add the sums of the step. ok: bool scalar; otherwise the step was skipped, and its values are dropped."""
        for name, found in zip(self._of_step, summed_parts([*self._of_step.values()]), strict=True):
            sums = torch.where(ok, found, 0.0)
            self._totals[name] = self._totals[name] + sums if name in self._totals else sums
        self._of_step.clear()

    def __len__(self) -> int:
        return len(self._totals)

    def take(self) -> dict[str, tuple[list[float], list[float], bool]]:
        """Parts of the sum of the values and of `per`, see parts_of, and root, by name, of this rank since the last
        call. Waits for the device."""
        names, sums = [*self._totals], [*self._totals.values()]
        self._totals = {}
        both = torch.stack(sums).mT.tolist() if sums else []
        return {name: (values, per, name in self._roots) for name, (values, per) in zip(names, both, strict=True)}


def summed_parts(noted: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The sum of the parts of each list, float64 (PARTS, *shape), see parts_of. The tensors have one shape."""
    if not noted:
        return []
    parts = parts_of(torch.stack([values for each in noted for values in each]))  # at once, for fewer operations
    return [of_each.sum(1) for of_each in parts.split([len(each) for each in noted], dim=1)]


def parts_of(values: Tensor) -> Tensor:
    """Split values into parts, float64 (PARTS, *shape): multiples of 2^32, 1, 2^-32, 2^-64 and 2^-96.

    Each kind of part adds up exactly, for up to 2^20 values below 2^64. The values are the sums of their parts, up to
    2^-97.
    """
    parts, rest = [], values.to(torch.float64)
    for exponent in _GRIDS:
        shift = 1.5 * 2.0 ** (52 + exponent)
        parts.append((rest + shift) - shift)
        rest = rest - parts[-1]
    return torch.stack(parts)
