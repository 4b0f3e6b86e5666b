"""Reading of model folders in the format of Hugging Face's transformers: validation first, then shards of tensors.

The content is not trusted: files must be inside the folder, and the tensors must be exactly those of the model that
config.json describes. Pickle files are never opened.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokenizer_files import TEMPLATES, TOKENIZER_FILES, TOKENIZER_JSON
from titanlite.hf.generation_defaults import GENERATION_FILE, defaults_of_config
from titanlite.hf.safetensors import (
    BLOCK_SCALES,
    BLOCKS,
    FP8_BLOCK,
    GROUP,
    SCALES,
    SUFFIX,
    Stored,
    StoredFp8,
    StoredMxfp4,
    StoredRows,
    StoredSlices,
    StoredStack,
    StoredTensor,
    read_box_,
    read_header,
    read_object,
)
from titanlite.models.family import (
    CHOICE_BIAS,
    FAMILIES,
    Family,
    StoredCopies,
    StoredGroups,
    StoredName,
    StoredPart,
    saved_tensors,
)
from titanlite.models.hugging_face import OWN_BALANCE_LOSS, stored_names, unknown_fields
from titanlite.models.init import local_region
from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import JsonError, read_regular

PREFIX = "hf:"
"""Prefix of checkpoint.initial_load_path for a model in Hugging Face format."""

CONFIG_FILE = "config.json"
SINGLE_FILE = f"model{SUFFIX}"
INDEX_FILE = f"{SINGLE_FILE}.index.json"

OUTPUT, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
"""Names in Hugging Face format. Some folders store a tied output layer, too; it must equal the embedding."""
_ROTARY_TABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Rotary frequencies, which older versions of transformers stored; they follow from config.json."""
_OF_TEXT = re.compile(r"(?:language_model\.|(model\.)language_model\.|(?=mtp\.))(.+)")
"""Names of the text model's tensors in a model that wraps it, in both forms that transformers has had, and of its layer
that predicts further tokens."""
_STACKS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
"""Ends of the names of the matrices of all experts of a block, if they are stored as one tensor."""
_TIED = ("mistral3", "internvl")
"""Models that wrap a text model, and tie its embeddings unless they say otherwise, whatever the text model does."""
_COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_FURTHER = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Fields with the number of layers that predict further tokens. The published folders of Qwen3-Next have neither, and
one such layer."""
_MAX_FAULTS = 8
_MAX_FURTHER = 64
"""Layers that predict further tokens: of all published models, one has at most a few."""


@dataclass(frozen=True)
class ModelFolder:
    """A validated model folder.

    name: as given by the user. tensors: by titanlite's parameter names. num_tensors: how many are stored. copies: more
    stored ones of parameters that modules share, as (name in the folder, copy), by titanlite's names. computed: names
    of stored tensors that are not read, since they follow from config.json. left_out: those outside of the text model,
    if another model wraps it, or of layers that the model does not have. unknown: fields of config.json that no family
    reads. generation_config: the content of generation_config.json, if any; see defaults_of_config. has_own_loss:
    whether the coefficient of the balance loss in config.json is that of a run of titanlite.
    """

    name: str
    path: Path
    family: Family
    hyper_parameters: Any
    tensors: Mapping[str, Stored]
    num_tensors: int
    copies: Mapping[str, tuple[tuple[str, StoredTensor], ...]]
    computed: tuple[str, ...]
    left_out: tuple[str, ...]
    unknown: tuple[str, ...]
    generation_config: bytes | None
    has_own_loss: bool

    def files(self) -> list[Path]:
        """All files of the folder, sorted."""
        return sorted(file for file in self.path.iterdir() if file.is_file())

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Those of the parameters."""
        return {tensor.dtype for name, tensor in self.tensors.items() if not name.endswith(CHOICE_BIAS)}

    def describe(self, dtype: torch.dtype) -> str:
        """One line about the tensors and their conversion to parameters of `dtype`."""
        stored = " and ".join(sorted(str(one).removeprefix("torch.") for one in self.dtypes))
        ours = str(dtype).removeprefix("torch.")
        conversion = f"{ours}" if stored == ours else f"converted from {stored} to {ours}"
        ignored = f", {len(self.computed)} rotary tables ignored" if self.computed else ""
        parts = ", ".join(sorted({name.removeprefix("model.").partition(".")[0] for name in self.left_out}))
        left_out = f", {len(self.left_out)} of {parts} left out" if parts else ""
        unknown = f"; unknown fields of {CONFIG_FILE}: {', '.join(self.unknown)}" if self.unknown else ""
        return f"{self.num_tensors} tensors, {conversion}{ignored}{left_out}{unknown}"

    @property
    def tokenizer_file(self) -> Path | None:
        """Path of tokenizer.json; None if it does not exist."""
        file = self.path / TOKENIZER_JSON
        return file if file.is_file() else None

    def tokenizer_fingerprint(self) -> str | None:
        """Fingerprint of the tokenizer; None if the folder has no tokenizer.json."""
        file = self.tokenizer_file
        return Tokenizer(file).fingerprint if file else None

    def fill_(self, parameters: Mapping[str, Tensor]) -> int:
        """Load parameters, by titanlite's names, in place and in their dtype; return the number of bytes read.

        Parameters may be plain tensors or DTensors of any placement: each rank reads its own shards, without
        communication. Raises UserError.
        """
        num_bytes = 0
        for name, parameter in parameters.items():
            local, shape, offset = local_region(parameter)
            stored = self.tensors[name]
            assert shape == stored.shape, f"{name} has shape {shape} in the model and {stored.shape} in {self.name}"
            read_box_(local, stored, offset)
            for other, stored_copy in self.copies.get(name, ()):
                self._require_equal(name, other, stored_copy, local, offset)
            num_bytes += local.numel() * stored.dtype.itemsize
        return num_bytes

    def _require_equal(
        self, ours: str, name: str, stored: StoredTensor, parameter: Tensor, offset: tuple[int, ...]
    ) -> None:
        copy = torch.empty_like(parameter)
        read_box_(copy, stored, offset)
        if torch.equal(copy, parameter):
            return
        if name == OUTPUT:
            raise UserError(
                f"{self.name}: {OUTPUT} differs from {EMBEDDING}, but they are tied by tie_word_embeddings in "
                f"{CONFIG_FILE}, or by its default: set tie_word_embeddings to false, or remove {OUTPUT}"
            )
        first = stored_names(self.family.exported.names(self.hyper_parameters)[ours])[0]
        raise UserError(
            f"{self.name}: {name} differs from {first}, which the layer that predicts further tokens shares: leave "
            f"the layer out with num_nextn_predict_layers = 0 in {CONFIG_FILE}, or remove {name}"
        )


def open_folder(name: str, path: Path, inside: Path | None = None) -> ModelFolder:
    """Open and validate a model folder; reads only headers. Raises UserError that names the invalid entry.

    inside: the folder that symbolic links may point into; default: the folder itself.
    """
    files = _Files(name, path, path if inside is None else inside)
    fields = files.read_json(CONFIG_FILE)
    for entry in TOKENIZER_FILES:
        if os.path.lexists(path / entry):
            files.find(entry)
    if (path / TEMPLATES).is_dir():
        templates = _Files(f"{name}/{TEMPLATES}", path / TEMPLATES, path if inside is None else inside)
        for entry in templates.names():
            templates.find(entry)
    generation_config = defaults_of_config(fields)
    if os.path.lexists(path / GENERATION_FILE):
        files.read_json(GENERATION_FILE)
        generation_config = read_regular(path / GENERATION_FILE)
    found = _read_shards(files, *_listed_shards(files))
    left_out: tuple[str, ...] = ()
    if isinstance(fields.get("text_config"), dict):
        found, left_out = _text_tensors(found)
        fields = _text_fields(fields, found)
    further = _of_further_layers(fields, found)
    number = next((fields[each] for each in _FURTHER if fields.get(each) is not None), 1) if further else 0
    # several are left out
    fields_read = {**fields, **dict.fromkeys(_FURTHER, number if number == 1 else 0)}
    family, hyper_parameters = _model_of(name, fields_read, len(found))
    names = family.exported.names(hyper_parameters)
    further = () if getattr(hyper_parameters, "n_further_tokens", 0) else further
    found = {each: tensor for each, tensor in found.items() if each not in further}
    left_out += further
    stacks = 0
    stored = dict.fromkeys(theirs for name in names.values() for theirs in stored_names(name))
    for each in [each for each in found if each not in stored and each.endswith(_STACKS)]:
        parts = _of_experts(each, found[each])
        if parts.keys() <= stored.keys():
            del found[each]
            found |= parts
            stacks += 1 - len(parts)
    tied = found.pop(OUTPUT, None) if EMBEDDING in stored and OUTPUT not in stored else None
    computed = tuple(stored_name for stored_name in found if _ROTARY_TABLE.fullmatch(stored_name))
    faults = list(_faults(found, names, _shapes(family, hyper_parameters), computed))
    if tied is not None and EMBEDDING in found and tied.shape != found[EMBEDDING].shape:
        faults.append(
            f"{OUTPUT} has shape {tied.shape}; {EMBEDDING}, to which it is tied, has {found[EMBEDDING].shape}"
        )
    if faults:
        more = [f"and {len(faults) - _MAX_FAULTS} more"] if len(faults) > _MAX_FAULTS else []
        raise UserError(f"{name} does not match its {CONFIG_FILE}: {'; '.join([*faults[:_MAX_FAULTS], *more])}")
    tensors = {ours: _located(found, theirs) for ours, theirs in names.items()}
    copies = {ours: _copies(found, theirs, tied) for ours, theirs in names.items()}
    count = len(found) - len(computed) + stacks
    unknown = tuple(unknown_fields(family.exported.config_json(hyper_parameters), fields))
    unread = (computed, left_out, unknown)
    own_loss = OWN_BALANCE_LOSS in fields and fields[OWN_BALANCE_LOSS] == fields.get("router_aux_loss_coef")
    return ModelFolder(
        *(name, path, family, hyper_parameters, tensors, count, copies, *unread, generation_config, own_loss)
    )


def _of_experts(name: str, stack: StoredTensor) -> dict[str, StoredTensor]:
    """The matrices of experts by the names that they have if they are stored one by one. stack: (experts, out, in),
    with those of gate above those of up, as in the folders of Qwen3.5."""
    prefix, _, kind = name.rpartition(".")
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    if len(stack.shape) != 3 or stack.shape[1] % len(kinds):
        return {name: stack}
    n_experts, rows, columns = stack.shape
    matrix = replace(stack, shape=(rows // len(kinds), columns))
    places = enumerate((expert, kind) for expert in range(n_experts) for kind in kinds)
    return {
        f"{prefix}.{expert}.{kind}.weight": replace(matrix, start=stack.start + index * matrix.num_bytes)
        for index, (expert, kind) in places
    }


def _copies(
    found: Mapping[str, StoredTensor], name: StoredName, tied: StoredTensor | None
) -> tuple[tuple[str, StoredTensor], ...]:
    """The stored copies of a parameter. tied: that of the embedding, as the output layer."""
    others = name.copies if isinstance(name, StoredCopies) else ()
    of_output = ((OUTPUT, tied),) if tied is not None and stored_names(name)[0] == EMBEDDING else ()
    return (*of_output, *((other, found[other]) for other in others if other in found))


def _located(found: Mapping[str, StoredTensor], name: StoredName) -> Stored:
    if isinstance(name, str | StoredCopies):
        return _matrix(found, stored_names(name)[0])
    if isinstance(name, tuple):
        return StoredStack(tuple(_matrix(found, each) for each in name))
    if isinstance(name, StoredGroups):
        return StoredSlices(found[name.name], name.groups, name.start, name.stop)
    whole = found.get(name.name) or StoredMxfp4(found[name.name + BLOCKS], found[name.name + SCALES])
    return StoredRows(whole, name.start, name.step)


def _matrix(found: Mapping[str, StoredTensor], name: str) -> StoredTensor | StoredFp8:
    scales = found.get(name + BLOCK_SCALES)
    return found[name] if scales is None else StoredFp8(found[name], scales)


class _Files:
    """Access to the entries of a folder; raises UserError if a link leaves `inside`."""

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
        """Path of the file, with symbolic links resolved."""
        if entry in ("", ".", "..") or PurePosixPath(entry).name != entry or "\\" in entry or "\0" in entry:
            raise self.error(f"{entry!r} is not a plain file name")
        real = Path(os.path.realpath(self._path / entry))
        if not real.is_relative_to(self._inside):
            raise self.error(
                f"{entry} is a link that leaves the folder, to {real}: replace it by a copy of the file (cp -L), or "
                "give the model's name on the hub"
            )
        if not real.is_file():
            raise self.error(f"{entry} is {'not a file' if real.exists() else 'missing'}")
        return real

    def read_json(self, entry: str) -> dict[str, Any]:
        file = self.find(entry)
        try:
            return read_object(read_regular(file), f"{self._name}: {entry}")
        except JsonError as error:
            raise self.error(f"{entry} {error}") from None
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
    # the first one, if a plugin's family is a variant of another in the same format
    known = {family.hugging_face.model_type: family for family in [*FAMILIES.values()][::-1] if family.hugging_face}
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        supported = " or ".join(map(repr, known))
        raise UserError(f"{name}: {CONFIG_FILE}: model_type is {kind!r}; choose a model of type {supported}")
    quantization = fields.get("quantization_config") or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    supported = known[kind].exported.quantization
    if quantization and method != (supported or None):
        only = f"only those of quant_method {supported!r}" if supported else "quantized models are not supported"
        raise UserError(f"{name}: {CONFIG_FILE}: quantization_config: {only}")
    sizes = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if method == "fp8" and sizes != [FP8_BLOCK, FP8_BLOCK]:
        only = f"only blocks of {FP8_BLOCK} rows and columns"
        raise UserError(f"{name}: {CONFIG_FILE}: quantization_config.weight_block_size = {sizes!r}: {only}")
    for key in _COUNTS:  # before anything is computed from them
        value = fields.get(key)
        if type(value) is int and not 1 <= value <= (num_tensors if key == "num_hidden_layers" else 2**31):
            raise UserError(f"{name}: {CONFIG_FILE}: {key} = {value}, but the folder has {num_tensors} tensors")
    try:
        return known[kind], known[kind].exported.config_from_json(fields)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def _text_fields(fields: Mapping[str, Any], found: Collection[str]) -> dict[str, Any]:
    """Fields of the text model in those of a model that wraps it, such as one of text and images; "wrapper" is the type
    of that. found: its tensors."""
    default = {"tie_word_embeddings": True} if OUTPUT not in found and fields.get("model_type") in _TIED else {}
    outside = {name: fields[name] for name in ("tie_word_embeddings", "quantization_config") if name in fields}
    return {**default, **fields["text_config"], **outside, "wrapper": fields.get("model_type")}


def _text_tensors(found: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """The tensors of the text model, by their names without the model that wraps it, and the names of all others."""
    own = {name: match for name in found if (match := _OF_TEXT.fullmatch(name))}
    tensors = {(match[1] or "") + match[2]: found[name] for name, match in own.items()}
    if OUTPUT in found:
        tensors[OUTPUT] = found[OUTPUT]
    return tensors, tuple(name for name in found if name not in own and name != OUTPUT)


def _of_further_layers(fields: Mapping[str, Any], found: Collection[str]) -> tuple[str, ...]:
    """The names of the tensors of layers that predict further tokens, behind those of the model."""
    count, further = fields.get("num_hidden_layers"), fields.get(_FURTHER[0])
    numbers: set[str] = set()
    if type(count) is int and type(further) is int:
        numbers = {f"model.layers.{index}" for index in range(count, min(count + further, count + _MAX_FURTHER))}
    return tuple(name for name in found if name.startswith("mtp.") or ".".join(name.split(".")[:3]) in numbers)


def shard_of_tensors(index: Mapping[str, Any]) -> dict[str, str]:
    """The file of each tensor, from the content of an index file. Raises UserError that names the invalid entry."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{INDEX_FILE} has no weight_map")
    for tensor, file in weight_map.items():
        plain = isinstance(file, str) and PurePosixPath(file).name == file and "\\" not in file and "\0" not in file
        if not plain or not file.endswith(SUFFIX):
            raise UserError(
                f"{INDEX_FILE}: {tensor} is in {file!r}, which is not the plain name of a {SUFFIX} file in the folder"
            )
    return weight_map


def _listed_shards(files: _Files) -> tuple[list[str], Mapping[str, str] | None]:
    """(weight files, file of each tensor from the index or None). Raises UserError if there are other weight files."""
    entries = files.names()
    if INDEX_FILE in entries:
        index = files.read_json(INDEX_FILE)
        try:
            weight_map = shard_of_tensors(index)
        except UserError as error:
            raise files.error(str(error)) from None
        listed = sorted(set(weight_map.values()))
    elif SINGLE_FILE in entries:
        weight_map, listed = None, [SINGLE_FILE]
    else:
        pickles = [entry for entry in entries if entry.endswith((".bin", ".pt", ".pth"))]
        if pickles:
            raise files.error(
                f"its weights are in {pickles[0]}, a pickle file, which is not supported: convert them to {SUFFIX} "
                "with transformers, from_pretrained(…).save_pretrained(…)"
            )
        raise files.error(f"has neither {SINGLE_FILE} nor {INDEX_FILE}")
    extra = [entry for entry in entries if entry.endswith(SUFFIX) and entry not in listed]
    if extra:
        expected = f"{INDEX_FILE} does not list it" if weight_map is not None else f"only {SINGLE_FILE} is expected"
        raise files.error(f"unexpected file {extra[0]}: {expected}; remove it if another model has left it")
    return listed, weight_map


def _read_shards(files: _Files, shards: list[str], weight_map: Mapping[str, str] | None) -> dict[str, StoredTensor]:
    """All tensors of the shards, by name. Raises UserError if they do not match the index."""
    found: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in files.read_header(shard).items():
            listed = shard if weight_map is None else weight_map.get(name)
            if listed != shard:
                where = f"lists it in {listed}" if listed else "does not list it"
                raise files.error(f"{shard} contains {name}, but {INDEX_FILE} {where}")
            found[name] = tensor
    for name, shard in (weight_map or {}).items():
        if name not in found:
            raise files.error(f"{shard} lacks {name}, which {INDEX_FILE} lists there")
    return found


def _shapes(family: Family, hyper_parameters: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = family.build(hyper_parameters)
    model.tie_weights()
    return {name: tuple(tensor.shape) for name, tensor in saved_tensors(model).items()}


def _faults(
    found: Mapping[str, StoredTensor],
    names: Mapping[str, StoredName],
    shapes: Mapping[str, tuple[int, ...]],
    computed: Collection[str],
) -> Iterator[str]:
    expected_shapes: dict[str, tuple[int, ...]] = {}
    for ours, name in names.items():
        expected_shapes |= _stored_shapes(found, name, shapes[ours])
    for theirs, expected in expected_shapes.items():
        if theirs not in found:
            tied = f': if it is tied to {EMBEDDING}, add "tie_word_embeddings": true to {CONFIG_FILE}'
            yield f"{theirs} is missing{tied if theirs == OUTPUT else ''}"
            continue
        shape = found[theirs].shape
        if shape != expected:
            transposed = ": it is transposed" if len(shape) > 1 and shape == expected[::-1] else ""
            yield f"{theirs} has shape {shape}; by {CONFIG_FILE} it must be {expected}{transposed}"
        elif (found[theirs].dtype == torch.float8_e4m3fn) != (theirs + BLOCK_SCALES in found):
            rule = f"those with {BLOCK_SCALES} have torch.float8_e4m3fn, and only these"
            yield f"{theirs} has dtype {found[theirs].dtype}; {rule}"
        elif (found[theirs].dtype == torch.uint8) != theirs.endswith((BLOCKS, SCALES)):
            yield f"{theirs} has dtype {found[theirs].dtype}; {BLOCKS} and {SCALES} have torch.uint8, and only these"
    others = (theirs for theirs in found if theirs not in expected_shapes and theirs not in computed)
    yield from (f"{theirs} is not a tensor of this model" for theirs in others)


def _stored_shapes(
    found: Mapping[str, StoredTensor], name: StoredName, shape: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """The shapes of the stored tensors of a parameter of this shape."""
    if isinstance(name, StoredGroups):
        return {name.name: (name.groups * name.rows, *shape[1:])}
    if isinstance(name, StoredCopies):
        return {name.name: shape, **{other: shape for other in name.copies if other in found}}
    if not isinstance(name, StoredPart):
        expected = shape if isinstance(name, str) else shape[1:]
        blocks = tuple(-(-size // FP8_BLOCK) for size in expected)
        factors = [f"{each}{BLOCK_SCALES}" for each in stored_names(name)] if len(blocks) == 2 else []
        given = [each for each in factors if each in found]
        return dict.fromkeys(stored_names(name), expected) | dict.fromkeys(given, blocks)
    n_experts, rows, *columns = (shape[0], name.step * shape[1], *shape[2:])
    if name.name not in found and columns and name.name + BLOCKS in found:
        scales = (n_experts, rows, columns[0] // GROUP)
        return {name.name + BLOCKS: (*scales, GROUP // 2), name.name + SCALES: scales}
    return {name.name: (n_experts, *columns, rows)}
