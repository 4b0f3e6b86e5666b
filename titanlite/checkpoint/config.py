"""The [checkpoint] section."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from titanlite.runtime.errors import Problem, check_ranges, ranged, require

AsyncMode = Literal["disabled", "async", "async_with_pinned_mem"]
Changeable = Literal["data", "tokenizer", "init_version"]
"""Facts that may be changed by accept_changes: the run goes on, but is no longer what one run would be."""
Verify = Literal["full", "size", "off"]


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, when, and where a run starts from."""

    enable: bool = False
    """Whether checkpoints are written, and a run goes on from its newest one. The last step is always saved."""
    folder: str = "checkpoint"
    """Folder of the checkpoints, inside job.dump_folder."""
    interval: int = ranged(500, "1 saves every step", least=1)
    """Optimizer steps between checkpoints."""
    async_mode: AsyncMode = "disabled"
    """Whether training goes on while a checkpoint is written: async copies it to host memory first, which takes that
    much memory; async_with_pinned_mem to page-locked memory, on an accelerator."""
    keep_latest_k: int = ranged(10, "0 keeps all", least=0)
    """So many of the newest checkpoints are kept; 0: all."""
    keep_every: int = ranged(0, "0 keeps none for good", least=0)
    """Checkpoints at multiples of this step are kept for good; 0: none."""
    load_step: int = ranged(-1, "-1 takes the newest one", least=-1)
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
        *check_ranges(section, key),
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
