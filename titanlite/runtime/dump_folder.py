"""The folder of a run's output files. An earlier run's files are renamed, never overwritten."""

import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log
from titanlite.runtime.text import counted

_REMEDY = "give another folder with --job.dump_folder"


def make_dump_folder(folder: str | Path, key: str = "job.dump_folder") -> Path:
    """Create `folder` if it does not exist. Raises UserError if it cannot be created or written. key: of the option
    that names it."""
    folder, remedy = Path(folder), f"give another folder with --{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{key}: {folder} is a file, not a folder; {remedy}") from None
    except OSError as error:
        raise UserError(f"{key}: cannot create {folder}: {error.strerror}; {remedy}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{key}: no permission to write in {folder}; {remedy}")
    return folder


def prepare_dump_folder(folder: str | Path, outputs: Sequence[str], rank: int) -> list[Path]:
    """Prepare `folder` for a new run; returns the new paths of an earlier run's files.

    outputs: names, inside the folder, of the files and folders that the run will write. Existing ones are renamed to
    `<name>.<n>` with one n for all names: the smallest number that is free for each of them. Other files are not
    touched. Logs one line with the new names.

    Only rank 0 accesses the disk; the other ranks return [] at once and must not write here before rank 0 has returned
    (the caller's barrier). `job_lock` excludes concurrent runs in one folder. Raises UserError if the folder cannot be
    created or written, or a file cannot be renamed.
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
    log.info("%s has files of an earlier run; renamed to %s", folder, ", ".join(path.name for path in kept))
    return kept


def rename_links(folder: Path, outputs: Sequence[str], opaque: Sequence[str] = ()) -> None:
    """Rename what is a link among a run's outputs in `folder`, before anything is written there, to `<name>.<n>` with
    the smallest free number: a run that someone else made could write into any file of this user. Logs one line.

    outputs: names of files, and of folders, which are searched at any depth. opaque: those of them that are not,
    since other programs put links there themselves. Neither `folder` itself nor a link above it is renamed. Hard links
    are not found. Raises UserError if a link cannot be renamed.
    """
    links = []
    for name in outputs:
        path = folder / name
        inside = () if name in opaque or path.is_symlink() else os.walk(path)
        below = (Path(parent, each) for parent, folders, files in inside for each in (*folders, *files))
        links += [each for each in (path, *below) if each.is_symlink()]
    for link in links:
        number = next(n for n in count(1) if not os.path.lexists(f"{link}.{n}"))
        try:
            link.rename(f"{link}.{number}")
        except OSError as error:
            raise UserError(f"job.dump_folder: cannot rename the link {link}: {error.strerror}; {_REMEDY}") from None
    if links:
        others = f", and {counted(len(links) - 3, 'more link')}" if len(links) > 3 else ""
        names = ", ".join(repr(str(link.relative_to(folder))) for link in links[:3])
        log.warning(
            "%s: links among the outputs of a run are not followed, and were renamed to NAME.N: %s%s",
            *(folder, names, others),
        )
