"""Evaluation of a saved run: `python -m titanlite evaluate RUN [--data SOURCE ...]`, or the same by torchrun."""

from titanlite.runtime.failure import FailureReport, end_on_interrupt, end_process
from titanlite.runtime.orphans import end_with_launcher

if __name__ == "__main__":  # before the imports that take seconds
    end_with_launcher()
    end_on_interrupt()

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist

from titanlite.assembly.data import build_validation_data, pin_revisions
from titanlite.assembly.model import build_forward, build_model
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.config.check import check_config, resolve_config
from titanlite.config.load import config_from_values
from titanlite.config.schema import JobConfig, JobSection
from titanlite.data.check import check_validation
from titanlite.data.kinds import open_source, source_from_path
from titanlite.data.sources.config import SourceConfig
from titanlite.data.tokenizer import Tokenizer
from titanlite.metrics.validation import SetTotals, sum_of
from titanlite.parallel.mesh import AXES, Mesh, ParallelismConfig
from titanlite.runtime.determinism import apply_determinism
from titanlite.runtime.distributed import (
    CommConfig,
    World,
    connect,
    init_process_group,
    set_timeout,
    world_from_environment,
)
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.runtime.logging import log, setup_logging
from titanlite.runtime.signals import StopRequest
from titanlite.tools.saved_run import SavedRun, open_run, reading
from titanlite.validation import Evaluator, build_token_bytes, why_no_bytes

DESCRIPTION = """\
Loss, perplexity and bits per byte of a saved run on any data, by the code of validation. Nothing is trained, and
nothing is written into the run's folder. RUN's own configuration holds, but for its layout: all processes are
data-parallel unless --parallelism.… says otherwise. Without --data: the run's own validation.sources.
"""
SECTIONS = ("validation", "data", "training", "parallelism", "compile", "comm")
"""Whose keys may be given: a model, its tokenizer and how it was trained are as they were saved."""
BATCH_KEYS = ("data.num_streams", "training.global_batch_size", "training.local_batch_size")
DATA = "--data"
CHECKPOINT_KEY = "evaluated_checkpoint"
"""Key in the store: the folder that all ranks evaluate."""


@dataclass(frozen=True)
class Found:
    """totals and seconds by source; why_no_bytes: "" where bits per byte are known."""

    totals: Mapping[str, SetTotals]
    time_s: Mapping[str, float]
    why_no_bytes: str


def main(argv: Sequence[str]) -> None:
    """The same program on every rank; a table from rank 0."""
    end_with_launcher()
    with FailureReport() as failure:
        own, rest = parse_arguments(argv)
        world = world_from_environment()
        setup_logging(world.rank)
        failure.store = connect(world, CommConfig())
        saved = verified_run(own.run, world, failure.store)
        with reading(saved.path):
            tokenizer = saved.tokenizer_at(own.tokenizer) if own.tokenizer else saved.tokenizer()
            if tokenizer is not None:
                saved.require_room(tokenizer, own.tokenizer)
            config = evaluated_config(saved, own, rest, world, has_tokenizer=tokenizer is not None)
            found = evaluate(config, saved, tokenizer, world, failure.store, failure)
        if world.rank == 0:
            print("\n".join(report_lines(config, saved, found)), flush=True)
            if own.json is not None:
                write_json(own.json, config, saved, found)
        dist.destroy_process_group()


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own arguments, and the words of `--section.key value`. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        "titanlite evaluate",
        description=DESCRIPTION,
        epilog=f"--section.key value overrides a key of the run, of the sections {', '.join(SECTIONS)}; "
        "--validation.sources.0.kind and so on say all about a source that --data cannot say.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="dump folder of a run, or one of its folders step-N")
    text = "file, folder or glob, its kind by the files' names; several for several sources"
    parser.add_argument(DATA, metavar="SOURCE", action="append", default=[], help=text)
    text = "of each source at most N batches of training.global_batch_size sequences (default: the whole of it)"
    parser.add_argument("--steps", metavar="N", type=int, help=text)
    text = "tokenizer.json or its folder, for a run on tokens that has none; default: the run's own"
    parser.add_argument("--tokenizer", metavar="PATH", help=text)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there as well")
    own, rest = parser.parse_known_args(argv)
    problems = []
    if own.steps is not None and own.steps < 1:
        problems.append(Problem("--steps", own.steps, "at least 1", "leave it out to evaluate on all of the data"))
    if own.json is not None and (own.json.is_dir() or not os.access(own.json.absolute().parent, os.W_OK | os.X_OK)):
        rule = "a file in a folder that exists and may be written"
        problems.append(Problem("--json", str(own.json), rule, f"look at {own.json.absolute().parent}"))
    for word in rest:
        key = word[2:].partition("=")[0]
        if word.startswith("--") and key.partition(".")[0] not in SECTIONS:
            rule = f"a key of a section that evaluation depends on: {', '.join(SECTIONS)}"
            problems.append(Problem(key, "", rule, "leave it out: the rest is as it was saved"))
    if problems:
        raise ConfigError(problems)
    return own, rest


def verified_run(path: Path, world: World, store: dist.Store) -> SavedRun:
    """The checkpoint that RUN means, the same on all ranks: rank 0 chooses and verifies it. Raises UserError."""
    if world.rank == 0:
        saved = open_run(path)
        store.set(CHECKPOINT_KEY, str(saved.path))
        return saved
    store.wait([CHECKPOINT_KEY], timedelta(seconds=CommConfig.save_timeout_s))
    path = Path(store.get(CHECKPOINT_KEY).decode())
    with reading(path):
        return open_run(path, verifies=False)


def evaluated_config(
    saved: SavedRun, own: argparse.Namespace, rest: Sequence[str], world: World, *, has_tokenizer: bool
) -> JobConfig:
    """The run's configuration with the data that are asked for and a layout for this world. Raises ConfigError.

    Checked is what evaluation depends on: not whether training could go on here.
    """
    sources = [source_from_path(text, DATA) for text in own.data]
    problems = [source for source in sources if isinstance(source, Problem)]
    if problems:
        raise ConfigError(problems)
    values = {name: dict(table) for name, table in saved.manifest.config.items()}
    validation = values.get("validation", {})
    if sources or any(word.startswith("--validation.sources") for word in rest):
        tables = [asdict(source) for source in sources if isinstance(source, SourceConfig)]
        validation |= {"sources": tables, "steps": -1}
    if own.steps is not None:
        validation["steps"] = own.steps
    layout = values.get("parallelism", {}) | {axis: getattr(ParallelismConfig, axis) for axis in AXES}
    if own.tokenizer is not None:
        values["tokenizer"] = values["tokenizer"] | {"path": own.tokenizer}
    config = config_from_values(values | {"validation": validation, "parallelism": layout | {"pp_split": []}}, rest)
    config = replace(config, validation=replace(config.validation, enable=True))
    if not config.validation.sources:
        rule = "something to evaluate on: the run itself has no validation.sources"
        raise ConfigError([Problem(DATA, "", rule, f"write {DATA} and a file, a folder or a glob")])
    rule = "tokens: the run has no tokenizer, neither in its dump folder nor where its configuration says"
    remedy = "give it token files, or --tokenizer PATH"
    problems = [
        Problem(f"validation.sources.{n}.kind", source.kind, rule, remedy)
        for n, source in enumerate(config.validation.sources)
        if open_source(source).holds == "text" and not has_tokenizer
    ]
    if problems:
        raise ConfigError(problems)
    config = replace(config, job=JobSection(), checkpoint=CheckpointConfig())
    problems = check_config(config, world_size=world.size, device_type=world.device_type, looks_at_files=False)
    problems = problems or check_validation(
        config.validation, config.data, vocab_size=saved.hyper_parameters.vocab_size, has_tokenizer=True
    )
    if problems:
        raise ConfigError([_of_this_mesh(problem, rest) for problem in problems])
    config = resolve_config(config, world_size=world.size, device_type=world.device_type)
    return replace(config, data=replace(config.data, sources=()))  # those of training play no part


def _of_this_mesh(problem: Problem, given: Sequence[str]) -> Problem:
    """Of a value that is the run's own and does not fit so many processes: what to do about it here."""
    if problem.key not in BATCH_KEYS or any(word.startswith(f"--{problem.key}") for word in given):
        return problem
    remedy = f"it is the run's own: use another number of processes, or give --{problem.key} for this evaluation"
    return replace(problem, remedy=remedy)


def evaluate(
    config: JobConfig,
    saved: SavedRun,
    tokenizer: Tokenizer | None,
    world: World,
    store: dist.Store,
    failure: FailureReport,
) -> Found:
    """Builds the model without what training adds, loads it, goes through the data. On all ranks; raises UserError."""
    apply_determinism(config.debug)
    config = pin_revisions(config, world, store)
    # As in training, data comes before the ranks are tied together: an index that one of them builds takes its time.
    mesh = Mesh(config.parallelism, world)
    loaders = build_validation_data(config, mesh, tokenizer)
    init_process_group(world, store, config.comm)
    mesh.connect(config.comm.init_timeout_s)
    control = mesh.new_group(config.comm.init_timeout_s)
    parts = build_model(config, mesh, world.device, draws_weights=False)
    set_timeout([control], config.comm.save_timeout_s)
    saved.load({name: p.data for part in parts for name, p in part.named_parameters()}, control)
    set_timeout([control], config.comm.init_timeout_s)
    log.info("Loaded %s", saved.path)
    model = build_forward(config, parts, mesh, world.device)
    token_bytes = build_token_bytes(tokenizer, saved.hyper_parameters.vocab_size, world.device)
    evaluator = Evaluator(model, control, token_bytes, StopRequest())
    totals, time_s, start = {}, {}, perf_counter()
    for name, found in evaluator.totals_by_name(
        loaders, steps=config.validation.steps, max_bad_rows=config.data.max_bad_rows, failure=failure
    ):
        totals[name], time_s[name] = found, perf_counter() - start
        start = perf_counter()
    for loader in loaders.values():
        loader.close()
    return Found(totals, time_s, why_no_bytes(tokenizer) if token_bytes is None else "")


def conditions(config: JobConfig, saved: SavedRun) -> dict[str, Any]:
    """All that losses depend on beside the data: they compare only where these are alike."""
    data, training = config.data, config.training
    return {
        "checkpoint": str(saved.path),
        "step": saved.manifest.step,
        "seq_len": training.seq_len,
        "dtype": training.dtype,
        "compute_dtype": training.mixed_precision_param,
        **{name: getattr(data, name) for name in ("packing", "document_mask", "add_bos", "add_eos", "num_streams")},
        "max_piece_bytes": data.max_piece_bytes,
        "steps": config.validation.steps,
        "global_batch_size": training.global_batch_size,
    }


def report_lines(config: JobConfig, saved: SavedRun, found: Found) -> list[str]:
    """What losses depend on, a row for each source, and one for all of them."""
    about = conditions(config, saved)
    said = ", ".join(f"{name} {json.dumps(about[name])}".replace('"', "") for name in list(about)[2:-2])
    limit = config.validation.steps
    limits = [] if limit < 0 else [f"at most {limit} x {about['global_batch_size']} sequences of each source"]
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
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        f"{saved.path}, step {saved.manifest.step}",
        said,
        *limits,
        "",
        *("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in table),
        "",
        "loss: the mean cross-entropy in nats per token; perplexity: its exponential",
        *([f"without bits per byte, since {found.why_no_bytes}"] if found.why_no_bytes else []),
    ]


def write_json(file: Path, config: JobConfig, saved: SavedRun, found: Found) -> None:
    """The same, with all digits; null is what is not a finite number. Raises UserError."""

    def entry(totals: SetTotals, time_s: float) -> dict[str, float | int | None]:
        numbers = {"loss_sum": totals.loss_sum, **totals.numbers(), "time_s": time_s}
        numbers["tokens_per_second"] = totals.num_valid / time_s
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {**finite, "num_valid": totals.num_valid, "num_bytes": totals.num_bytes}

    content = {
        **conditions(config, saved),
        "sources": {name: entry(totals, found.time_s[name]) for name, totals in found.totals.items()},
        "all": entry(sum_of(found.totals.values()), sum(found.time_s.values())),
        "why_no_bits_per_byte": found.why_no_bytes,
    }
    try:
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
    end_process(0)
