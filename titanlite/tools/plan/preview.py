"""What `titanlite train` does in place of training: --print-config, --check, --dry-run, --write-slurm."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from titanlite.config.ineffective import describe
from titanlite.config.load import Parsed, keep_earlier, resolve, without_effect
from titanlite.config.schema import JobConfig
from titanlite.config.stages import stage_lines
from titanlite.config.toml import print_config
from titanlite.data.bpe import prepare_tokenizer
from titanlite.parallel.mesh import resolve_degrees
from titanlite.planning.automatic import fit_memory
from titanlite.planning.estimate import has_estimate
from titanlite.planning.hardware.machine import load_profile
from titanlite.planning.search import SEARCHED, search, with_settings
from titanlite.runtime.errors import UsageError
from titanlite.runtime.memory import GIB, device_memory_bytes
from titanlite.runtime.text import counted, for_stdout
from titanlite.tools.outputs import new_output, require_new
from titanlite.tools.plan.report import DEFAULT_GIB, estimate_largest, report, stage_heading
from titanlite.tools.sequences import sequences_as_text
from titanlite.tools.slurm import job_script

SHOWN_SEQUENCES = 8
"""Sequences of the first step that --dry-run shows at most."""


def preview(parsed: Parsed, world_sizes: Sequence[int], local_size: int) -> None:
    """Print or write what an option of the command line asks for, on rank 0, and exit with 0; return if there is none.

    world_sizes: numbers of processes that the launcher may start; local_size: those on this machine. --world-size
    replaces both. Starts nothing, and writes nothing into the dump folder. Raises ConfigError, UserError.
    """
    options = parsed.options
    if not options.preview:
        return
    has_gpus = torch.cuda.is_available() or options.write_slurm is not None  # the nodes of a cluster have them
    device_type = options.device or ("cuda" if has_gpus else "cpu")
    if options.write_slurm is not None and options.world_size is None:
        raise UsageError("--write-slurm needs the number of GPUs of the job: add --world-size 16")
    if options.world_size:
        world_sizes, local_size = [options.world_size], options.world_size
    for world_size in world_sizes:
        config = resolve(parsed, world_size=world_size, device_type=device_type)
        if os.environ.get("RANK", "0") == "0":
            text = _text(parsed, config, world_size, min(local_size, world_size), device_type)
            if options.write_slurm is not None:
                _write_job(options.write_slurm, parsed, world_size, device_type)
            _print(text)
    raise SystemExit(0)


def _text(parsed: Parsed, config: JobConfig, world_size: int, local_size: int, device_type: str) -> str:
    if parsed.options.print_config:
        chosen_later = SEARCHED if _is_auto(config) else ()
        return print_config(parsed.config, keep_earlier(parsed.config), config, parsed.origins, chosen_later)
    options = parsed.options
    has_summary = options.check or options.write_slurm is not None
    lines = [_summary(parsed.path, config, world_size, device_type)] if has_summary else []
    unused = [f"Without effect: {describe(problem)}" for problem in without_effect(parsed, config, world_size)]
    if options.dry_run:
        lines += _dry_run(parsed, config, world_size, local_size, device_type)
    return "\n".join([*lines, *unused]) + "\n"


def _write_job(file: Path, parsed: Parsed, world_size: int, device_type: str) -> None:
    """Write the script of a Slurm job. Raises UserError."""
    require_new(file, "--write-slurm")
    words = [*parsed.words, *(["--strict"] if parsed.options.strict else [])]
    text = job_script(words, config=parsed.path, script=str(file), world_size=world_size, device_type=device_type)
    with new_output(file) as path:
        path.write_text(text, encoding="utf-8")
    _print(f"Script: {file}; see its first lines\n")


def _print(text: str) -> None:
    try:
        print(for_stdout(text), end="", flush=True)
    except BrokenPipeError:  # the reader has closed the pipe, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _is_auto(config: JobConfig) -> bool:
    return config.parallelism.layout == "auto"


def _summary(file: str, config: JobConfig, world_size: int, device_type: str) -> str:
    """That the configuration is valid, and the run in one line."""
    model, training = config.model, config.training
    sizes = resolve_degrees(config.parallelism, world_size)
    axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"
    return (
        f"{Path(file).name} is valid for {counted(world_size, 'process')}: "
        f"{model.family} {model.flavor} on {device_type}, layout {'auto' if _is_auto(config) else axes}, "
        f"{counted(training.steps, 'step')} of {counted(training.global_batch_size, 'sequence')} "
        f"of {training.seq_len:,} tokens" + "".join(f"; {line}" for line in stage_lines(config))
    )


def _dry_run(parsed: Parsed, config: JobConfig, world_size: int, local_size: int, device_type: str) -> list[str]:
    """The plan for this machine, and the first sequences as text."""
    memory_gib = DEFAULT_GIB
    if device_type == "cpu":  # the processes of a node share its memory
        memory_gib = device_memory_bytes(torch.device("cpu")) / GIB / local_size
    elif torch.cuda.is_available():
        memory_gib = device_memory_bytes(torch.device("cuda", 0)) / GIB
    memory_gib = round(memory_gib, 1)
    if _is_auto(config):
        config = _with_fastest_layout(parsed.origins.keys(), config, world_size, memory_gib)
    lines = [f"The memory of the family {config.model.family} cannot be planned", ""]
    if has_estimate(config):
        config = fit_memory(config, world_size, device_type=device_type, memory_bytes=round(memory_gib * GIB))
        number, of_stage, plan = estimate_largest(config, world_size, device_type=device_type)
        lines = [stage_heading(config, number) + report(of_stage, plan, memory_gib)]
    vocab_size = config.hyper_parameters.vocab_size
    tokenizer = prepare_tokenizer(config.tokenizer, config.data.sources, vocab_size=vocab_size)
    sequences = config.training.global_batch_size
    shown = min(sequences, SHOWN_SEQUENCES)
    lines.append(f"The first step has {counted(sequences, 'sequence')}; shown: {shown}")
    lines += sequences_as_text(config, tokenizer, vocab_size, shown)
    if shown < sequences:
        lines += ["", f"All of them: titanlite inspect {parsed.path} --sequences {sequences}"]
    return [*lines, ""]


def _with_fastest_layout(given: Collection[str], config: JobConfig, world_size: int, memory_gib: float) -> JobConfig:
    """The configuration with the layout that the start of the run would choose. Raises UsageError."""
    if not config.parallelism.hardware:
        raise UsageError(
            'parallelism.layout = "auto" measures the machine at the start of the run: for --dry-run, add '
            "--parallelism.hardware, the name of a profile or a file of titanlite calibrate"
        )
    profile = load_profile(config.parallelism.hardware)
    found = search(config, world_size, profile, memory_gib=memory_gib, kept=given)
    if not found.fastest:
        raise UsageError(
            f'parallelism.layout = "auto": no layout of {counted(world_size, "rank")} fits: see titanlite plan --search'
        )
    return with_settings(config, found.best.settings)
