"""Parts that the commands share: options read by tyro, exit codes, and outputs that are written atomically."""

import contextlib
import errno
import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args

import tyro

from titanlite.runtime.errors import Problem, UsageError, UserError, check_ranges
from titanlite.runtime.failure import describe_user_error, raise_on_interrupt
from titanlite.runtime.signal_thread import stop_signals

ConfigFile = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CONFIG")]
RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
Folder = Annotated[Path, tyro.conf.arg(metavar="DIR")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
Count = Annotated[int, tyro.conf.arg(metavar="N")]
OptionalCount = Annotated[int | None, tyro.conf.arg(metavar="N")]
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
    """The command's options: an instance of the dataclass `kind`, or of one of a union of subcommands; not checked.

    Prints the help and exits if argv has --help. Raises UsageError.
    """
    subcommands = {get_args(each)[1].name: get_args(each)[0] for each in get_args(kind)}
    if subcommands and argv[:1] not in (["--help"], ["-h"]):
        name = _subcommand(argv, list(subcommands))
        return read_options(subcommands[name], argv[1:], f"{command} {name}")
    options_of_kind = [] if subcommands else fields(kind)
    flags = {_flag(field.name) for field in options_of_kind} | {"--help"}
    repeatable = {_flag(field.name) for field in options_of_kind if isinstance(field.default, tuple)}
    given: dict[str, str | None] = {}  # option -> the text after it: its value, another option, or None at the end
    for word, following in zip(argv, [*argv, None][1:], strict=True):
        if not word.startswith("--"):
            continue
        name, equals, text = word.partition("=")
        name = _flag(name.removeprefix("--"))
        if name not in flags:  # tyro would first report a missing positional argument
            close = get_close_matches(name.strip("-"), [flag.strip("-") for flag in flags], 1)
            remedy = f"did you mean --{close[0]}?" if close else f"see titanlite {command} --help"
            raise UsageError(f"unexpected argument {word!r}: {remedy} (a value that starts with -: --OPTION=VALUE)")
        if name in given.keys() - repeatable:
            raise UsageError(f"{name} is given twice: keep one")
        given[name] = text if equals else following
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            options, rest = tyro.cli(
                kind,
                args=list(argv),
                prog=f"titanlite {command}",
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise UsageError(f"{_message(printed.getvalue(), given)}\nsee titanlite {command} --help") from None
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}: see titanlite {command} --help")
    for name, after in given.items():  # tyro reads these as no values, and as the current folder
        value = getattr(options, name.removeprefix("--").replace("-", "_"))
        if value == () or (after == "" and isinstance(value, Path)):
            raise UsageError(f"{name} needs a value\nsee titanlite {command} --help")
    return options


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
    """Problems of numbers that are out of range."""
    problems = check_ranges(options, "options")
    return [replace(problem, key=_flag(problem.key.partition(".")[2])) for problem in problems]


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


def _message(box: str, given: Mapping[str, str | None]) -> str:
    """The error that tyro prints in a box, without the box and the help text.

    given: option -> the text after it on the command line.
    """
    lines = [line.strip("│╭╮╰╯").rstrip() for line in box.splitlines()][1:-1]
    # Of each missing argument: its name, then its help, which is indented more.
    missing = re.findall(r"^ {5}(\S.*)\n((?: {9}.*\n?)+)", "\n".join(lines), re.MULTILINE)
    if lines and lines[0].startswith(" Missing from ") and missing:
        texts = [(name, " ".join(text.replace("(required)", "").split())) for name, text in missing]
        return "; ".join(f"{name} is missing ({text})" for name, text in texts)
    lines = [line.strip() for line in lines]
    blocks = "\n".join("" if set(line) == {"─"} else line for line in lines).split("\n\n")
    kept = [block for block in blocks if not block.startswith(("For full helptext", "Argument helptext"))]
    text = "; ".join(" ".join(block.split()) for block in kept)
    if found := re.match(r"Missing value for argument '([^']+)'", text):
        name = found[1]
        following = given.get(_flag(name.removeprefix("--"))) or ""
        is_value = following.startswith("-") and not following.startswith("--")
        return f"{name} needs a value" + (f"; for a value that starts with -: {name}={following}" if is_value else "")
    text = re.sub(r"Arguments (\S+) and (\S+) are not allowed together!", r"give \1 or \2, not both", text)
    text = re.sub(r"Error parsing (\S+): .*?(?:int\(\)|\bINT\b).*?('[^']*').*", r"\1 needs an integer, not \2", text)
    return re.sub(r"Error parsing (\S+): .*?float: ('[^']*').*", r"\1 needs a number, not \2", text)


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
