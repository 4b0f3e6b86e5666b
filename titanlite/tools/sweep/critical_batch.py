"""Command: continue a run from a checkpoint with several batch sizes, and find the largest one without loss."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from titanlite.assembly.facts import model_facts
from titanlite.checkpoint.compatibility import check_facts
from titanlite.checkpoint.folder import published_steps, read_or_none, step_folder
from titanlite.checkpoint.manifest import Manifest
from titanlite.config.arguments import split_arguments
from titanlite.config.load import CONFIG_COPY, config_from_values, parse, read_copy, resolve
from titanlite.config.schema import JobConfig
from titanlite.config.stages import batch_stages
from titanlite.config.value_types import text_of
from titanlite.data.steps import BatchStage, stage_index
from titanlite.optim.schedule import build_schedule
from titanlite.runtime.environment import expand_home
from titanlite.runtime.errors import ConfigError, Problem, UsageError, UserError, raise_problems
from titanlite.runtime.settings import setting
from titanlite.storage.address import Place, is_address
from titanlite.tools.command import AllowImport, RunFolder, print_lines, run_command
from titanlite.tools.saved_run import checkpoints_in, require_names, saved_config
from titanlite.tools.stores import apply_storage
from titanlite.tools.sweep.combinations import DUMP_FOLDER, Run, arguments_of, checked_runs, parse_texts
from titanlite.tools.sweep.command import RunsOptions, carry_out, raise_failed, read_runs_options
from titanlite.tools.sweep.training import final_loss, folders, report_line, table

TASKS = "validation.tasks"
VALIDATIONS = 8
"""Of each branch, after equal numbers of tokens."""


@dataclass(frozen=True)
class Options(RunsOptions):
    """Find the critical batch size of a run: the largest batch with which it loses nothing at equal tokens.

    titanlite critical-batch outputs/quickstart --step 100 --batches 8 16 32 64 --tokens 100000

    Branches continue the run from one checkpoint, each with another batch, with its optimizer and position in the data,
    and with a learning rate in proportion to the square root of the batch. See docs/critical-batch.md.
    """

    batches: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N N ...")]
    """numbers of sequences of a step, two or more; the smallest is what the others are compared with"""
    run: RunFolder = setting(is_path=True)
    """dump folder of a run with checkpoints; --section.key VALUE overrides a key of all branches"""
    tokens: Annotated[int, tyro.conf.arg(metavar="N")] = setting(remedy="write the tokens of each branch", least=1)
    """tokens that each branch trains on, rounded up to full steps of all of them"""
    step: Annotated[int, tyro.conf.arg(metavar="N")] = setting(-1, "write the step of a checkpoint", least=-1)
    """the checkpoint to continue from; -1: the latest one"""
    tolerance: Annotated[float, tyro.conf.arg(metavar="LOSS")] = setting(0.01, "0.01 is usual", least=0, below=math.inf)
    """increase of the validation loss that counts as none"""
    allow_import: AllowImport = False


def main(argv: Sequence[str]) -> None:
    """Check the branches, train them, and print the largest batch without loss. Raises UserError."""
    options, overrides = read_runs_options(Options, argv, "critical-batch")
    runs = branches(options, overrides)
    codes = carry_out(options, runs)
    if codes is None:
        return
    folder = runs[0].folder.parent
    print_lines("", *table(runs, codes), "", *compared(runs, options.tolerance), "")
    if found := folders(runs):
        print_lines(report_line(*found, folder=folder).replace(" --out", " --over tokens --out"))
    raise_failed(runs, codes)


def branches(options: Options, overrides: Sequence[str]) -> list[Run]:
    """The checked branches, in the order of their batches. Raises UserError."""
    sizes = sorted({*options.batches})
    if len(sizes) < 2 or sizes[0] < 1:
        raise UsageError("--batches needs two or more numbers of sequences: write for example --batches 8 16 32")
    if is_address(options.run):
        rule = "a local folder; its checkpoints may be in a store"
        raise ConfigError([Problem("argument RUN", options.run, rule, "pass the job.dump_folder of the run")])
    folder = Path(expand_home(options.run))
    if not (folder / CONFIG_COPY).is_file():
        raise UserError(f"{folder} has no {CONFIG_COPY}: pass the dump folder of a run")
    apply_storage(overrides)
    arguments = split_arguments(overrides)
    raise_problems(arguments.problems)
    given = {key: text or "true" for key, text in arguments.texts.items()}
    switches = ["--strict"] if arguments.options.strict else []
    config = saved_config(folder / CONFIG_COPY, (), folder, allow_import=options.allow_import)
    if not options.allow_import and TASKS not in given:
        require_names(folder, config.validation.tasks, f"leave them out: --{TASKS} '[]'")
    path, manifest = _checkpoint(checkpoints_in(folder, folder, allow_import=options.allow_import), options.step)
    last, config = config, _at_step(config, manifest)
    stage = _stage(config, manifest.step)
    if config.optimizer.weight_decay_end != -1 and "optimizer.weight_decay_end" not in given:
        rule = "left out: the weight decay of a step depends on the run's last step, which differs between branches"
        remedy = "add --optimizer.weight_decay_end=-1, and the weight decay of the checkpoint's step"
        value = config.optimizer.weight_decay_end
        raise ConfigError([Problem("optimizer.weight_decay_end", value, rule, remedy)])
    step_tokens = math.lcm(*sizes) * stage.seq_len
    tokens = -(-options.tokens // step_tokens) * step_tokens
    changed = {**_differences("optimizer", last, config), **_differences("lr_schedule", last, config)}
    shared = {**changed, **_constants(config, manifest, path), **_own_storage(folder, config), **given}
    shared.setdefault(DUMP_FOLDER, str(folder / f"critical_batch_step-{manifest.step}"))

    def make(size: int) -> Run:
        row = f"training.stages.{len(config.training.stages)}"
        steps = tokens // (size * stage.seq_len)
        texts = {
            **shared,
            f"{row}.from_step": str(manifest.step + 1),
            f"{row}.global_batch_size": str(size),
            "training.steps": str(manifest.step + steps),
            "validation.interval": str(max(steps // VALIDATIONS, 1)),
            "metrics.log_freq": "1",
        }
        name, file = f"batch-{size}_tokens-{tokens}", str(folder / CONFIG_COPY)
        words = arguments_of(file, texts, name, parse_texts(file, texts), switches)
        checked = resolve(parse(words), world_size=options.processes, device_type=options.device_type)
        facts, accepted = model_facts(checked), checked.checkpoint.accept_changes
        saved = {name: fact for name, fact in manifest.facts.items() if name in facts}
        check_facts(saved, facts, accepted, str(path), manifest.step)
        if not checked.validation.enable:
            rule = "true: the branches are compared by their validation losses"
            raise ConfigError([Problem("validation.enable", False, rule, "add --validation.enable")])
        lr = schedule_of(checked)(checked.training.steps)
        values = {"batch": str(size), "lr": f"{lr:.3g}", "tokens": f"{tokens:,}"}
        return Run(name, values, words, checked)

    return checked_runs({f"batch {size}": partial(make, size) for size in sizes})


def _checkpoint(folder: Place, step: int) -> tuple[Place, Manifest]:
    """The checkpoint of a step, -1: the latest one, and its manifest. Raises UserError."""
    steps = published_steps(folder)
    path = step_folder(folder, steps[-1] if steps and step == -1 else step)
    manifest = read_or_none(path)
    if manifest is None or manifest.content != "full":
        present = ", ".join(map(str, steps)) or "none"
        raise UserError(f"{path}: no checkpoint with optimizer and position in the data; choose --step of: {present}")
    return path, manifest


def _at_step(config: JobConfig, manifest: Manifest) -> JobConfig:
    """The configuration with the optimizer and learning rate of the checkpoint's step: a later start may have changed
    them. Raises UserError."""
    then = config_from_values(manifest.config)
    training = replace(config.training, steps=then.training.steps)
    return replace(config, optimizer=then.optimizer, lr_schedule=then.lr_schedule, training=training)


def _stage(config: JobConfig, step: int) -> BatchStage:
    """The training stage of a step, which the branches continue. Raises UserError."""
    stages = batch_stages(config)
    stage = stages[stage_index(stages, step)]
    if stage is not stages[-1]:
        start = stages[stage_index(stages, step) + 1].from_step
        raise UserError(f"a stage of the run begins later, at step {start:,}: choose a --step in the last stage")
    if stage.tokens != stages[0].tokens and config.lr_schedule.batch_scaling == "none":
        raise UserError(
            f'the run has changed its batch by step {step:,} without lr_schedule.batch_scaling = "sqrt", so the '
            "learning rates of its branches are not known: choose a --step of its first stage"
        )
    return stage


def _constants(config: JobConfig, manifest: Manifest, path: Place) -> dict[str, str]:
    """The values of all branches: data as at the checkpoint, and the learning rate of its step times the square root of
    the batch's growth. Raises UserError."""
    schedule = replace(config, lr_schedule=replace(config.lr_schedule, batch_scaling="none"))
    factor = schedule_of(schedule)(manifest.step) / config.optimizer.lr
    if factor == 0:
        raise UserError(f"the learning rate of step {manifest.step:,} is 0: choose a --step before the decay")
    constant = {"warmup_steps": "0", "batch_scaling": "sqrt", "decay": "none"}
    if factor < 1:  # a decay that ends with step 1
        constant |= {"decay": "linear", "decay_steps": "1", "min_lr_factor": repr(factor)}
    return {
        "checkpoint.enable": "false",
        "checkpoint.initial_load_path": str(path),
        "checkpoint.initial_load_model_only": "false",
        **{f"lr_schedule.{key}": text for key, text in constant.items()},
    }


def _own_storage(folder: Path, config: JobConfig) -> dict[str, str]:
    """The values of [storage] that a branch takes from this process, and not from the run's file."""
    return _differences("storage", read_copy(folder), config)


def _differences(section: str, earlier: JobConfig, config: JobConfig) -> dict[str, str]:
    """The values of a section that differ from those of another configuration."""
    before, now = asdict(getattr(earlier, section)), asdict(getattr(config, section))
    return {f"{section}.{key}": str(text_of(value)) for key, value in now.items() if value != before[key]}


def schedule_of(config: JobConfig) -> Callable[[int], float]:
    """The learning rate by step. config: resolved."""
    return build_schedule(config.lr_schedule, config.optimizer.lr, config.training.steps, batch_stages(config))


def compared(runs: Sequence[Run], tolerance: float) -> list[str]:
    """The lines of the result: differences to the smallest batch, and the largest batch without loss."""
    losses = [final_loss(run) for run in runs]
    known = [loss for loss in losses if loss is not None]
    if len(known) < len(losses):
        return ["No result yet: not all branches have a last validation"]
    sizes = [run.values["batch"] for run in runs]
    others = ", ".join(f"{size}: {loss - known[0]:+.4f}" for size, loss in zip(sizes[1:], known[1:], strict=True))
    fits = [loss <= known[0] + tolerance for loss in known]
    count = fits.index(False) if False in fits else len(fits)
    largest = f"{sizes[count - 1]} sequences"
    if count == len(fits):
        largest = f"at least {largest}: add larger ones"
    elif count == 1:
        largest = f"below {sizes[1]} sequences: add smaller ones"
    return [
        f"Validation loss compared with batch {sizes[0]}: {others}",
        f"Largest batch without loss, with a tolerance of {tolerance:g}: {largest}",
    ]


if __name__ == "__main__":
    run_command(main)
