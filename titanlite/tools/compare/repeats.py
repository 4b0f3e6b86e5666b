"""The repeats of a run: the same mathematics, each with another rounding."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from titanlite.checkpoint.compatibility import differences
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.folder import published_steps
from titanlite.config.arguments import split_arguments
from titanlite.config.fields import setting_of
from titanlite.config.load import CONFIG_COPY, check_and_resolve
from titanlite.config.schema import JobConfig
from titanlite.config.toml import dump_config, tables_of
from titanlite.generation.config import SamplesConfig
from titanlite.profiling.config import ProfilingConfig
from titanlite.runtime.durability import replace_file
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.runtime.text import counted
from titanlite.tools.command import print_lines
from titanlite.tools.sweep.combinations import Run, require_same_settings
from titanlite.tools.sweep.training import Process, wait_for

DIVISORS = (1, 2, 3, 5)
"""Of loss.chunk_tokens: the parts in which a loss and the gradient of the output layer are added up."""
CHUNK_TOKENS = {"cpu": 256, "cuda": 4096}
"""At most as many as loss.chunk_tokens = "auto" takes, for the memory."""


def setting_differences(a: JobConfig, b: JobConfig) -> list[str]:
    """A line for each key that decides what is learned and differs. Paths may differ."""
    before, after = _settings(a), _settings(b)
    lines = [line for key in sorted({*before, *after}) for line in differences(before.get(key), after.get(key), key)]
    compared = [line for line in lines if not setting_of(line.partition(":")[0]).is_path]
    return [line.replace("in the checkpoint,", "in A,").removesuffix("now") + "in B" for line in compared]


def _settings(config: JobConfig) -> dict[str, Any]:
    model = config.model
    config = replace(config, model=replace(model, overrides={**model.kept, **model.overrides}, kept={}))
    found = {f"{section}.{key}": value for section, table in tables_of(config).items() for key, value in table.items()}
    return {key: value for key, value in found.items() if setting_of(key).affects in ("numbers", "facts")}


def repeats_of(config: JobConfig, out: Path, count: int, last: int, processes: int, device_type: str) -> Sequence[Run]:
    """The trainings of `count` repeats up to the step `last`, in folders of `out`. Writes their configurations.

    config: of the run, resolved. Layouts and sizes that do not fit it are left out. Raises UserError if too few fit.
    """
    runs: list[Run] = []
    errors = []
    for name, values, changed in _roundings(_base(config, last), processes, device_type):
        if len(runs) == count:
            break
        changed = replace(changed, job=replace(changed.job, dump_folder=str(out / name)))
        try:
            resolved = check_and_resolve(changed, world_size=processes, device_type=device_type)
        except ConfigError as error:
            errors.append(error)
            continue
        runs.append(Run(name, values, [f"--job.config_file={out / name}.toml"], resolved))
        replace_file(out / f"{name}.toml", dump_config(changed).encode())  # follows no link
    if not runs and errors:
        raise errors[0]
    if len(runs) < count:
        raise UserError(
            f"on {counted(processes, 'process')}, only {len(runs)} repeats of this configuration round in different "
            f"ways: write --repeats {len(runs)}, or another --nproc"
        )
    return runs


def train(runs: Sequence[Run], last: int, start: Callable[[Run], Process], cost: str = "") -> None:
    """Train the repeats that have not reached the step `last`. cost: for the line that is printed before.

    Raises UserError if one fails, or has other settings than those in its folder.
    """
    left = [run for run in runs if max(published_steps(run.folder / run.config.checkpoint.folder), default=0) < last]
    for run in runs:
        if (run.folder / CONFIG_COPY).is_file():
            require_same_settings(run, "out")
    print_lines(f"Trains {len(left)} of {counted(len(runs), 'repeat')} to step {last:,}{cost}")
    for run in left:
        print_lines(f"Repeat {', '.join(f'{key} {value}' for key, value in run.values.items())}")
        if code := wait_for(start(run)):
            raise UserError(f"the repeat in {run.folder} failed ({code}): the same command continues")


def _base(config: JobConfig, last: int) -> JobConfig:
    checkpoint = replace(
        config.checkpoint,
        enable=True,
        folder=CheckpointConfig.folder,
        interval=config.checkpoint.interval if config.checkpoint.enable else last,
        keep_latest_k=0,
        stop_after=last if last < config.training.steps else -1,
        async_mode="disabled",
        on_save_error="stop",
    )
    return replace(without_outputs(config), checkpoint=checkpoint, training=replace(config.training, bit_equal=False))


def _roundings(config: JobConfig, processes: int, device_type: str) -> Iterator[tuple[str, dict[str, str], JobConfig]]:
    """(name, what changes, configuration) of each way to round, the ones that differ most first."""
    rows = config.training.local_batch_size
    sizes = [2 * rows, 1] if rows == 1 else [rows >> shift for shift in range(rows.bit_length())]
    for divisor, size, (axes, sync) in product(DIVISORS, sizes, _layouts(processes)):
        tokens = min(size * config.training.seq_len, CHUNK_TOKENS[device_type]) // divisor
        chunk: Any = "auto" if divisor == 1 else max(1, tokens)
        mesh = "-".join(f"{axis}-{degree}" for axis, degree in axes.items() if degree > 1) or "one-process"
        values = {"mesh": mesh, "rows": str(size), "sync": sync, "chunk": str(chunk)}
        layout: Any = {"pp_microbatch_size": 1, "pp_split": (), "gradient_sync": sync, **axes}
        changed = replace(
            config,
            training=replace(config.training, local_batch_size=size),
            loss=replace(config.loss, chunk_tokens=chunk),
            parallelism=replace(config.parallelism, **layout),
        )
        yield "_".join([mesh, f"rows-{size}", f"sync-{sync}", f"chunk-{chunk}"]), values, changed


def _layouts(processes: int) -> Iterator[tuple[dict[str, int], str]]:
    """Degrees of the axes, and gradient_sync."""
    one = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1}
    yield one | {"dp_shard": processes}, "every"
    if processes % 2 == 0:
        yield one | {"pp": 2, "dp_shard": processes // 2}, "last"
        yield one | {"tp": 2, "dp_shard": processes // 2}, "every"
        yield one | {"dp_replicate": 2, "dp_shard": processes // 2}, "last"


def check_overrides(overrides: Sequence[str]) -> list[Problem]:
    """Problems of overrides `--section.key=value` that change numbers. A path does not: the content is compared."""
    arguments = split_arguments(overrides)
    rule, remedy = "a key that changes no number: what the run has computed is computed again", "leave it out"
    changes = [key for key in arguments.texts if _changes_numbers(key)]
    return [*arguments.problems, *(Problem(key, arguments.texts[key], rule, remedy) for key in changes)]


def _changes_numbers(key: str) -> bool:
    try:
        setting = setting_of(key)
    except KeyError:
        return False  # unknown, which the configuration reports
    return setting.affects in ("numbers", "facts") and not setting.is_path


def without_outputs(config: JobConfig) -> JobConfig:
    """The configuration with only those outputs that a comparison reads: rows of metrics.jsonl, and the console.

    Without tasks: a task that a run names as a file may be code of another person.
    """
    metrics = replace(config.metrics, loggers=("console", "jsonl"), columns=())
    section = config.validation
    validation = replace(section, enable=section.enable and bool(section.sources), tasks=())
    return replace(config, metrics=metrics, validation=validation, profiling=ProfilingConfig(), samples=SamplesConfig())
