"""Checks of the checkpoint that a run will start from. Reads manifests only, before the ranks are connected."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.folder import ever_published, latest_manifest, published_steps, read_or_none, step_folder
from titanlite.checkpoint.manifest import MANIFEST_FILE
from titanlite.hf.folder import PREFIX
from titanlite.runtime.errors import Problem, require


def check_start(section: CheckpointConfig, dump_folder: str) -> list[Problem]:
    """Return problems of load_step and initial_load_path, such as a missing checkpoint."""
    steps = published_steps(Path(dump_folder, section.folder)) if section.enable else []
    path, text = Path(section.initial_load_path), section.initial_load_path
    key, rule = "checkpoint.initial_load_path", "a folder step-N of a run's checkpoint folder, or that folder"
    if section.load_step >= 0 and section.enable:
        latest = latest_manifest(Path(dump_folder, section.folder))
        if latest is not None and latest.lineage[-1].step == section.load_step:
            return []  # the run has gone back to it already: a restart by torchrun must not do it again
        present = ", ".join(map(str, steps)) or "no checkpoint"
        return require(
            section.load_step in steps,
            "checkpoint.load_step",
            section.load_step,
            f"the step of a checkpoint in {Path(dump_folder, section.folder)}, which has: {present}",
            "choose one of these, or -1 for the latest" if steps else "leave it out",
        )
    own = Path(dump_folder, section.folder)
    if steps and text and path.resolve().is_relative_to(own.resolve()):
        return [
            Problem(
                key,
                text,
                f"a checkpoint of another run: {own} is the folder of this run, which resumes from step {steps[-1]}",
                "add --job.dump_folder ANOTHER for a new run from that checkpoint; to go back in this run: "
                "--checkpoint.load_step STEP in its place",
            )
        ]
    if not text or steps:  # the run resumes from its own checkpoint
        return []
    if text.startswith(PREFIX):
        return require(
            section.initial_load_model_only,
            "checkpoint.initial_load_model_only",
            False,
            f"true with initial_load_path = {text!r}, which has no optimizer state and no position in the data",
            "leave it out",
        )
    if text.startswith("~"):
        return [Problem(key, text, 'a path without "~", which is not expanded', f'write "{os.path.expanduser(text)}"')]
    remedy = f"no checkpoint at {path.absolute()}: fix the path (relative to the current folder)"
    if published_steps(path / section.folder):
        remedy = f'this is a dump folder: write "{path / section.folder}"'
    elif others := published_steps(path.parent):
        remedy = f"{path.parent} has the steps {', '.join(map(str, others))}: name one of them"
    elif (path / "config.json").is_file():
        remedy = f'this is a model folder in the Hugging Face format: write "{PREFIX}{text}"'
    return require((path / MANIFEST_FILE).exists() or bool(published_steps(path)), key, text, rule, remedy)


def imported_from(section: CheckpointConfig, dump_folder: str) -> str:
    """Return initial_load_path if it begins with "hf:" and the run has no checkpoints of its own; else ""."""
    resumes = section.enable and (section.load_step >= 0 or ever_published(Path(dump_folder, section.folder)))
    return section.initial_load_path if section.initial_load_path.startswith(PREFIX) and not resumes else ""


def earlier_config(section: CheckpointConfig, dump_folder: str) -> Mapping[str, Any]:
    """Return the resolved configuration of the checkpoint that a run will most likely start from; {} if absent.

    Reads manifests only, so it may be called before the ranks are connected.
    """
    folders = [Path(dump_folder, section.folder)] if section.enable else []
    path = section.initial_load_path
    if path and not path.startswith(PREFIX) and not section.initial_load_model_only:
        folders.append(Path(section.initial_load_path))
    for folder in folders:
        chosen = read_or_none(step_folder(folder, section.load_step)) if section.load_step >= 0 else None
        manifest = chosen or read_or_none(folder) or latest_manifest(folder)
        if manifest is not None:
            return manifest.config
    return {}
