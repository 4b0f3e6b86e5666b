"""Summary at the end of a run: results, output files, suggested next commands."""

import os
import shlex
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
    same_config = shlex.quote(str(folder / CONFIG_COPY))  # includes command-line overrides
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")  # set by torchrun
    torchrun = "torchrun --standalone --nproc-per-node"
    train = "titanlite train" if processes == "1" else f"{torchrun} {processes} -m titanlite.train"
    log.info(
        "Done: %d steps, %s tokens, final loss %.4f, %s tokens/s",
        record.step,
        f"{record.tokens_seen:,}",
        record.loss,
        f"{tokens / train_s:,.0f}",
    )
    if record.skipped_steps:
        log.warning(
            "%d of %d steps were skipped: they did not change the weights, see the warnings above",
            *(record.skipped_steps, record.step),
        )
    log.info("Outputs: %s (a row per logged step), %s (the configuration)", folder / METRICS_FILE, folder / CONFIG_COPY)
    data_exhausted = record.step < config.training.steps
    new_folder = ""
    next_steps = []
    if config.checkpoint.enable:
        new_folder = f" --job.dump_folder {shlex.quote(f'{folder}-2')}"
        if (folder / TOKENIZER_FOLDER).exists():
            python_source = any(source.kind == PythonStdlib.kind for source in config.data.sources)
            # Without a trailing space, which most tokenizers join to the next word.
            prompt = "def __init__(self" if python_source else "The"
            next_steps.append(("generate text", f'titanlite generate {shlex.quote(str(folder))} --prompt "{prompt}"'))
    if not data_exhausted and not config.checkpoint.last_save_model_only:
        next_steps.append(("train longer", f"{train} {same_config} --training.steps {4 * record.step}"))
    if os.environ.get("WORLD_SIZE", "1") == "1":
        next_steps.append(("on two processes", f"{torchrun} 2 -m titanlite.train {same_config}{new_folder}"))
    next_steps.append(("on your own text", "set data.sources in a TOML file; all keys: titanlite train --help"))
    next_steps.append(("see its curves", f"titanlite report {shlex.quote(str(folder))}"))
    for number, (title, command) in enumerate(next_steps):
        log.info("%-5s %-16s  %s", "" if number else "Next:", title, command)
