"""Command: tokenize the sources of a configuration into token files."""

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from titanlite.config.value_types import literal
from titanlite.data.bpe import prepare_tokenizer
from titanlite.data.config import DataConfig
from titanlite.data.sources.tokens import MANIFEST, Shard
from titanlite.runtime.errors import Problem, UserError
from titanlite.runtime.settings import setting
from titanlite.runtime.text import counted
from titanlite.storage.address import address_problem, is_address
from titanlite.tools.command import ConfigFile, OptionalCount, print_lines, read_options_and_overrides, run_command
from titanlite.tools.documents import config_of_data, piece_bytes
from titanlite.tools.outputs import require_new
from titanlite.tools.tokenize.folder import OutputFolder, errors_of_writing, output_folder
from titanlite.tools.tokenize.local import run_locally
from titanlite.tools.tokenize.manifest import finish
from titanlite.tools.tokenize.on_ray import check_ray, run_on_ray
from titanlite.tools.tokenize.part import tokenize_part
from titanlite.tools.tokenize.plan import ENTRY, Job, large_parts, open_job, start_job
from titanlite.tools.tokenize.progress import with_progress
from titanlite.tools.tokenize.slurm import MAX_TASKS, submit, write_script


@dataclass(frozen=True)
class Options:
    """Tokenize the text of a configuration into token files, in parallel: on this machine, on Ray or on Slurm.

    The files do not depend on the engine and the number of workers. An interrupted command resumes if it is started
    again. --section.key VALUE overrides a key of CONFIG, as for training.
    """

    config: ConfigFile
    """TOML file, or the name of a shipped configuration"""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = setting(is_path=True)
    """new folder or address, such as s3://bucket/tokens, or that of an interrupted command"""
    engine: Literal["local", "ray", "slurm"] = "local"
    """where the parts are written. ray: RAY_ADDRESS, else a cluster on this machine; slurm: write the script of an
    array"""
    workers: OptionalCount = setting(None, "write 0 to tokenize in this process", least=0)
    """worker processes, tasks of Ray at the same time, or tasks of the array; default: the CPUs, for slurm 1000"""
    part_bytes: OptionalCount = setting(None, least=1)
    """bytes of the sources for each token file; default: 64 MiB, more for sources of 625 GiB or more"""
    part: OptionalCount = setting(None, least=0)
    """write only this part, whose plan is in --out, and with --tasks N each N-th part after it"""
    tasks: OptionalCount = setting(None, least=1)
    """number of tasks that share the parts"""
    script: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("tokenize.sbatch")
    """new file for the script of --engine slurm"""
    submit: bool = False
    """submit the script of --engine slurm"""


def main(argv: Sequence[str]) -> None:
    """Write token files of uint16, or of uint32 if the vocabulary needs it. Raises UserError.

    The tokens are those of all documents once, in source order, with BOS and EOS as in training: the tokens that one
    unshuffled stream reads.
    """
    options, overrides, problems = read_options_and_overrides(Options, argv, "tokenize")
    config = config_of_data(options, overrides, [*problems, *_check(options)], needs_tokenizer=True, reads_chat=False)
    tokenizer = prepare_tokenizer(config.tokenizer, config.data.sources, vocab_size=config.hyper_parameters.vocab_size)
    assert tokenizer is not None, "sources of text have a tokenizer"
    section, out = replace(config.data, max_piece_bytes=piece_bytes(config)), output_folder(options.out)
    if options.part is not None:
        job = open_job(section, out, tokenizer)
        if job is None:
            print_lines(f"{out} is complete")
            return
        with errors_of_writing(out):
            _write_parts_of_task(job, options.part, options.tasks)
        return
    if options.engine == "ray":
        check_ray()
    with out.owned():
        if options.engine == "slurm":
            require_new(options.script, "--script")
        print_lines(f"tokenizer: {tokenizer.description}")
        job = start_job(section, out, tokenizer, options.part_bytes)
        for line in large_parts(job.plan):
            print_lines(line)
        if options.engine == "slurm":
            _write_script(job, options, overrides)
            return
        missing = job.missing()
        total = len(job.plan["parts"])
        if len(missing) < total:
            print_lines(f"resuming: {total - len(missing)} of {counted(total, 'part')} are written")
        with closing(_run(job, missing, options)) as entries:  # ends the workers after an error
            for _ in with_progress(entries, section, done=total - len(missing), total=total):
                pass
        _report(out, finish(job))


def _check(options: Options) -> Iterator[Problem]:
    """Problems of options that do not go together, and of the address."""
    if is_address(options.out) and (fault := address_problem(options.out)):
        yield Problem("--out", options.out, *fault)
    if options.submit and options.engine != "slurm":
        yield Problem("--submit", True, "only with --engine slurm", "add --engine slurm, or leave --submit out")
    if options.part is not None and options.engine != "local":
        yield Problem("--part", options.part, "without --engine", "leave --engine out: a part is written here")
    if options.part is not None and options.workers is not None:
        yield Problem("--workers", options.workers, "without --part", "leave it out: a part is written in this process")
    if options.part is not None and options.part_bytes is not None:
        yield Problem("--part-bytes", options.part_bytes, "without --part", "leave it out: the plan in --out has it")
    if options.tasks is not None and options.part is None:
        yield Problem("--tasks", options.tasks, "only with --part", "add --part, or leave --tasks out")
    if options.part is not None and options.tasks is not None and options.part >= options.tasks:
        remedy = f"number the tasks from 0 to {options.tasks - 1}"
        yield Problem("--part", options.part, f"less than --tasks = {options.tasks}", remedy)
    if options.workers == 0 and options.engine != "local":
        yield Problem("--workers", 0, f"at least 1 with --engine {options.engine}", "leave --workers out")


def _run(job: Job, parts: Sequence[int], options: Options) -> Generator[Shard, None, None]:
    """Write parts by an engine of this command."""
    if options.engine == "ray":
        return run_on_ray(job, parts, options.workers)
    return run_locally(job, parts, len(os.sched_getaffinity(0)) if options.workers is None else options.workers)


def _write_parts_of_task(job: Job, first: int, tasks: int | None) -> None:
    """Write the parts of one task, and the manifest if no part is missing then."""
    total = len(job.plan["parts"])
    if tasks is None and first >= total:
        raise UserError(f"--part {first}: the plan has {counted(total, 'part')}, numbered from 0")
    parts = range(first, total, tasks or total)
    entries = (tokenize_part(job, part) for part in parts)
    try:
        for _ in with_progress(entries, job.section, done=0, total=len(parts)):
            pass
    except UserError:  # perhaps since another task has completed the folder, and removed the files of this one
        if MANIFEST not in job.out.names():
            raise
    if not (missing := job.missing()):
        _report(job.out, finish(job))
    elif MANIFEST in job.out.names():
        job.out.delete(job.name(part, ENTRY) for part in parts)
        print_lines(f"{job.out} is complete")
    else:
        print_lines(f"{counted(len(parts), 'part')} written, {len(missing):,} of {total:,} are missing")


def _write_script(job: Job, options: Options, overrides: Sequence[str]) -> None:
    parts, arguments = len(job.plan["parts"]), [options.config, "--out", options.out, *overrides]
    tasks = options.workers or MAX_TASKS
    write_script(options.script, out=options.out, parts=parts, tasks=tasks, arguments=arguments)
    print_lines(f"Script: {options.script} ({counted(parts, 'part')}); see its first lines")
    if options.submit:
        print_lines(*submit(options.script).split("\n"))


def _report(out: OutputFolder, manifest: Mapping[str, Any]) -> None:
    """Print the totals, and the TOML of a run on the token files."""
    print_lines(
        f"{out}: {counted(manifest['tokens'], 'token')} of {counted(manifest['documents'], 'document')}, "
        f"{manifest['dtype']}, {counted(len(manifest['shards']), 'shard')}; "
        f"{counted(manifest['bad_rows'], 'bad row')}",
        "to use it, instead of [tokenizer] and the sources of text:",
        "",
        *toml_lines(str(out), manifest).split("\n"),
    )


def toml_lines(out: str, manifest: Mapping[str, Any]) -> str:
    """The TOML of a run on the token files: vocabulary, source, and the settings that are not the defaults."""
    settings, default = manifest["settings"], DataConfig()
    different = ["add_eos"] if settings["add_eos"] != default.add_eos else []
    tables = [
        f"[model]\nvocab_size = {manifest['tokenizer']['vocab_size']}",
        *(["\n".join(["[data]", *(f"{key} = {literal(settings[key])}" for key in different)])] if different else []),
        f'[[data.sources]]\nkind = "tokens"\npath = {literal(out)}',
    ]
    return "\n\n".join(tables)


if __name__ == "__main__":
    run_command(main)
