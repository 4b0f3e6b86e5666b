"""Outputs of commands: nothing is overwritten, and none appears before it is complete."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titanlite.runtime.durability import PARTIAL, appears_complete
from titanlite.runtime.errors import UserError


def require_new(out: Path, option: str = "--out") -> None:
    """Raise UserError if `out`, the value of `option`, exists: nothing is overwritten."""
    if os.path.lexists(out):
        raise UserError(f"{out} already exists and is not overwritten: remove it, or choose another {option}")


def cannot_write(out: Path, error: OSError) -> UserError:
    """The error of an output folder that could not be created or written."""
    if file := next((path for path in (out, *out.parents) if path.is_file()), None):
        return UserError(f"{file} is a file: choose a new folder for --out")
    return UserError(f"cannot write {out}: {error.strerror or error}; fix this, or choose another --out")


@contextmanager
def new_output(out: Path) -> Iterator[Path]:
    """Context of appears_complete for a file or folder `out` that must not exist. Raises UserError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with appears_complete(out, out.with_name(f"{out.name}{PARTIAL}-{os.getpid()}")) as temporary:
            yield temporary
            require_new(out)
    except OSError as error:
        raise cannot_write(out, error) from error
