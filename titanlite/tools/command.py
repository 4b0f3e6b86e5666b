"""Parts that the commands share: options, exit codes, and outputs that are written atomically."""

import argparse
import contextlib
import errno
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import tyro

from titanlite.runtime.durability import PARTIAL, appears_complete
from titanlite.runtime.errors import Problem, Rules, UsageError, UserError
from titanlite.runtime.failure import describe_user_error, raise_on_interrupt
from titanlite.runtime.settings import settings_of
from titanlite.runtime.signal_thread import stop_signals

ConfigFile = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CONFIG")]
RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
Folder = Annotated[Path, tyro.conf.arg(metavar="DIR")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
Count = Annotated[int, tyro.conf.arg(metavar="N")]
OptionalCount = Annotated[int | None, tyro.conf.arg(metavar="N")]
EITHER = tyro.conf.create_mutex_group(required=False)
"""Marks options of which at most one may be given."""
AllowImport = Annotated[bool, tyro.conf.arg(help="import the modules that job.plugins of the run names: they are code")]


def run_command(main: Callable[[Sequence[str]], None]) -> None:
    """Run `main` on the command line and exit: 0, 1 after an error, 2 after a usage or configuration error, 130 after
    Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
    code = 0
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
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"titanlite: the path {error.filename} is too long: choose a shorter one", file=sys.stderr)
        code = 1
    sys.exit(code)


class _Parser(argparse.ArgumentParser):
    """Raises UsageError in place of exiting."""

    def error(self, message: str) -> NoReturn:
        hint = " (if it starts with -: --OPTION=VALUE)" if ": expected" in message else ""
        raise UsageError(f"{message}{hint}\nsee {self.prog} --help")


def read_options(kind: Any, argv: Sequence[str], command: str) -> Any:
    """The command's options: an instance of the dataclass `kind`, or of one of a union of subcommands; not checked.

    Hyphens and underscores in names are the same. Prints the help and exits if argv has --help. Raises UsageError.
    """
    subcommands = {get_args(each)[1].name: get_args(each)[0] for each in get_args(kind)}
    if {"--help", "-h"} & {*(argv[:1] if subcommands else argv)}:
        tyro.cli(kind, args=["--help"], prog=f"titanlite {command}", config=(tyro.conf.FlagCreatePairsOff,))
    if subcommands:
        if not argv or argv[0] not in subcommands:
            problem = f"unknown subcommand {argv[0]!r}" if argv else "a subcommand is missing"
            raise UsageError(f"{problem}: write {' or '.join(subcommands)}")
        return read_options(subcommands[argv[0]], argv[1:], f"{command} {argv[0]}")
    parser = _Parser(f"titanlite {command}", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    exclusive = parser.add_mutually_exclusive_group()
    hints, flags = get_type_hints(kind, include_extras=True), {}
    for field in fields(kind):
        settings, marks = _settings(hints[field.name])
        is_required = field.default is MISSING
        if tyro.conf.Positional in marks:
            parser.add_argument(field.name, **{"nargs": None if is_required else "?", **settings})
        else:
            flags[_flag(field.name)] = settings
            group = exclusive if EITHER in marks else parser
            group.add_argument(_flag(field.name), dest=field.name, required=is_required, **settings)
    words = [re.sub("^--[^=]+", lambda name: _flag(name[0][2:]), word) for word in argv]
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    repeated = {name for name in given if given.count(name) > 1 and "action" not in flags.get(name, {})}
    problems = [_unexpected(name, flags) for name in given if name not in flags]
    problems += [f"{name} is given twice: keep one" for name in sorted(repeated)]
    if problems:
        parser.error("\n".join(problems))
    options, rest = parser.parse_known_args(words)
    if rest:
        parser.error("\n".join(_unexpected(word, flags) for word in rest))
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in vars(options).items()})


def _settings(hint: Any) -> tuple[dict[str, Any], Sequence[Any]]:
    """(settings of argparse, annotations of tyro) of a field of this type"""
    kind, marks = (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())
    if kind is bool:
        return {"action": "store_true"}, marks
    is_list = get_origin(kind) is tuple
    kind = get_args(kind)[0] if is_list or NoneType in get_args(kind) else kind
    settings = {"choices": get_args(kind)} if get_origin(kind) is Literal else {"type": _path if kind is Path else kind}
    settings |= {"metavar": next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None)}
    if is_list:
        settings |= {"action": "append"} if tyro.conf.UseAppendAction in marks else {"action": "extend", "nargs": "+"}
    return settings, marks


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("needs a path")
    return Path(text)


def _unexpected(word: str, flags: Iterable[str]) -> str:
    """The problem of an argument that is none of the options `flags`."""
    close = get_close_matches(word.strip("-"), [flag.strip("-") for flag in flags], 1)
    return f"unexpected argument {word!r}" + (f": did you mean --{close[0]}?" if close else "")


def read_options_and_overrides(kind: Any, argv: Sequence[str], command: str) -> tuple[Any, list[str]]:
    """As `read_options`; also the overrides of the configuration in argv (`--section.key value`)."""
    own: list[str] = []
    overrides: list[str] = []
    takes_value = False
    for word in argv:
        if word.startswith("--"):
            key, equals, _ = word.partition("=")
            (overrides if "." in key else own).append(word)
            takes_value = "." in key and not equals
        else:
            (overrides if takes_value else own).append(word)
            takes_value = False
    return read_options(kind, own, command), overrides


def check_options(options: Any) -> list[Problem]:
    """Problems of numbers that are out of range, and, in a program, of values that are no choice."""
    rules = Rules("--", options)
    for name, found in settings_of(type(options)).items():
        if (limits := found.range) is not None:
            rules.require(name, limits.has(getattr(options, name)), str(limits), limits.remedy)
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        choices = _settings(hint)[0].get("choices", ())
        value, default = getattr(options, name), type(options).__dataclass_fields__[name].default
        if choices and value not in (*choices, default):
            rules.require(name, False, f"one of {', '.join(choices)}", "write one of these")
    return rules.problems


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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


def require_new(out: Path, option: str = "--out") -> None:
    """Raise UserError if `out`, the value of `option`, exists: nothing is overwritten."""
    if os.path.lexists(out):
        raise UserError(f"{out} already exists and is not overwritten: remove it, or choose another {option}")


def cannot_write(out: Path, error: OSError) -> UserError:
    """The error of an output folder that could not be created or written."""
    if file := next((path for path in (out, *out.parents) if path.is_file()), None):
        return UserError(f"{file} is a file: choose a new folder for --out")
    return UserError(f"cannot write {out}: {error.strerror or error}; fix this, or choose another --out")


@contextlib.contextmanager
def new_output(out: Path) -> Iterator[Path]:
    """Context of appears_complete for a file or folder `out` that must not exist. Raises UserError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with appears_complete(out, out.with_name(f"{out.name}{PARTIAL}-{os.getpid()}")) as temporary:
            yield temporary
            require_new(out)
    except OSError as error:
        raise cannot_write(out, error) from error
