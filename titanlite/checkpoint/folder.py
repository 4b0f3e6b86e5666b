"""The folder of a run's checkpoints: names, publishing, quarantine and retention. One rank calls these functions.

    step-N                        a published checkpoint; valid if its files match its MANIFEST.json
    step-N.invalid-<time>         a corrupted checkpoint, quarantined
    step-N.superseded-<branch>    a checkpoint of a branch that was left by going back to an earlier step
    .step-N.writing               being written, or left by an interrupted save
    .step-N.deleting              being deleted

Folders and files with other names are never touched. A link, file or pipe named step-N is quarantined at a start.
"""

import os
import re
import shutil
from collections.abc import Collection
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path

from titanlite.checkpoint.manifest import (
    MANIFEST_FILE,
    InvalidCheckpointError,
    Manifest,
    UnknownFormatError,
    check_file,
    read_manifest,
)
from titanlite.runtime.durability import sync_path

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_CHECKPOINT = re.compile(_STEP.pattern + r"(\.(invalid|superseded)-.*)?")
_LEFTOVER = re.compile(r"\." + _STEP.pattern + r"\.(writing|deleting)")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def writing_folder(folder: Path, step: int) -> Path:
    return folder / f".step-{step}.writing"


def step_of(path: Path) -> int | None:
    """Return N if the path's name is step-N; None for other names, such as those of quarantined checkpoints."""
    name = _STEP.fullmatch(path.name)
    return int(name[1]) if name else None


def published_steps(folder: Path) -> list[int]:
    """Steps of the published checkpoints, corrupted ones included, in ascending order."""
    steps = (step_of(path) for path in _folders_in(folder))
    return sorted(step for step in steps if step is not None)


def misplaced_steps(folder: Path) -> list[int]:
    """Steps with a link, a file, a pipe or a device in the place of the folder step-N, in ascending order."""
    names = os.listdir(folder) if folder.is_dir() else ()
    return sorted({int(name[1]) for name in map(_STEP.fullmatch, names) if name} - {*published_steps(folder)})


def ever_published(folder: Path) -> bool:
    """Whether `folder` has any checkpoint: published, quarantined or superseded."""
    return folder.is_dir() and any(map(_CHECKPOINT.fullmatch, os.listdir(folder)))


def own_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest. Errors as read_manifest, also for that of another step than the folder's name."""
    manifest = read_manifest(path)
    if step_of(path) not in (None, manifest.step):
        raise InvalidCheckpointError(f"{MANIFEST_FILE} belongs to step {manifest.step}")
    return manifest


def complete_manifest(folder: Path, step: int) -> Manifest:
    """Read a checkpoint's manifest and check the sizes of all files. Raises InvalidCheckpointError, OSError."""
    path = step_folder(folder, step)
    manifest = own_manifest(path)
    for name, record in manifest.files.items():
        check_file(path, name, record, content=False)
    return manifest


def read_or_none(path: Path) -> Manifest | None:
    """The manifest of the checkpoint at `path`; None if it is missing or unreadable."""
    try:
        return read_manifest(path)
    except (InvalidCheckpointError, UnknownFormatError, OSError):
        return None


def latest_manifest(folder: Path) -> Manifest | None:
    """The latest readable manifest in `folder`; None if no checkpoint has one."""
    manifests = (read_or_none(step_folder(folder, step)) for step in reversed(published_steps(folder)))
    return next((manifest for manifest in manifests if manifest is not None), None)


def publish(folder: Path, step: int) -> None:
    """Rename the finished folder of `step` to its published name and sync it to disk. Raises OSError."""
    path = writing_folder(folder, step)
    sync_path(path)
    target = step_folder(folder, step)
    if os.path.lexists(target):  # rename would replace an empty folder
        raise FileExistsError(None, "exists already", str(target))
    path.rename(target)
    sync_path(folder)


def clear_leftovers(folder: Path) -> list[str]:
    """Remove leftovers of interrupted saves and deletions; returns their names, for the log."""
    leftovers = [path for path in _folders_in(folder) if _LEFTOVER.fullmatch(path.name)]
    for path in leftovers:
        shutil.rmtree(path)
    return [path.name for path in leftovers]


def quarantine(folder: Path, step: int, kind: str) -> Path:
    """Rename a checkpoint to step-N.<kind>, or to step-N.<kind>-2 and so on if taken; returns the new path."""
    path = step_folder(folder, step)
    targets = (path.with_name(f"{path.name}.{kind}{suffix}") for suffix in chain([""], (f"-{n}" for n in count(2))))
    target = next(target for target in targets if not os.path.lexists(target))
    path.rename(target)
    sync_path(folder)
    return target


def invalid_kind() -> str:
    """Suffix for a corrupted checkpoint found now."""
    return f"invalid-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def supersede_after(folder: Path, step: int) -> list[int]:
    """Rename the checkpoints after `step`, to which the run has gone back, as superseded; returns their steps."""
    later = [other for other in published_steps(folder) if other > step]
    for other in later:
        manifest = read_or_none(step_folder(folder, other))
        quarantine(folder, other, f"superseded-{manifest.lineage[-1].id if manifest else 'unknown'}")
    return later


def delete(folder: Path, step: int) -> None:
    """Delete a checkpoint. The remains of an interrupted deletion are never taken for a checkpoint."""
    deleting = folder / f".step-{step}.deleting"
    if deleting.exists():
        shutil.rmtree(deleting)
    step_folder(folder, step).rename(deleting)
    sync_path(folder)  # else a power failure could undo the rename alone and leave a corrupted checkpoint
    shutil.rmtree(deleting)


def retain(folder: Path, keep_latest_k: int, keep_every: int, keep: Collection[int]) -> list[int]:
    """Delete old checkpoints; returns their steps. Raises OSError.

    Keeps the latest `keep_latest_k` (0: all), multiples of `keep_every` (0: disabled), the steps `keep`, and always the
    latest one. Only complete checkpoints with optimizer and position in the data are counted and deleted.
    """
    if keep_latest_k == 0:
        return []
    candidates = [step for step in published_steps(folder) if _is_full(folder, step)]
    kept = {*candidates[-keep_latest_k:], *keep, *(s for s in candidates if keep_every and s % keep_every == 0)}
    deleted = [step for step in candidates if step not in kept]
    for step in deleted:
        delete(folder, step)
    return deleted


def _folders_in(folder: Path) -> list[Path]:
    """Subfolders of `folder`, sorted, without symlinks, which titanlite never creates."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False))


def _is_full(folder: Path, step: int) -> bool:
    try:
        return complete_manifest(folder, step).content == "full"
    except (InvalidCheckpointError, UnknownFormatError, OSError):
        return False
