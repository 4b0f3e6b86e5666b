"""The folder of a run's checkpoints: what stands in it, and what may go. Everything here is one rank's work.

    step-N                        a checkpoint, published; complete where its MANIFEST.json says so
    step-N.invalid-<time>         was found damaged, and set aside
    step-N.superseded-<branch>    of a branch that was left by going back to an earlier step
    .step-N.writing               being written, or left by a save that did not end
    .step-N.deleting              being deleted

Any other name belongs to somebody else and is never touched.
"""

import os
import re
import shutil
from collections.abc import Collection
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path

from titanlite.checkpoint.manifest import MANIFEST_FILE, Manifest, UnknownFormatError, read_manifest
from titanlite.checkpoint.storage import InvalidCheckpointError, check_file, sync_folder

DELETED_MANIFEST = "MANIFEST.json.deleted"
"""What the manifest of a folder that is being deleted is called: the folder is no damaged checkpoint then."""

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_LEFTOVER = re.compile(r"\.step-(0|[1-9][0-9]*)\.(writing|deleting)")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def writing_folder(folder: Path, step: int) -> Path:
    return folder / f".step-{step}.writing"


def step_of(path: Path) -> int | None:
    """The step that the name of a checkpoint says; None for other names, such as those of what was set aside."""
    name = _STEP.fullmatch(path.name)
    return int(name[1]) if name else None


def published_steps(folder: Path) -> list[int]:
    """Steps of the published checkpoints, damaged ones as well, from the oldest to the newest."""
    found = [(_STEP.fullmatch(path.name), path) for path in _folders_in(folder)]
    return sorted(int(name[1]) for name, path in found if name and not _is_being_deleted(path))


def ever_published(folder: Path) -> bool:
    """Whether there are traces of checkpoints: published ones, or such that were set aside or superseded."""
    traces = re.compile(_STEP.pattern + r"(\.(invalid|superseded)-.*)?")
    return any(traces.fullmatch(path.name) and not _is_being_deleted(path) for path in _folders_in(folder))


def whole_manifest(folder: Path, step: int) -> Manifest:
    """The manifest of a checkpoint that is complete by its files' sizes. Raises InvalidCheckpointError, OSError."""
    path = step_folder(folder, step)
    manifest = read_manifest(path)
    if manifest.step != step:
        raise InvalidCheckpointError(f"{MANIFEST_FILE} is that of step {manifest.step}")
    for name, record in manifest.files.items():
        check_file(path, name, record, "size")
    return manifest


def read_or_none(path: Path) -> Manifest | None:
    """The manifest of the checkpoint at `path`, where there is one that can be read."""
    try:
        return read_manifest(path)
    except (InvalidCheckpointError, UnknownFormatError, OSError):
        return None


def newest_manifest(folder: Path) -> Manifest | None:
    """That of the newest checkpoint in `folder` that has one which can be read."""
    manifests = (read_or_none(step_folder(folder, step)) for step in reversed(published_steps(folder)))
    return next((manifest for manifest in manifests if manifest is not None), None)


def publish(folder: Path, step: int) -> None:
    """Gives the finished folder of `step` its name; it is on the disk on return. Raises OSError."""
    path = writing_folder(folder, step)
    sync_folder(path)
    target = step_folder(folder, step)
    if os.path.lexists(target):  # rename would replace an empty folder
        raise FileExistsError(None, "exists already", str(target))
    path.rename(target)
    sync_folder(folder)


def clear_leftovers(folder: Path) -> list[str]:
    """Removes what interrupted saves and deletions have left; returns the names, for the log."""
    cleared = []
    for entry in _folders_in(folder):
        if _LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry)
        elif _STEP.fullmatch(entry.name) and _is_being_deleted(entry):
            delete(folder, int(entry.name.removeprefix("step-")))
        else:
            continue
        cleared.append(entry.name)
    return cleared


def set_aside(folder: Path, step: int, kind: str) -> Path:
    """Renames a checkpoint to step-N.<kind>, with a number behind it where that name is taken; returns the new path."""
    path = step_folder(folder, step)
    targets = (path.with_name(f"{path.name}.{kind}{suffix}") for suffix in chain([""], (f"-{n}" for n in count(2))))
    target = next(target for target in targets if not os.path.lexists(target))
    path.rename(target)
    sync_folder(folder)
    return target


def invalid_kind() -> str:
    """What to call a damaged checkpoint found now."""
    return f"invalid-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def supersede_after(folder: Path, step: int) -> list[int]:
    """Sets aside the checkpoints after `step`, which the run has gone back to; returns their steps."""
    later = [other for other in published_steps(folder) if other > step]
    for other in later:
        try:
            branch = read_manifest(step_folder(folder, other)).lineage[-1].id
        except (InvalidCheckpointError, UnknownFormatError, OSError):
            branch = "unknown"
        set_aside(folder, other, f"superseded-{branch}")
    return later


def delete(folder: Path, step: int) -> None:
    """Deletes a checkpoint. Interrupted anywhere, what is left is recognised as something that is being deleted."""
    path = step_folder(folder, step)
    if (path / MANIFEST_FILE).exists():
        (path / MANIFEST_FILE).replace(path / DELETED_MANIFEST)
        sync_folder(path)
    deleting = folder / f".step-{step}.deleting"
    if deleting.exists():
        shutil.rmtree(deleting)
    path.rename(deleting)
    shutil.rmtree(deleting)


def retain(folder: Path, *, keep_latest_k: int, keep_every: int, keep: Collection[int]) -> list[int]:
    """Deletes the checkpoints that need not be kept; returns their steps. Raises OSError.

    Kept are the newest `keep_latest_k` (0: all), those at multiples of `keep_every` (0: none), the steps `keep`, and
    always the newest one. Only full, complete checkpoints count and are deleted: damaged ones and those of the model
    alone stay.
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
    """What may be ours: a file or a link of such a name is somebody else's."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False))


def _is_full(folder: Path, step: int) -> bool:
    try:
        return whole_manifest(folder, step).content == "full"
    except (InvalidCheckpointError, UnknownFormatError, OSError):
        return False


def _is_being_deleted(path: Path) -> bool:
    return (path / DELETED_MANIFEST).exists() and not (path / MANIFEST_FILE).exists()
