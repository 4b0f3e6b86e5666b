"""The checkpoint of a run whose weights an exported model folder has."""

from collections.abc import Sequence
from pathlib import Path

import torch

from titanlite.checkpoint.folder import published_steps, step_folder
from titanlite.checkpoint.state import AVERAGE, MODEL
from titanlite.hf.folder import ModelFolder, open_folder
from titanlite.runtime.errors import UserError
from titanlite.storage.address import Place
from titanlite.tools.saved_run import stored_shapes, stored_tensors


def origin_of(exported: Path, checkpoints: Place) -> int:
    """The step whose weights, or average of the weights, an exported folder has in its dtypes. Raises UserError."""
    folder = open_folder(str(exported), exported)
    differing = ""
    for step in reversed(published_steps(checkpoints)):
        path = step_folder(checkpoints, step)
        stored = stored_shapes(path)
        plain = [MODEL + name for name in folder.tensors]
        averages = [AVERAGE + name if AVERAGE + name in stored else MODEL + name for name in folder.tensors]
        for names in (plain, averages)[: 1 + (plain != averages)]:
            name = _first_difference(path, [each for each in names if each in stored], folder)
            if not name:
                return step
            differing = differing or f"step {step}, the latest one, differs first in {name}"
    raise UserError(f"{exported} has the weights of no checkpoint in {checkpoints}: {differing or 'there is none'}")


def _first_difference(path: Place, names: Sequence[str], folder: ModelFolder) -> str:
    """The first parameter that differs between a checkpoint and the folder; "" if none does."""
    if len(names) < len(folder.tensors):
        return "the names of its tensors"
    for (_, tensor), (name, stored) in zip(stored_tensors(path, names), folder.tensors.items(), strict=True):
        found = torch.empty(stored.shape, dtype=stored.dtype)
        if tensor.shape != found.shape:
            return name
        folder.fill_({name: found})
        if not torch.equal(tensor.to(found.dtype), found):
            return name
    return ""
