"""The [checkpoint] section, and what an earlier start of the run has settled."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from titanlite.checkpoint.compatibility import Changeable
from titanlite.checkpoint.folder import ever_published, published_steps, step_folder
from titanlite.checkpoint.manifest import MANIFEST_FILE
from titanlite.checkpoint.resume import newest_manifest, read_or_none
from titanlite.checkpoint.saver import AsyncMode
from titanlite.checkpoint.storage import Verify
from titanlite.huggingface.source import PREFIX
from titanlite.runtime.errors import Problem, require


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, when, and where a run starts from."""

    enable: bool = False
    """Whether checkpoints are written, and a run goes on from its newest one. The last step is always saved."""
    folder: str = "checkpoint"
    """Folder of the checkpoints, inside job.dump_folder."""
    interval: int = 500
    """Optimizer steps between checkpoints."""
    async_mode: AsyncMode = "disabled"
    """Whether training goes on while a checkpoint is written: async copies it to host memory first, which takes that
    much memory; async_with_pinned_mem to page-locked memory, on an accelerator."""
    keep_latest_k: int = 10
    """So many of the newest checkpoints are kept; 0: all."""
    keep_every: int = 0
    """Checkpoints at multiples of this step are kept for good; 0: none."""
    load_step: int = -1
    """The step to start from; -1: the newest whole checkpoint. Going back sets the later ones aside."""
    initial_load_path: str = ""
    """What a run without checkpoints of its own starts from: a step folder, or a folder of such; "hf:FOLDER", a model
    in the format of transformers, or "hf:ORGANISATION/NAME[@REVISION]", one of the hub: its weights alone."""
    initial_load_model_only: bool = True
    """Whether initial_load_path gives the parameters alone; otherwise also optimizer, step and place in the data."""
    verify: Verify = "full"
    """What is looked at before a checkpoint is loaded: full, the hash of each file; size, their sizes; or nothing."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What follows where a checkpoint cannot be saved; the run's last one has to be."""
    last_save_model_only: bool = False
    """Whether the last step is saved without optimizer and place in the data: smaller, but no run can go on from it."""
    accept_changes: tuple[Changeable, ...] = ()
    """What may be another than in the checkpoint: data, tokenizer, init_version."""


def check_checkpoint(section: CheckpointConfig, device_type: str, taken: Collection[str] = ()) -> list[Problem]:
    """taken: what else the run writes into job.dump_folder."""
    key = "checkpoint"
    folder = PurePath(section.folder)
    return [
        *require(section.interval >= 1, f"{key}.interval", section.interval, "at least 1", "1 saves every step"),
        *require(section.keep_latest_k >= 0, f"{key}.keep_latest_k", section.keep_latest_k, "0 or more", "0 keeps all"),
        *require(
            section.keep_every >= 0, f"{key}.keep_every", section.keep_every, "0 or more", "0 keeps none for good"
        ),
        *require(
            section.load_step >= -1, f"{key}.load_step", section.load_step, "-1 or a step", "-1 takes the newest one"
        ),
        *require(
            section.load_step == -1 or section.enable,
            f"{key}.load_step",
            section.load_step,
            "only with checkpoint.enable",
            "checkpoint.enable = true, or leave it out",
        ),
        *require(
            bool(folder.parts) and not folder.is_absolute() and ".." not in folder.parts,
            f"{key}.folder",
            section.folder,
            "a folder inside job.dump_folder: not empty, relative, without '..'",
            'a plain name such as "checkpoint"',
        ),
        *require(
            folder.parts[:1] == () or folder.parts[0] not in taken,
            f"{key}.folder",
            section.folder,
            f"none of the other names that the run writes ({', '.join(taken)})",
            'a plain name such as "checkpoint"',
        ),
        *require(
            section.async_mode != "async_with_pinned_mem" or device_type != "cpu",
            f"{key}.async_mode",
            section.async_mode,
            "needs an accelerator, and there is none: page-locked memory is for its copies",
            f'{key}.async_mode = "async"',
        ),
    ]


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
