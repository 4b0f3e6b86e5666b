"""Finding the newest checkpoint that is whole, and loading it; all ranks together."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from titanlite.checkpoint.config import Verify
from titanlite.checkpoint.folder import (
    clear_leftovers,
    ever_published,
    invalid_kind,
    published_steps,
    set_aside,
    step_folder,
    step_of,
)
from titanlite.checkpoint.manifest import MANIFEST_FILE, Manifest, UnknownFormatError, read_manifest
from titanlite.checkpoint.saver import size_of
from titanlite.checkpoint.storage import InvalidCheckpointError, check_file, first_failure, load_tensors, read_shapes
from titanlite.runtime.agreement import on_first, together
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log

Usable = Callable[[Manifest], bool]
"""Decides by the manifest, the same on all ranks, before files are looked at; may raise UserError."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole. verified: how that is known, for the log."""

    path: Path
    manifest: Manifest
    verified: str


def prepare_folder(folder: Path, group: dist.ProcessGroup) -> tuple[list[int], bool]:
    """(published steps from the oldest, whether anything was ever published); clears what interrupted saves left."""

    def look() -> tuple[list[int], bool]:
        cleared = clear_leftovers(folder)
        if cleared:
            log.info("Removed what an interrupted save or deletion had left: %s", ", ".join(cleared))
        return published_steps(folder), ever_published(folder)

    return on_first(look, group)


def newest_whole(
    folder: Path, steps: list[int], verify: Verify, group: dist.ProcessGroup, usable: Usable
) -> Found | None:
    """The newest of `steps` that is whole and usable; damaged ones are set aside on the way, with a line each."""
    for step in reversed(steps):
        found = look_at(step_folder(folder, step), verify, group, usable)
        if isinstance(found, Found):
            return found
        if found is not None:
            on_first(partial(_set_aside, folder, step, found), group)
    return None


def _set_aside(folder: Path, step: int, damage: str) -> None:
    moved = set_aside(folder, step, invalid_kind())
    log.warning("Checkpoint step-%d is damaged: %s. Set aside as %s", step, damage, moved.name)


def look_at(path: Path, verify: Verify, group: dist.ProcessGroup, usable: Usable) -> Found | str | None:
    """The checkpoint at `path`; or what is damaged about it; or None where it is not usable."""
    manifest = on_first(lambda: _read(path), group)
    if isinstance(manifest, str):
        return manifest
    if not usable(manifest):
        return None
    start = time.perf_counter()
    damages = [damage for damage in together(lambda: _damage(path, manifest, verify, group), group) if damage]
    if damages:
        return damages[0]
    how = {"full": "verified in full", "size": "sizes verified", "off": "not verified"}[verify]
    return Found(path, manifest, f"{how} ({size_of(manifest.files)}, {time.perf_counter() - start:.2f} s)")


def load(found: Found, tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Fills the tensors in place. Raises UserError on all ranks."""
    try:
        load_tensors(found.path, tensors, group)
    except dcp.CheckpointException as error:
        raise UserError(f"{found.path} cannot be loaded: {first_failure(error)}") from None


def nothing_usable(folder: Path) -> UserError:
    """What to do where there were checkpoints and the run can go on from none."""
    names = sorted(name for name in os.listdir(folder) if name.startswith("step-"))
    models = published_steps(folder)  # what was damaged is set aside by now
    remedy = (
        f"step-{models[-1]} holds the model alone: start a new run from its weights with --job.dump_folder ANOTHER "
        f"--checkpoint.initial_load_path {step_folder(folder, models[-1])}"
        if models
        else "to use one that was set aside, mend it and take the suffix off its name"
    )
    return UserError(
        f"no checkpoint in {folder} can be used, and there were some: {', '.join(names)}. To start anew all the same, "
        f"give another --job.dump_folder or move that folder away; {remedy}"
    )


def check_tensors(
    path: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup, differences: Sequence[str] = ()
) -> list[str]:
    """A line where the checkpoint at `path` has them in another dtype, to which they are converted when it is loaded.

    Raises UserError where it lacks one of the tensors or has it in another shape. differences: between the two models,
    for that case.
    """

    what = "\n".join(f"  {line}" for line in differences)
    remedy = f"\n{what}\n  remedy: write in [model] what is in the checkpoint, and use its tokenizer" if what else ""

    def check() -> tuple[str, list[str]]:
        there = read_shapes(path)
        for name, tensor in tensors.items():
            if name not in there:
                return f"has no {name}: it is of another model{remedy}", []
            shape, _ = there[name]
            if shape != tuple(tensor.shape):
                return (
                    f"has {name} of shape {shape}, and this model needs {tuple(tensor.shape)}: no row or column is "
                    f"made up or left out{remedy}"
                ), []
        dtypes = {(there[name][1], str(tensor.dtype)) for name, tensor in tensors.items()}
        return "", [f"from {saved} to {now}" for saved, now in dtypes if saved != now]

    found = together(check, group)
    for problem, _ in found:
        if problem:
            raise UserError(f"checkpoint.initial_load_path: {path} {problem}")
    return [f"The weights of {path} are converted {how}" for how in sorted({how for _, part in found for how in part})]


def _read(path: Path) -> Manifest | str:
    try:
        manifest = read_manifest(path)
    except InvalidCheckpointError as error:
        return str(error)
    except UnknownFormatError as error:
        raise UserError(f"{path}: {error}") from None
    named = step_of(path)
    return manifest if named in (None, manifest.step) else f"{MANIFEST_FILE} is that of step {manifest.step}"


def _damage(path: Path, manifest: Manifest, verify: Verify, group: dist.ProcessGroup) -> str | None:
    """What is wrong with this rank's share of the files; every file is looked at by one rank."""
    if verify == "off":
        return None
    by_size = sorted(manifest.files.items(), key=lambda item: -item[1].bytes)
    try:
        for name, record in by_size[dist.get_rank(group) :: group.size()]:
            check_file(path, name, record, verify)
    except InvalidCheckpointError as error:
        return str(error)
    return None
