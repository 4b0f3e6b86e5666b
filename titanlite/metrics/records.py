"""The records of a run: what loggers take, and the rows of their files."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from titanlite.metrics.config import EXPERTS_FILE, METRICS_FILE, SAMPLES_FILE
from titanlite.metrics.scores import SetTotals, TaskScores, sum_of

PREFIX = "validation/"
"""Prefix of all keys of these rows except step."""
TASK_PREFIX = f"{PREFIX}task/"
"""Prefix of the keys of tasks: validation/task/NAME/acc."""


WATCH_PREFIX = "watch/"
"""Prefix of the keys of values that code of a plugin notes."""


class LogRecord(Protocol):
    """What all kinds of records have. A new kind is one more class here; loggers leave out the kinds they do not know.

    FILE: the file of the dump folder that has its rows.
    """

    FILE: ClassVar[str]

    @property
    def step(self) -> int: ...

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The lines of FILE, in order."""


@dataclass(frozen=True)
class Record:
    """One row of metrics.jsonl, over the entire mesh. Field names are the keys there and the tags in TensorBoard."""

    FILE: ClassVar = METRICS_FILE

    step: int
    """Optimizer step, from 1. loss, grad_norm, lr and num_valid are those of this step, not of the interval."""
    loss: float
    """Mean loss (loss.name) per valid token, without its terms."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate of this step's update."""
    num_valid: int
    """Tokens of this step's global batch that count in the loss."""
    tokens_seen: int
    """Input positions of all steps so far, whether valid or not."""
    tokens_per_second: float
    """Input positions per second of the entire mesh, over the interval since the last row."""
    step_time_s: float
    """Mean seconds per step over the interval."""
    data_time_s: float
    """Mean seconds per step that the trainer waited for data over the interval, maximum over the ranks."""
    memory_gib: float
    """Peak memory so far, maximum over the ranks: reserved on the device (CUDA), resident (CPU)."""
    skipped_steps: int
    """Steps so far whose update was skipped (no valid token, or a gradient norm that is not finite)."""
    bad_rows: int
    """Rows so far that were skipped as bad, over all data ranks."""
    interval_loss: float | None = None
    """Mean loss per valid token since the last row, without skipped steps; None if all were skipped."""
    max_score: float | None = None
    """With optimizer.qk_clip: the largest attention score of this step, of all layers, heads and rows."""
    mfu: float | None = None
    """Model FLOP/s as a fraction of the devices' peak; None if the peak is unknown."""
    digest: str | None = None
    """With training.bit_equal: the digest of the weights after this step, the same on all meshes."""
    computed_by: str | None = None
    """With training.bit_equal: six digits of torch's version, the device and what else decides bits; at each resume
    that changes them, those of the following steps are added."""
    slowest_rank: int | None = None
    """The rank with the highest slowest_ratio; None, like the next two, if no rank has peers in its pipeline stage."""
    slowest_host: str | None = None
    """Host of the slowest rank."""
    slowest_ratio: float | None = None
    """Compute time of the slowest rank by the median of its pipeline stage, each the median over the interval. See
    ComputeTime."""
    epochs: Mapping[str, float] = field(default_factory=dict)
    """epoch/NAME: by source, how often it has been read so far."""
    too_long: Mapping[str, float] = field(default_factory=dict)
    """too_long/NAME: by source of conversations, those so far that were longer than a sequence, in its first epoch."""
    by_source: Mapping[str, float] = field(default_factory=dict)
    """By source, if there are several. loss/NAME: mean loss per valid token of the source since the last row, without
    skipped steps; absent if the source had no valid token. share/NAME: the source's fraction of all sequences
    so far with a valid token."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """term/NAME: by term of the loss, its part of this step's objective; `loss` does not contain it."""
    watched: Mapping[str, float] = field(default_factory=dict)
    """watch/NAME: means of what code of a plugin has noted since the last row, see `titanlite.watch`."""
    experts: Mapping[str, float] = field(default_factory=dict)
    """If the model has experts, since the last row. balance_loss, z_loss: without their coefficients, means over the
    blocks; `loss` does not contain them. By transformer block: max_load/BLOCK, min_load/BLOCK, positions of the most
    and of the least loaded expert relative to the mean of the block's experts; router_entropy/BLOCK, of the
    probabilities of a position, 1 if all experts are equally probable; bias_range/BLOCK, the largest minus the smallest
    bias, if there are biases."""
    goodput: Mapping[str, float] = field(default_factory=dict)
    """goodput: share of the wall time since the run's first start that was spent in steps. time_s/CAUSE: the seconds in
    steps, and those lost by other causes, see Goodput. unix_time: seconds since 1970 at this row."""

    def row(self) -> dict[str, int | float | str]:
        """Key -> value in the order of the fields, without unknown values."""
        row = {key: value for key, value in asdict(self).items() if value is not None}
        groups = ("epochs", "too_long", "by_source", "terms", "watched", "experts", "goodput")
        own = {key: value for name in groups for key, value in row.pop(name).items()}
        return {**row, **own}

    def rows(self) -> list[dict[str, int | float | str]]:
        return [self.row()]


@dataclass(frozen=True)
class ValidationRecord:
    """One row of metrics.jsonl: the model after `step`, on each source of the validation data and each task.

    time_s: duration of the validation. tokens_seen: see Record; not in the row. tasks: by name.
    """

    FILE: ClassVar = METRICS_FILE

    step: int
    by_source: Mapping[str, SetTotals]
    time_s: float
    tokens_seen: int
    tasks: Mapping[str, TaskScores] = field(default_factory=dict)

    def row(self) -> dict[str, int | float]:
        """validation/loss, … and, if there are several sources, validation/loss/NAME, …; validation/too_long/NAME of
        conversations; validation/task/NAME/acc, …; without unknown values."""
        total = sum_of(self.by_source.values())
        row: dict[str, int | float] = {"step": self.step}
        row |= {f"{PREFIX}{key}": value for key, value in total.numbers().items()}
        row |= {f"{PREFIX}num_valid": total.num_valid} if self.by_source else {}
        row[f"{PREFIX}time_s"] = self.time_s
        for name, totals in self.by_source.items() if len(self.by_source) > 1 else ():
            row |= {f"{PREFIX}{key}/{name}": value for key, value in totals.numbers().items()}
        for name, totals in self.by_source.items():
            row |= {} if totals.too_long is None else {f"{PREFIX}too_long/{name}": totals.too_long}
        for name, scores in self.tasks.items():
            row |= {f"{TASK_PREFIX}{name}/{key}": value for key, value in scores.numbers.items()}
        return row

    def rows(self) -> list[dict[str, int | float]]:
        return [self.row()]


Count = Annotated[int, Field(ge=0, lt=2**63)]


class SampleRow(TypedDict):
    """One line of samples.jsonl."""

    step: Count
    prompt: str
    text: str


@dataclass(frozen=True)
class SamplesRecord:
    """Texts of the model after `step`: pairs of a prompt and its continuation. A row per prompt."""

    FILE: ClassVar = SAMPLES_FILE

    step: int
    texts: Sequence[tuple[str, str]]

    def rows(self) -> list[SampleRow]:
        return [SampleRow(step=self.step, prompt=prompt, text=text) for prompt, text in self.texts]


def _rectangular(rows: list[list[int]]) -> list[list[int]]:
    if not rows or not rows[0] or len({*map(len, rows)}) > 1:
        raise ValueError("not as many experts in each block")
    return rows


class ExpertsRow(TypedDict):
    """One line of experts.jsonl. loads: positions by block and expert since the previous log line."""

    step: Count
    loads: Annotated[list[list[Count]], AfterValidator(_rectangular)]


@dataclass(frozen=True)
class ExpertsRecord:
    """Loads up to `step`, see ExpertsRow."""

    FILE: ClassVar = EXPERTS_FILE

    step: int
    loads: list[list[int]]

    def rows(self) -> list[ExpertsRow]:
        return [ExpertsRow(step=self.step, loads=self.loads)]


def is_validation(row: Mapping[str, object]) -> bool:
    """Whether a row of metrics.jsonl is a validation row."""
    return f"{PREFIX}loss" in row or f"{PREFIX}time_s" in row  # without sources there is no loss


def scalars(record: Record | ValidationRecord) -> dict[str, int | float]:
    """The numbers of the record's row by key, for curves over its step."""
    return {key: value for key, value in record.row().items() if key != "step" and not isinstance(value, str)}
