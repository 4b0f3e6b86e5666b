"""Checks of the checkpoint that a run will start from. Reads manifests only, before the ranks are connected."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.checkpoint.config import CheckpointConfig, another_run
from titanlite.checkpoint.folder import checkpoint_names, latest_manifest, published_steps, read_or_none, step_folder
from titanlite.checkpoint.manifest import Manifest, has_manifest
from titanlite.hf.folder import PREFIX
from titanlite.runtime.errors import Problem, Rules
from titanlite.storage.address import Address, Place, place


def check_start(section: CheckpointConfig, dump_folder: str) -> list[Problem]:
    """Return problems of folder in a store, load_step and initial_load_path, such as a missing checkpoint."""
    rules, text, key = Rules("checkpoint", section), section.initial_load_path, "initial_load_path"
    own, path = place(section.folder, dump_folder), place(text)
    if section.enable and isinstance(own, Address):
        rule = "the folder of all checkpoints of the run; this is one checkpoint"
        rules.require("folder", not has_manifest(own), rule, f"write {own.parent}")
    steps = published_steps(own) if section.enable else []
    if section.load_step >= 0 and section.enable:
        latest = latest_manifest(own)
        if latest is None or latest.lineage[-1].step != section.load_step:  # else a restart by torchrun goes back again
            present = ", ".join(map(str, steps)) or "no checkpoint"
            remedy = "choose one of these, or -1 for the latest" if steps else "leave it out"
            rule = f"the step of a checkpoint in {own}, which has: {present}"
            rules.require("load_step", section.load_step in steps, rule, remedy)
    elif steps:  # the run resumes from its own checkpoint
        rule = f"a checkpoint of another run: {own} is the folder of this run, which resumes from step {steps[-1]}"
        remedy = (
            f"add {another_run(own)} for a new run from that checkpoint; to go back in this run: "
            "--checkpoint.load_step STEP in its place"
        )
        rules.require(key, not text or not _is_inside(path, own), rule, remedy)
    elif text.startswith(PREFIX):
        rule = f"true with initial_load_path = {text!r}, which has no optimizer state and no position in the data"
        rules.require("initial_load_model_only", section.initial_load_model_only, rule, "leave it out")
    elif text:
        if isinstance(path, Address):
            remedy = f"no checkpoint at {path}: fix the address"
        else:
            remedy = f"no checkpoint at {path.absolute()}: fix the path (relative to the current folder)"
        inside = place(section.folder, path) if isinstance(path, Path) else path / CheckpointConfig.folder
        if published_steps(inside):
            remedy = f'this is a dump folder: write "{inside}"'
        elif others := published_steps(path.parent):
            remedy = f"{path.parent} has the steps {', '.join(map(str, others))}: name one of them"
        elif isinstance(path, Path) and (path / "config.json").is_file():
            remedy = f'this is a model folder in the Hugging Face format: write "{PREFIX}{text}"'
        has_one = has_manifest(path) or published_steps(path)
        rules.require(key, has_one, "a folder step-N of a run's checkpoint folder, or that folder", remedy)
    return rules.problems


def imported_from(section: CheckpointConfig, dump_folder: str) -> str:
    """Return initial_load_path if it begins with "hf:" and the run has no checkpoints of its own; else ""."""
    resumes = section.enable and (section.load_step >= 0 or checkpoint_names(place(section.folder, dump_folder)))
    return section.initial_load_path if section.initial_load_path.startswith(PREFIX) and not resumes else ""


def earlier_manifest(section: CheckpointConfig, dump_folder: str) -> Manifest | None:
    """Return the manifest of the checkpoint that a run will most likely start from; None if absent.

    Reads manifests only, so it may be called before the ranks are connected.
    """
    folders = [place(section.folder, dump_folder)] if section.enable else []
    path = section.initial_load_path
    if path and not path.startswith(PREFIX) and not section.initial_load_model_only:
        folders.append(place(path))
    for folder in folders:
        chosen = read_or_none(step_folder(folder, section.load_step)) if section.load_step >= 0 else None
        if found := chosen or _manifest_in(folder):
            return found
    return None


def initial_config(section: CheckpointConfig) -> Mapping[str, Any]:
    """The resolved configuration of the checkpoint in initial_load_path; {} if there is none. Reads a manifest only."""
    path = section.initial_load_path
    manifest = _manifest_in(place(path)) if path and not path.startswith(PREFIX) else None
    return {} if manifest is None else manifest.config


def _manifest_in(folder: Place) -> Manifest | None:
    """That of a checkpoint, or of the latest one in a folder of checkpoints; None if there is none."""
    return read_or_none(folder) or latest_manifest(folder)


def _is_inside(path: Place, own: Place) -> bool:
    if isinstance(path, Address) or isinstance(own, Address):
        return isinstance(path, Address) and isinstance(own, Address) and path.is_relative_to(own)
    return path.resolve().is_relative_to(own.resolve())
