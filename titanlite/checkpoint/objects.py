"""The checkpoints of a run in a store, where nothing can be renamed. One rank calls these functions.

    step-N/<attempt>/<file>                     written by one attempt to save step N; each has a random name
    step-N/MANIFEST.json                        names the attempt: it is put last, only if absent, and is the commit
    step-N.invalid-<time>/MANIFEST.json         that of a corrupted checkpoint; its files stay below step-N
    step-N.superseded-<branch>/MANIFEST.json    that of a checkpoint of a branch that was left

A checkpoint exists as long as its manifest does: this is put after all other objects, and deleted before them. Objects
of attempts that no manifest names are removed at a start. Objects with other names are never touched.
"""

import re
import secrets
from collections.abc import Iterable
from dataclasses import replace

from titanlite.checkpoint.manifest import (
    MANIFEST_FILE,
    STORE_FORMAT_VERSION,
    InvalidCheckpointError,
    Manifest,
    UnknownFormatError,
    manifest_text,
    read_manifest,
)
from titanlite.ranks.claim import require_claim
from titanlite.runtime.errors import UserError
from titanlite.storage.address import Address
from titanlite.storage.store import Store, in_parallel

_ATTEMPT = re.compile("attempt-[0-9a-f]{16}")


def names(folder: Address) -> list[str]:
    """Names of the checkpoints: those that have a manifest."""
    store, steps = Store(folder), step_names(folder)
    found = in_parallel(lambda name: store.exists(f"{name}/{MANIFEST_FILE}"), steps)
    return [name for name, exists in zip(steps, found, strict=True) if exists]


def step_names(folder: Address) -> list[str]:
    """Names below which there are checkpoints, or files of one that is not published."""
    return [name for name, facts in Store(folder).children().items() if facts is None and name.startswith("step-")]


def begin(folder: Address, step: int) -> Address:
    """The place of the files of a new attempt to save `step`."""
    return folder / f"step-{step}" / f"attempt-{secrets.token_hex(8)}"


def discard(writing: Address) -> None:
    """Delete what a failed attempt has written, as far as the store still answers: a start deletes the rest."""
    try:
        _delete_below(writing)
    except UserError:
        return


def publish(writing: Address, manifest: Manifest) -> None:
    """Put the manifest of a finished attempt. Raises FileExistsError if the step is published already, and UserError if
    another job has taken over the folder meanwhile."""
    require_claim(writing.parent.parent)
    own = replace(manifest, attempt=writing.name, format=max(manifest.format, STORE_FORMAT_VERSION))
    Store(writing.parent).create(MANIFEST_FILE, manifest_text(own))


def clear_leftovers(folder: Address) -> list[str]:
    """Delete the objects and unfinished uploads of attempts that no manifest names; returns the names of the attempts.
    The job must be the only one that uses the folder."""
    store = Store(folder)
    store.abort_uploads()
    checkpoints = names(folder)
    cleared = []
    for name in step_names(folder):
        attempts = {each for each in store.children(name) if _ATTEMPT.fullmatch(each)}
        if "." in name or not attempts:
            continue
        manifests = [each for each in checkpoints if each.partition(".")[0] == name]
        try:
            kept = {read_manifest(folder / each).attempt for each in manifests}
        except (InvalidCheckpointError, UnknownFormatError):
            continue  # its files are unknown
        for attempt in sorted(attempts - kept):
            _delete_below(folder / name / attempt)
            cleared.append(f"{name}/{attempt}")
    return cleared


def rename(folder: Address, name: str, targets: Iterable[str]) -> str:
    """Put the manifest of the checkpoint `name` under the first free name of `targets`, and then delete it under the
    old name; returns the new name. After a kill between, both exist: it is then renamed again."""
    store = Store(folder)
    content = store.read(f"{name}/{MANIFEST_FILE}")
    for target in targets:
        try:
            store.create(f"{target}/{MANIFEST_FILE}", content)
        except FileExistsError:
            continue
        store.delete([f"{name}/{MANIFEST_FILE}"])
        return target
    raise AssertionError("targets are endless")


def delete(folder: Address, step: int) -> None:
    """Delete a checkpoint whose manifest is valid: first the manifest, then the files."""
    place = folder / f"step-{step}"
    attempt = read_manifest(place).attempt
    Store(place).delete([MANIFEST_FILE])
    _delete_below(place / attempt)


def _delete_below(place: Address) -> None:
    store = Store(place)
    store.delete(store.list())
