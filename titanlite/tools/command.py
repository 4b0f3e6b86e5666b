"""Parts that the commands share: options, exit codes, and outputs that are written atomically."""

import contextlib
import errno
import json
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tyro

from titanlite.config.describe import field_texts
from titanlite.runtime.errors import Problem, UsageError, UserError, check_ranges
from titanlite.runtime.failure import describe_user_error, raise_on_interrupt
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


def read_options(kind: Any, argv: Sequence[str], command: str) -> Any:
    """The command's options: an instance of the dataclass `kind`, or of one of a union of subcommands.

    Hyphens and underscores in names are the same. A value after a space does not start with `--`. Prints the help and
    exits if argv has --help. Raises UsageError with all problems but those of check_options.
    """
    subcommands = {get_args(each)[1].name: get_args(each)[0] for each in get_args(kind)}
    if {"--help", "-h"} & {*(argv[:1] if subcommands else argv)}:
        tyro.cli(kind, args=["--help"], prog=f"titanlite {command}", config=(tyro.conf.FlagCreatePairsOff,))
    if subcommands:
        name = _subcommand(argv, list(subcommands))
        return read_options(subcommands[name], argv[1:], f"{command} {name}")
    options = {name: _option(name, hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    texts, problems = _split(argv, options)
    values: dict[str, Any] = {}
    for name, given in texts.items():
        try:
            found = tuple(_value(text, options[name].kind) for text in given)
            values |= {name: found if options[name].is_list else found[0]} if found else {}
        except ValueError as error:
            problems.append(f"{options[name].shown} {error}")
    if len(exclusive := [_flag(name) for name in texts if EITHER in options[name].marks]) > 1:
        problems.append(f"give {' or '.join(exclusive)}, not both")
    if not any(problem.startswith("unexpected") for problem in problems):  # else that word may be what is missing
        missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in texts]
        problems += [f"{options[name].shown} is missing ({field_texts(kind)[name]})" for name in missing]
    if problems:
        raise UsageError("\n".join([*problems, f"see titanlite {command} --help"]))
    return kind(**values)


class _Option(NamedTuple):
    """shown: CONFIG of a positional argument, --option of others. kind: type of one value. marks: tyro's."""

    shown: str
    kind: Any
    is_list: bool
    marks: Sequence[Any]


def _option(name: str, hint: Any) -> _Option:
    """hint: type of the field."""
    kind, marks = (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())
    is_list = get_origin(kind) is tuple
    kind = get_args(kind)[0] if is_list or NoneType in get_args(kind) else kind
    metavars = [mark.metavar.split()[0] for mark in marks if getattr(mark, "metavar", None)]
    return _Option(metavars[0] if tyro.conf.Positional in marks else _flag(name), kind, is_list, marks)


def _split(argv: Sequence[str], options: Mapping[str, _Option]) -> tuple[dict[str, list[str]], list[str]]:
    """(field -> texts of its values, problems)"""
    positional = [name for name, option in options.items() if tyro.conf.Positional in option.marks]
    named = options.keys() - positional
    texts: dict[str, list[str]] = {}
    problems: list[str] = []
    words = deque(argv)
    while words:
        word = words.popleft()
        free = [name for name in positional if options[name].is_list or name not in texts]
        if not word.startswith("-") and free:
            texts.setdefault(free[0], []).append(word)
            continue
        name, equals, text = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if name not in named or not word.startswith("--"):
            close = get_close_matches(name, named, 1) if word.startswith("-") else []
            problems.append(f"unexpected argument {word!r}" + (f": did you mean {_flag(close[0])}?" if close else ""))
            if word.startswith("-") and not equals and words and not words[0].startswith("-"):
                words.popleft()  # its value
            continue
        kind, is_list, marks = options[name][1:]
        given = [text] if equals else ["true"] if kind is bool else []
        most = len(words) if is_list and not equals and tyro.conf.UseAppendAction not in marks else 1
        while words and len(given) < most and not words[0].startswith("--"):
            given.append(words.popleft())
        if not given:
            problems.append(f"{options[name].shown} needs a value (if it starts with --: {options[name].shown}=VALUE)")
        if name in texts and not is_list:
            problems.append(f"{options[name].shown} is given twice: keep one")
        texts.setdefault(name, []).extend(given)
    return texts, problems


def _value(text: str, kind: Any) -> Any:
    """Raises ValueError with what is needed."""
    if get_origin(kind) is Literal and text not in get_args(kind):
        raise ValueError(f"needs one of {', '.join(get_args(kind))}, not {text!r}")
    if kind is Path and not text:
        raise ValueError("needs a value")
    if kind is bool and text != "true":
        raise ValueError("takes no value")
    try:
        return kind(text) if kind in (int, float, Path, bool) else text
    except ValueError:
        raise ValueError(f"needs {'an integer' if kind is int else 'a number'}, not {text!r}") from None


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
    found = check_ranges(options, "options")
    problems = [replace(problem, key=_flag(problem.key.partition(".")[2])) for problem in found]
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        choices = get_args(kind) if get_origin(kind := _option(name, hint).kind) is Literal else ()
        value, default = getattr(options, name), type(options).__dataclass_fields__[name].default
        if choices and value not in (*choices, default):
            problems.append(Problem(_flag(name), value, f"one of {', '.join(choices)}", "write one of these"))
    return problems


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _subcommand(argv: Sequence[str], names: Sequence[str]) -> str:
    """The subcommand that the first word names. Raises UsageError."""
    if not argv or argv[0].startswith("-"):
        raise UsageError(f"a subcommand is missing: {' or '.join(names)}")
    if argv[0] not in names:
        close = get_close_matches(argv[0], names, 1)
        remedy = f"did you mean {close[0]}?" if close else f"write {' or '.join(names)}"
        raise UsageError(f"unknown subcommand {argv[0]!r}: {remedy}")
    return argv[0]


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
def appears_complete(out: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder written atomically: renamed to `out` at the end, removed on error."""
    temporary = out.with_name(f"{out.name}.incomplete-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        require_new(out)
        os.rename(temporary, out)
    except OSError as error:
        raise cannot_write(out, error) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        elif temporary.exists():
            temporary.unlink()
