"""What the experts did over the mesh since the last log line."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.metrics.records import ExpertsRecord
from titanlite.models.experts import ROUTER_SUMS, mixtures_of
from titanlite.models.family import LanguageModel
from titanlite.models.watch import PARTS
from titanlite.runtime.logging import log

MOST_RECORDS = 200
"""Records of loads in a run: one of a large model takes 50 KB."""
MIN_EXPECTED = 100
"""Choices per expert in an interval, on average, from which an expert without any is reported."""
SHOWN = 8
"""Experts that a warning names."""


class ExpertLoads:
    """Sums of the blocks with experts. All ranks of the default group must flush at the same steps.

    records: whether `flush` also returns records, at most about MOST_RECORDS in `total_steps`.
    """

    def __init__(
        self,
        model_parts: Sequence[LanguageModel],
        device: torch.device,
        *,
        counts: bool,
        num_blocks: int,
        num_dense: int = 0,
        n_experts: int,
        n_active: int,
        first_step: int,
        total_steps: int,
    ) -> None:
        """counts: whether this is the first of the ranks that route the same positions. num_blocks, n_experts: of the
        full model; 1 expert if it has no mixtures of experts. num_dense: first blocks without experts. n_active:
        experts of a position. first_step: of this start."""
        self._mixtures = mixtures_of(model_parts)
        self._counts = counts
        self._shape = num_blocks, n_experts
        self._num_dense = num_dense
        self._n_active = n_active
        self._device = device
        self._every = total_steps // MOST_RECORDS
        self._recorded: int | None = None
        self._step = first_step - 1
        self._dead: set[tuple[int, int]] = set()

    def totals(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of all ranks since the last call: positions by expert, int64 (num_blocks, n_experts); ROUTER_SUMS, float64
        (num_blocks, len(ROUTER_SUMS)); the largest and the smallest bias, negated, float64 (num_blocks, 2). Two
        collectives; no host read."""
        blocks, n_experts = self._shape
        sums = torch.zeros(blocks, n_experts + PARTS * len(ROUTER_SUMS), dtype=torch.float64, device=self._device)
        biases = torch.full((blocks, 2), -math.inf, dtype=torch.float64, device=self._device)
        for mixture in self._mixtures:
            block, found = mixture.placement.block, mixture.take_totals()
            if found is not None and self._counts:
                sums[block] = torch.cat((found[0].to(torch.float64), found[1].flatten()))
            if mixture.bias is not None:
                biases[block] = torch.stack((mixture.bias.amax(), -mixture.bias.amin()))
        dist.all_reduce(sums)  # the loads stay exact: they are far below 2^53
        dist.all_reduce(biases, dist.ReduceOp.MAX)
        router_sums = sums[:, n_experts:].view(blocks, PARTS, -1).sum(1)
        return sums[:, :n_experts].to(torch.int64), router_sums, biases

    def flush(self, step: int) -> tuple[Mapping[str, float], ExpertsRecord | None]:
        """The columns of Record.experts, and the record of the interval if one is due; nothing without experts. A
        collective that waits for the device. Rank 0 warns of experts that no position chose."""
        if self._shape[1] == 1:
            return {}, None
        loads, sums, biases = self.totals()
        choices = loads.sum(dim=1).clamp(min=1)
        relative = loads / choices.unsqueeze(1) * self._shape[1]
        balance_loss, rows, z_loss, entropy = sums.unbind(dim=1)
        positions = choices / self._n_active
        by_block = torch.stack(
            (
                relative.amax(dim=1),
                relative.amin(dim=1),
                entropy / positions / math.log(self._shape[1]),
                biases.sum(dim=1),
                balance_loss / rows.clamp(min=1),
                z_loss / positions,
            )
        )
        *columns, balance_losses, z_losses = by_block[:, self._num_dense :].tolist()
        names = ["max_load", "min_load", "router_entropy", *(["bias_range"] if math.isfinite(columns[3][0]) else [])]
        found = {"balance_loss": mean(balance_losses), "z_loss": mean(z_losses)} | {
            f"{name}/{block}": value
            for name, values in zip(names, columns, strict=False)
            for block, value in enumerate(values, self._num_dense)
        }
        interval, self._step = step - self._step, step
        if dist.get_rank() != 0:
            return found, None
        self._warn(loads.tolist(), interval)
        if self._recorded is not None and step - self._recorded < self._every:
            return found, None
        self._recorded = step
        return found, ExpertsRecord(step, loads.tolist())

    def _warn(self, loads: list[list[int]], interval: int) -> None:
        dead = {
            (block, expert)
            for block, counts in enumerate(loads)
            if sum(counts) >= MIN_EXPECTED * len(counts)
            for expert, count in enumerate(counts)
            if count == 0
        }
        for block in sorted({block for block, _ in dead - self._dead}):
            experts = [expert for of_block, expert in sorted(dead) if of_block == block]
            log.warning(
                "No position chose %s of block %d in the last %d steps: they do not learn. A larger model.balance_loss "
                "or model.bias_rate balances the experts",
                *(_listed(experts), block, interval),
            )
        self._dead = dead


def _listed(experts: list[int]) -> str:
    shown = ", ".join(map(str, experts[:SHOWN]))
    more = f" and {len(experts) - SHOWN} more" if len(experts) > SHOWN else ""
    return f"expert{'s' if len(experts) > 1 else ''} {shown}{more}"
