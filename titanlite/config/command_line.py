"""The command line of a training run. The launcher checks it before it starts the ranks, and each rank reads it."""

import os
import runpy
import sys
from collections.abc import Sequence

from titanlite.config.arguments import split_arguments
from titanlite.config.files import shipped_names
from titanlite.config.load import Parsed, parse
from titanlite.runtime.errors import UsageError

GETTING_STARTED = """\
a configuration is missing. To start:

  titanlite train quickstart    train a small Llama on your Python's standard library: minutes on a laptop
  titanlite train my.toml       train with your own TOML file; add --section.key VALUE to override its keys
  titanlite train --help        list all keys

Shipped configurations: """


def read_command_line(argv: Sequence[str]) -> Parsed:
    """The configuration of a run as given. Raises UsageError.

    If argv asks for help, prints it, on rank 0, and exits with 0.
    """
    arguments = split_arguments(argv)
    if arguments.wants_help:
        if os.environ.get("RANK", "0") == "0":
            sys.argv[1:] = argv
            runpy.run_module("titanlite.config.help", run_name="__main__")  # imports tyro
        raise SystemExit(0)
    if not arguments.has_config:
        raise UsageError(GETTING_STARTED + ", ".join(shipped_names()))
    return parse(argv)
