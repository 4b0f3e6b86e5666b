"""Checks of what a run starts from, by the manifests alone, before the ranks are connected."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.folder import ever_published, newest_manifest, published_steps, read_or_none, step_folder
from titanlite.checkpoint.manifest import MANIFEST_FILE
from titanlite.hf.folder import PREFIX
from titanlite.runtime.errors import Problem, require


def check_start(section: CheckpointConfig, dump_folder: str) -> list[Problem]:
    """What there has to be on the disk for the run to start from."""
    steps = published_steps(Path(dump_folder, section.folder)) if section.enable else []
    path, text = Path(section.initial_load_path), section.initial_load_path
    key, rule = "checkpoint.initial_load_path", "a folder step-N of a run's checkpoint folder, or that folder"
    if section.load_step >= 0 and section.enable:
        newest = newest_manifest(Path(dump_folder, section.folder))
        if newest is not None and newest.lineage[-1].step == section.load_step:
            return []  # gone back to it already, which a restart by torchrun does not do again
        there = ", ".join(map(str, steps)) or "none"
        return require(
            section.load_step in steps,
            "checkpoint.load_step",
            section.load_step,
            f"a step of which there is a checkpoint in {Path(dump_folder, section.folder)}, and there are: {there}",
            "choose one of these, or -1 for the newest" if steps else "leave it out",
        )
    if not text or steps:  # the run goes on from its own
        return []
    if text.startswith(PREFIX):
        return require(
            section.initial_load_model_only,
            "checkpoint.initial_load_model_only",
            False,
            f"true with initial_load_path = {text!r}, which holds no optimizer and no place in the data",
            "leave it out",
        )
    if text.startswith("~"):
        return [Problem(key, text, 'a path as it is; "~" has no meaning here', f'write "{path.expanduser()}"')]
    remedy = f"there is none at {path.absolute()}: mend the path (relative to the current folder)"
    if published_steps(path / section.folder):
        remedy = f'it is a dump folder: write "{path / section.folder}"'
    elif (path / "config.json").is_file():
        remedy = f'it is a model folder in the format of transformers: write "{PREFIX}{text}"'
    return require((path / MANIFEST_FILE).exists() or bool(published_steps(path)), key, text, rule, remedy)


def imported_from(section: CheckpointConfig, dump_folder: str) -> str:
    """initial_load_path, where it is of "hf:" and the run does not go on from checkpoints of its own; else ""."""
    goes_on = section.enable and (section.load_step >= 0 or ever_published(Path(dump_folder, section.folder)))
    return section.initial_load_path if section.initial_load_path.startswith(PREFIX) and not goes_on else ""


def earlier_config(section: CheckpointConfig, dump_folder: str) -> Mapping[str, Any]:
    """The resolved configuration of the checkpoint that a run will most likely go on from; {} where there is none.

    By the manifests alone, which may be read before the ranks know each other.
    """
    folders = [Path(dump_folder, section.folder)] if section.enable else []
    path = section.initial_load_path
    if path and not path.startswith(PREFIX) and not section.initial_load_model_only:
        folders.append(Path(section.initial_load_path))
    for folder in folders:
        chosen = read_or_none(step_folder(folder, section.load_step)) if section.load_step >= 0 else None
        manifest = chosen or read_or_none(folder) or newest_manifest(folder)
        if manifest is not None:
            return manifest.config
    return {}
