"""Print a completion script for a shell, made by tyro from the options of all commands."""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any

import tyro

from titanlite.config.help import options_type
from titanlite.config.schema import JobConfig
from titanlite.tools import calibrate, digest, evaluate, inspect, ledger, profile, schema, train_tokenizer
from titanlite.tools.audit.__main__ import Options as AuditOptions
from titanlite.tools.command import run_command
from titanlite.tools.compare.__main__ import Options as CompareOptions
from titanlite.tools.convert.__main__ import Options as ConvertOptions
from titanlite.tools.generate.__main__ import Options as GenerateOptions
from titanlite.tools.ladder.__main__ import Options as LadderOptions
from titanlite.tools.parity.__main__ import Options as ParityOptions
from titanlite.tools.plan.__main__ import Options as PlanOptions
from titanlite.tools.replay.__main__ import Options as ReplayOptions
from titanlite.tools.report.__main__ import Options as ReportOptions
from titanlite.tools.sweep.__main__ import Options as SweepOptions
from titanlite.tools.sweep.critical_batch import Options as CriticalBatchOptions
from titanlite.tools.tokenize.__main__ import Options as TokenizeOptions

OPTIONS: Mapping[str, Any] = {
    "train": options_type(JobConfig()),
    "sweep": SweepOptions,
    "ladder": LadderOptions,
    "critical-batch": CriticalBatchOptions,
    "parity": ParityOptions,
    "plan": PlanOptions,
    "calibrate": calibrate.Options,
    "profile": profile.Options,
    "convert": ConvertOptions,
    "generate": GenerateOptions,
    "evaluate": evaluate.Options,
    "inspect": inspect.Options,
    "schema": schema.Options,
    "tokenize": TokenizeOptions,
    "replay": ReplayOptions,
    "audit": AuditOptions,
    "compare": CompareOptions,
    "ledger": ledger.Options,
    "digest": digest.Options,
    "report": ReportOptions,
    "train-tokenizer": train_tokenizer.Options,
}
"""Command -> the dataclass of its options, or a union of them."""


def main(argv: Sequence[str]) -> None:
    """Print the script. argv: the shell."""
    commands: Any = reduce(or_, (Annotated[each, tyro.conf.subcommand(name)] for name, each in OPTIONS.items()))
    config = (tyro.conf.FlagCreatePairsOff,)  # as read_options: no --no-OPTION
    tyro.cli(commands, prog="titanlite", args=["--tyro-print-completion", *argv], config=config)


if __name__ == "__main__":
    run_command(main)
