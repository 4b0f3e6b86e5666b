"""Loads of experts over the mesh, since the last log line."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.models.experts import MixtureOfExperts
from titanlite.models.family import LanguageModel


class ExpertLoads:
    """Loads of the blocks with experts. All ranks of the default group must flush at the same steps."""

    def __init__(
        self,
        model_parts: Sequence[LanguageModel],
        device: torch.device,
        *,
        counts: bool,
        num_blocks: int,
        n_experts: int,
    ) -> None:
        """counts: whether this is the first of the ranks that route the same positions. num_blocks, n_experts: of the
        full model; 1 expert if it has no mixtures of experts."""
        self._mixtures = [each for part in model_parts for each in part.modules() if isinstance(each, MixtureOfExperts)]
        self._counts = counts
        self._shape = num_blocks, n_experts
        self._device = device

    def totals(self) -> Tensor:
        """Positions by expert since the last call, int64 (num_blocks, n_experts). A collective; no host read."""
        totals = torch.zeros(self._shape, dtype=torch.int64, device=self._device)
        for mixture in self._mixtures:
            if mixture.load is not None and self._counts:
                totals[mixture.block] = mixture.load
            mixture.load = None
        dist.all_reduce(totals)
        return totals

    def flush(self) -> Mapping[str, float]:
        """max_load/BLOCK and min_load/BLOCK: the positions of the most and of the least loaded expert relative to the
        mean of the block's experts; nothing without experts. A collective that waits for the device."""
        if self._shape[1] == 1:
            return {}
        totals = self.totals()
        relative = totals / totals.sum(dim=1, keepdim=True).clamp(min=1) * self._shape[1]
        most, least = torch.stack((relative.amax(dim=1), relative.amin(dim=1))).tolist()
        return {f"max_load/{block}": load for block, load in enumerate(most)} | {
            f"min_load/{block}": load for block, load in enumerate(least)
        }
