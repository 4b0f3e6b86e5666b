"""Compute a step again: the configuration, the start, and the step in the run's dtypes and in float64."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.assembly.data import build_data, build_tokenizer
from titanlite.assembly.job import job_of
from titanlite.assembly.model import build_model, build_trainer, draw_weights_
from titanlite.assembly.run import build_meter, checkpoint_facts, fetch_imported, fix_threads
from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.checkpoint.compatibility import changed_settings
from titanlite.checkpoint.folder import latest_manifest
from titanlite.checkpoint.start import StartFinder
from titanlite.checkpoint.state import RunState
from titanlite.config.check import check_config, resolve_config
from titanlite.config.fields import keys_that_affect
from titanlite.config.load import CONFIG_COPY, config_from_values
from titanlite.config.plugins import import_plugins_of
from titanlite.config.schema import JobConfig
from titanlite.data.loader import Loader
from titanlite.data.tokenizer import Tokenizer
from titanlite.faults.record import Record, RecordedStep
from titanlite.forward import on_device
from titanlite.models.attention import pin_kernels
from titanlite.models.family import parameters_of, saved_tensors
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.microbatches import rows_together
from titanlite.ranks.distributed import World
from titanlite.ranks.network import connect, init_process_group
from titanlite.runtime.determinism import apply_determinism
from titanlite.runtime.errors import UsageError, UserError, raise_problems
from titanlite.runtime.logging import Progress, log
from titanlite.runtime.torch_internals import local_part
from titanlite.storage.address import Place, place
from titanlite.tools.parity.layouts import ONE_PROCESS, config_of
from titanlite.tools.parity.measure import passes
from titanlite.tools.saved_run import SavedRun, initial_checkpoint, name_storage, saved_config, with_own_storage
from titanlite.trainer import Trainer

AVERAGE_KEY = "optimizer.ema_decay"
"""The setting that changes the average of the weights, but no step."""


@dataclass(frozen=True)
class Row:
    """A sequence of the step. place: source, file and row. text: of its tokens, or their ids. num_valid: tokens that
    count in the loss."""

    place: str
    text: str
    num_valid: int


@dataclass(frozen=True)
class Replayed:
    """The step as computed here. own, exact: in the run's dtypes and in float64. earlier: the steps before it that were
    computed again, in the run's dtypes. rows: its sequences, in order."""

    own: RecordedStep
    exact: RecordedStep
    earlier: list[RecordedStep]
    rows: list[Row]


def launch_config(
    folder: Path, checkpoints: Place, records: Sequence[Record], saved: SavedRun | None, *, allow_import: bool
) -> JobConfig:
    """The configuration of the launch that took the step. Raises ConfigError.

    It is in the record; without one, that of the run's checkpoint `saved` or of the latest start is taken. The values
    of the flavor are those in the `checkpoints` of the run. allow_import: whether to import its plugins.
    """
    begun = latest_manifest(checkpoints)
    if records:
        values = records[0].about["config"]
        import_plugins_of(values, folder, allowed=allow_import)
        config = config_from_values(values, begun=begun)
        name_storage(folder, config.storage)
        return with_own_storage(config)
    if saved is not None:
        name_storage(folder, saved.storage)
        return saved.config
    return saved_config(folder / CONFIG_COPY, (), folder, allow_import=allow_import, begun=begun)


def start_of_run(config: JobConfig, step: int, *, allow_import: bool) -> SavedRun | None:
    """The checkpoint of another run that this one continued; None if it began at step 0. Raises UserError.

    config: of a launch. step: the one to replay. allow_import: see open_run.
    """
    if not config.checkpoint.initial_load_path or config.checkpoint.initial_load_model_only:
        return None
    found = initial_checkpoint(place(config.checkpoint.initial_load_path), allow_import=allow_import)
    if step <= found.manifest.step:
        raise UserError(
            f"the run began after step {found.manifest.step}, from {found.path}, so it has not taken step {step}: "
            "replay this step in the run of that checkpoint"
        )
    return found


def replayed_config(config: JobConfig, folder: Path, start: SavedRun | None, world: World) -> JobConfig:
    """The configuration of a launch, for one process that begins from the checkpoint `start`. Raises ConfigError.

    start: None for what the run itself began from, at step 0.
    """
    checkpoint = replace(config.checkpoint, enable=False, load_step=-1)
    if start is not None:
        checkpoint = replace(checkpoint, initial_load_path=str(start.path), initial_load_model_only=False)
    training = config.training
    if training.bit_equal:
        rows = rows_together(config.parallelism, training.local_batch_size)
        training = replace(training, local_batch_size=rows)
    config = replace(
        config_of(config, ONE_PROCESS),
        training=training,
        job=replace(config.job, dump_folder=str(folder)),
        checkpoint=checkpoint,
        data=replace(config.data, num_workers=0),
        validation=replace(config.validation, enable=False),
    )
    problems = check_config(config, world_size=world.size, device_type=world.device_type)
    raise_problems(problems)
    return resolve_config(config, world_size=world.size, device_type=world.device_type)


def require_trained(
    folder: Place, last_row: Mapping[str, Any], records: Sequence[Record], saved: Sequence[int], step: int
) -> None:
    """Raise UsageError if the run has not taken the step, so far as its metrics, records and saved steps show."""
    recorded = [taken for record in records for taken in record.steps]
    last = max([0, last_row.get("step", 0), *recorded, *saved])
    if step > last:
        remedy = f"give a --step from 1 to {last}" if last else "it has no step to compute again"
        raise UsageError(f"{folder} is the folder of a run that was trained to step {last}: {remedy}")


def require_start(
    folder: Place,
    last_row: Mapping[str, Any],
    config: JobConfig,
    records: Sequence[Record],
    start: SavedRun | None,
    step: int,
    *,
    from_checkpoint_only: bool,
) -> None:
    """Log how many steps are computed again first, and for how long. Raises UserError if that is not allowed."""
    where = str(start.path) if start is not None else config.checkpoint.initial_load_path or "the initial weights"
    before = step - 1 - (start.manifest.step if start is not None else 0)
    steps = "1 step" if before == 1 else f"{before} steps"
    if before and from_checkpoint_only:
        raise UserError(
            f"{folder} has no valid checkpoint of step {step - 1}; {steps} from {where} would have to be computed "
            "first: leave out --from-checkpoint-only to do so"
        )
    first = f"after {steps} from there" if before else "the next one"
    step_time_s = last_row.get("step_time_s")
    if before and records and isinstance(step_time_s, float):  # the file may have been edited
        first += f", about {duration(step_time_s * records[0].about['world_size'] * before)} on one device"
    log.info("Replay of step %d from %s: %s", step, where, first)
    if not records:
        log.info("The run has no record of step %d: it is computed, but there is nothing to compare it with", step)


def require_same_settings(
    record: Record, records: Sequence[Record], saved: SavedRun | None, start: SavedRun | None, step: int
) -> None:
    """Raise UserError if steps that are computed again were trained with other settings than step `step`.

    record: of the step. records: of all launches. saved: checkpoint of the run. start: the checkpoint to begin from,
    `saved` or another run's. Known are the settings of `saved` and of recorded steps.
    """
    first = start.manifest.step + 1 if start is not None else 1
    if first == step:
        return
    others = [other.about["config"] for other in records if any(first <= taken < step for taken in other.steps)]
    others += [saved.manifest.config] if saved is not None else []
    for other in others:
        changed = changed_settings(other, record.about["config"], keys_that_affect("numbers", "reports"))
        changed = [line for line in changed if not line.startswith(f"{AVERAGE_KEY}:")]
        if changed:
            raise UserError(
                f"the steps before step {step} were trained with other settings, so they cannot be computed again with "
                f"those of step {step}: {'; '.join(changed)}. Replay a step whose checkpoint is nearer"
            )


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, with two digits."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"


def replay(config: JobConfig, start: SavedRun | None, step: int, world: World) -> Replayed:
    """Compute the step on this process. config: see replayed_config. Raises UserError."""
    apply_determinism(config.debug)
    fix_threads(config, world, os.environ)
    pin_kernels(world.device)
    store = connect(world, config.comm)
    imported = fetch_imported(config, world, store) if start is None else None
    mesh = Mesh(config.parallelism, world)
    tokenizer = build_tokenizer(config)
    loader = build_data(job_of(config, mesh.world.size), mesh, tokenizer)
    group = init_process_group(world, store, config.comm)
    mesh.connect(config.comm)
    try:
        parts = build_model(config, mesh, world.device, draws_weights=False)
        trainer = build_trainer(job_of(config, mesh.world.size), parts, mesh, world.device)
        norms = trainer.spikes.norms if trainer.spikes else None
        state = RunState(trainer.model_parts, trainer.optimizer, loader, mesh, norms, trainer.average, trainer.exact)
        about = checkpoint_facts(config, tokenizer, loader.sources, world.device)
        meter = build_meter(job_of(config, mesh.world.size), world, trainer, group)
        folder = place(config.checkpoint.folder, config.job.dump_folder)
        draw = partial(draw_weights_, config, parts)
        steps = config.training.steps
        finder = StartFinder(config.checkpoint, folder, state, meter, about, steps, group, draw, imported)
        trainer.step = finder.find().step
        earlier = recompute(trainer, loader, step)
        assert trainer.step == step - 1, f"the start is step {trainer.step}, too late for step {step}"
        batches = [on_device(batch, world.device) for batch in loader.next_step()]
        exact = copy_in_float64(config, trainer, mesh, world.device)
        return Replayed(
            exact=take_step(exact, batches, loader),
            own=take_step(trainer, batches, loader),
            earlier=earlier,
            rows=describe_rows(batches, loader, tokenizer),
        )
    finally:
        loader.close()
        dist.destroy_process_group()


def recompute(trainer: Trainer, loader: Loader, step: int) -> list[RecordedStep]:
    """Take the steps before `step`; returns their numbers."""
    steps: list[RecordedStep] = []
    progress = Progress()
    while trainer.step < step - 1:
        batches = [on_device(batch, trainer.device) for batch in loader.next_step()]
        steps.append(take_step(trainer, batches, loader))
        progress.note(f"Computed step {trainer.step} again, {step - 1 - trainer.step} to go")
    return steps


def copy_in_float64(config: JobConfig, trainer: Trainer, mesh: Mesh, device: torch.device) -> Trainer:
    """A trainer with the same weights at the same step, in float64, without clipping."""
    config = passes(config)[0]
    exact = build_trainer(
        job_of(config, mesh.world.size), build_model(config, mesh, device, draws_weights=False), mesh, device
    )
    exact.step = trainer.step
    weights = {name: tensor for part in trainer.model_parts for name, tensor in saved_tensors(part).items()}
    for part in exact.model_parts:
        for name, tensor in saved_tensors(part).items():
            local_part(tensor).copy_(local_part(weights[name]))
    return exact


def take_step(trainer: Trainer, batches: Sequence[Batch], loader: Loader) -> RecordedStep:
    """Take a step; returns its numbers. On one process, each shard is the full gradient."""
    stats = trainer.train_step(batches)
    names = parameters_of(trainer.model_parts)
    return RecordedStep(
        trainer.step,
        int(stats.num_valid),
        bool(stats.skipped),
        stats.grad_norm.item(),
        dict(zip(names, stats.shard_norms.tolist(), strict=True)),
        stats.row_losses.tolist(),
        loader.first_sequence,
    )


def describe_rows(batches: Sequence[Batch], loader: Loader, tokenizer: Tokenizer | None) -> list[Row]:
    """The sequences of the last step that the loader returned."""
    lengths = [length for batch in batches if batch.lengths is not None for length in batch.lengths.tolist()]
    rows = torch.cat([batch.tokens for batch in batches]).tolist()
    tokens = [ids[:length] for ids, length in zip(rows, lengths, strict=True)]  # without padding
    valid = (torch.cat([batch.labels for batch in batches]) != IGNORE_INDEX).sum(1).tolist()
    return [
        Row(loader.locate(origin), tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids)), num_valid)
        for origin, ids, num_valid in zip(loader.origins, tokens, valid, strict=False)  # filler comes last
    ]
