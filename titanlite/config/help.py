"""The help of the training command: `python -m titanlite.config.help [CONFIG] [--section.key VALUE ...]`."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, get_type_hints

import tyro

from titanlite.config.arguments import Options
from titanlite.config.describe import Line, describe_config, field_texts
from titanlite.config.files import CONFIG_FILE
from titanlite.config.load import parse
from titanlite.config.schema import JobConfig

HELP = """\
Train a language model: titanlite train CONFIG [OPTION ...] [--section.key VALUE ...].
CONFIG is a TOML file or the name of a shipped configuration. The command line
overrides it; values are written as in TOML, strings without quotes. Given a
CONFIG, --help shows its values as defaults.
"""


METAVARS = {"world_size": "N", "device": "cuda|cpu"}
"""Names of the values of options."""


def print_help(argv: Sequence[str]) -> None:
    """Print all keys with their values."""
    parsed = parse(argv)
    config = parsed.config
    if not parsed.file_is_read and any(problem.key == CONFIG_FILE for problem in parsed.problems):
        message = f"titanlite: {parsed.path} cannot be read: the defaults below are the built-in ones\n"
        print(message, file=sys.stderr, flush=True)
    options = options_type(config)
    try:
        tyro.cli(
            options,
            prog="titanlite train",
            description=HELP,
            args=["--help"],
            use_underscores=True,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except BrokenPipeError:  # the reader has closed the pipe, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def options_type(config: JobConfig) -> Any:
    """A dataclass of all keys, as tyro prints them; every value is a string, with a label of our own for its type."""
    sections: list[tuple[str, Any, Any]] = []
    for section in describe_config(config):
        fields: list[tuple[str, Any, Any]] = [
            (key.name, Annotated[str, _argument(key)], key.value) for key in section.keys
        ]
        shown: Any = dataclasses.make_dataclass(section.name.title().replace(".", ""), fields, frozen=True)
        shown.__doc__ = section.text
        named = Annotated[shown, tyro.conf.arg(name=section.name)]
        sections.append((section.name.replace(".", "_"), named, shown()))
    text = "TOML file, or the name of a shipped configuration"
    file = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CONFIG", help=text, help_behavior_hint="")]
    texts, types = field_texts(Options), get_type_hints(Options)
    options = [
        (key.name, Annotated[types[key.name], _option(key.name, texts[key.name])], key.default)
        for key in dataclasses.fields(Options)
    ]
    return dataclasses.make_dataclass("JobConfig", [("config", file, ""), *options, *sections], frozen=True)


def _option(name: str, text: str) -> Any:
    return tyro.conf.arg(help=text, metavar=METAVARS.get(name), help_behavior_hint="")


def _argument(key: Line) -> Any:
    return tyro.conf.arg(help=key.text, metavar=key.label, help_behavior_hint=f"(default: {key.value})")


if __name__ == "__main__":
    print_help(sys.argv[1:])
