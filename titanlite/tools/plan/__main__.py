"""Command: estimate what a run needs on N ranks. One process, no accelerator, no data, no tokenizer."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro

from titanlite.config.load import load_config
from titanlite.planning.batch import fit_local_batch_size
from titanlite.planning.estimate import estimate
from titanlite.runtime.errors import ConfigError, ranged
from titanlite.runtime.memory import GIB
from titanlite.tools.command import ConfigFile, Count, check_options, read_options_and_overrides, run_command
from titanlite.tools.plan.report import report


@dataclass(frozen=True)
class Options:
    """Memory, communication and idle time of a configuration on a number of ranks, before you run it.

    Override a key of CONFIG by --section.key VALUE, as for training. Exit code 2 if training would refuse the
    configuration.
    """

    config: ConfigFile
    """TOML file, or the name of a shipped configuration"""
    world_size: Count = ranged(tyro.MISSING, "give the number of processes of the run", least=1)
    """number of processes"""
    device: Literal["cuda", "cpu"] = "cuda"
    """device that "auto" dtypes are resolved for"""
    device_memory_gib: Annotated[float, tyro.conf.arg(metavar="GIB")] = ranged(
        80.0, "set the memory of one device in GiB, for example 80 for an H100", above=0, below=math.inf
    )
    """memory of one device"""


def main(argv: Sequence[str]) -> None:
    """Print the plan. Raises UsageError."""
    options, overrides = read_options_and_overrides(Options, argv, "plan")
    if problems := check_options(options):
        raise ConfigError(problems)
    arguments = ["--job.config_file", options.config, *overrides]
    world_size, device = options.world_size, options.device
    config = load_config(arguments, world_size=world_size, device_type=device, checks_files=False)
    if config.training.local_batch_size == -1:
        memory = round(options.device_memory_gib * GIB)
        rows = fit_local_batch_size(config, world_size, device_type=device, memory_bytes=memory)
        config = replace(config, training=replace(config.training, local_batch_size=rows))
    plan = estimate(config, world_size, device_type=device)
    sys.stdout.write(report(config, plan, options.device_memory_gib))


if __name__ == "__main__":
    run_command(main)
