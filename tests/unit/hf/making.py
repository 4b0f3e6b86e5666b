"""Make model folders in the format of transformers, with the safetensors library."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from titanlite.models.family import (
    Family,
    StoredCopies,
    StoredGroups,
    StoredName,
    StoredPart,
    saved_tensors,
    stored_dtype,
)
from titanlite.models.hugging_face import stored_tensors
from titanlite.models.registry import FAMILIES
from titanlite.models.shrink import shrink_model


def tiny(family: Family, **changes: Any) -> Any:
    """Hyper-parameters of a tiny model whose sizes all differ."""
    small = shrink_model(family.flavors["debug"], 2)
    if small.linear_key_heads:  # a layer of each kind
        small = replace(small, full_interval=2)
    return replace(small, **{"vocab_size": 131, "max_seq_len": 96, "n_layers": 2} | changes)


def weights(family: Family, config: Any, seed: int = 0) -> dict[str, Tensor]:
    """Random weights, including norms, by titanlite's parameter names, in float64."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = family.build(config)
    model.tie_weights()
    return {
        name: torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
        for name, parameter in saved_tensors(model).items()
    }


def write_model(
    folder: Path, family: str = "llama3", dtype: torch.dtype = torch.float64, shards: int = 1, **changes: Any
) -> dict[str, Tensor]:
    """Write a folder; returns its tensors by their names in the folder."""
    found = FAMILIES[family]
    config = tiny(found, **changes)
    names = found.hugging_face.names(config)
    own = {name: tensor.to(stored_dtype(name, dtype)) for name, tensor in weights(found, config).items()}
    tensors = {
        theirs: part.clone(memory_format=torch.contiguous_format) for theirs, part in stored_tensors(own, names).items()
    }
    folder.mkdir(parents=True)
    about = {"model_type": found.hugging_face.model_type, "architectures": [found.hugging_face.architecture]}
    (folder / "config.json").write_text(json.dumps(about | found.hugging_face.config_json(config)))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return tensors
    files = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    weight_map = {name: files[number % shards] for number, name in enumerate(tensors)}
    for file in files:
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def parameter_of(stored: Mapping[str, Tensor], name: StoredName) -> Tensor:
    """A parameter from stored tensors: the inverse of `stored_tensors`."""
    if isinstance(name, StoredPart):
        whole = stored[name.name]
        return (whole.mT if whole.dim() == 3 else whole)[:, name.start :: name.step]
    if isinstance(name, StoredGroups):
        return stored[name.name].unflatten(0, (name.groups, -1))[:, name.start : name.stop].flatten(0, 1)
    if isinstance(name, StoredCopies):
        return stored[name.name]
    return stored[name] if isinstance(name, str) else torch.stack([stored[each] for each in name])
