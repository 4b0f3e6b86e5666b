"""The functions of `import titanlite`: those of the commands, in this process."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from titanlite.assembly.data_files import resolve_with_data, resolve_without_data
from titanlite.assembly.facts import config_values
from titanlite.assembly.resolve import resolve_job
from titanlite.assembly.run import job_locks
from titanlite.config.files import CONFIG_FILE
from titanlite.config.ineffective import describe
from titanlite.config.load import parse, reparsed, resolve, without_effect
from titanlite.config.schema import JobConfig
from titanlite.config.value_types import text_of
from titanlite.data.sources.token_table import use_looks
from titanlite.generation.generate import Prompt
from titanlite.metrics.config import METRICS_FILE
from titanlite.metrics.jsonl import last_row, read_rows
from titanlite.metrics.scores import SetTotals, TaskScores, sum_of
from titanlite.ranks.agreement import start_rank
from titanlite.ranks.distributed import ELASTIC, CommConfig, World, world_from_environment
from titanlite.ranks.failure import EmbeddedReport
from titanlite.ranks.network import connect
from titanlite.runtime.environment import expand_home, raise_open_file_limit
from titanlite.runtime.errors import ConfigError, UsageError, UserError
from titanlite.runtime.logging import keep_for_log_file, log
from titanlite.runtime.process_state import restored_process
from titanlite.storage.address import Address
from titanlite.storage.config import StorageConfig
from titanlite.tools import evaluate
from titanlite.tools.command import check_options
from titanlite.tools.convert import __main__ as convert
from titanlite.tools.generate import __main__ as generate
from titanlite.tools.saved_run import SavedRun, Weights, open_run
from titanlite.train import run_job

_USED = threading.Lock()
"""Held during a run or an evaluation: process groups, the log and torch's settings belong to the entire process."""


@dataclass(frozen=True)
class TrainedRun:
    """A run that `run` has trained. `generate_text`, `evaluate_run` and `export_run` take it, if it has checkpoints.

    config: as trained, without automatic values. step: the last one. loss: of the last logged step, per token, by
    default the cross-entropy in nats; None if no step was logged.
    ended: "finished": training.steps are done. "data exhausted": data.sources with `epochs` are read. "stopped": a
    signal, such as Ctrl-C, or checkpoint.stop_after has stopped the run after `step`, which is saved; `run` with the
    same configuration, without that key, resumes.
    """

    config: JobConfig
    step: int
    loss: float | None
    ended: Literal["finished", "data exhausted", "stopped"]

    @property
    def folder(self) -> Path:
        """The dump folder."""
        return Path(self.config.job.dump_folder)

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: one per logged step, and one per validation, whose keys begin with "validation/".

        Empty without "jsonl" in metrics.loggers. Raises UserError if the file cannot be read.
        """
        return read_rows(self.folder / METRICS_FILE)


@dataclass(frozen=True)
class Evaluation:
    """Loss of a run's model over data. checkpoint: the evaluated folder step-N. by_source: sums by name of the source.
    tasks: scores by name of the task, which is that of its file without suffix.

    settings: those that the numbers depend on beside the data; two losses are comparable only if these are equal.
    """

    checkpoint: Path | Address
    step: int
    by_source: Mapping[str, SetTotals]
    settings: Mapping[str, Any]
    tasks: Mapping[str, TaskScores]

    @property
    def loss(self) -> float | None:
        """Mean loss per token over all sources: the cross-entropy in nats, or that of loss.name. None if only tasks
        were evaluated."""
        return sum_of(self.by_source.values()).numbers().get("loss")

    @property
    def perplexity(self) -> float | None:
        """The exponential of the loss; None if loss.name is not the cross-entropy."""
        return sum_of(self.by_source.values()).numbers().get("perplexity")

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text; None as for the perplexity, or if the bytes of the tokens are unknown."""
        return sum_of(self.by_source.values()).numbers().get("bits_per_byte")


AnyRun = TrainedRun | SavedRun | str | Path
"""A run: what `run` or `open_run` returns; a dump folder, for its latest valid checkpoint; or a folder step-N."""


def load_config(config: str | Path, overrides: Mapping[str, Any] | None = None) -> JobConfig:
    """Read a configuration, as `titanlite train CONFIG` does: checked and resolved for the processes of this program.

    config: the path of a TOML file, or the name of a shipped configuration, such as "quickstart". overrides: full key
    -> value, such as {"training.steps": 20, "data.sources.0.path": "text.txt"}; values are those of TOML, or paths. A
    list of tables replaces all tables of the key: {"data.sources": [{"kind": "text", "path": "text.txt"}]}.

    Writes nothing. Raises ConfigError with all problems.
    """
    world = world_from_environment()
    return _loaded(config, overrides, world)


def run(config: JobConfig | str | Path, overrides: Mapping[str, Any] | None = None) -> TrainedRun:
    """Train in this process, as `titanlite train CONFIG` does; returns the run at its end.

    config, overrides: as for load_config; or a JobConfig, which dataclasses.replace may have changed, without
    overrides. A program that torchrun has started is one of its ranks: call `run` on all of them.

    Writes the dump folder (config.job.dump_folder), and resumes the run in it if that has checkpoints; the log goes to
    stdout. Afterwards the process is as before: signal handlers, logging, torch's settings, environment variables.
    Any number of runs may follow one another, with the numbers that each has in a process of its own.

    Ctrl-C and SIGTERM: with checkpoint.enable, the run is saved after the current step and returned as "stopped"; a
    second Ctrl-C raises KeyboardInterrupt at once. Without checkpoints, or before the first step, Ctrl-C raises
    KeyboardInterrupt. In another thread than the main one, and if the program has set its own handlers, signals do not
    stop the run.

    Raises ConfigError; UserError for what the user can fix, such as a dump folder in use; and other exceptions as they
    are. The process is not ended, but a rank that has lost another one waits for the timeout of its collective.
    """
    with _in_this_process() as (world, cleanup):
        _, environment = start_rank()
        if world.rank == 0:
            keep_for_log_file()
        if isinstance(config, JobConfig):
            if overrides:
                raise UsageError("overrides are for a path or a name: give them to load_config, or replace the values")
            parsed, is_given = reparsed(config), True
        else:
            parsed, is_given = parse(_argv(config), overrides), False
        resolved = partial(resolve, parsed, world_size=world.size, device_type=world.device_type)
        before = resolve_without_data(resolved, world)
        store = connect(world, before.comm)
        cleanup.callback(use_looks, [])
        checked = before if world.size == 1 else None
        found = resolve_with_data(lambda: checked or resolved(), world, store, before.comm.save_timeout_s)
        given = _changed_keys(found) if is_given else parsed.origins.keys()
        job = resolve_job(found, given, world, store, environment)
        if not is_given and world.rank == 0:
            for problem in without_effect(parsed, job.config, world.size):
                log.warning("Without effect: %s", describe(problem))
        report = EmbeddedReport(cleanup)
        with job_locks(job.config, world, environment, report.end_by_error):
            end = run_job(job, world, store, report, environment, cleanup)
        trained = TrainedRun(end.config, end.step, None, end.how)
        loss = end.record.loss if end.record else last_row(trained.folder / METRICS_FILE).get("loss")
        return replace(trained, loss=loss)


def generate_text(
    run: AnyRun,
    prompts: str | Sequence[str] = (),
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | Path | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    ignore_eos: bool = False,
    weights: Weights | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto",
    tokenizer: str | Path | None = None,
) -> list[str]:
    """Continue prompts with the model of a run, as `titanlite generate` does; returns the new text of each prompt.

    All prompts are one batch; a single string is one prompt. The texts are without the prompts and without the token
    that ends a document; the same arguments give the same texts.

    messages: a conversation to answer in place of prompts, such as [{"role": "user", "content": "Hello"}]; returns a
    list of one text, the answer. To continue, append it as {"role": "assistant", "content": ...}, and the user's next
    message. An answer has up to 1,024 tokens. chat_template: a file in Jinja; None: the tokenizer's own.

    max_new_tokens: None: 200, or fewer if the model has fewer positions left. temperature: divides the logits; 0: the
    most likely token; None: the model's own default, else 0.8. top_k, top_p: sample from the K most likely tokens (0:
    all), and of these from the fewest with total probability P; None: the model's own defaults, else all. ignore_eos:
    continue after the end of a document. weights: "last", or "ema" for their average; None: those of the SavedRun, else
    "last". dtype: "auto": that of the run's weights. tokenizer: a tokenizer.json or its folder; None: the run's own.

    Writes nothing. Raises ConfigError for invalid arguments, and UserError, for example if the run has no checkpoint.
    """
    with _problems_of_keywords():
        options = generate.Options(
            run="",
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            ignore_eos=ignore_eos,
            weights=_weights(run, weights),
            device=device,
            dtype=dtype,
            tokenizer=None if tokenizer is None else expand_home(tokenizer),
            chat=messages is not None,
            chat_template="" if chat_template is None else expand_home(chat_template),
        )
        if problems := generate.check(options):
            raise ConfigError(problems)
        if messages is not None:
            if prompts:
                raise UsageError("generate_text takes either prompts or messages")
            return [generate.answer_to(_opened(run, weights), messages, options)]
        texts = [prompts] if isinstance(prompts, str) else prompts
        given = [Prompt(f"prompts[{index}]", text) for index, text in enumerate(texts)]
        return generate.generated_texts(_opened(run, weights), given, options) if given else []


def evaluate_run(
    run: AnyRun,
    data: str | Path | Sequence[str | Path] = (),
    *,
    tasks: str | Path | Sequence[str | Path] = (),
    steps: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    weights: Weights | None = None,
    tokenizer: str | Path | None = None,
    chat_template: str | Path | None = None,
) -> Evaluation:
    """Compute loss, perplexity and bits per byte of a run on any data, and its scores on tasks, as `titanlite evaluate`
    does.

    data: files, folders or globs. tasks: names of the harness, or files of tasks in YAML. Without both: the run's
    validation.sources and validation.tasks, of which files need a TrainedRun. steps: batches of
    training.global_batch_size sequences per source; None: all data. overrides: as for load_config, for keys of the
    sections that evaluation depends on. weights: as for generate_text. tokenizer: for a run on token files without one.
    chat_template: a file in Jinja, for conversations; None: the tokenizer's own.

    In a program that torchrun has started, all ranks evaluate together. Writes nothing into the run's folder. Raises
    ConfigError and UserError. Restores the process, as `run` does.
    """
    with _in_this_process() as (world, cleanup), _problems_of_keywords():
        paths, files = ([given] if isinstance(given, str | Path) else given for given in (data, tasks))
        options = evaluate.Options(
            run=str(run.path if isinstance(run, SavedRun) else run.folder if isinstance(run, TrainedRun) else run),
            data=tuple(map(expand_home, paths)),
            tasks=tuple(map(expand_home, files)),
            steps=steps,
            weights=_weights(run, weights),
            tokenizer=None if tokenizer is None else expand_home(tokenizer),
            chat_template="" if chat_template is None else expand_home(chat_template),
            allow_import=isinstance(run, TrainedRun),  # this program has named its code
        )
        own = asdict(run.config.storage) if isinstance(run, TrainedRun) else {}
        of_run = {f"storage.{key}": value for key, value in own.items() if value != getattr(StorageConfig, key)}
        arguments = _arguments(of_run | {**(overrides or {})})
        evaluate.check_arguments(options, arguments)
        raise_open_file_limit()
        store = connect(world, CommConfig())
        config, saved, found = evaluate.evaluate_saved(
            options, arguments, world, store, EmbeddedReport(cleanup), cleanup
        )
        return Evaluation(
            saved.path, saved.manifest.step, found.totals, evaluate.conditions(config, saved), found.tasks
        )


def export_run(
    run: AnyRun,
    out: str | Path,
    *,
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto",
    weights: Weights | None = None,
    shard_size: str = "5GB",
    verify: bool | None = None,
) -> Path:
    """Write the model of a run as a folder that transformers loads, as `titanlite convert export` does; returns `out`.

    out: a new folder, which appears complete or not at all. weights: as for generate_text. shard_size: maximum size of
    a file of weights. verify: whether to compare the logits of the folder with those of the run; None: if the memory
    suffices for two models.

    Raises ConfigError for invalid arguments; UserError if `out` exists or cannot be written, or the logits differ.
    """
    with _problems_of_keywords():
        out = Path(expand_home(out))
        options = convert.ExportOptions(
            *("", out, dtype, _weights(run, weights), shard_size), verify=verify is True, no_verify=verify is False
        )
        if problems := check_options(options):
            raise ConfigError(problems)
        shard_bytes = convert.size_in_bytes(shard_size)
        convert.check_new(out)
        convert.write_export(_opened(run, weights), options, shard_bytes)
        return out


@contextmanager
def _in_this_process() -> Iterator[tuple[World, ExitStack]]:
    """Context of a run or an evaluation, the only one of the process, which is afterwards as before.

    Yields the ranks, and the stack for what has to be closed. Raises UserError.
    """
    if not _USED.acquire(blocking=False):
        raise UserError("titanlite runs in another thread of this process: wait until it ends, or use another process")
    try:
        if dist.is_initialized():
            raise UserError(
                "torch.distributed is initialized in this process, which titanlite does by itself: call "
                "torch.distributed.destroy_process_group() before"
            )
        if ELASTIC in os.environ:
            raise UserError(
                "titanlite.run needs a fixed number of ranks: start the program with --nnodes N, or train with "
                "python -P -m titanlite.torchrun ... -m titanlite.train"
            )
        world = world_from_environment()
        with restored_process(world.device), ExitStack() as cleanup:
            yield world, cleanup
    finally:
        _USED.release()


def _argv(config: str | Path) -> list[str]:
    return [f"--{CONFIG_FILE}={config}"]


def _loaded(config: str | Path, overrides: Mapping[str, Any] | None, world: World) -> JobConfig:
    return resolve(parse(_argv(config), overrides), world_size=world.size, device_type=world.device_type)


def _changed_keys(config: JobConfig) -> set[str]:
    """Full keys of values that are not the defaults, which parallelism.layout = "auto" does not change."""
    defaults = dict(config_values(JobConfig()))
    return {key for key, value in config_values(config) if key not in defaults or defaults[key] != value}


def _weights(run: AnyRun, weights: Weights | None) -> Weights:
    return weights or (run.weights if isinstance(run, SavedRun) else "last")


def _opened(run: AnyRun, weights: Weights | None) -> SavedRun:
    """Raises UserError, and ConfigError if the run does not have these weights."""
    path = run.folder if isinstance(run, TrainedRun) else run
    saved = path if isinstance(path, SavedRun) else open_run(path, allow_import=isinstance(run, TrainedRun))
    return saved.with_weights(_weights(run, weights))


def _arguments(overrides: Mapping[str, Any]) -> list[str]:
    """The overrides as they are written on the command line, where each key of a table has its own argument."""
    words = []
    for key, value in overrides.items():
        if isinstance(value, Sequence) and value and all(isinstance(table, Mapping) for table in value):
            rows = {f"{key}.{index}.{name}": item for index, table in enumerate(value) for name, item in table.items()}
        else:
            rows = {key: value}
        words += [f"--{name}={'' if (text := text_of(item)) is None else text}" for name, item in rows.items()]
    return words


@contextmanager
def _problems_of_keywords() -> Iterator[None]:
    """Name the options of a command in problems as the keyword arguments of this module: max_new_tokens."""
    try:
        yield
    except ConfigError as error:
        keys = (problem.key for problem in error.problems)
        names = [key[2:].replace("-", "_") if key.startswith("--") and "." not in key else key for key in keys]
        renamed = [replace(problem, key=name) for problem, name in zip(error.problems, names, strict=True)]
        raise ConfigError(renamed) from None
