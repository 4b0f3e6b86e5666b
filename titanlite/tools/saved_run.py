"""Open a saved run, for the commands that use its model."""

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.folder import published_steps, step_folder
from titanlite.checkpoint.manifest import (
    InvalidCheckpointError,
    Manifest,
    UnknownFormatError,
    check_files,
    has_manifest,
    read_manifest,
)
from titanlite.checkpoint.start import generation_config_of, load
from titanlite.checkpoint.state import AVERAGE, MODEL
from titanlite.checkpoint.storage import read_shapes
from titanlite.config.begun import with_begun_model
from titanlite.config.files import CONFIG_FILE
from titanlite.config.load import CONFIG_COPY, config_from_values, parse, read_copy
from titanlite.config.plugins import import_plugins_of
from titanlite.config.schema import JobConfig
from titanlite.config.stages import stage_sizes
from titanlite.config.toml import tables_of
from titanlite.config.values import read_values
from titanlite.data.bpe import prepare_tokenizer
from titanlite.data.steps import stage_index
from titanlite.data.tokenizer import TOKENIZER_FOLDER, Tokenizer
from titanlite.data.tokenizer_files import tokenizer_file
from titanlite.evaluation.harness import task_file
from titanlite.generation.model import empty_model
from titanlite.hf.generation_defaults import GenerationDefaults, read_generation_defaults
from titanlite.models.family import Family, LanguageModel, ModelConfig, resolve_model, saved_tensors
from titanlite.models.registry import FAMILIES, check_model, full_model
from titanlite.precision import DTYPES
from titanlite.runtime.environment import expand_home
from titanlite.runtime.errors import ConfigError, Problem, UserError, raise_problems
from titanlite.runtime.logging import log
from titanlite.runtime.text import without_userinfo
from titanlite.storage.address import Address, Place, is_address, is_below, place
from titanlite.storage.config import StorageConfig
from titanlite.storage.store import Store, settings
from titanlite.tools.dump_folder import local_dump_folder

Weights = Literal["last", "ema"]
"""last: the weights of the checkpoint's step. ema: the average of the weights, see WeightAverage."""

VARIABLES = {
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "profile": ("AWS_PROFILE",),
    "ca_file": ("AWS_CA_BUNDLE",),
}
"""Keys of [storage] that are never taken from a saved run -> environment variables of the clients for the same."""
MOST_POSITIONS = 2**26
"""Elements of a table of rotary embeddings that any model may have: 262,144 positions of 256, for example."""
BATCH_BYTES = 2**30

_EDITED = ": it was edited, or another program wrote it"
_ANOTHER = "pass another folder step-N, or the dump folder, whose latest valid checkpoint is used"


@dataclass(frozen=True)
class SavedRun:
    """One valid checkpoint of a run. path: its folder, step-N. weights: which ones are loaded."""

    path: Place
    manifest: Manifest
    family: Family
    hyper_parameters: Any
    weights: Weights = "last"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return DTYPES[self.manifest.facts["dtype"]]

    @property
    def config(self) -> JobConfig:
        """The resolved configuration in the checkpoint, with the [storage] of this process. Raises UserError if this
        version cannot read it."""
        return with_own_storage(self._saved_config)

    @property
    def storage(self) -> StorageConfig:
        """[storage] of the configuration in the checkpoint, which is not used. Raises UserError."""
        return self._saved_config.storage

    @property
    def seq_len(self) -> int:
        """Tokens per sequence of the training at the checkpoint's step. Raises UserError, see `config`."""
        stages = stage_sizes(self._saved_config.training)
        return stages[stage_index(stages, self.manifest.step)].seq_len

    @property
    def _saved_config(self) -> JobConfig:
        try:
            return config_from_values(self.manifest.config, begun=self.manifest)
        except ConfigError as error:
            version = self.manifest.versions.get("titanlite", "of an unknown version")
            raise UserError(
                f"{self.path}: this version of titanlite cannot read the configuration that titanlite {version} saved; "
                "use that version, or a later one:",
                *error.args,
            ) from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the model's parameters, by name. Raises UserError."""
        return self._shapes(MODEL)

    def load(self, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Load `tensors`, keyed by parameter name, in place; reads no other tensors. Raises UserError.

        Buffers have no average, so they are always those of the step. group: the ranks that load together, each its own
        shards; None: this process only.
        """
        averages = self._shapes(AVERAGE) if self.weights == "ema" else {}
        named = {(AVERAGE if name in averages else MODEL) + name: tensor for name, tensor in tensors.items()}
        load(self.path, named, group)

    def model(self, device: torch.device, dtype: torch.dtype) -> LanguageModel:
        """The full model with its weights, in evaluation mode. Raises UserError."""
        model = empty_model(self.family, self.hyper_parameters, device, dtype)
        self.load(saved_tensors(model))
        return model.eval()

    def generation_config(self) -> bytes | None:
        """The generation_config.json of the model that the run began from, if it had one. Raises UserError."""
        return generation_config_of(self.path, self.manifest)

    def generation_defaults(self) -> GenerationDefaults:
        """What generation_config says; nothing if the run has no such file. Raises UserError."""
        return read_generation_defaults(self.generation_config())

    def tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer: the copy in the dump folder, else the configured one; None if both are missing.

        Raises UserError if it is not the tokenizer that the run was trained with.
        """
        fingerprint = self.manifest.facts["tokenizer"]
        if fingerprint is None:
            return None
        copy = next((file for file in self._tokenizer_copies() if file.is_file()), None)
        found = self._configured_tokenizer() if copy is None else Tokenizer(copy)
        if found is not None and found.fingerprint != fingerprint:
            raise UserError(f"{self.path} was trained with a different tokenizer than {found.description}")
        return found

    @property
    def _is_import(self) -> bool:
        """Whether the weights are those of a model folder."""
        return self.manifest.step == 0 and "imported_from" in self.manifest.facts

    def tokenizer_for(self, path: str | None, chat_template: str = "") -> Tokenizer | None:
        """The tokenizer at `path`, a value of --tokenizer, with a warning if it is not the run's; None: the run's own.

        chat_template: a file, the value of --chat-template, in place of the tokenizer's own template.

        Raises ConfigError if the file is missing, or if the tokenizer has more tokens than the model, as the one of an
        imported run may have.
        """
        if path is None:
            tokenizer = self.tokenizer()
        elif not tokenizer_file(path).is_file():
            rule = "a tokenizer.json, or a folder that contains one"
            raise ConfigError([Problem("--tokenizer", path, rule, "omit it to use the run's own tokenizer")])
        else:
            section = self.config.tokenizer
            tokenizer = Tokenizer(tokenizer_file(path), bos=section.bos, eos=section.eos)
            if self.manifest.facts["tokenizer"] not in (None, tokenizer.fingerprint):
                log.warning("%s was trained with a different tokenizer than %s", self.path, tokenizer.description)
        vocab_size = self.hyper_parameters.vocab_size
        if tokenizer is not None and tokenizer.vocab_size > vocab_size:
            rule = f"at most the model's vocab_size = {vocab_size} tokens; it has {tokenizer.vocab_size}"
            remedy = "pass the path of the tokenizer that the run was trained with"
            raise ConfigError([Problem("--tokenizer", path, rule, remedy)])
        if tokenizer is not None and tokenizer.adds_bos and not self.config.data.adds_bos and self._is_import:
            log.warning("%s: an earlier version has not recorded that texts begin with BOS: import it again", self.path)
        if tokenizer is not None and chat_template:
            return Tokenizer(**{**tokenizer.arguments, "chat_template": chat_template})
        return tokenizer

    def with_weights(self, weights: Weights) -> "SavedRun":
        """The same checkpoint, of which other weights are loaded. Raises ConfigError if it does not have them."""
        if weights == "ema" and not self._shapes(AVERAGE):
            rule = f"only with optimizer.ema_decay above 0: {self.path} has no average of the weights"
            remedy = "leave it out for the last weights, or train with an average: --optimizer.ema_decay 0.999"
            raise ConfigError([Problem("--weights", weights, rule, remedy)])
        return replace(self, weights=weights)

    def _shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors below `prefix`, by their names without it. Raises UserError."""
        found = stored_shapes(self.path).items()
        return {name.removeprefix(prefix): shape for name, (shape, _) in found if name.startswith(prefix)}

    def _tokenizer_copies(self) -> list[Path]:
        """Candidate paths of the dump folder's copy: above the path as given, and above it with links resolved."""
        if isinstance(self.path, Address):
            return []
        depth = len(PurePath(self.config.checkpoint.folder).parts)
        steps = (Path(os.path.abspath(self.path)), self.path.resolve())
        folders = [step.parents[depth] for step in steps if len(step.parents) > depth]
        return [folder / TOKENIZER_FOLDER / "tokenizer.json" for folder in folders]

    def _configured_tokenizer(self) -> Tokenizer | None:
        config = self.config
        try:
            return prepare_tokenizer(config.tokenizer, config.data.sources, vocab_size=self.hyper_parameters.vocab_size)
        except UserError:
            return None


def with_own_storage(config: JobConfig) -> JobConfig:
    """A saved configuration, which reaches stores as this process does: a server that a stranger's run names would get
    the user's credentials. It may still say that none are sent."""
    own = settings()
    return replace(config, storage=replace(own, anonymous=own.anonymous or config.storage.anonymous))


@cache
def name_storage(where: Place, saved: StorageConfig) -> None:
    """Name what a saved configuration says about stores and this process does not use, and how to use it; once."""
    own = settings()
    ignored = {
        key: without_userinfo(text)
        for key, variables in VARIABLES.items()
        if (text := getattr(saved, key)) and text not in (getattr(own, key), *map(os.environ.get, variables))
    }
    if ignored:
        found = ", ".join(f"storage.{key} = {text!r}" for key, text in ignored.items())
        words = shlex.join(word for key, text in ignored.items() for word in (f"--storage.{key}", text))
        log.warning("%s was trained with %s, which is not used here: if you trust it, add %s", where, found, words)


def saved_config(
    file: Path, overrides: Sequence[str], where: Place, *, allow_import: bool, begun: Manifest | None = None
) -> JobConfig:
    """The configuration in a TOML file that was saved with the run `where`, with overrides `--section.key=value` and
    the [storage] of this process. allow_import: whether to import its plugins. begun: a checkpoint of the run, see
    with_begun_model. Raises UserError, ConfigError."""
    of_file = [f"--{CONFIG_FILE}={file}"]
    arguments = [*of_file, *overrides]
    import_plugins_of(tables_of(parse(arguments, imports=False).config), where, allowed=allow_import)
    parsed = parse(arguments)
    raise_problems(parsed.problems)
    name_storage(where, parse(of_file, imports=False).config.storage)
    config = parsed.config
    if begun is not None:
        config = replace(config, model=with_begun_model(config.model, begun))
    return with_own_storage(config)


def require_names(where: Place, tasks: Sequence[str], remedy: str) -> None:
    """Raise UserError if a task of a saved run is a file, and not a name of the harness: it may be code. remedy: what
    else to write than --allow-import."""
    if files := [task for task in tasks if task_file(task)]:
        raise UserError(
            f"{where} names files of tasks: {', '.join(map(repr, files))}; to evaluate with them, if you trust them, "
            f"add --allow-import, or {remedy}"
        )


def open_run(path: str | Place, *, verifies: bool = True, allow_import: bool = False) -> SavedRun:
    """Open the checkpoint at `path`: a folder step-N, or the latest valid one of a dump folder or checkpoint folder.

    Verifies all its files. In a folder of several, skips damaged checkpoints with a warning each. verifies: False on
    ranks whose folder step-N another rank has verified. allow_import: whether to import the plugins that the run's
    configuration names, and to follow its checkpoint.folder out of the dump folder. Raises UserError.
    """
    path = path if isinstance(path, Address) else place(expand_home(path))
    if has_manifest(path):
        try:
            return _opened(path, verifies=verifies, allow_import=allow_import)
        except InvalidCheckpointError as error:
            raise UserError(f"{path} is damaged: {error}; {_ANOTHER}") from None
    folder, steps = path, published_steps(path)
    if not steps:
        folder = _checkpoints_of(path, allow_import=allow_import)
        steps = published_steps(folder)
    found = next(_valid(folder, steps, allow_import=allow_import), None)
    if found is not None:
        return found
    what = "no valid checkpoint" if steps else "no checkpoint"
    raise UserError(
        f"{path} contains {what}; pass the dump folder of a run with checkpoint.enable = true, its checkpoint.folder, "
        "or a folder step-N in it"
    )


def latest_before(folder: Place, step: int, *, allow_import: bool) -> SavedRun | None:
    """The latest valid checkpoint of a step before `step` with the state of the optimizer; None if absent.

    allow_import: see open_run. Raises UserError.
    """
    earlier = [saved for saved in published_steps(folder) if saved < step]
    return _latest_full(folder, earlier, allow_import=allow_import)


def initial_checkpoint(path: Place, *, allow_import: bool) -> SavedRun:
    """The checkpoint with the state of the optimizer that checkpoint.initial_load_path leads to. allow_import: see
    open_run. Raises UserError."""
    if has_manifest(path):
        return open_run(path, allow_import=allow_import)
    found = _latest_full(path, published_steps(path), allow_import=allow_import)
    if found is None:
        raise UserError(
            f"checkpoint.initial_load_path: the run began from {path}, which has no valid checkpoint any more: put it "
            "back, or replay a step after a checkpoint of the run itself"
        )
    return found


def _latest_full(folder: Place, steps: Sequence[int], *, allow_import: bool) -> SavedRun | None:
    """The latest valid checkpoint of `steps` with the state of the optimizer; None if absent. Raises UserError."""
    valid = _valid(folder, steps, allow_import=allow_import)
    return next((found for found in valid if found.manifest.content == "full"), None)


def _valid(folder: Place, steps: Sequence[int], *, allow_import: bool) -> Iterator[SavedRun]:
    """The valid checkpoints of `steps`, the latest first; damaged ones are skipped with a warning."""
    for step in reversed(steps):
        try:
            yield _opened(step_folder(folder, step), allow_import=allow_import)
        except InvalidCheckpointError as error:
            log.warning("%s is damaged: %s; trying the previous checkpoint", step_folder(folder, step), error)


def checkpoints_in(dump_folder: Path, where: Place, *, allow_import: bool) -> Place:
    """The folder of the checkpoints of the run in `dump_folder`, which is the place `where` or a copy of it.

    allow_import: whether the run's configuration may name a place outside of it. Raises UserError.
    """
    copy = dump_folder / CONFIG_COPY
    folder = read_copy(dump_folder).checkpoint.folder if copy.is_file() else CheckpointConfig.folder
    if not (allow_import or is_below(folder)):
        raise UserError(
            f"{where}: checkpoint.folder of its {CONFIG_COPY} is {folder!r}, outside of it; to read that place, if you "
            "trust the run, add --allow-import; where checkpoints suffice, as for titanlite generate, pass that place"
        )
    return where / folder if isinstance(where, Address) and not is_address(folder) else place(folder, dump_folder)


def _checkpoints_of(dump_folder: Place, *, allow_import: bool) -> Place:
    if isinstance(dump_folder, Path):
        return checkpoints_in(dump_folder, dump_folder, allow_import=allow_import)
    if not Store(dump_folder).exists(CONFIG_COPY):
        return dump_folder / CheckpointConfig.folder
    with local_dump_folder(dump_folder) as copy:
        return checkpoints_in(copy, dump_folder, allow_import=allow_import)


def _opened(path: Place, *, verifies: bool = True, allow_import: bool) -> SavedRun:
    """Raises InvalidCheckpointError, UserError."""
    try:
        manifest = read_manifest(path)
    except UnknownFormatError as error:
        raise UserError(f"{path}: {error}") from None
    if verifies:
        check_files(path, manifest)
    import_plugins_of(manifest.config, path, allowed=allow_import)
    if problem := _facts_problem(manifest):
        raise UserError(f"{path}: MANIFEST.json {problem}{_EDITED}")
    values = manifest.model
    family = FAMILIES.get(values.pop("family"))
    if family is None:
        raise UserError(
            f"{path}: there is no family {manifest.facts['model']['family']!r}: a program has registered it, or "
            "another version of titanlite has it; register it before in the same way, or use that version"
        )
    return SavedRun(path, manifest, family, _hyper_parameters(path, family, values))


def _facts_problem(manifest: Manifest) -> str:
    """What is wrong with the values that every command needs; "": nothing."""
    facts, model = manifest.facts, manifest.facts.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("family"), str):
        return "has no model among its facts"
    if not isinstance(facts.get("dtype"), str) or facts["dtype"] not in DTYPES:
        return f"has dtype = {facts.get('dtype')!r} among its facts"
    return "" if isinstance(facts.get("tokenizer", 0), str | None) else "has no tokenizer among its facts"


def _hyper_parameters(path: Place, family: Family, values: Mapping[str, Any]) -> Any:
    """The hyper-parameters in a manifest, after the checks that [model] of a TOML gets, and if the model of these sizes
    has the tensors that are stored. Raises UserError, InvalidCheckpointError."""
    try:
        family.config_type(**values)
    except TypeError as error:
        reason = str(error).partition("() ")[2]
        raise UserError(
            f"{path}: another version of titanlite wrote this model of the family {family.name!r}, with different "
            f"hyper-parameters: {reason}; use that version"
        ) from None
    read, problems = read_values({"model": dict(values)}, family.name)
    stored = {
        name.removeprefix(MODEL): shape for name, (shape, _) in read_shapes(path).items() if name.startswith(MODEL)
    }
    if not problems:
        section = ModelConfig(family.name, next(iter(family.flavors)), read["model"])
        found = resolve_model(section)[1]
        problems = _layer_problems(found, stored) or check_model(section, seq_len=1, tp=1, pp=1)
        problems = problems or _position_problems(found, stored)
    if problems:
        each = problems[0]
        raise UserError(f"{path}: MANIFEST.json has {each.key} = {each.value!r}; it must be {each.rule}{_EDITED}")
    try:
        model = full_model(section)
    except (RuntimeError, ValueError, ArithmeticError) as error:  # sizes or factors whose product is no number
        raise UserError(f"{path}: MANIFEST.json has a model that cannot be built: {error}") from None
    for name, tensor in saved_tensors(model).items():
        shape = tuple(tensor.shape)
        if stored.get(name) != shape:
            has = f"has {name} in shape {stored[name]}" if name in stored else f"has no {name}"
            raise UserError(f"{path}: the model in MANIFEST.json needs {name} in shape {shape}; the checkpoint {has}")
    if others := sorted(stored.keys() - saved_tensors(model).keys()):
        raise UserError(f"{path}: the model in MANIFEST.json has no {others[0]}, which the checkpoint has")
    return found


def _layer_problems(model: Any, stored: Mapping[str, tuple[int, ...]]) -> list[Problem]:
    """Problems of the number of layers, before anything is computed from it."""
    layers = getattr(model, "n_layers", 0) + getattr(model, "n_further_tokens", 0)
    rule = f"at most {len(stored)}, the number of tensors in the checkpoint"
    return [] if layers <= len(stored) else [Problem("model.n_layers", layers, rule, "")]


def _position_problems(model: Any, stored: Mapping[str, tuple[int, ...]]) -> list[Problem]:
    """Problems of the tables of rotary embeddings, which no tensor of the checkpoint bounds."""
    most = max(MOST_POSITIONS, 4 * sum(map(math.prod, stored.values()))) // max(model.head_dim, 1)
    rule = f"at most {most}: its tables of positions would be larger than the model"
    return [] if model.max_seq_len <= most else [Problem("model.max_seq_len", model.max_seq_len, rule, "")]


def stored_shapes(path: Place) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of the tensors of a checkpoint. Raises UserError."""
    try:
        return read_shapes(path)
    except InvalidCheckpointError as error:
        raise UserError(f"{path} is damaged: {error}; {_ANOTHER}") from None


def stored_tensors(path: Place, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint by their names there. About BATCH_BYTES are read at a time: each read opens files, in
    a store it costs whole parts of them. Raises UserError."""
    stored, batch = stored_shapes(path), dict[str, Tensor]()
    for name in names:
        shape, dtype = stored[name]
        batch[name] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        if name == names[-1] or sum(tensor.nbytes for tensor in batch.values()) >= BATCH_BYTES:
            load(path, batch, None)
            yield from batch.items()
            batch = {}


@contextmanager
def reading(path: Place) -> Iterator[None]:
    """Replace a UserError inside the block by one that names the cause, if the checkpoint was deleted meanwhile."""
    try:
        yield
    except UserError:
        if has_manifest(path) if isinstance(path, Address) else path.is_dir():
            raise
        raise UserError(
            f"{path} was deleted while it was being read, perhaps by the run itself (checkpoint.keep_latest_k); "
            "run the command again with the dump folder, to use its latest checkpoint"
        ) from None
