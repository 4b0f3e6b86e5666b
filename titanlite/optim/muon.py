"""Muon: momentum, orthogonalized. Jordan et al., "Muon" (2024); scale and decay of Liu et al., "Muon is Scalable for LLM
Training" (2025).

Momentum is that of each rank's shards; matrices are orthogonalized by their owners (titanlite/optim/owners.py).
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from titanlite.optim.newton_schulz import flops, orthogonalize
from titanlite.optim.optimizer import OptimizerConfig, OptimizerKind
from titanlite.optim.owners import Owners
from titanlite.parallel.mesh import Sharing
from titanlite.precision import DTYPES
from titanlite.runtime.dtensors import local_part

Scale = Literal["rms", "spectral"]


def scale_of(scale: Scale, rows: int, columns: int) -> float:
    """The factor of an update. rms: 0.2 sqrt(max(rows, columns)), so that its root mean square is that of a usual AdamW
    update, 0.2 (Liu et al., section 2.2); spectral: sqrt(max(1, rows / columns)) (Jordan et al.)."""
    return 0.2 * max(rows, columns) ** 0.5 if scale == "rms" else max(1.0, rows / columns) ** 0.5


class Muon(torch.optim.Optimizer):
    """A torch optimizer of matrices, or stacks of them, whose step is a collective of `sharing`.

    `found_inf`, a float scalar on the device: other than 0 skips the update, as for torch's fused optimizers. State:
    momentum, of the parameter's shape and dtype. Nothing is read from the device.
    """

    found_inf: Tensor

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        steps: int,
        coefficients: tuple[float, float, float],
        dtype: torch.dtype | None,
        scale: Scale,
        sharing: Sharing,
    ) -> None:
        """groups: with weight_decay. dtype: of the orthogonalization and its messages; None: that of the parameters, at
        least float32."""
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})  # type: ignore[arg-type]
        self._momentum, self._nesterov, self._scale, self._dtype = momentum, nesterov, scale, dtype
        self._function = partial(orthogonalize, steps=steps, coefficients=coefficients)
        self._owners = Owners(
            [each for group in self.param_groups for each in group["params"]], sharing, partial(flops, steps=steps)
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters, unless found_inf."""
        ok = self.found_inf == 0
        directions = []
        for parameter, _ in self._each():
            gradient, state = local_part(parameter.grad), self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            before = local_part(state["momentum"])
            after = before.lerp(gradient, 1 - self._momentum)
            direction = gradient.lerp(after, self._momentum) if self._nesterov else after
            before.copy_(torch.where(ok, after, before))
            directions.append(direction.to(self._dtype or torch.promote_types(direction.dtype, torch.float32)))
        results = self._owners.apply(directions, self._function)
        for (parameter, group), result in zip(self._each(), results, strict=True):
            weights = local_part(parameter)
            factor = group["lr"] * scale_of(self._scale, *parameter.shape[-2:])
            updated = (weights * (1 - group["lr"] * group["weight_decay"])).add_(
                result.to(weights.dtype), alpha=-factor
            )
            weights.copy_(torch.where(ok, updated, weights))

    def _each(self) -> Iterable[tuple[Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            yield from ((parameter, group) for parameter in group["params"])


def build(
    groups: list[dict[str, Any]],
    section: OptimizerConfig,
    implementation: str,  # noqa: ARG001
    device: torch.device,  # noqa: ARG001
    sharing: Sharing,
) -> Muon:
    auto = section.newton_schulz_dtype == "auto"
    return Muon(
        groups,
        lr=section.lr,
        momentum=section.momentum,
        nesterov=section.nesterov,
        steps=section.newton_schulz_steps,
        coefficients=section.newton_schulz_coefficients,
        dtype=None if auto else DTYPES[section.newton_schulz_dtype],
        scale=section.muon_scale,
        sharing=sharing,
    )


MUON = OptimizerKind(build, has_fused=False, always_skips=True)
