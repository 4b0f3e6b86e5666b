"""The [checkpoint] section."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePath
from typing import ClassVar, Literal

from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import Affects, Needs, setting
from titanlite.storage.address import Place, is_address

AsyncMode = Literal["disabled", "async", "async_with_pinned_mem"]
Changeable = Literal["data", "tokenizer", "init_version", "rope", "optimizer", "bit_equal"]
"""Facts that accept_changes can accept; the resumed run then differs from an uninterrupted one."""


def another_run(folder: Place | str) -> str:
    """The options of a run that must not use `folder`, the checkpoints of another: a store has them outside of
    job.dump_folder."""
    return "--job.dump_folder ANOTHER" + (" --checkpoint.folder ANOTHER" if is_address(str(folder)) else "")


_SAVES = Needs("checkpoint.enable = true", lambda section: section.enable)
_LOADS = Needs(
    "checkpoint.enable = true or an initial_load_path", lambda section: section.enable or section.initial_load_path
)
_KEEPS = Needs(
    "checkpoint.enable = true and keep_latest_k above 0", lambda section: section.enable and section.keep_latest_k > 0
)
_IMPORTS = Needs("checkpoint.initial_load_path", lambda section: section.initial_load_path)


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved, and which one a run starts from."""

    AFFECTS: ClassVar[Affects] = "nothing"

    enable: bool = False
    """Write checkpoints, and resume from the latest valid one. The last step is always saved."""
    folder: str = setting("checkpoint", is_path=True, needs=_SAVES)
    """Folder of the checkpoints, inside job.dump_folder; or an address in a store, such as s3://BUCKET/RUN."""
    interval: int = setting(500, "1 saves every step", least=1, needs=_SAVES)
    """Optimizer steps between checkpoints."""
    async_mode: AsyncMode = setting("disabled", needs=_SAVES)
    """Whether training continues while a checkpoint is written. async first copies the rank's state to host memory,
    which needs as much memory; async_with_pinned_mem copies to page-locked memory and needs an accelerator."""
    keep_latest_k: int = setting(10, "0 keeps all", least=0, needs=_SAVES)
    """Number of latest checkpoints to keep; 0: all."""
    keep_every: int = setting(0, "0 disables it", least=0, needs=_KEEPS)
    """Keep checkpoints at multiples of this step permanently; 0: disabled."""
    load_step: int = setting(-1, "-1 selects the latest valid checkpoint", least=-1, needs=_SAVES, once=True)
    """Step to start from; -1: the latest valid checkpoint. Checkpoints of later steps are renamed, not deleted."""
    stop_after: int = setting(-1, "leave it out to train to the end", least=1, unset=-1, needs=_SAVES, once=True)
    """Step that is saved, validated if it is due, and ends this start: schedules are those of training.steps, and the
    run resumes without this key."""
    initial_load_path: str = setting("", affects="facts", per_node=True, is_path=True)
    """Initial state of a run that has no checkpoints yet: a folder step-N, a folder of such folders, either also in a
    store, "hf:FOLDER" (a model in the Hugging Face format) or "hf:ORGANIZATION/NAME[@REVISION]" (a model on the hub).
    """
    initial_load_model_only: bool = setting(True, affects="facts", needs=_IMPORTS)
    """Load only the parameters from initial_load_path; if false, also optimizer, step and position in the data."""
    on_save_error: Literal["stop", "continue"] = setting("stop", needs=_SAVES)
    """What to do if a save fails. continue: train on and save again at the next interval. A failed last save always
    raises an error."""
    accept_changes: tuple[Changeable, ...] = setting((), needs=_LOADS, once=True)
    """Differences from the checkpoint, or from an imported model, to accept. rope: the keys model.rope_*, as in a run
    that extends the context. optimizer: the state of all optimizers then starts anew. bit_equal: training.bit_equal,
    its rows of a microbatch, and the threads of a rank."""


def check_checkpoint(section: CheckpointConfig, device_type: str, taken: Collection[str] = ()) -> list[Problem]:
    """Return the problems of [checkpoint]. taken: other names that the run writes into job.dump_folder."""
    rules = Rules("checkpoint", section)
    rules.needs("load_step", section.load_step == -1 or section.enable, "checkpoint.enable = true")
    folder, remedy = PurePath(section.folder), 'a plain name such as "checkpoint"'
    inside = folder.parts and not folder.is_absolute() and ".." not in folder.parts
    rule = "a folder inside job.dump_folder, without '..', or an address such as s3://BUCKET/RUN"
    if not is_address(section.folder) and rules.require("folder", inside, rule, remedy):
        free = folder.parts[0] not in taken
        rules.require("folder", free, f"not a name that the run writes ({', '.join(taken)})", remedy)
    pinned = section.async_mode != "async_with_pinned_mem" or device_type != "cpu"
    rules.require("async_mode", pinned, "needs an accelerator", 'checkpoint.async_mode = "async"')
    return rules.problems
