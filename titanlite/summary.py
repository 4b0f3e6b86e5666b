"""What a run says at its end: what was done, where it is, and what one would do next."""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from titanlite.config.load import CONFIG_COPY
from titanlite.config.schema import JobConfig
from titanlite.data.sources.python_stdlib import PythonStdlib
from titanlite.data.tokenizer import TOKENIZER_FOLDER
from titanlite.metrics.config import METRICS_FILE
from titanlite.metrics.meter import Record
from titanlite.runtime.logging import log


def summarize(config: JobConfig, record: Record, steps: int, train_s: float) -> None:
    """A few lines of the log. steps, train_s: of this start."""
    tokens = steps * config.training.global_batch_size * config.training.seq_len
    folder = Path(config.job.dump_folder)
    again = f"CONFIG_FILE={shlex.quote(str(folder / CONFIG_COPY))}"  # all that was given, also on the command line
    log.info(
        "Done: %d steps, %s tokens, final loss %.4f, %s tokens/s",
        record.step,
        f"{record.tokens_seen:,}",
        record.loss,
        f"{tokens / train_s:,.0f}",
    )
    log.info("Outputs: %s (a row per logged step), %s (the configuration)", folder / METRICS_FILE, folder / CONFIG_COPY)
    ended = record.step < config.training.steps  # the data has
    elsewhere = ""
    next_steps = []
    if config.checkpoint.enable:
        elsewhere = f" --job.dump_folder {shlex.quote(f'{folder}-2')}"
        if (folder / TOKENIZER_FOLDER).exists():
            generate = f"{python_command(os.environ)} -m titanlite generate {shlex.quote(str(folder))}"
            next_steps.append(("see it write", f'{generate} --prompt "{prompt_for(config)}"'))
    if not ended and not config.checkpoint.last_save_model_only:
        next_steps.append(("train longer", f"{again} ./run_train.sh --training.steps {4 * record.step}"))
    next_steps.append(("on two processes", f"NGPU=2 {again} ./run_train.sh{elsewhere}"))
    next_steps.append(("on your own text", "see docs/data.md"))
    for number, (what, command) in enumerate(next_steps):
        log.info("%-5s %-16s  %s", "" if number else "Next:", what, command)


def prompt_for(config: JobConfig) -> str:
    """A beginning that the model of a run may know how to go on from; no space behind it, which is a part of what comes
    next to most tokenizers."""
    return "def __init__(self" if any(source.kind == PythonStdlib.kind for source in config.data.sources) else "The"


def python_command(environment: Mapping[str, str]) -> str:
    """What starts this Python in the user's shell, which need not have it on its PATH even where we do."""
    if sys.prefix in (environment.get("VIRTUAL_ENV"), environment.get("CONDA_PREFIX")):
        return "python"
    executable, here = Path(sys.executable), Path.cwd()
    return shlex.quote(str(executable.relative_to(here) if executable.is_relative_to(here) else executable))
