"""Find a valid checkpoint and verify its files. All functions are collectives over a group of ranks.

Corrupted checkpoints of the run's own folder are quarantined.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from titanlite.checkpoint.folder import (
    clear_leftovers,
    ever_published,
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
    copy_id,
)
from titanlite.checkpoint.saver import size_of
from titanlite.ranks.agreement import run_on_all_ranks, run_on_rank_0
from titanlite.runtime.cache import hash_of
from titanlite.runtime.errors import UsageError, UserError
from titanlite.runtime.logging import log

Usable = Callable[[Manifest], bool]
"""Whether a checkpoint can be used, by its manifest alone; the same on all ranks. May raise UserError."""


@dataclass(frozen=True)
class Found:
    """A valid checkpoint. verified: how it was verified, for the log."""

    path: Path
    manifest: Manifest
    verified: str


def prepare_folder(folder: Path, group: dist.ProcessGroup) -> tuple[list[int], bool]:
    """Remove leftovers of interrupted saves; returns (published steps in ascending order, see ever_published)."""

    def look() -> tuple[list[int], bool]:
        cleared = clear_leftovers(folder)
        if cleared:
            log.info("Removed leftovers of an interrupted save or deletion: %s", ", ".join(cleared))
        for step in misplaced_steps(folder):
            _quarantine(folder, step, "it is not a folder but a link or another kind of file")
        return published_steps(folder), ever_published(folder)

    return run_on_rank_0(look, group)


def latest_valid(folder: Path, steps: list[int], group: dist.ProcessGroup, usable: Usable) -> Found:
    """The latest valid and usable checkpoint of `steps`; corrupted ones are quarantined, with a warning each.

    Raises UserError if no checkpoint is valid and usable.
    """
    for step in reversed(steps):
        found = verify_checkpoint(step_folder(folder, step), group, usable)
        if isinstance(found, Found):
            return found
        if found is not None:
            run_on_rank_0(partial(_quarantine, folder, step, found), group)
    names = sorted(name for name in os.listdir(folder) if name.startswith("step-"))
    models = published_steps(folder)  # corrupted ones are quarantined by now
    remedy = (
        f"step-{models[-1]} has only the model: start a new run from its weights with --job.dump_folder ANOTHER "
        f"--checkpoint.initial_load_path {step_folder(folder, models[-1])}"
        if models
        else "to use a quarantined one, repair it and remove the suffix from its name"
    )
    raise UserError(
        f"cannot resume from any checkpoint in {folder}: {', '.join(names)}. To start a new run, "
        f"give another --job.dump_folder or move that folder away; {remedy}"
    )


def _quarantine(folder: Path, step: int, damage: str) -> None:
    moved = quarantine(folder, step, invalid_kind())
    log.warning("Checkpoint step-%d is corrupted: %s. Quarantined as %s", step, damage, moved.name)


def verify_checkpoint(path: Path, group: dist.ProcessGroup, usable: Usable) -> Found | str | None:
    """Verify the checkpoint at `path`. Returns Found, a description of the damage, or None if it is not usable."""
    manifest = run_on_rank_0(lambda: _read(path), group)
    if isinstance(manifest, str):
        return manifest
    if not usable(manifest):
        return None
    start = time.perf_counter()
    sharers = _sharers(path, group)
    for damage in run_on_all_ranks(lambda: _damage(path, manifest, sharers, dist.get_rank(group)), group):
        if damage is not None:
            return damage
    return Found(path, manifest, f"verified in full ({size_of(manifest.files)}, {time.perf_counter() - start:.2f} s)")


def _read(path: Path) -> Manifest | str:
    try:
        return own_manifest(path)
    except InvalidCheckpointError as error:
        return str(error)
    except UnknownFormatError as error:
        raise UserError(f"{path}: {error}") from None


def _sharers(path: Path, group: dist.ProcessGroup) -> list[int]:
    """The ranks that read the same copy of the checkpoint as this rank. Raises UsageError if the ranks' paths lead to
    different checkpoints."""

    def look() -> tuple[str, str, list[int]]:
        where = f"{path} on {socket.gethostname()}"
        try:
            return where, f"{MANIFEST_FILE} {hash_of(path / MANIFEST_FILE)}", copy_id(path)
        except OSError as error:
            return where, f"{MANIFEST_FILE}: {error.strerror}", []

    found = run_on_all_ranks(look, group)
    here, first, _ = found[0]
    for rank, (where, digest, _) in enumerate(found):
        if digest != first:
            raise UsageError(
                "the ranks would load different checkpoints, so nothing was trained; make checkpoint.initial_load_path "
                "the same one on all nodes, and start again:\n"
                f"  rank {rank}: {where}, {digest}\n  rank 0: {here}, {first}"
            )
    own = found[dist.get_rank(group)][2]
    return [rank for rank, (*_, copy) in enumerate(found) if copy == own]


def _damage(path: Path, manifest: Manifest, sharers: list[int], rank: int) -> str | None:
    """The first damage among this rank's share of the files; each file of a copy is checked by one of its sharers."""
    by_size = sorted(manifest.files.items(), key=lambda item: -item[1].bytes)
    try:
        for name, record in by_size[sharers.index(rank) :: len(sharers)]:
            check_file(path, name, record)
    except InvalidCheckpointError as error:
        return str(error)
    return None
