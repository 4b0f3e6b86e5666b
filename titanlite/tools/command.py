"""Parts that the commands share: options, exit codes, and outputs that are written atomically."""

import errno
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import tyro

from titanlite.config.arguments import HELP, Option, check_values, option_values, options_of, split
from titanlite.ranks.failure import prepare_streams, raise_on_interrupt
from titanlite.ranks.message import describe_user_error
from titanlite.ranks.signals import stop_signals
from titanlite.runtime.errors import ConfigError, Problem, UsageError, UserError, raise_problems
from titanlite.runtime.text import visible, visible_lines

ConfigFile = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CONFIG")]
RunFolder = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
Folder = Annotated[Path, tyro.conf.arg(metavar="DIR")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
Count = Annotated[int, tyro.conf.arg(metavar="N")]
OptionalCount = Annotated[int | None, tyro.conf.arg(metavar="N")]
EITHER = tyro.conf.create_mutex_group(required=False)
"""Marks options of which at most one may be given."""
AllowImport = Annotated[
    bool, tyro.conf.arg(help="import the code that the run names, in job.plugins or by files of tasks")
]


def run_command(main: Callable[[Sequence[str]], None]) -> None:
    """Run `main` on the command line and exit: 0, 1 after an error, 2 after a usage or configuration error, 130 after
    Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
    code = 0
    gc.freeze()  # the imported modules, which each collection would visit
    gc.enable()
    prepare_streams()
    for number in {signal.SIGTERM, signal.SIGHUP} & {*stop_signals()}:
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # removes temporary files
    try:
        raise_on_interrupt()
        main(sys.argv[1:])
    except UserError as error:
        print(f"titanlite: {describe_user_error(error)}", file=sys.stderr)
        code = 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("titanlite: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader has closed the pipe, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
    except UnicodeEncodeError as error:  # of a path: what is printed is escaped
        where = f"the path {error.object!r} cannot be written in this locale ({error.encoding})"
        print(f"titanlite: {visible(where)}: set LC_ALL=C.UTF-8, or choose another path", file=sys.stderr)
        code = 1
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"titanlite: the path {visible(str(error.filename))} is too long: choose a shorter one", file=sys.stderr)
        code = 1
    sys.exit(code)


def print_lines(*lines: str) -> None:
    """Print lines to stdout. What they quote from files of strangers cannot begin another one: it is `visible`."""
    print(*map(visible, lines), sep="\n", flush=True)


def print_text(text: str) -> None:
    """Print a text of several lines to stdout, `visible` but for its line ends and tabs."""
    print(visible_lines(text), flush=True)


def read_options(kind: Any, argv: Sequence[str], command: str) -> Any:
    """The command's options: an instance of the dataclass `kind`, or of one of a union of subcommands.

    Prints the help and exits if argv has --help. Raises ConfigError with all problems.
    """
    options, _, problems = read_options_and_overrides(kind, argv, command, takes_keys=False)
    raise_problems(problems)
    return options


def read_options_and_overrides(
    kind: Any, argv: Sequence[str], command: str, *, takes_keys: bool = True
) -> tuple[Any, list[str], list[Problem]]:
    """(options, overrides of the configuration in argv, `--section.key=value`, problems of the options).

    kind: see read_options. An option with a problem has its default. takes_keys: False: overrides are problems. Raises
    ConfigError if an option without a default has a problem, and UsageError without a known subcommand.
    """
    subcommands = {get_args(each)[1].name: get_args(each)[0] for each in get_args(kind)}
    if argv and argv[0] in subcommands:
        name = f"{command} {argv[0]}"
        return read_options_and_overrides(subcommands[argv[0]], argv[1:], name, takes_keys=takes_keys)
    if subcommands and argv and argv[0] in HELP:
        print_help(kind, command)
    if subcommands:
        problem = f"unknown subcommand {argv[0]!r}" if argv else "a subcommand is missing"
        raise UsageError(f"{problem}: write {' or '.join(subcommands)}")
    known = command_options(kind)
    words = split(argv, known)
    if words.wants_help:
        print_help(kind, command)
    keys = {name: words.given.pop(name) for name in list(words.given) if takes_keys and "." in name}
    overrides = ["=".join([f"--{key}", *time]) for key, times in keys.items() for time in times]
    values, problems = option_values(known, words, f"titanlite {command}")
    if any(option.is_required and name not in values for name, option in known.items()):
        raise ConfigError(problems)
    return kind(**values), overrides, problems


def print_help(kind: Any, command: str) -> NoReturn:
    """Print the options, and exit with 0."""
    tyro.cli(kind, args=["--help"], prog=f"titanlite {command}", config=(tyro.conf.FlagCreatePairsOff,))
    sys.exit(0)


def command_options(kind: Any) -> dict[str, Option]:
    """The options of a command, by name, as tyro's marks say."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: option._replace(
            takes="repeated" if tyro.conf.UseAppendAction in (marks := _marks(hints[name])) else option.takes,
            position=_label(name, marks) if tyro.conf.Positional in marks else "",
            excludes=EITHER in marks,
        )
        for name, option in options_of(kind).items()
    }


def _marks(hint: Any) -> Sequence[Any]:
    """tyro's annotations of a field of this type."""
    return hint.__metadata__ if get_origin(hint) is Annotated else ()


def _label(name: str, marks: Sequence[Any]) -> str:
    return next((mark.metavar.partition(" ")[0] for mark in marks if getattr(mark, "metavar", None)), name.upper())


def check_options(options: Any) -> list[Problem]:
    """Problems of options that a program has filled: types, choices and ranges."""
    return check_values(options, command_options(type(options)))


def check_chat_template(file: str) -> list[Problem]:
    """Problems of --chat-template; "": not given."""
    rule = "a file with a chat template in Jinja"
    return [Problem("--chat-template", file, rule, "fix the path")] if file and not Path(file).is_file() else []


def check_output_file(option: str, path: Path | None) -> list[Problem]:
    """Problems of a file that the command will write at its end."""
    if path is None:
        return []
    target = Path(os.path.realpath(path))
    is_file = target.is_file() or not target.exists()  # opening a pipe would wait for a reader
    if is_file and os.access(target.parent, os.W_OK | os.X_OK):
        return []
    remedy = f"create {target.parent}, or choose another path" if is_file else "choose another path"
    return [Problem(option, str(path), "a regular file in a writable folder", remedy)]


def write_json(file: Path, content: Any) -> None:
    """Write JSON; the numbers in it must be finite. Raises UserError."""
    try:
        file.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}; fix this, or choose another path") from None
