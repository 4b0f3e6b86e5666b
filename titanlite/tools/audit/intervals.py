"""The intervals between the checkpoints of a run, and the training that computes one of them again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.folder import published_steps, read_or_none, step_folder, step_of
from titanlite.config.load import check_and_resolve, config_from_values
from titanlite.config.schema import JobConfig
from titanlite.config.toml import dump_config, tables_of
from titanlite.parallel.microbatches import rows_together
from titanlite.runtime.durability import replace_file
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import open_regular
from titanlite.runtime.text import visible
from titanlite.storage.address import Place
from titanlite.tools.compare.repeats import without_outputs
from titanlite.tools.saved_run import SavedRun, open_run
from titanlite.tools.sweep.combinations import Run

CHECKPOINTS = CheckpointConfig.folder
"""Of a recomputation, in its dump folder."""
MAX_COMMAND_BYTES = 2**16


@dataclass(frozen=True)
class Interval:
    """The steps after one checkpoint up to the next one. start: None: the run began there, at step 0."""

    start: SavedRun | None
    end: SavedRun

    @property
    def steps(self) -> range:
        return range(1 if self.start is None else self.start.manifest.step + 1, self.end.manifest.step + 1)

    @property
    def name(self) -> str:
        """Of the folder of its recomputation."""
        return config_file(Path(), self.steps).stem


def config_file(out: Path, steps: range) -> Path:
    """The configuration of the training that computes these steps again."""
    return out / f"steps-{steps[0]}-{steps[-1]}.toml"


def command_in(file: Path) -> str:
    """The command of the audit that has written this configuration. Raises UserError."""
    try:
        with open_regular(file) as opened:
            return opened.readline(MAX_COMMAND_BYTES).decode(errors="replace").rstrip("\n").removeprefix("# ")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None


def intervals_of(checkpoints: Place) -> list[range]:
    """The steps of each interval, from the folder of a run's checkpoints. Raises UserError if there is none.

    A run that continued another one with the state of its optimizer has no interval before its first checkpoint.
    """
    saved = published_steps(checkpoints)
    manifest = read_or_none(step_folder(checkpoints, saved[0])) if saved else None
    section = manifest.config.get("checkpoint", {}) if manifest is not None else {}
    continued = not section or (section.get("initial_load_path") and not section.get("initial_load_model_only"))
    ends = [*([] if continued else [0]), *saved]
    if len(ends) < 2:
        raise UserError(f"{checkpoints} has no two checkpoints, between which steps could be computed again")
    return [range(before + 1, after + 1) for before, after in pairwise(ends)]


def open_interval(checkpoints: Place, steps: range, *, allow_import: bool) -> Interval:
    """Open and verify the two checkpoints of an interval. Raises UserError if one is damaged, misplaced, or of another
    history than the other."""
    end = _opened(step_folder(checkpoints, steps[-1]), allow_import=allow_import)
    if steps.start == 1:
        return Interval(None, end)
    start = _opened(step_folder(checkpoints, steps.start - 1), allow_import=allow_import)
    earlier, later = start.manifest.lineage, end.manifest.lineage
    if later[: len(earlier)] != earlier:
        raise UserError(
            f"{end.path} does not continue {start.path}: the branches of its history, {_ids(end)}, do not begin with "
            f"{_ids(start)}; one of the two was put there from another run"
        )
    return Interval(start, end)


def _opened(path: Place, *, allow_import: bool) -> SavedRun:
    run = open_run(path, allow_import=allow_import)
    if run.manifest.step != step_of(path):
        raise UserError(f"{path} is the checkpoint of step {run.manifest.step}: it was renamed or swapped")
    if run.manifest.content != "full":
        raise UserError(f"{path} has weights only: an interval needs the state of the optimizer at both ends")
    return run


def _ids(run: SavedRun) -> str:
    return ", ".join(branch.id for branch in run.manifest.lineage)


def recomputation(
    interval: Interval, out: Path, overrides: Sequence[str], command: str, *, processes: int, device_type: str
) -> Run:
    """The training of an interval, in a folder of `out`: the run's configuration, on a mesh of these processes.

    overrides: see check_overrides. Writes the configuration into `out`, with the command of the audit in its first
    line. Raises ConfigError.
    """
    config = config_from_values(tables_of(_recomputed(interval, out / interval.name)), overrides)
    resolved = check_and_resolve(config, world_size=processes, device_type=device_type)
    file = config_file(out, interval.steps)
    replace_file(file, f"# {visible(command)}\n{dump_config(config)}".encode())  # follows no link
    return Run(interval.name, {"steps": interval.name}, [f"--job.config_file={file}"], resolved)


def _recomputed(interval: Interval, folder: Path) -> JobConfig:
    """The configuration of the interval's end, with only those outputs that an audit compares."""
    config, last = interval.end.config, interval.steps[-1]
    layout, training = config.parallelism, config.training
    kept = (layout.tp, layout.cp, layout.ep) if training.bit_equal else (1, 1, 1)
    rows = rows_together(layout, training.local_batch_size)
    checkpoint = replace(
        config.checkpoint,
        enable=True,
        folder=CHECKPOINTS,
        interval=last,
        stop_after=last if last < training.steps else -1,
        async_mode="disabled",
        on_save_error="stop",
    )
    if interval.start is not None:
        checkpoint = replace(checkpoint, initial_load_path=str(interval.start.path), initial_load_model_only=False)
    return replace(
        without_outputs(config),
        checkpoint=checkpoint,
        training=replace(training, local_batch_size=rows) if training.bit_equal else training,
        parallelism=replace(layout, dp_replicate=1, dp_shard=-1, pp=1, pp_split=(), tp=kept[0], cp=kept[1], ep=kept[2]),
        job=replace(config.job, dump_folder=str(folder)),
    )
