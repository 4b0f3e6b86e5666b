"""Command: translate a configuration of torchtitan 0.2 into one of titanlite."""

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import JsonError, check_depth, read_regular
from titanlite.runtime.text import counted
from titanlite.tools.command import File, appears_complete, read_options, require_new, run_command
from titanlite.tools.from_torchtitan.translate import translate


@dataclass(frozen=True)
class Options:
    """Print a TOML of titanlite with the meaning of one of torchtitan 0.2. Keys without counterpart are comments."""

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """TOML file of torchtitan 0.2.0 to 0.2.2"""
    out: File = None
    """new file to write, in place of standard output"""


def main(argv: Sequence[str]) -> None:
    """Print or write the TOML, and what is left to do. Raises UserError."""
    options = read_options(Options, argv, "from-torchtitan")
    if options.out is not None:
        require_new(options.out)
    found = translate(read_document(options.file), options.file.name)
    if options.out is None:
        print(found.text, end="")
    else:
        with appears_complete(options.out) as path:
            path.write_text(found.text, encoding="utf-8")
        print(f"Configuration: {options.out}")
    left = [
        *([f"{counted(len(found.fill_in), 'value')} to fill in"] if found.fill_in else []),
        *([f"{counted(len(found.lost), 'key')} without counterpart"] if found.lost else []),
        *([f"{counted(len(found.unknown), 'key')} that torchtitan 0.2 does not have"] if found.unknown else []),
    ]
    if left:
        print(f"titanlite: {', '.join(left)}: see the comments at the top", file=sys.stderr)


def read_document(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises UserError."""
    try:
        content = tomllib.loads(read_regular(path).decode("utf-8-sig"))
        check_depth(content)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except JsonError as error:
        raise UserError(f"{path} {error}: pass a TOML file") from None
    except (ValueError, RecursionError) as error:  # also a UnicodeDecodeError
        reason = "its tables are too deep" if isinstance(error, RecursionError) else error
        raise UserError(f"{path} is not valid TOML ({reason}): pass a configuration of torchtitan 0.2") from None
    return content


if __name__ == "__main__":
    run_command(main)
