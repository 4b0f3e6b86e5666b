"""Print a completion script for a shell, made by tyro from the options of all commands."""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any

import tyro

from titanlite.config.describe import options_type
from titanlite.config.schema import JobConfig
from titanlite.runtime.errors import UsageError
from titanlite.tools import evaluate, inspect, ledger, tokenize, train_tokenizer
from titanlite.tools.command import run_command
from titanlite.tools.convert.__main__ import Options as ConvertOptions
from titanlite.tools.generate.__main__ import Options as GenerateOptions
from titanlite.tools.parity.__main__ import Options as ParityOptions
from titanlite.tools.plan.__main__ import Options as PlanOptions

SHELLS = ("bash", "zsh", "fish")


def main(argv: Sequence[str]) -> None:
    """Print the script. argv: the shell. Raises UsageError."""
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise UsageError(f"--tyro-print-completion needs the name of a shell: {', '.join(SHELLS)}")
    options: dict[str, Any] = {
        "train": options_type(JobConfig()),
        "parity": ParityOptions,
        "plan": PlanOptions,
        "convert": ConvertOptions,
        "generate": GenerateOptions,
        "evaluate": evaluate.Options,
        "inspect": inspect.Options,
        "tokenize": tokenize.Options,
        "ledger": ledger.Options,
        "train-tokenizer": train_tokenizer.Options,
    }
    commands: Any = reduce(or_, (Annotated[each, tyro.conf.subcommand(name)] for name, each in options.items()))
    tyro.cli(commands, prog="titanlite", args=["--tyro-print-completion", *argv])


if __name__ == "__main__":
    run_command(main)
