"""A model folder in the format of Hugging Face's transformers: opened and checked, then read part by part.

Nothing in it is trusted: what its files name has to lie in the folder, and its tensors have to be those of the model
that config.json describes, no more and no less. No pickle is ever opened.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from titanlite.data.tokenizer import CHAT_TEMPLATE, Tokenizer
from titanlite.hf.safetensors import SUFFIX, StoredTensor, read_box_, read_header, read_object
from titanlite.models.family import Family
from titanlite.models.init import local_region
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import UserError

PREFIX = "hf:"
"""Of checkpoint.initial_load_path, where it means such a folder."""

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
SINGLE_FILE = f"model{SUFFIX}"
INDEX_FILE = f"{SINGLE_FILE}.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", CHAT_TEMPLATE)

OUTPUT, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
"""A folder may hold the output layer's weights although they are tied to the embedding's; they have to be equal."""
_COMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Folders of older versions hold the rotary frequencies, which follow from config.json."""
_COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_MAX_JSON_BYTES = 100_000_000
_MAX_FAULTS = 8


@dataclass(frozen=True)
class ModelFolder:
    """name: as the user gave it. tensors: by the names of the model's own parameters, all of them.

    tied: the copy of a tied embedding, where there is one. computed: names of what is there and not read, since it
    follows from config.json.
    """

    name: str
    path: Path
    family: Family
    hyper_parameters: Any
    tensors: Mapping[str, StoredTensor]
    tied: StoredTensor | None
    computed: tuple[str, ...]

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {tensor.dtype for tensor in self.tensors.values()}

    def describe(self, dtype: torch.dtype) -> str:
        """What becomes of its tensors where the parameters are of `dtype`, in one line."""
        there = " and ".join(sorted(str(one).removeprefix("torch.") for one in self.dtypes))
        here = str(dtype).removeprefix("torch.")
        conversion = f"{here}" if there == here else f"converted from {there} to {here}"
        left = f", {len(self.computed)} rotary tables left aside" if self.computed else ""
        return f"{len(self.tensors)} tensors, {conversion}{left}"

    @property
    def tokenizer_file(self) -> Path | None:
        """Its tokenizer.json, where there is one."""
        file = self.path / TOKENIZER_FILES[0]
        return file if file.is_file() else None

    def tokenizer_fingerprint(self) -> str | None:
        """Of its tokenizer; None if it has none."""
        file = self.tokenizer_file
        return Tokenizer(file).fingerprint if file else None

    def fill_(self, parameters: Mapping[str, Tensor]) -> int:
        """Fills parameters, by the model's own names, in place and in their dtype; returns the bytes that were read.

        They may be plain or DTensors of any placement: this rank's part of each is read, nothing is communicated.
        Raises UserError.
        """
        num_bytes, names = 0, self.family.hugging_face.names(self.hyper_parameters)
        for name, parameter in parameters.items():
            local, shape, offset = local_region(parameter)
            stored = self.tensors[name]
            assert shape == stored.shape, f"{name} has shape {shape} here and {stored.shape} in {self.name}"
            try:
                read_box_(local, stored, offset)
                if self.tied is not None and names[name] == EMBEDDING:
                    self._require_equal(self.tied, local, offset)
            except OSError as error:
                raise UserError(f"{stored.file} cannot be read: {error.strerror or error}") from None
            num_bytes += local.numel() * stored.dtype.itemsize
        return num_bytes

    def _require_equal(self, tied: StoredTensor, embedding: Tensor, offset: tuple[int, ...]) -> None:
        copy = torch.empty_like(embedding)
        read_box_(copy, tied, offset)
        if not torch.equal(copy, embedding):
            raise UserError(
                f"{self.name}: {OUTPUT} is another matrix than {EMBEDDING}, and {CONFIG_FILE} says that they are one: "
                "set tie_word_embeddings to false there, or remove it"
            )


def open_folder(name: str, path: Path, inside: Path | None = None) -> ModelFolder:
    """Raises UserError, which names the entry that is wrong: nothing but headers has been read then.

    inside: the folder that links may lead to; default: the folder itself.
    """
    files = _Files(name, path, path if inside is None else inside)
    fields = files.read_json(CONFIG_FILE)
    for entry in (*TOKENIZER_FILES, GENERATION_FILE):
        if os.path.lexists(path / entry):
            files.find(entry)
    found = _read_shards(files, *_listed_shards(files))
    family, hyper_parameters = _model_of(name, fields, len(found))
    names = family.hugging_face.names(hyper_parameters)
    tied = None
    if EMBEDDING in names.values() and OUTPUT not in names.values():
        tied = found.pop(OUTPUT, None)
    computed = tuple(there for there in found if _COMPUTED.fullmatch(there))
    faults = list(_faults(found, names, _shapes(family, hyper_parameters), computed))
    if tied is not None and EMBEDDING in found and tied.shape != found[EMBEDDING].shape:
        faults.append(
            f"{OUTPUT} has shape {tied.shape}, and {EMBEDDING}, to which it is tied, {found[EMBEDDING].shape}"
        )
    if faults:
        more = [f"and {len(faults) - _MAX_FAULTS} more"] if len(faults) > _MAX_FAULTS else []
        raise UserError("\n".join([f"{name} is not the model of its {CONFIG_FILE}:", *faults[:_MAX_FAULTS], *more]))
    tensors = {here: found[there] for here, there in names.items()}
    return ModelFolder(name, path, family, hyper_parameters, tensors, tied, computed)


class _Files:
    """The entries of a folder, none of which may lead out of `inside`."""

    def __init__(self, name: str, path: Path, inside: Path) -> None:
        self._name = name
        self._path = path
        self._inside = Path(os.path.realpath(inside))

    def error(self, text: str) -> UserError:
        return UserError(f"{self._name}: {text}")

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._path))
        except OSError as error:
            raise self.error(error.strerror or str(error)) from None

    def find(self, entry: str) -> Path:
        """The file itself, links followed."""
        if entry in ("", ".", "..") or PurePosixPath(entry).name != entry or "\\" in entry or "\0" in entry:
            raise self.error(f"{entry!r} is not the plain name of a file in the folder")
        real = Path(os.path.realpath(self._path / entry))
        if not real.is_relative_to(self._inside):
            raise self.error(
                f"{entry} is a link that leaves the folder, to {real}: put the file itself there (cp -L), or give the "
                "name on the hub where it is from"
            )
        if not real.is_file():
            raise self.error(f"{entry} is {'not a file' if real.exists() else 'missing'}")
        return real

    def read_json(self, entry: str) -> dict[str, Any]:
        file = self.find(entry)
        try:
            if file.stat().st_size > _MAX_JSON_BYTES:
                raise self.error(f"{entry} has more than {_MAX_JSON_BYTES:,} bytes")
            return read_object(file.read_bytes(), f"{self._name}: {entry}")
        except OSError as error:
            raise self.error(f"{entry} cannot be read: {error.strerror or error}") from None

    def read_header(self, entry: str) -> dict[str, StoredTensor]:
        file = self.find(entry)
        try:
            return read_header(file)
        except OSError as error:
            raise self.error(f"{entry} cannot be read: {error.strerror or error}") from None
        except UserError as error:
            raise self.error(f"{entry}: {error}") from None


def _model_of(name: str, fields: Mapping[str, Any], num_tensors: int) -> tuple[Family, Any]:
    known = {family.hugging_face.model_type: family for family in FAMILIES.values()}
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        raise UserError(f"{name}: {CONFIG_FILE}: model_type is {kind!r}, and known are {', '.join(map(repr, known))}")
    if fields.get("quantization_config"):
        raise UserError(f"{name}: {CONFIG_FILE}: quantization_config: quantized models cannot be trained here")
    for key in _COUNTS:  # before anything is computed from them
        value = fields.get(key)
        if type(value) is int and not 1 <= value <= (num_tensors if key == "num_hidden_layers" else 2**31):
            raise UserError(f"{name}: {CONFIG_FILE}: {key} = {value}, and there are {num_tensors} tensors")
    try:
        return known[kind], known[kind].hugging_face.config_from_json(fields)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def shard_of_tensors(index: Mapping[str, Any]) -> dict[str, str]:
    """What an index says: the file of each tensor. Raises UserError, which names the entry."""
    found = index.get("weight_map")
    if not isinstance(found, dict) or not found:
        raise UserError(f"{INDEX_FILE} has no weight_map")
    for tensor, file in found.items():
        plain = isinstance(file, str) and PurePosixPath(file).name == file and "\\" not in file and "\0" not in file
        if not plain or not file.endswith(SUFFIX):
            raise UserError(
                f"{INDEX_FILE}: {tensor} is in {file!r}, which is not the plain name of a {SUFFIX} file in the folder"
            )
    return found


def _listed_shards(files: _Files) -> tuple[list[str], Mapping[str, str] | None]:
    """The files that hold the tensors, and where the index says that each tensor is; no other such file is there."""
    there = files.names()
    if INDEX_FILE in there:
        index = files.read_json(INDEX_FILE)
        try:
            weight_map = shard_of_tensors(index)
        except UserError as error:
            raise files.error(str(error)) from None
        listed = sorted(set(weight_map.values()))
    elif SINGLE_FILE in there:
        weight_map, listed = None, [SINGLE_FILE]
    else:
        pickles = [entry for entry in there if entry.endswith((".bin", ".pt", ".pth"))]
        if pickles:
            raise files.error(
                f"its weights are in {pickles[0]}, a pickle, which is not opened: save them as {SUFFIX} with "
                "transformers, from_pretrained(…).save_pretrained(…)"
            )
        raise files.error(f"has neither {SINGLE_FILE} nor {INDEX_FILE}")
    extra = [entry for entry in there if entry.endswith(SUFFIX) and entry not in listed]
    if extra:
        by = f"{INDEX_FILE} does not name" if weight_map is not None else f"does not belong to {SINGLE_FILE}"
        raise files.error(f"{extra[0]} is there, which {by}: left by another model? Move it away")
    return listed, weight_map


def _read_shards(files: _Files, shards: list[str], weight_map: Mapping[str, str] | None) -> dict[str, StoredTensor]:
    """All tensors of the shards, each where the index says."""
    found: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in files.read_header(shard).items():
            said = shard if weight_map is None else weight_map.get(name)
            if said != shard:
                where = f"in {said}" if said else "nowhere"
                raise files.error(f"{shard} holds {name}, which is {where} by {INDEX_FILE}")
            found[name] = tensor
    for name, shard in (weight_map or {}).items():
        if name not in found:
            raise files.error(f"{shard} lacks {name}, which is there by {INDEX_FILE}")
    return found


def _shapes(family: Family, hyper_parameters: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = family.build(hyper_parameters)
    model.tie_weights()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _faults(
    found: Mapping[str, StoredTensor],
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    computed: Collection[str],
) -> Iterator[str]:
    for here, there in names.items():
        if there not in found:
            yield f"{there} is missing"
            continue
        shape, expected = found[there].shape, shapes[here]
        if shape != expected:
            transposed = ": it is transposed" if len(shape) > 1 and shape == expected[::-1] else ""
            yield f"{there} has shape {shape}, and {CONFIG_FILE} asks for {expected}{transposed}"
    expected_names = {*names.values(), *computed}
    yield from (f"{there} is a tensor that this model does not have" for there in found if there not in expected_names)
