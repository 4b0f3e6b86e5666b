"""Find a valid checkpoint and verify its files. All functions are collectives over a group of ranks.

Corrupted checkpoints of the run's own folder are quarantined.
"""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from titanlite.checkpoint.config import another_run
from titanlite.checkpoint.folder import (
    checkpoint_names,
    clear_leftovers,
    invalid_kind,
    misplaced_steps,
    own_manifest,
    published_steps,
    quarantine,
    step_folder,
)
from titanlite.checkpoint.manifest import (
    MANIFEST_FILE,
    InvalidCheckpointError,
    Manifest,
    UnknownFormatError,
    check_file,
    check_files,
    copy_id,
    files_of,
    manifest_hash,
    read_listed,
)
from titanlite.checkpoint.saver import size_of
from titanlite.ranks.agreement import run_on_all_ranks, run_on_rank_0
from titanlite.runtime.errors import UsageError, UserError
from titanlite.runtime.logging import log
from titanlite.storage.address import Address, Place

Usable = Callable[[Manifest], bool]
"""Whether a checkpoint can be used, by its manifest alone; the same on all ranks. May raise UserError."""


@dataclass(frozen=True)
class Found:
    """A valid checkpoint. verified: how it was verified, for the log."""

    path: Place
    manifest: Manifest
    verified: str


def prepare_folder(folder: Place, group: dist.ProcessGroup) -> tuple[list[int], bool]:
    """Remove leftovers of interrupted saves; returns (published steps in ascending order, whether there is any
    checkpoint: published, quarantined or superseded)."""

    def look() -> tuple[list[int], bool]:
        cleared = clear_leftovers(folder)
        if cleared:
            log.info("Removed leftovers of an interrupted save or deletion: %s", ", ".join(cleared))
        for step in misplaced_steps(folder):
            quarantine_damaged(folder, step, "it is not a folder but a link or another kind of file")
        return published_steps(folder), bool(checkpoint_names(folder))

    return run_on_rank_0(look, group)


def latest_valid(folder: Place, steps: list[int], group: dist.ProcessGroup, usable: Usable) -> Found:
    """The latest valid and usable checkpoint of `steps`; corrupted ones are quarantined, with a warning each.

    Raises UserError if no checkpoint is valid and usable.
    """
    for step in reversed(steps):
        found = verify_checkpoint(step_folder(folder, step), group, usable)
        if isinstance(found, Found):
            return found
        if found is not None:
            run_on_rank_0(partial(quarantine_damaged, folder, step, found), group)
    names = checkpoint_names(folder)
    models = published_steps(folder)  # corrupted ones are quarantined by now
    remedy = (
        f"step-{models[-1]} has only the model: start a new run from its weights with {another_run(folder)} "
        f"--checkpoint.initial_load_path {step_folder(folder, models[-1])}"
        if models
        else f"to use a quarantined one, repair it and copy its {MANIFEST_FILE} to step-N"
        if isinstance(folder, Address)
        else "to use a quarantined one, repair it and remove the suffix from its name"
    )
    raise UserError(
        f"cannot resume from any checkpoint in {folder}: {', '.join(names)}. To start a new run, "
        f"give {another_run(folder)}, or move that folder away; {remedy}"
    )


def quarantine_damaged(folder: Place, step: int, damage: str) -> None:
    name = quarantine(folder, step, invalid_kind())
    log.warning("Checkpoint step-%d is corrupted: %s. Quarantined as %s", step, damage, name)


def verify_checkpoint(path: Place, group: dist.ProcessGroup, usable: Usable) -> Found | str | None:
    """Verify the checkpoint at `path`. Returns Found, a description of the damage, or None if it is not usable."""
    manifest = run_on_rank_0(lambda: _read(path), group)
    if isinstance(manifest, str):
        return manifest
    if not usable(manifest):
        return None
    start = time.perf_counter()
    sharers = _sharers(path, group)
    if isinstance(path, Address):
        damage = run_on_rank_0(lambda: _damage_in_store(path, manifest), group)
        how = f"{size_of(manifest.files)}, {time.perf_counter() - start:.2f} s"
        return damage or Found(path, manifest, f"sizes verified ({how}), contents when they are read")
    for damage in run_on_all_ranks(lambda: _damage(path, manifest, sharers, dist.get_rank(group)), group):
        if damage is not None:
            return damage
    return Found(path, manifest, f"verified in full ({size_of(manifest.files)}, {time.perf_counter() - start:.2f} s)")


def _read(path: Place) -> Manifest | str:
    try:
        return own_manifest(path)
    except InvalidCheckpointError as error:
        return str(error)
    except UnknownFormatError as error:
        raise UserError(f"{path}: {error}") from None


def _sharers(path: Place, group: dist.ProcessGroup) -> list[int]:
    """The ranks that read the same copy of the checkpoint as this rank. Raises UsageError if the ranks' paths lead to
    different checkpoints."""

    def look() -> tuple[str, str, list[int]]:
        where = f"{path} on {socket.gethostname()}"
        try:
            return where, f"{MANIFEST_FILE} {manifest_hash(path)}", copy_id(path)
        except OSError as error:
            return where, f"{MANIFEST_FILE}: {error.strerror}", []

    found = run_on_all_ranks(look, group)
    here, first, _ = found[0]
    for rank, (where, digest, _) in enumerate(found):
        if digest != first:
            raise UsageError(
                "the ranks would load different checkpoints, so nothing was trained; make checkpoint.initial_load_path "
                "the same one on all nodes, and start again:",
                f"  rank {rank}: {where}, {digest}",
                f"  rank 0: {here}, {first}",
            )
    own = found[dist.get_rank(group)][2]
    return [rank for rank, (*_, copy) in enumerate(found) if copy == own]


def _damage_in_store(path: Address, manifest: Manifest) -> str | None:
    """The first damage that shows without reading all files, as rank 0 finds it."""
    try:
        check_files(path, manifest)
        read_listed(path, manifest, manifest.metadata_file)
    except (InvalidCheckpointError, FileNotFoundError) as error:
        return str(error)
    return None


def _damage(path: Path, manifest: Manifest, sharers: list[int], rank: int) -> str | None:
    """The first damage among this rank's share of the files; each file of a copy is checked by one of its sharers."""
    by_size, files = sorted(manifest.files.items(), key=lambda item: -item[1].bytes), files_of(path, manifest)
    assert isinstance(files, Path)
    try:
        for name, record in by_size[sharers.index(rank) :: len(sharers)]:
            check_file(files, name, record)
    except InvalidCheckpointError as error:
        return str(error)
    return None
