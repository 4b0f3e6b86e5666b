"""Parts that the commands share: options read by tyro, exit codes, and outputs that are written atomically."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import tyro

from titanlite.runtime.errors import Problem, UsageError, UserError, check_ranges, require

ConfigFile = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CONFIG")]
RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
Folder = Annotated[Path, tyro.conf.arg(metavar="DIR")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
Count = Annotated[int, tyro.conf.arg(metavar="N")]
OptionalCount = Annotated[int | None, tyro.conf.arg(metavar="N")]


def run_command(main: Callable[[Sequence[str]], None]) -> None:
    """Run `main` on the command line and exit: 0, 1 after an error, 2 after a usage or configuration error, 130 after
    Ctrl-C, 143 after SIGTERM."""
    code = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that temporary files are removed
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"titanlite: {error}", file=sys.stderr)
        code = 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("titanlite: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader has closed the pipe, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
    sys.exit(code)


def read_options(kind: Any, argv: Sequence[str], command: str) -> Any:
    """The command's options: an instance of the dataclass `kind`, or of one of a union of subcommands; not checked.

    Prints the help and exits if argv has --help. Raises UsageError.
    """
    kinds = [get_args(each)[0] if get_origin(each) is Annotated else each for each in get_args(kind) or (kind,)]
    flags = {_flag(field.name) for each in kinds for field in fields(each)} | {"--help"}
    repeatable = {_flag(field.name) for each in kinds for field in fields(each) if isinstance(field.default, tuple)}
    given: set[str] = set()
    for word in (word for word in argv if word.startswith("--")):
        name = _flag(word.partition("=")[0].removeprefix("--"))
        if name not in flags:  # tyro would first report a missing positional argument
            close = get_close_matches(name, flags, 1)
            remedy = f"did you mean {close[0]}?" if close else f"see titanlite {command} --help"
            raise UsageError(f"unexpected argument {word!r}: {remedy} (a value that starts with -: --OPTION=VALUE)")
        if name in given - repeatable:
            raise UsageError(f"{name} is given twice: keep one")
        given.add(name)
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
        raise UsageError(f"{_message(printed.getvalue())}\nsee titanlite {command} --help") from None
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}: see titanlite {command} --help")
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


def _message(box: str) -> str:
    """The error that tyro prints in a box, without the box and the help text."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()]
    blocks = "\n".join("" if set(line) == {"─"} else line for line in lines[1:-1]).split("\n\n")
    kept = [block for block in blocks if not block.startswith(("For full helptext", "Argument helptext"))]
    text = "; ".join(" ".join(block.replace(" (required)", ",").split()).rstrip(",") for block in kept)
    text = re.sub(r"Error parsing (\S+): .*?(?:int\(\)|\bINT\b).*?('[^']*').*", r"\1 needs an integer, not \2", text)
    return re.sub(r"Error parsing (\S+): .*?float: ('[^']*').*", r"\1 needs a number, not \2", text)


def check_output_file(option: str, path: Path | None) -> list[Problem]:
    """Problems of a file that the command will write at its end."""
    if path is None:
        return []
    target = Path(os.path.realpath(path))
    is_file = target.is_file() or not target.exists()  # opening a pipe would wait for a reader
    remedy = f"create {target.parent}, or choose another path" if is_file else "choose another path"
    writable = is_file and os.access(target.parent, os.W_OK | os.X_OK)
    return require(writable, option, str(path), "a regular file in a writable folder", remedy)


def write_json(file: Path, content: Any) -> None:
    """Write JSON; the numbers in it must be finite. Raises UserError."""
    try:
        file.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error}") from None


def require_new(out: Path) -> None:
    """Raise UserError if `out` exists: nothing is overwritten."""
    if os.path.lexists(out):
        raise UserError(f"{out} already exists and is not overwritten: remove it, or choose another --out")


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
        raise UserError(f"cannot write {out}: {error}") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        elif temporary.exists():
            temporary.unlink()
