"""The folder of everything that a run writes, without ever losing or mixing an earlier run's files."""

import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log

_REMEDY = "give another folder with --job.dump_folder"


def make_dump_folder(folder: str | Path) -> Path:
    """Make `folder` where it is missing. Raises UserError where it cannot be made or written."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"job.dump_folder: {folder} is a file, not a folder; {_REMEDY}") from None
    except OSError as error:
        raise UserError(f"job.dump_folder: cannot create {folder}: {error.strerror}; {_REMEDY}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"job.dump_folder: no permission to write in {folder}; {_REMEDY}")
    return folder


def prepare_dump_folder(folder: str | Path, outputs: Sequence[str], rank: int) -> list[Path]:
    """Make `folder` ready for a run that starts afresh; returns the new paths of what an earlier run had left.

    outputs: names, inside the folder, of the files and folders that the run will write. Those that exist are renamed
    to `<name>.<n>`, with one n for all: the smallest number that none of the names has taken, so an earlier run's files
    stay together. What is not listed is not touched. One line in the log says what was kept.

    Only rank 0 touches the disk; the others get [] at once, and must not write here before rank 0 has returned (the
    caller's barrier). Two runs in one folder are kept apart by `job_lock`, not here.
    Raises UserError where the folder cannot be made, written, or cleared.
    """
    if rank != 0:
        return []
    folder = make_dump_folder(folder)
    earlier = [folder / name for name in outputs if os.path.lexists(folder / name)]
    if not earlier:
        return []
    number = next(n for n in count(1) if not any(os.path.lexists(folder / f"{name}.{n}") for name in outputs))
    kept = []
    for path in earlier:
        target = path.with_name(f"{path.name}.{number}")
        try:
            path.rename(target)
        except OSError as error:
            raise UserError(f"job.dump_folder: cannot rename {path} to {target}: {error.strerror}; {_REMEDY}") from None
        kept.append(target)
    log.info("%s holds an earlier run; its files are kept as %s", folder, ", ".join(path.name for path in kept))
    return kept
