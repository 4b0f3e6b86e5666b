"""Summary at the end of a run: results, output files, suggested next commands."""

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
    """Log the summary. steps, train_s: of this start."""
    tokens = steps * config.training.global_batch_size * config.training.seq_len
    folder = Path(config.job.dump_folder)
    same_config = f"CONFIG_FILE={shlex.quote(str(folder / CONFIG_COPY))}"  # includes command-line overrides
    log.info(
        "Done: %d steps, %s tokens, final loss %.4f, %s tokens/s",
        record.step,
        f"{record.tokens_seen:,}",
        record.loss,
        f"{tokens / train_s:,.0f}",
    )
    log.info("Outputs: %s (a row per logged step), %s (the configuration)", folder / METRICS_FILE, folder / CONFIG_COPY)
    data_exhausted = record.step < config.training.steps
    new_folder = ""
    next_steps = []
    if config.checkpoint.enable:
        new_folder = f" --job.dump_folder {shlex.quote(f'{folder}-2')}"
        if (folder / TOKENIZER_FOLDER).exists():
            generate = f"{python_command(os.environ)} -m titanlite generate {shlex.quote(str(folder))}"
            next_steps.append(("generate text", f'{generate} --prompt "{prompt_for(config)}"'))
    if not data_exhausted and not config.checkpoint.last_save_model_only:
        next_steps.append(("train longer", f"{same_config} ./run_train.sh --training.steps {4 * record.step}"))
    next_steps.append(("on two processes", f"NGPU=2 {same_config} ./run_train.sh{new_folder}"))
    next_steps.append(("on your own text", "see docs/data.md"))
    for number, (title, command) in enumerate(next_steps):
        log.info("%-5s %-16s  %s", "" if number else "Next:", title, command)


def prompt_for(config: JobConfig) -> str:
    """Example prompt for the training data; without a trailing space, which most tokenizers join to the next word."""
    return "def __init__(self" if any(source.kind == PythonStdlib.kind for source in config.data.sources) else "The"


def python_command(environment: Mapping[str, str]) -> str:
    """Shell command that starts this Python, also if it is not on the PATH of the user's shell."""
    if sys.prefix in (environment.get("VIRTUAL_ENV"), environment.get("CONDA_PREFIX")):
        return "python"
    executable, folder = Path(sys.executable), Path.cwd()
    return shlex.quote(str(executable.relative_to(folder) if executable.is_relative_to(folder) else executable))
