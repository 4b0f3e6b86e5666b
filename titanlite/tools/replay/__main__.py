"""Command: compute one step of a run again, on one process, and compare it with what the run recorded."""

import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Annotated

import tyro

from titanlite.assembly.facts import code_facts
from titanlite.checkpoint.folder import published_steps
from titanlite.config.load import CONFIG_COPY
from titanlite.faults.record import RECORD_FOLDER, read_records
from titanlite.metrics.config import METRICS_FILE
from titanlite.metrics.jsonl import last_row
from titanlite.ranks.distributed import world_from_environment
from titanlite.runtime.environment import expand_home
from titanlite.runtime.errors import UsageError, UserError
from titanlite.runtime.logging import setup_logging
from titanlite.runtime.settings import setting
from titanlite.storage.address import place
from titanlite.tools.command import AllowImport, Count, print_lines, run_command
from titanlite.tools.dump_folder import local_dump_folder
from titanlite.tools.parity.measure import own_dtypes
from titanlite.tools.replay.compare import judge, report_lines
from titanlite.tools.replay.compute import (
    launch_config,
    replay,
    replayed_config,
    require_same_settings,
    require_start,
    require_trained,
    start_of_run,
)
from titanlite.tools.saved_run import checkpoints_in, latest_before
from titanlite.tools.stores import read_options_of_stores


@dataclass(frozen=True)
class Options:
    """Compute step K of a run again on one process, and compare it with what the run recorded.

    Starts from the run's latest checkpoint before step K, or from what the run began from; the steps up to K - 1
    are computed again in the run's dtypes. Step K is computed in float64 and in the run's dtypes. Both are compared
    with the record of the run's last 100 steps: the gradient norm of each parameter, the loss of each
    sequence. Nothing is written into the run's folder. Exit code: 0 if the record is reproduced; 1 if it differs or
    does not exist; 2 for invalid arguments.
    """

    dump_folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DUMP_FOLDER")] = setting(
        MISSING, is_path=True
    )
    """job.dump_folder of the run, or the address of a copy in a store"""
    step: Annotated[int, tyro.conf.arg(metavar="K")] = setting(MISSING, "a step of the run", least=1)
    """the step to compute again"""
    from_checkpoint_only: bool = False
    """do not compute earlier steps again: needs a checkpoint of step K - 1"""
    sequences: Count = setting(5, least=0)
    """number of sequences to show: those with the largest losses"""
    allow_import: AllowImport = False


def main(argv: Sequence[str]) -> None:
    """Print the comparison; exit with 1 if the record is not reproduced. Raises UserError."""
    options = read_options_of_stores(Options, argv, "replay")
    world = world_from_environment()
    if world.size > 1:
        raise UsageError("replay runs on one process: start it without torchrun")
    setup_logging(0)
    where, step = place(expand_home(options.dump_folder)), options.step
    with local_dump_folder(where, RECORD_FOLDER) as folder:
        if not (folder / CONFIG_COPY).is_file():
            raise UserError(f"{where} has no {CONFIG_COPY}: pass the dump folder of a run")
        all_records, last = read_records(folder), last_row(folder / METRICS_FILE)
        checkpoints = checkpoints_in(folder, where, allow_import=options.allow_import)
        require_trained(where, last, all_records, published_steps(checkpoints), step)
        records = [record for record in all_records if step in record.steps]
        saved = latest_before(checkpoints, step, allow_import=options.allow_import)
        config = launch_config(folder, checkpoints, records, saved, allow_import=options.allow_import)
        start = saved or start_of_run(config, step, allow_import=options.allow_import)
        config = replayed_config(config, folder, start, world)
        require_start(where, last, config, records, start, step, from_checkpoint_only=options.from_checkpoint_only)
        if records:
            require_same_settings(records[0], all_records, saved, start, step)
        replayed = replay(config, start, step, world)
    dtypes = own_dtypes(config)
    verdict = judge(replayed, all_records, dtypes, code_facts(os.environ))
    for line in report_lines(records, replayed, verdict, "/".join(dict.fromkeys(dtypes)), options.sequences):
        print_lines(line)
    if not verdict.reproduced:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
