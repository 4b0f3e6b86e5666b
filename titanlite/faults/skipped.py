"""Skipped steps and spikes: their numbers stay on the device, and are explained on the host at log lines."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from titanlite.batch import StepStats
from titanlite.data.loader import Loader
from titanlite.data.streams import Origin
from titanlite.faults.config import FaultsConfig
from titanlite.faults.record import NotedStep, StepRecorder
from titanlite.parallel.clip import WINDOW
from titanlite.parallel.exact import HEAD_ROOM
from titanlite.ranks.agreement import RanksError, run_on_all_ranks, warn_on_rank_0

MAX_STEPS = 1000
"""Steps that are kept without a check; each takes 8 bytes per parameter tensor and 4 per sequence of this rank."""

MAX_SAMPLES = 5
"""Samples that a message lists; it counts the others."""


class Cause(NamedTuple):
    """One rank's part of the explanation of a skipped step.

    parameter: this rank's first gradient that is not finite, by stage and position in it, and its name; None if all are
    finite. samples: this rank's sequences whose loss is not finite, if the rank counts their losses.
    """

    parameter: tuple[int, int, str] | None
    samples: list[str]


class SkippedSteps:
    """Explains skipped steps at log lines, and stops a run that skips too many.

    stages: pipeline stage of each of this rank's model_parts. group: all ranks, with gloo. counts_loss: whether this
    rank counts the loss of its rows. recorder: records every step. bit_equal: with training.bit_equal.
    """

    def __init__(
        self,
        section: FaultsConfig,
        model_parts: Sequence[nn.Module],
        stages: Sequence[int],
        loader: Loader,
        group: dist.ProcessGroup,
        recorder: StepRecorder,
        *,
        counts_loss: bool,
        bit_equal: bool = False,
    ) -> None:
        self._section = section
        self._overflow = "the backward pass overflowed"
        if bit_equal:
            self._overflow += f", or a gradient exceeds {2**HEAD_ROOM:,} times the largest of its row so far"
        self._recorder = recorder
        places = {
            name: (stage, position, name)
            for stage, part in zip(stages, model_parts, strict=True)
            for position, (name, _) in enumerate(part.named_parameters())
        }
        self._parameters = [*places.values()]
        self._loader = loader
        self._group = group
        self._counts_loss = counts_loss
        self._steps: list[NotedStep] = []
        self._in_a_row = 0

    def note(self, step: int, stats: StepStats) -> None:
        """Keep a step, whose sequences are those that the loader has returned last. Waits for the device only in
        `check`, which every MAX_STEPS-th call calls. Raises as `check`."""
        loader = self._loader
        self._steps.append(NotedStep(step, stats, loader.first_sequence, loader.sequences, loader.origin_values))
        if len(self._steps) == MAX_STEPS:
            self.check()

    def check(self) -> None:
        """Record the steps since the last call; log or raise if some were skipped or spikes. A collective.

        Waits for the device. Raises RanksError.
        """
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        self._recorder.write(steps)  # first: the record of a step that stops the run is needed most
        ratios = torch.stack([step.stats.spike_ratio for step in steps])
        flags = torch.stack([step.stats.skipped for step in steps]).to(ratios.dtype)
        values = torch.stack([flags, ratios]).T.tolist()  # the same on all ranks
        longest = 0
        for skipped, _ in values:
            self._in_a_row = self._in_a_row + 1 if skipped else 0
            longest = max(longest, self._in_a_row)
        factor = self._section.spike_factor or torch.inf
        spikes = [(step, ratio) for step, (_, ratio) in zip(steps, values, strict=True) if ratio > factor]
        broken = [step for step, (skipped, ratio) in zip(steps, values, strict=True) if skipped and ratio <= factor]
        lines = []
        if broken:
            step = next((step for step in broken if step.stats.num_valid), broken[0])
            causes = run_on_all_ranks(lambda: self._cause(step), self._group)
            lines += _explain(step.number, int(step.stats.num_valid), causes, len(broken), self._overflow)
            if step.stats.num_valid:
                lines.append(self._hint(step))
        if spikes:
            spike, ratio = spikes[0]
            found = run_on_all_ranks(lambda: self._largest_losses(spike), self._group)
            total = sum(losses for losses, _ in found)
            samples = [
                (loss / total, f"rank {rank}, {text}") for rank, (_, rows) in enumerate(found) for loss, text in rows
            ]
            norm = float(spike.stats.grad_norm)
            lines += _explain_spike(spike.number, norm, ratio, self._section, sorted(samples)[::-1], len(spikes))
            lines.append(self._hint(spike))
        unchanged = "skipped steps did not change the weights"
        if longest > self._section.max_skipped_steps:
            limit = f"faults.max_skipped_steps = {self._section.max_skipped_steps}"
            raise RanksError(*lines, f"{limit}: {longest} steps in a row were skipped; {unchanged}")
        if lines:
            warn_on_rank_0([*lines, "  training continues"], self._group)

    def _hint(self, step: NotedStep) -> str:
        """The command that computes the step again."""
        return f"  to compute it again: {self._recorder.replay_command} {step.number}"

    def _place(self, step: NotedStep, row: int) -> str:
        return f"sequence {step.sequences[row]}, {self._loader.locate(Origin(*step.origins[row].tolist()))}"

    def _largest_losses(self, step: NotedStep) -> tuple[float, list[tuple[float, str]]]:
        """The sum of this rank's row losses, and its rows with the largest ones: loss, and where it is."""
        losses = step.stats.row_losses.tolist() if self._counts_loss else []
        rows = sorted(range(len(losses)), key=lambda row: -losses[row])[:MAX_SAMPLES]
        return sum(losses), [(losses[row], self._place(step, row)) for row in rows]

    def _cause(self, step: NotedStep) -> Cause:
        norms = step.stats.shard_norms.isfinite().tolist()
        rows = step.stats.row_losses.isfinite().tolist() if self._counts_loss else []
        samples = [self._place(step, row) for row, is_finite in enumerate(rows) if not is_finite]
        return Cause(self._parameters[norms.index(False)] if False in norms else None, samples)


def _explain_spike(
    step: int, norm: float, ratio: float, section: FaultsConfig, samples: Sequence[tuple[float, str]], count: int
) -> list[str]:
    """The lines about `count` spikes, the first of them `step`. samples: largest shares of the loss, and places."""
    lines = [
        f"step {step} is a spike{' and was skipped' if section.on_spike == 'skip' else ''}: gradient norm {norm:.4g}, "
        f"{ratio:.6g} times the median of the last {WINDOW} steps (faults.spike_factor = {section.spike_factor:g})"
    ]
    lines += [f"  {share:.1%} of the loss: {text}" for share, text in samples[:MAX_SAMPLES]]
    lines += [f"  {count} steps were spikes since the last log line"] if count > 1 else []
    return lines


def _explain(step: int, num_valid: int, causes: Sequence[Cause], count: int, overflow: str) -> list[str]:
    """The lines about `count` skipped steps, the first of them `step`. causes: by rank. overflow: what a gradient
    that is not finite means if all losses are finite."""
    if not num_valid:
        lines = [f"step {step} was skipped: no token of its global batch counts in the loss"]
    else:
        lines = [f"step {step} was skipped: its loss or its gradient norm is not finite"]
        parameters = [(each.parameter, rank) for rank, each in enumerate(causes) if each.parameter is not None]
        if parameters:
            (_, _, name), rank = min(parameters)
            lines.append(f"  first gradient that is not finite: {name}, on rank {rank}")
        samples = [f"rank {rank}, {sample}" for rank, each in enumerate(causes) for sample in each.samples]
        lines += [f"  loss that is not finite: {sample}" for sample in samples[:MAX_SAMPLES]]
        lines += [f"  and {len(samples) - MAX_SAMPLES} more"] if len(samples) > MAX_SAMPLES else []
        if not samples:
            lines.append(f"  the loss of every sequence is finite: {overflow}")
    if count > 1:
        lines.append(f"  {count} steps were skipped since the last log line")
    return lines
