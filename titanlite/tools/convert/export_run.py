"""Export a run's model as a folder in the format of Hugging Face's transformers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.state import first_not_finite
from titanlite.data.chat.encoder import ChatEncoder
from titanlite.data.tokenizer import Tokenizer
from titanlite.hf.folder import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from titanlite.hf.generation_defaults import GENERATION_FILE, read_generation_defaults, with_eos
from titanlite.hf.safetensors import SUFFIX, write_tensors
from titanlite.models.family import StoredCopies, StoredName, stored_dtype
from titanlite.models.hugging_face import OWN_BALANCE_LOSS, stored_names, stored_tensors
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log
from titanlite.tools.saved_run import SavedRun


def write_folder(run: SavedRun, folder: Path, dtype: torch.dtype, shard_bytes: int) -> list[str]:
    """Write the model into the empty `folder`, synced to disk on return; returns the names of the weight files.

    The same weights give the same bytes, whatever mesh saved them. Holds in memory one shard at a time (at most
    `shard_bytes` in `dtype`, unless a single tensor is larger) and one tensor in the dtype it was saved in.
    Raises OSError, and UserError if `dtype` cannot represent a value.
    """
    tokenizer = run.tokenizer()
    generation = generation_json(run, tokenizer)
    (folder / GENERATION_FILE).write_bytes(generation)
    eos_ids = read_generation_defaults(generation).eos_ids
    _write_json(folder / CONFIG_FILE, config_json(run, dtype, tokenizer, eos_ids))
    if tokenizer is not None:
        tokenizer.save(folder, adds_bos=run.config.data.adds_bos)
    return _write_weights(run, folder, dtype, shard_bytes)


def config_json(
    run: SavedRun, dtype: torch.dtype, tokenizer: Tokenizer | None, eos_ids: Sequence[int]
) -> dict[str, Any]:
    """The contents of config.json. Names the dtype twice: transformers before 4.56 reads it as torch_dtype.

    eos_ids: those of generation_config.json, which some programs do not read.
    """
    described, coefficient = run.family.exported, "router_aux_loss_coef"
    fields = described.config_json(run.hyper_parameters)
    own = {OWN_BALANCE_LOSS: fields[coefficient]} if coefficient in fields else {}
    name = str(dtype).removeprefix("torch.")
    return {
        "architectures": [described.architecture],
        "model_type": described.model_type,
        "dtype": name,
        "torch_dtype": name,
        **fields,
        **own,
        **_separators(tokenizer),
        **({"eos_token_id": eos_ids if len(eos_ids) > 1 else eos_ids[0]} if eos_ids else {}),
    }


def generation_json(run: SavedRun, tokenizer: Tokenizer | None) -> bytes:
    """The contents of generation_config.json: those of the model that the run began from, with the EOS of the run.

    The run has learned to write the tokenizer's EOS after a document, and to end a turn as the chat template does if it
    was trained on conversations. What the file lacks of these ids comes before its own ones, and is logged. Everything
    else is unchanged.
    """
    own = run.generation_config()
    before = _json(_separators(tokenizer)) if own is None else own
    content = with_eos(before, learned_ends(run, tokenizer))
    if content != before:
        ids = read_generation_defaults(content).eos_ids
        log.info("%s: eos_token_id is %s, with the tokens that end the texts of the run", GENERATION_FILE, list(ids))
    return content


def learned_ends(run: SavedRun, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that the run has learned to write at the end of a document, or of an assistant's turn."""
    if tokenizer is None:
        return ()
    if tokenizer.chat_template and any(source.is_chat for source in run.config.data.sources):
        return ChatEncoder(tokenizer).stop_ids
    return () if tokenizer.eos_id is None else (tokenizer.eos_id,)


def _separators(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """The ids of BOS and EOS; null if absent, since a reader would otherwise use its own defaults."""
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None}
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}


def _write_weights(run: SavedRun, folder: Path, dtype: torch.dtype, shard_bytes: int) -> list[str]:
    shapes = run.shapes()
    names = run.family.exported.names(run.hyper_parameters)
    assert names.keys() <= shapes.keys(), "the family maps a name that the run does not have"
    _require_no_others(run, {name: shape for name, shape in shapes.items() if name not in names})
    sizes = {name: prod(shapes[name]) * stored_dtype(name, dtype).itemsize for name in names}
    for name, stored in names.items():
        sizes[name] *= 1 + (len(stored.copies) if isinstance(stored, StoredCopies) else 0)
    shards = list(_shards(_together(names, sizes), sizes, shard_bytes))
    count, stem = len(shards), SINGLE_FILE.removesuffix(SUFFIX)
    files = [f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]
    files = files if count > 1 else [SINGLE_FILE]
    for file, shard in zip(files, shards, strict=True):
        tensors = {name: torch.empty(shapes[name], dtype=stored_dtype(name, dtype)) for name in shard}
        run.load(tensors)
        _require_finite(tensors, dtype)
        write_tensors(folder / file, _stored(tensors, names))
        del tensors
    if count > 1:
        weight_map = {
            theirs: file
            for file, shard in zip(files, shards, strict=True)
            for name in shard
            for theirs in stored_names(names[name])
        }
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    return files


def _require_no_others(run: SavedRun, others: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UserError if a tensor that the format does not have is not zero, as it changes what the model computes."""
    tensors = {name: torch.empty(shape) for name, shape in others.items()}
    run.load(tensors)
    kept = [name for name, tensor in tensors.items() if tensor.any()]
    if kept:
        raise UserError(
            f"{run.path} has {kept[0]}{f' and {len(kept) - 1} more' if len(kept) > 1 else ''}, which the format of "
            f"{run.family.exported.architecture} does not have: without it, the model would compute something "
            "else. Train without it (for experts: model.bias_rate = 0.0), or use the run in titanlite"
        )


def _stored(tensors: Mapping[str, Tensor], names: Mapping[str, StoredName]) -> dict[str, Tensor]:
    """The tensors as they are stored: contiguous, and without shared memory, which the library refuses."""
    alone = {name for name in names.values() if isinstance(name, str)}
    return {
        name: tensor if name in alone else tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in stored_tensors(tensors, names).items()
    }


def _together(names: Mapping[str, StoredName], sizes: Mapping[str, int]) -> list[list[str]]:
    """The parameters in order, in groups that are stored as one tensor."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in sizes:
        groups.setdefault(stored_names(names[name]), []).append(name)
    return [*groups.values()]


def _shards(groups: Sequence[Sequence[str]], sizes: Mapping[str, int], limit: int) -> Iterator[Sequence[str]]:
    """Names in order, per shard: as many groups as the limit allows, and at least one."""
    shard: list[str] = []
    filled = 0
    for group in groups:
        size = sum(sizes[name] for name in group)
        if shard and filled + size > limit:
            yield shard
            shard, filled = [], 0
        shard += group
        filled += size
    yield shard


def _require_finite(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raise UserError if a value is not finite. Checkpoints hold finite values only, so the cast to `dtype` failed."""
    name = first_not_finite(tensors)
    if name is not None:
        raise UserError(
            f"--dtype {str(dtype).removeprefix('torch.')} cannot represent all values of {name}: use another dtype"
        )


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_bytes(_json(content))


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
