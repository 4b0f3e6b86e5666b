"""Summary at the end of a run: results, output files, suggested next commands."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from titanlite.config.check import check_config
from titanlite.config.load import CONFIG_COPY
from titanlite.config.schema import JobConfig
from titanlite.config.stages import batch_stages
from titanlite.data.sources.python_stdlib import PythonStdlib
from titanlite.data.steps import tokens_until
from titanlite.data.tokenizer import TOKENIZER_FOLDER
from titanlite.metrics.config import METRICS_FILE
from titanlite.metrics.records import Record
from titanlite.runtime.logging import log
from titanlite.runtime.text import counted
from titanlite.storage.address import is_address, is_below

RUN_TRAIN = "TITANLITE_RUN_TRAIN"
"""Environment variable: how the user has called run_train.sh, which sets it."""


def summarize(config: JobConfig, record: Record, steps: int, train_s: float) -> None:
    """Log the summary. steps, train_s: of this start."""
    stages = batch_stages(config)
    tokens = tokens_until(stages, record.step) - tokens_until(stages, record.step - steps)
    folder = Path(config.job.dump_folder)
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
    for (_, name), count in ((key.split("/", 1), count) for key, count in record.too_long.items() if count):
        some = counted(int(count), "conversation")
        log.info("%s: %s had more than training.seq_len + 1 tokens (too_long)", name, some)
    if not config.checkpoint.enable:
        log.warning("The weights were not saved: checkpoint.enable = false")
    log.info("Outputs: %s (a row per logged step), %s (the configuration)", folder / METRICS_FILE, folder / CONFIG_COPY)
    for number, (title, command) in enumerate(next_commands(config, record)):
        log.info("%-5s %-16s  %s", "" if number else "Next:", title, command)


def next_commands(config: JobConfig, record: Record) -> Iterator[tuple[str, str]]:
    """(purpose, command) of what can follow on this run, to be pasted in the folder where the run was started."""
    folder = Path(config.job.dump_folder)
    same_config = shlex.quote(str(folder / CONFIG_COPY))  # includes command-line overrides
    processes, all_processes = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    train, is_one_node = train_command(processes), processes == all_processes
    python_source = any(source.kind == PythonStdlib.kind for source in config.data.sources)
    if config.checkpoint.enable:
        if (folder / TOKENIZER_FOLDER).exists():
            allow_import = " --allow-import" if config.job.plugins or not is_below(config.checkpoint.folder) else ""
            generate = f"{titanlite()} generate {shlex.quote(str(folder))}{allow_import}"
            if any(source.is_chat for source in config.data.sources):
                yield "talk with it", f"{generate} --chat"
            else:
                # Without a trailing space, which most tokenizers join to the next word.
                yield "generate text", f'{generate} --prompt "{"def __init__(self" if python_source else "The"}"'
        data_exhausted = record.step < config.training.steps
        if is_one_node and not data_exhausted:
            yield "train longer", f"{train} {same_config} --training.steps {4 * record.step}"
    elif is_one_node:
        yield "train and save", f"{train} {same_config} --checkpoint.enable"
    if all_processes == 1 and fits_two_processes(config):
        new = {"job.dump_folder": f"{folder}-2"}
        if is_address(config.checkpoint.folder):
            new["checkpoint.folder"] = f"{config.checkpoint.folder.rstrip('/')}-2"
        options = " ".join(f"--{key} {shlex.quote(value)}" for key, value in new.items())
        yield "on two processes", f"{train_command(2)} {same_config} {options}"
    if python_source:
        yield "on your own text", f"set data.sources in a TOML file; all keys: {titanlite()} train --help"
    yield "see its curves", f"{titanlite()} report {shlex.quote(str(folder))}"


def fits_two_processes(config: JobConfig) -> bool:
    """Whether the configuration can run on two processes of this machine."""
    if torch.cuda.device_count() == 1:
        return False
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return not check_config(config, world_size=2, device_type=device_type, checks_files=False)


def train_command(processes: int) -> str:
    """The command of a training on this many processes of this machine, by the program that has started this run."""
    if script := os.environ.get(RUN_TRAIN):
        variables = {name: os.environ.get(name, "") for name in ("PYTHON", "DEVICE", "NGPU")}
        if processes > 1 or variables["NGPU"]:
            variables["NGPU"] = str(processes)
        given = [f"{name}={shlex.quote(value)}" for name, value in variables.items() if value]
        return " ".join([*given, shlex.quote(script)])
    if processes == 1:
        return f"{titanlite()} train"
    python = program(Path(sys.executable).name)
    return f"{python} -P -m titanlite.torchrun --standalone --nproc-per-node {processes} -m titanlite.train"


def titanlite() -> str:
    """The command `titanlite` of this Python."""
    if Path(sys.executable).with_name("titanlite").exists():
        return program("titanlite")
    return f"{program(Path(sys.executable).name)} -P -m titanlite"


def program(name: str) -> str:
    """A program beside this Python: its name if the user's shell finds it there, else its path."""
    path = Path(sys.executable).with_name(name)
    if RUN_TRAIN not in os.environ and shutil.which(name) == str(path):  # run_train.sh may extend PATH
        return name
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
