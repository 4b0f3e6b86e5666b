"""Spikes of the gradient norm, found on the device by all ranks alike."""

import torch
from torch import Tensor

WINDOW = 128
MIN_NORMS = 32
"""Known norms without which no step is a spike."""


class SpikeGate:
    """Compares each global gradient norm with the median of those of the last WINDOW steps. Never reads the device.

    factor: a norm above `factor` times the median is a spike. skips: whether such a step is skipped. norms: float64
    (WINDOW,), by step modulo WINDOW, -1 where unknown; saved in checkpoints, which have no NaN. The same on all ranks.
    """

    def __init__(self, factor: float, device: torch.device, *, skips: bool) -> None:
        self.factor = factor
        self.skips = skips
        self.norms = torch.full((WINDOW,), -1.0, dtype=torch.float64, device=device)

    def ratio(self, step: int, norm: Tensor) -> Tensor:
        """`norm` of this step relative to the median of earlier ones, 0 without a verdict; then keeps `norm`.

        float64 scalar. A norm that is 0 or not finite is not kept.
        """
        known = self.norms >= 0
        median = self.norms.where(known, torch.nan).nanmedian()
        ratio = torch.where((known.sum() >= MIN_NORMS) & (median > 0) & norm.isfinite(), norm / median, 0.0)
        self.norms[step % WINDOW] = torch.where(norm.isfinite() & (norm > 0), norm.to(torch.float64), -1.0)
        return ratio
