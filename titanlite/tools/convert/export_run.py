"""A run's model as a folder in the format of Hugging Face's transformers."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.state import first_not_finite
from titanlite.checkpoint.storage import sync_folder
from titanlite.data.tokenizer import Tokenizer
from titanlite.hf.folder import CONFIG_FILE, GENERATION_FILE, INDEX_FILE, SINGLE_FILE
from titanlite.hf.safetensors import SUFFIX, sync_file, write_tensors
from titanlite.runtime.errors import UserError
from titanlite.tools.saved_run import SavedRun


def write_folder(run: SavedRun, folder: Path, dtype: torch.dtype, shard_bytes: int) -> list[str]:
    """Writes the model into the empty `folder`, on the disk on return; returns the names of the weights' files.

    The same bytes for the same weights, whatever mesh has saved them. In memory is one shard at a time, of at most
    `shard_bytes` in `dtype` where a tensor is not larger by itself, and one of the tensors as it was saved.
    Raises UserError for values that `dtype` cannot hold, OSError.
    """
    tokenizer = run.tokenizer()
    write_json(folder / CONFIG_FILE, config_json(run, dtype, tokenizer))
    write_json(folder / GENERATION_FILE, _separators(tokenizer) | {"do_sample": False})
    if tokenizer is not None:
        tokenizer.save(folder)
        for file in folder.iterdir():
            sync_file(file)
    files = _write_weights(run, folder, dtype, shard_bytes)
    sync_folder(folder)
    return files


def config_json(run: SavedRun, dtype: torch.dtype, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """dtype stands twice: as it is called now, and as versions of transformers before 4.56 read it."""
    described = run.family.hugging_face
    name = str(dtype).removeprefix("torch.")
    return {
        "architectures": [described.architecture],
        "model_type": described.model_type,
        "dtype": name,
        "torch_dtype": name,
        **described.config_json(run.hyper_parameters),
        **_separators(tokenizer),
    }


def _separators(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Written as null where there is none: else a reader would put its own in their place."""
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None}
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}


def _write_weights(run: SavedRun, folder: Path, dtype: torch.dtype, shard_bytes: int) -> list[str]:
    shapes = run.shapes()
    names = run.family.hugging_face.names(run.hyper_parameters)
    assert names.keys() == shapes.keys(), "the family names its parameters in Hugging Face's format, all of them"
    sizes = {name: prod(shapes[name]) * dtype.itemsize for name in names}
    shards = list(_shards(sizes, shard_bytes))
    files = [shard_name(number, len(shards)) for number in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        tensors = {name: torch.empty(shapes[name], dtype=dtype) for name in shard}
        run.load(tensors)
        _require_finite(tensors, dtype)
        write_tensors(folder / file, {names[name]: tensor for name, tensor in tensors.items()})
        del tensors
    if len(shards) > 1:
        weight_map = {names[name]: file for file, shard in zip(files, shards, strict=True) for name in shard}
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    return files


def _shards(sizes: Mapping[str, int], limit: int) -> Iterator[Sequence[str]]:
    """Names in order, as many in one shard as the limit allows, one at least."""
    shard: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if shard and filled + size > limit:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard


def shard_name(number: int, count: int) -> str:
    """Of the shard `number`, counted from 0."""
    stem = SINGLE_FILE.removesuffix(SUFFIX)
    return SINGLE_FILE if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}{SUFFIX}"


def _require_finite(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Nothing that is not finite is ever saved, so that the dtype has made it."""
    name = first_not_finite(tensors)
    if name is not None:
        raise UserError(
            f"--dtype {str(dtype).removeprefix('torch.')}: {name} has values that it cannot hold: write another one"
        )


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """A new file, on the disk on return."""
    with file.open("x", encoding="utf-8") as opened:
        opened.write(json.dumps(content, indent=2) + "\n")
        opened.flush()
        os.fsync(opened.fileno())
