"""Command: evaluate a saved run; on several processes by `titanlite.torchrun`."""

from titanlite.ranks.failure import FailureReport, end_process, prepare_process

if __name__ == "__main__":  # before the imports that take seconds
    prepare_process()

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro

from titanlite.assembly.data import build_evaluator, build_tasks, build_validation_data
from titanlite.assembly.data_files import resolve_with_data
from titanlite.assembly.facts import content_facts, program_facts
from titanlite.assembly.job import job_of
from titanlite.assembly.model import build_forward, build_model
from titanlite.assembly.resolve import pin_revisions
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.manifest import MANIFEST_FILE, copy_id
from titanlite.config.check import apply_stores, check_config, resolve_config
from titanlite.config.load import config_from_values
from titanlite.config.schema import JobConfig, JobSection
from titanlite.data.check import check_tasks, check_validation, keys_with_conversations
from titanlite.data.kinds import open_source, source_from_path
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.token_table import use_looks
from titanlite.data.tokenizer import Tokenizer
from titanlite.evaluation.evaluator import share_tasks
from titanlite.evaluation.harness import CLOSE, Generate
from titanlite.generation.generate import Sampling, generate
from titanlite.generation.model import gather_model
from titanlite.metrics.scores import SetTotals, TaskScores, sum_of
from titanlite.models.attention import pin_kernels
from titanlite.models.family import LanguageModel, saved_tensors
from titanlite.parallel.mesh import LAYOUT, Mesh, ParallelismConfig
from titanlite.precision import DTYPES
from titanlite.profiling.config import ProfilingConfig
from titanlite.ranks.agreement import require_equal, share_from_rank_0, start_rank, watch_ranks
from titanlite.ranks.distributed import CommConfig, World, set_timeout
from titanlite.ranks.network import connect, init_process_group
from titanlite.ranks.signals import StopRequest
from titanlite.runtime.determinism import apply_determinism
from titanlite.runtime.errors import ConfigError, Problem, Rules, raise_problems
from titanlite.runtime.logging import log
from titanlite.runtime.settings import setting
from titanlite.runtime.text import aligned, counted
from titanlite.storage.address import place
from titanlite.tools.command import (
    AllowImport,
    File,
    OptionalCount,
    RunFolder,
    check_chat_template,
    check_options,
    check_output_file,
    print_lines,
    read_options_and_overrides,
    write_json,
)
from titanlite.tools.saved_run import SavedRun, Weights, name_storage, open_run, reading, require_names
from titanlite.tools.stores import apply_storage

SECTIONS = ("validation", "data", "training", "parallelism", "compile", "float8", "loss", "comm", "storage")
"""Sections whose keys may be overridden; the model, its tokenizer and its training stay as saved."""
STREAMS = "data.num_streams"
DATA = "--data"
TASKS = "--tasks"
TASKS_KEY = "--validation.tasks"


@dataclass(frozen=True)
class Options:
    """Loss, perplexity and bits per byte of a saved run on any data, and scores of tasks, by the code of validation.

    Nothing is trained or written into the run's folder. The run's own configuration applies, except for its layout:
    all processes are data-parallel unless --parallelism.AXIS is given. Without --data and --tasks, the run's
    validation.sources and validation.tasks are evaluated. --section.key VALUE overrides a key of the sections
    validation, data, training, parallelism, compile, loss, comm and storage; --validation.sources.0.KEY VALUE sets the
    keys of a source that --data cannot express. A run with another loss than the cross-entropy is evaluated by its own,
    without terms; --loss.name cross_entropy: by this one. Tasks always use the cross-entropy.
    """

    run: RunFolder = setting(is_path=True)
    """dump folder of a run, or one of its folders step-N; also an address in a store"""
    data: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE")]] = setting(
        (), is_path=True
    )
    """file, folder or glob; its kind follows from the file names"""
    tasks: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="TASK")]] = setting(
        (), is_path=True
    )
    """task of lm-evaluation-harness: a name such as hellaswag, or a YAML file (docs/evaluation.md)"""
    steps: OptionalCount = setting(None, "leave it out to evaluate on all of the data", least=1)
    """batches of training.global_batch_size sequences per source; None: all of its data"""
    weights: Weights = "last"
    """last: the weights of the checkpoint's step; ema: their average, of a run with optimizer.ema_decay above 0"""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = setting(None, is_path=True)
    """tokenizer.json or its folder, for a run on token files without a tokenizer; None: the run's own"""
    chat_template: Annotated[str, tyro.conf.arg(metavar="FILE")] = setting("", is_path=True)
    """chat template in Jinja, for conversations and validation.task_chat; empty: the tokenizer's own"""
    json: File = None
    """also write the results to this file"""
    allow_import: AllowImport = False


@dataclass(frozen=True)
class Found:
    """Totals and seconds by source, scores by task. why_no_bytes: "" if bits per byte are known, or
    without sources."""

    totals: Mapping[str, SetTotals]
    time_s: Mapping[str, float]
    why_no_bytes: str
    tasks: Mapping[str, TaskScores]


def main(argv: Sequence[str]) -> None:
    """Evaluate, on every rank; rank 0 prints the table."""
    with FailureReport() as failure:
        options, overrides = read_arguments(argv)
        world, _ = start_rank()
        store = connect(world, CommConfig())
        watch_ranks(failure, world, store, None, CommConfig.train_timeout_s)
        cleanup = ExitStack()  # not entered: an error ends the process at once
        config, saved, found = evaluate_saved(options, overrides, world, store, failure, cleanup)
        if world.rank == 0:
            print_lines(*report_lines(config, saved, found))
            if options.json is not None:
                write_json(options.json, json_results(config, saved, found))
        cleanup.close()
        failure.finish(saved.manifest.step)


def evaluate_saved(
    options: Options,
    overrides: Sequence[str],
    world: World,
    store: dist.Store,
    failure: FailureReport,
    cleanup: ExitStack,
) -> tuple[JobConfig, SavedRun, Found]:
    """(configuration of the evaluation, evaluated checkpoint, result). A collective; cleanup: see `evaluate`.

    overrides: `--section.key value`, checked. Raises UserError.
    """
    apply_storage(overrides)
    saved = verified_run(options, world, store)
    name_storage(saved.path, saved.storage)
    with reading(saved.path):
        tokenizer = saved.tokenizer_for(options.tokenizer, options.chat_template)
        has_tokenizer = tokenizer is not None
        resolve = partial(evaluated_config, saved, options, overrides, world, has_tokenizer=has_tokenizer)
        cleanup.callback(use_looks, [])
        config = resolve_with_data(resolve, world, store, CommConfig.save_timeout_s)
        if not (options.tasks or options.allow_import or any(word.startswith(TASKS_KEY) for word in overrides)):
            require_names(saved.path, config.validation.tasks, f"name each of them yourself, as {TASKS} FILE")
        require_chat_template(saved, config, tokenizer)
        if failure.positions is not None:
            failure.positions.silence_s = config.comm.train_timeout_s
        allows_code = options.allow_import
        found = evaluate(config, saved, tokenizer, world, store, failure, cleanup, allows_code=allows_code)
        return config, saved, found


def read_arguments(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """The command's options, and the overrides: `--section.key value`. Raises UsageError."""
    options, overrides, problems = read_options_and_overrides(Options, argv, "evaluate")
    raise_problems(problems)
    check_arguments(options, overrides)
    return options, overrides


def check_arguments(options: Options, overrides: Sequence[str]) -> None:
    """Raise ConfigError if an option is out of range, or if an override does not concern evaluation."""
    problems = [*check_options(options), *check_output_file("--json", options.json)]
    problems += check_chat_template(options.chat_template)
    for word in overrides:
        key = word[2:].partition("=")[0]
        if word.startswith("--") and key.partition(".")[0] not in SECTIONS:
            rule = f"a key of a section that evaluation depends on: {', '.join(SECTIONS)}"
            problems.append(Problem(key, None, rule, "leave it out: the run's saved value is used"))
    raise_problems(problems)


def verified_run(options: Options, world: World, store: dist.Store) -> SavedRun:
    """The checkpoint to evaluate, the same path on all ranks: rank 0 chooses and verifies it. Raises UserError.

    The first rank of a node that has a copy of its own verifies this copy.
    """

    def choose() -> tuple[str, list[int]]:
        path = open_run(options.run, allow_import=options.allow_import).with_weights(options.weights).path
        return str(path), copy_id(path)

    text, verified = share_from_rank_0("evaluated_checkpoint", choose, world, store, CommConfig.save_timeout_s)
    path = place(text)
    with reading(path):
        verifies = world.local_rank == 0 and copy_id(path) != verified
        found = open_run(path, verifies=verifies, allow_import=options.allow_import)
        return found.with_weights(options.weights)


def evaluated_config(
    saved: SavedRun, options: Options, overrides: Sequence[str], world: World, *, has_tokenizer: bool
) -> JobConfig:
    """The run's configuration with the requested data and a layout for this world. Raises ConfigError.

    Only keys that evaluation depends on are checked, not whether training could resume here.
    """
    of_run = saved.config
    apply_stores(of_run)
    sources = [source_from_path(text, DATA) for text in options.data]
    raise_problems([*(each for each in sources if isinstance(each, Problem)), *check_tasks(TASKS, options.tasks)])
    values: dict[str, dict[str, Any]] = {"model": {}, "data": {}, "tokenizer": {}}
    values |= {name: dict(table) for name, table in saved.manifest.config.items()}
    values["storage"] = asdict(of_run.storage)
    first = saved.manifest.facts["model"]
    of_step = {key: value for key, value in saved.manifest.model.items() if value != first[key]}
    values["model"]["overrides"] = {**values["model"].get("overrides", {}), **of_step}
    values["training"]["stages"] = []
    validation = values.get("validation", {})
    if sources or options.tasks or any(word.startswith("--validation.sources") for word in overrides):
        tables = [asdict(source) for source in sources if isinstance(source, SourceConfig)]
        validation |= {"sources": tables, "steps": -1, "tasks": list(options.tasks)}
    if options.steps is not None:
        validation["steps"] = options.steps
    layout = values.get("parallelism", {}) | {axis: getattr(ParallelismConfig, axis) for axis in LAYOUT}
    if options.tokenizer is not None:
        values["tokenizer"] = values["tokenizer"] | {"path": options.tokenizer}
    values |= {"validation": validation, "parallelism": layout | {"pp_split": []}}
    config = config_from_values(values, overrides, saved.manifest)
    config = replace(config, validation=replace(config.validation, enable=True))
    if not config.validation.sources and not config.validation.tasks:
        rule = "needed, since the run has neither validation.sources nor validation.tasks"
        raise ConfigError([Problem(DATA, "", rule, f"give {DATA} and a file, a folder or a glob, or {TASKS} TASK")])
    if config.validation.tasks and not has_tokenizer:
        rule = "not without a tokenizer: neither the run's dump folder nor its tokenizer.path has one"
        raise ConfigError([Problem(TASKS, list(config.validation.tasks), rule, "give --tokenizer PATH")])
    rule = "a source of tokens: neither the run's dump folder nor its tokenizer.path has a tokenizer"
    remedy = "use token files, or give --tokenizer PATH"
    raise_problems(
        Problem(f"validation.sources.{n}.kind", source.kind, rule, remedy)
        for n, source in enumerate(config.validation.sources)
        if open_source(source).holds == "text" and not has_tokenizer
    )
    config = replace(config, job=JobSection(), checkpoint=CheckpointConfig(), profiling=ProfilingConfig())
    data = replace(config.data, sources=(), document_mask=config.data.masks_documents)  # training data is not evaluated
    of_mesh: dict[str, Any] = {"world_size": world.size, "device_type": world.device_type}
    problems = check_config(replace(config, data=data), **of_mesh, checks_files=False)
    problems = [problem for problem in problems if problem.key != "data.sources"]  # which only training needs
    given, rule = config.training.local_batch_size != -1, "at least 1 for an evaluation: -1 fits the memory of training"
    training = Rules("training", config.training, problems)
    training.require("local_batch_size", given, rule, "give the number of sequences per batch")
    problems = problems or check_validation(
        config.validation, config.data, vocab_size=saved.hyper_parameters.vocab_size, has_tokenizer=True
    )
    raise_problems(_of_this_mesh(problem, overrides) for problem in problems)
    config = resolve_config(config, **of_mesh)
    return replace(config, data=replace(config.data, sources=()))


def require_chat_template(saved: SavedRun, config: JobConfig, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError if the configuration evaluates conversations, and the tokenizer has no chat template."""
    keys = keys_with_conversations(config.validation)
    if keys and tokenizer is not None and tokenizer.chat_template is None:
        rule = f"required for conversations ({keys[0]}): the tokenizer of {saved.path} has no chat template"
        raise ConfigError([Problem("--chat-template", None, rule, "write the path of a template in Jinja")])


def _of_this_mesh(problem: Problem, given: Sequence[str]) -> Problem:
    """The problem, with another remedy if a value saved by the run does not fit this number of processes."""
    if problem.key != STREAMS or any(word.startswith(f"--{problem.key}") for word in given):
        return problem
    remedy = f"it is the run's value: use another number of processes, or give --{problem.key} for this evaluation"
    return replace(problem, remedy=remedy)


def evaluate(
    config: JobConfig,
    saved: SavedRun,
    tokenizer: Tokenizer | None,
    world: World,
    store: dist.Store,
    failure: FailureReport,
    cleanup: ExitStack,
    *,
    allows_code: bool,
) -> Found:
    """Build the model without optimizer, load it, evaluate the data. On all ranks. Raises UserError.

    cleanup: gets what closes the loaders and the process group. allows_code: whether tasks may run code of the user.
    """
    apply_determinism(config.debug)
    pin_kernels(world.device)
    facts = program_facts(config, world, os.environ)
    require_equal("program", facts, world, store, config.comm.init_timeout_s)
    job = job_of(pin_revisions(config, world, store), world.size)
    config = job.config
    # As in training, data comes before the process group: building an index may exceed its timeout.
    mesh = Mesh(config.parallelism, world)
    loaders = build_validation_data(job, mesh, tokenizer)
    for loader in loaders.values():
        cleanup.callback(loader.close)
    why_no_text = "" if world.size == 1 else "start titanlite evaluate without torchrun, in one process"
    harness = build_tasks(config, tokenizer, world, store, allows_code=allows_code, why_no_text=why_no_text)
    held_out = [source for loader in loaders.values() for source in loader.sources]
    manifests = [saved.path / MANIFEST_FILE] if isinstance(saved.path, Path) else []  # a store is the same for all
    facts = content_facts(config, tokenizer, [], held_out, manifests)
    require_equal("content", facts, world, store, config.comm.init_timeout_s)
    init_process_group(world, store, config.comm)
    cleanup.callback(dist.destroy_process_group)
    mesh.connect(config.comm)
    control = mesh.new_group(config.comm.init_timeout_s)
    parts = build_model(config, mesh, world.device, draws_weights=False)
    set_timeout([control], config.comm.save_timeout_s)
    failure.enter(saved.manifest.step, "loading")
    saved.load({name: tensor for part in parts for name, tensor in saved_tensors(part).items()}, control)
    set_timeout([control], config.comm.init_timeout_s)
    log.info("Loaded %s", saved.path)
    model = build_forward(job, parts, mesh, world.device)
    evaluator = build_evaluator(job, model, control, StopRequest(), tokenizer)
    failure.enter(saved.manifest.step, "evaluating")
    totals, time_s, start = {}, {}, perf_counter()
    for name, found in evaluator.totals_by_name(
        loaders, steps=config.validation.steps, max_bad_rows=config.data.max_bad_rows
    ):
        totals[name], time_s[name] = found, perf_counter() - start
        start = perf_counter()
    scores = {}
    if config.validation.tasks:
        generate = greedy_texts(config, parts, mesh, tokenizer) if world.size == 1 else None
        scores = evaluator.scores(share_tasks(harness, control), generate)
    return Found(totals, time_s, evaluator.why_no_bytes, scores)


def greedy_texts(
    config: JobConfig, parts: Sequence[LanguageModel], mesh: Mesh, tokenizer: Tokenizer | None
) -> Generate:
    """What generates the text of tasks, in one process."""

    @cache
    def full_model() -> LanguageModel:
        dtype = DTYPES[config.training.mixed_precision_param]
        model = gather_model(parts, mesh, config.family, config.hyper_parameters, dtype)
        assert model is not None, "one process"
        return model.eval()

    def generate_greedily(prompt: Sequence[int], most: int) -> Iterator[int]:
        ends = () if tokenizer is None or tokenizer.eos_id is None else (tokenizer.eos_id,)
        with torch.no_grad():
            for (token,) in generate(full_model(), [prompt], Sampling(), max_new_tokens=most, eos_ids=ends):
                if token is not None and token not in ends:
                    yield token

    return generate_greedily


def conditions(config: JobConfig, saved: SavedRun) -> dict[str, Any]:
    """Settings that losses depend on beside the data: two losses are comparable only if these are equal."""
    data, training, float8 = config.data, config.training, config.float8
    return {
        "checkpoint": str(saved.path),
        "step": saved.manifest.step,
        "loss_name": config.loss.name,
        "weights": saved.weights,
        "seq_len": training.seq_len,
        "dtype": training.dtype,
        "compute_dtype": training.mixed_precision_param,
        **({} if float8.recipe == "none" else {"float8": f"{float8.recipe} ({float8.scale})"}),
        **{
            name: getattr(data, name)
            for name in ("packing", "document_mask", "add_bos", "add_eos", "num_streams", "stream_version")
        },
        "max_piece_bytes": data.max_piece_bytes,
        "steps": config.validation.steps,
        "global_batch_size": training.global_batch_size,
    }


def report_lines(config: JobConfig, saved: SavedRun, found: Found) -> list[str]:
    """The settings that losses depend on, and tables of sources and of tasks."""
    about = conditions(config, saved)
    settings = ", ".join(f"{name} {json.dumps(about[name])}".replace('"', "") for name in list(about)[3:-2])
    limit = config.validation.steps
    limits = [] if limit < 0 else [f"at most {limit} x {about['global_batch_size']} sequences of each source"]
    return [
        f"{saved.path}, step {saved.manifest.step}",
        settings,
        *limits,
        *(loss_lines(config, found) if found.totals else ()),
        *(task_lines(config, found) if found.tasks else ()),
    ]


def loss_lines(config: JobConfig, found: Found) -> list[str]:
    """A row per source, and a row for all sources."""
    table = [["source", "loss", "perplexity", "bits/byte", "tokens", "seconds", "tokens/s"]]
    rows = list(found.totals.items())
    rows += [("all", sum_of(found.totals.values()))] if len(rows) > 1 else []
    for name, totals in rows:
        numbers = totals.numbers()
        time_s = found.time_s.get(name, sum(found.time_s.values()))
        table.append(
            [
                name,
                *(f"{numbers[key]:.6g}" if key in numbers else "-" for key in ("loss", "perplexity", "bits_per_byte")),
                *(f"{totals.num_valid:,}", f"{time_s:.1f}", f"{totals.num_valid / time_s:,.0f}"),
            ]
        )
    seq_len = config.training.seq_len
    meaning = "cross-entropy in nats per token; perplexity: its exponential"
    if not config.loss.is_cross_entropy:
        meaning = f'loss "{config.loss.name}" (loss.name) per token, without its terms'
    return [
        "",
        *aligned(table),
        "",
        f"loss: the mean {meaning}",
        *([f"no bits per byte: {found.why_no_bytes}"] if found.why_no_bytes else []),
        *(
            f"{name}: {counted(totals.too_long, 'conversation')} had more than training.seq_len + 1 = {seq_len + 1:,} "
            f"tokens (too_long = {source.too_long})"
            for source, (name, totals) in zip(config.validation.sources, found.totals.items(), strict=True)
            if totals.too_long
        ),
    ]


def task_lines(config: JobConfig, found: Found) -> list[str]:
    """A row per score of a task."""
    table = [["task", "score", "value", "stderr", "documents"]]
    for name, scores in found.tasks.items():
        for score in scores.names():
            error = scores.numbers.get(f"{score}_stderr")
            values = [f"{scores.numbers[score]:.6g}", "-" if error is None else f"{error:.4g}"]
            table.append([name, score, *values, f"{scores.num_documents:,}"])
    tasks = {name: scores for name, scores in found.tasks.items() if scores.log_likelihoods}
    return [
        "",
        *aligned(table),
        "",
        "acc: share of right answers; acc_norm: by log-likelihood per character; bits_per_byte: of the right answers",
        *(
            f"{name}: {counted(scores.num_truncated, 'request')} with a context too long for training.seq_len = "
            f"{config.training.seq_len:,}, whose first tokens were left out"
            for name, scores in tasks.items()
            if scores.num_truncated
        ),
        *(
            f"{name}: {counted(scores.num_close, 'document')} whose two best choices differ by less than {CLOSE:g}"
            for name, scores in tasks.items()
            if scores.num_close
        ),
        *([] if config.loss.is_cross_entropy else ["tasks: by the cross-entropy"]),
    ]


def json_results(config: JobConfig, saved: SavedRun, found: Found) -> dict[str, Any]:
    """The results with all digits; None for values that are not finite."""

    def entry(totals: SetTotals, time_s: float) -> dict[str, float | int | None]:
        numbers = {"loss_sum": totals.loss_sum, **totals.numbers(), "time_s": time_s}
        numbers["tokens_per_second"] = totals.num_valid / time_s
        finite = {name: _finite(value) for name, value in numbers.items()}
        too_long = {} if totals.too_long is None else {"too_long": totals.too_long}
        return {**finite, "num_valid": totals.num_valid, "num_bytes": totals.num_bytes, **too_long}

    def task_entry(scores: TaskScores) -> dict[str, Any]:
        return {
            "num_documents": scores.num_documents,
            "num_truncated": scores.num_truncated,
            "num_close": scores.num_close,
            **{name: _finite(value) for name, value in scores.numbers.items()},
            "log_likelihoods": [[_finite(each) for each in sums] for sums in scores.log_likelihoods],
        }

    return {
        **conditions(config, saved),
        "sources": {name: entry(totals, found.time_s[name]) for name, totals in found.totals.items()},
        **({"all": entry(sum_of(found.totals.values()), sum(found.time_s.values()))} if found.totals else {}),
        "why_no_bits_per_byte": found.why_no_bytes,
        "tasks": {name: task_entry(scores) for name, scores in found.tasks.items()},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    main(sys.argv[1:])
    end_process(0)
