"""Command: print the JSON schema of a configuration, for the completion and the checks of editors."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.config.files import CONFIG_FILE
from titanlite.config.json_schema import json_schema
from titanlite.config.load import parse
from titanlite.config.plugins import PLUGINS
from titanlite.runtime.errors import ConfigError
from titanlite.tools.command import ConfigFile, File, check_output_file, read_options, run_command, write_json


@dataclass(frozen=True)
class Options:
    """Print the JSON schema (draft 7) of a TOML file, with which editors complete its keys and check its values.

    With CONFIG, the schema has what its plugins add.
    """

    config: ConfigFile = ""
    """TOML file whose plugins are imported"""
    out: File = None
    """write it to this file, which is replaced"""


def main(argv: Sequence[str]) -> None:
    """Print or write the schema. Raises UserError."""
    options = read_options(Options, argv, "schema")
    problems = check_output_file("--out", options.out)
    if options.config:
        found = parse([f"--{CONFIG_FILE}", options.config])
        problems += [problem for problem in found.problems if problem.key in (CONFIG_FILE, PLUGINS)]
    if problems:
        raise ConfigError(problems)
    if options.out is not None:
        write_json(options.out, json_schema())
    else:
        sys.stdout.write(json.dumps(json_schema(), indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
