"""The folder of a run's checkpoints: names, publishing, quarantine and retention. One rank calls these functions.

    step-N                        a published checkpoint; valid if its files match its MANIFEST.json
    step-N.invalid-<time>         a corrupted checkpoint, quarantined
    step-N.superseded-<branch>    a checkpoint of a branch that was left by going back to an earlier step
    .step-N.writing               being written, or left by an interrupted save
    .step-N.deleting              being deleted

Folders and files with other names are never touched. A link, file or pipe named step-N is quarantined at a start.
In a store, nothing is renamed: see objects.py.
"""

import os
import re
import shutil
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path

from titanlite.checkpoint import objects
from titanlite.checkpoint.manifest import (
    MANIFEST_FILE,
    InvalidCheckpointError,
    Manifest,
    UnknownFormatError,
    check_files,
    read_manifest,
)
from titanlite.runtime.durability import sync_path
from titanlite.storage.address import Address, Place

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_CHECKPOINT = re.compile(_STEP.pattern + r"(\.(invalid|superseded)-.*)?")
_LEFTOVER = re.compile(r"\." + _STEP.pattern + r"\.(writing|deleting)")


def step_folder(folder: Place, step: int) -> Place:
    return folder / f"step-{step}"


def writing_folder(folder: Path, step: int) -> Path:
    return folder / f".step-{step}.writing"


def step_of(path: Place) -> int | None:
    """Return N if the path's name is step-N; None for other names, such as those of quarantined checkpoints."""
    name = _STEP.fullmatch(path.name)
    return int(name[1]) if name else None


def published_steps(folder: Place) -> list[int]:
    """Steps of the published checkpoints, corrupted ones included, in ascending order."""
    return _steps(objects.names(folder)) if isinstance(folder, Address) else _listed_steps(folder)


def _steps(names: Iterable[str]) -> list[int]:
    return sorted(int(name[1]) for name in map(_STEP.fullmatch, names) if name)


def checkpoint_names(folder: Place) -> list[str]:
    """Names of all checkpoints: published, quarantined or superseded."""
    if isinstance(folder, Address):
        return sorted(filter(_CHECKPOINT.fullmatch, objects.names(folder)))
    return sorted(filter(_CHECKPOINT.fullmatch, os.listdir(folder) if folder.is_dir() else []))


def misplaced_steps(folder: Place) -> list[int]:
    """Steps with a link, a file, a pipe or a device in the place of the folder step-N, in ascending order."""
    if isinstance(folder, Address):
        return []
    names = os.listdir(folder) if folder.is_dir() else ()
    return sorted({int(name[1]) for name in map(_STEP.fullmatch, names) if name} - {*published_steps(folder)})


def own_manifest(path: Place) -> Manifest:
    """Read a checkpoint's manifest. Errors as read_manifest, also for that of another step than the folder's name."""
    manifest = read_manifest(path)
    if step_of(path) not in (None, manifest.step):
        raise InvalidCheckpointError(f"{MANIFEST_FILE} belongs to step {manifest.step}")
    return manifest


def complete_manifest(folder: Place, step: int) -> Manifest:
    """Read a checkpoint's manifest and check the sizes of all files. Raises InvalidCheckpointError, OSError."""
    path = step_folder(folder, step)
    manifest = own_manifest(path)
    check_files(path, manifest, content=False)
    return manifest


def read_or_none(path: Place) -> Manifest | None:
    """The manifest of the checkpoint at `path`; None if it is missing or unreadable."""
    try:
        return read_manifest(path)
    except (InvalidCheckpointError, UnknownFormatError, OSError):
        return None


def latest_manifest(folder: Place) -> Manifest | None:
    """The latest readable manifest in `folder`; None if no checkpoint has one."""
    manifests = (read_or_none(step_folder(folder, step)) for step in reversed(published_steps(folder)))
    return next((manifest for manifest in manifests if manifest is not None), None)


def begin(folder: Place, step: int) -> Place:
    """Create the empty folder that a checkpoint is written into. Raises OSError."""
    if isinstance(folder, Address):
        return objects.begin(folder, step)
    path = writing_folder(folder, step)
    _remove(path)
    path.mkdir(parents=True)
    return path


def discard(writing: Place) -> None:
    """Delete what a failed save has written."""
    if isinstance(writing, Address):
        objects.discard(writing)
    else:
        shutil.rmtree(writing, ignore_errors=True)


def publish(folder: Path, step: int) -> None:
    """Rename the finished folder of `step` to its published name and sync it to disk. Raises OSError."""
    path = writing_folder(folder, step)
    sync_path(path)
    target = folder / f"step-{step}"
    if os.path.lexists(target):  # rename would replace an empty folder
        raise FileExistsError(None, "exists already", str(target))
    path.rename(target)
    sync_path(folder)


def clear_leftovers(folder: Place) -> list[str]:
    """Remove leftovers of interrupted saves and deletions; returns their names, for the log."""
    if isinstance(folder, Address):
        return objects.clear_leftovers(folder)
    leftovers = [path for path in _folders_in(folder) if _LEFTOVER.fullmatch(path.name)]
    for path in leftovers:
        shutil.rmtree(path)
    return [path.name for path in leftovers]


def quarantine(folder: Place, step: int, kind: str) -> str:
    """Rename a checkpoint to step-N.<kind>, or to step-N.<kind>-2 and so on if taken; returns the new name."""
    names = (f"step-{step}.{kind}{suffix}" for suffix in chain([""], (f"-{n}" for n in count(2))))
    if isinstance(folder, Address):
        return objects.rename(folder, f"step-{step}", names)
    name = next(name for name in names if not os.path.lexists(folder / name))
    (folder / f"step-{step}").rename(folder / name)
    sync_path(folder)
    return name


def invalid_kind() -> str:
    """Suffix for a corrupted checkpoint found now."""
    return f"invalid-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def supersede_after(folder: Place, step: int) -> list[int]:
    """Rename the checkpoints after `step`, to which the run has gone back, as superseded; returns their steps."""
    later = [other for other in published_steps(folder) if other > step]
    for other in later:
        manifest = read_or_none(step_folder(folder, other))
        quarantine(folder, other, f"superseded-{manifest.lineage[-1].id if manifest else 'unknown'}")
    return later


def delete(folder: Place, step: int) -> None:
    """Delete a checkpoint. The remains of an interrupted deletion are never taken for a checkpoint."""
    if isinstance(folder, Address):
        objects.delete(folder, step)
        return
    deleting = folder / f".step-{step}.deleting"
    _remove(deleting)
    (folder / f"step-{step}").rename(deleting)
    sync_path(folder)  # else a power failure could undo the rename alone and leave a corrupted checkpoint
    shutil.rmtree(deleting)


def _remove(leftover: Path) -> None:
    """Delete a folder, or the file or link in its place: a link is not followed. Raises OSError."""
    if leftover.is_dir() and not leftover.is_symlink():
        shutil.rmtree(leftover)
    elif os.path.lexists(leftover):
        leftover.unlink()


def retain(folder: Place, keep_latest_k: int, keep_every: int, keep: Collection[int]) -> list[int]:
    """Delete old checkpoints; returns their steps. Raises OSError.

    Keeps the latest `keep_latest_k` (0: all), multiples of `keep_every` (0: disabled), the steps `keep`, and always the
    latest one. Only complete checkpoints with optimizer and position in the data are counted and deleted.
    """
    if keep_latest_k == 0:
        return []
    counted, deleted = 0, list[int]()
    for step in reversed(_listed_steps(folder)):
        is_latest = counted < keep_latest_k
        is_kept = step in keep or (keep_every > 0 and step % keep_every == 0)
        if (is_kept and not is_latest) or not _is_full(folder, step):  # kept ones may be many: their files are not read
            continue
        if is_latest:
            counted += 1
        else:
            deleted.append(step)
    for step in reversed(deleted):
        delete(folder, step)
    return deleted[::-1]


def _listed_steps(folder: Place) -> list[int]:
    """As published_steps, by one listing: in a store, also steps without a manifest."""
    names = objects.step_names(folder) if isinstance(folder, Address) else [path.name for path in _folders_in(folder)]
    return _steps(names)


def _folders_in(folder: Path) -> list[Path]:
    """Subfolders of `folder`, sorted, without symlinks, which titanlite never creates."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False))


def _is_full(folder: Place, step: int) -> bool:
    try:
        return complete_manifest(folder, step).content == "full"
    except (InvalidCheckpointError, UnknownFormatError, OSError):
        return False
