"""The size of each optimizer step and the mixture of its sources, by training stage: pure functions of the step."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchStage:
    """Steps of one size, from `from_step` (steps count from 1) to the step before the next stage.

    local_batch_size: rows of a batch of a data rank. weights: of the sources, in their order; (): those of their
    tables.
    """

    from_step: int
    global_batch_size: int
    seq_len: int
    local_batch_size: int = 1
    weights: tuple[float, ...] = ()

    @property
    def tokens(self) -> int:
        """Input positions of a step."""
        return self.global_batch_size * self.seq_len


ONE_STAGE = (BatchStage(1, 1, 1),)
"""Steps of equal size."""


def stage_index(stages: Sequence[BatchStage], step: int) -> int:
    """The stage of a step, from 0."""
    return max(bisect_right(stages, step, key=lambda stage: stage.from_step) - 1, 0)


def tokens_until(stages: Sequence[BatchStage], step: int) -> int:
    """Input positions of the steps 1 to `step`."""
    return sum(count * stage.tokens for count, stage in zip(steps_of_stages(stages, step), stages, strict=True))


def steps_until(stages: Sequence[BatchStage], tokens: int) -> int:
    """The fewest steps, from the first one, that have so many input positions."""
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        before = stage.from_step - 1
        step = before + max(0, -(-(tokens - tokens_until(stages, before)) // stage.tokens))
        if following is None or step < following.from_step:
            return step
    raise AssertionError("there is a first stage")


def steps_of_stages(stages: Sequence[BatchStage], steps: int) -> list[int]:
    """How many of the first `steps` are of each stage."""
    begins = [min(stage.from_step - 1, steps) for stage in stages]
    return [end - begin for begin, end in zip(begins, [*begins[1:], steps], strict=True)]
