"""Find, verify and load what a run starts from: its latest valid checkpoint, the checkpoint of load_step, another run's
checkpoint, a Hugging Face model, or initial weights.

The functions that take a group are collectives over it.
"""

import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from titanlite.checkpoint.compatibility import (
    changed_settings,
    check_facts,
    differences,
    model_differences,
    optimizer_differences,
)
from titanlite.checkpoint.config import CheckpointConfig, another_run
from titanlite.checkpoint.folder import latest_manifest, published_steps, step_folder, supersede_after
from titanlite.checkpoint.manifest import (
    Branch,
    Computation,
    InvalidCheckpointError,
    Manifest,
    has_manifest,
    read_listed,
)
from titanlite.checkpoint.saver import probe
from titanlite.checkpoint.state import LARGEST, MODEL, STREAMS, RunState, first_not_finite
from titanlite.checkpoint.storage import first_failure, load_tensors, read_shapes
from titanlite.checkpoint.verification import Found, latest_valid, prepare_folder, quarantine_damaged, verify_checkpoint
from titanlite.hf.folder import ModelFolder
from titanlite.hf.generation_defaults import GENERATION_FILE, read_generation_defaults
from titanlite.metrics.meter import Meter, MeterState
from titanlite.ranks.agreement import RanksError, run_on_all_ranks, run_on_rank_0, warn_on_rank_0
from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import JsonError
from titanlite.runtime.logging import log
from titanlite.runtime.torch_internals import local_part
from titanlite.storage.address import Address, Place, place


@dataclass(frozen=True)
class RunFacts:
    """The run's fields of a manifest, as JSON values; see Manifest. logged: full keys whose change is logged.
    computation: facts of the Computation of this start; {} without training.bit_equal."""

    facts: Mapping[str, Any]
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    logged: Collection[str] = ()
    computation: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """The state that a run starts from.

    step: optimizer steps done; 0 for a new run. lineage: see Manifest. config: the checkpoint's, by section; {} without
    a checkpoint. resumes: whether the run resumes in its own folder. generation_config: that of the checkpoint or of
    the imported model, if any, for the checkpoints of the run. computations: see Manifest, this start's included.
    """

    step: int
    lineage: tuple[Branch, ...]
    config: Mapping[str, Any]
    resumes: bool = False
    generation_config: bytes | None = None
    computations: tuple[Computation, ...] = ()


@dataclass(frozen=True)
class StartFinder:
    """Finds, verifies and loads the start of a run: a checkpoint, a Hugging Face model, or initial weights.

    folder: of the run's checkpoints. steps: number of optimizer steps of the run. group: a gloo group of all ranks for
    loading and saving, also in a thread. draw: fills the model with initial weights, if nothing is loaded: a
    collective. imported: Hugging Face model that a new run starts from; None for initial weights
    or a checkpoint.
    """

    section: CheckpointConfig
    folder: Place
    state: RunState
    meter: Meter
    about: RunFacts
    steps: int
    group: dist.ProcessGroup
    draw: Callable[[], None]
    imported: ModelFolder | None = None

    def find(self) -> Start:
        """Load the state that the run starts from. Raises UserError on all ranks."""
        if self.section.enable:
            steps, ever = prepare_folder(self.folder, self.group)
            finished = bool(steps) and steps[-1] >= self.steps  # saves nothing, so needs no space
            if isinstance(self.folder, Path):
                probe(self.folder, 0 if finished else self.state.num_bytes(self.group), self.group)
            if steps or ever or self.section.load_step >= 0:
                return self._resume(steps)
        return self._begin()

    def _resume(self, steps: list[int]) -> Start:
        """Resume from a checkpoint of this run."""
        section = self.section
        goes_back = section.load_step >= 0 and not self._has_gone_back()
        if goes_back:
            found = self._of_load_step(steps)
            self._load_all(found)
        else:
            found = self._load_latest(steps)
        step, lineage = found.manifest.step, found.manifest.lineage
        if goes_back:
            lineage += (_new_branch(step),)
        superseded = run_on_rank_0(lambda: supersede_after(self.folder, step), self.group)
        if superseded:
            log.info("Renamed as superseded: the checkpoints of steps %s", ", ".join(map(str, superseded)))
        defaults = self._generation_config(found)
        earlier = found.manifest
        return Start(step, lineage, earlier.config, True, defaults, self._computations(step, earlier.computations))

    def _load_latest(self, steps: list[int]) -> Found:
        """Load the latest valid checkpoint of `steps`. In a store, damage may show only when the contents are read: the
        previous checkpoint is then loaded over what was read."""
        while True:
            found = latest_valid(self.folder, steps, self.group, self._is_usable)
            try:
                self._load_all(found)
            except DamagedError as error:
                damage, step = error.damage, found.manifest.step
                run_on_rank_0(lambda: quarantine_damaged(self.folder, step, damage), self.group)  # noqa: B023
                steps = [each for each in steps if each < step]
            else:
                return found

    def _has_gone_back(self) -> bool:
        """Whether this launch has gone back to load_step before a restart of its ranks."""
        restarts = run_on_all_ranks(lambda: os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), self.group)

        def on_new_branch() -> bool:
            latest = latest_manifest(self.folder)
            if latest is None or latest.lineage[-1].step != self.section.load_step:
                return False
            launch = _launch()
            # A launch without a unique run id is recognized by its restart counts, of which each node has its own.
            return latest.lineage[-1].launch == launch if launch else set(restarts) != {"0"}

        return run_on_rank_0(on_new_branch, self.group)

    def _begin(self) -> Start:
        """Start a new run from initial weights, another run's checkpoint, or a Hugging Face model."""
        path, defaults = self.section.initial_load_path, None
        if self.imported is not None:
            self._import(self.imported)
            defaults = self.imported.generation_config
        elif not path:
            self.draw()
            self.state.restart_average()
            log.info("Start: new run at step 0 with initial weights; no checkpoint in %s", self.folder)
        else:
            found = self._initial(place(path))
            defaults = self._generation_config(found)
            if not self.section.initial_load_model_only:
                self._check_facts(found.manifest, found.path)
                self._load_all(found)
                step = found.manifest.step
                lineage = (*found.manifest.lineage, _new_branch(step))
                computations = self._computations(step, found.manifest.computations)
                return Start(step, lineage, found.manifest.config, False, defaults, computations)
            self._load_weights(found)
        return Start(0, (_new_branch(0),), {}, False, defaults, self._computations(0))

    def _computations(self, step: int, earlier: tuple[Computation, ...] = ()) -> tuple[Computation, ...]:
        """Those of the run, this start's included; warns if it differs from the last one.

        Facts are {} for steps without training.bit_equal; () if the run has no others.
        """
        now = self.about.computation
        if not now and not earlier:
            return ()
        if step and not earlier:
            earlier = (Computation(0, {}),)
        if earlier and earlier[-1].facts == now:
            return earlier
        if earlier:
            lines = [f"  {line.removeprefix('.')}" for line in differences(earlier[-1].facts, now, "")]
            head = f"From step {step + 1} on, the bits may not be those of an uninterrupted run, since these differ:"
            warn_on_rank_0([head, *lines], self.group)
        return (*earlier, Computation(step, now))

    def _generation_config(self, found: Found) -> bytes | None:
        """The generation_config.json of a checkpoint, if it has one."""
        return run_on_rank_0(lambda: generation_config_of(found.path, found.manifest), self.group)

    def _load_weights(self, found: Found) -> None:
        tensors, saved = self.state.model(), self._shapes(found)
        absent = self.state.buffers - saved.keys()
        if absent:
            log.info("Not in the checkpoint, so they begin at 0: %s", ", ".join(sorted(absent)))
            tensors = {name: tensor for name, tensor in tensors.items() if name not in absent}
        changes = _of_weights(model_differences({"model": found.manifest.model}, self.about.facts))
        for line in check_tensors(found.path, saved, tensors, self.group, changes):
            log.info("%s", line)
        for line in changes:
            log.info("Changed from the model of the weights: %s", line)
        self._warn_of_tokenizer(found.manifest.facts.get("tokenizer"), str(found.path))
        load(found.path, tensors, self.group)
        self.state.restart_average()
        log.info(
            "Start: new run at step 0 with the weights of step %d in %s, %s",
            *(found.manifest.step, found.path, found.verified),
        )

    def _import(self, folder: ModelFolder) -> None:
        """Load the weights of a model folder; each rank reads its shards."""
        begin = time.perf_counter()
        tensors = {
            name.removeprefix(MODEL): tensor
            for name, tensor in self.state.model().items()
            if name not in self.state.buffers or name.removeprefix(MODEL) in folder.tensors
        }

        def fill() -> int:
            num_bytes = folder.fill_(tensors)
            name = first_not_finite({name: local_part(tensor) for name, tensor in tensors.items()})
            if name is not None:  # no checkpoint of such a run could be published
                raise UserError(
                    f"checkpoint.initial_load_path: {folder.name}: {name} has NaN or infinite values in "
                    f"{tensors[name].dtype}: give another folder, or a wider training.dtype if the values overflow"
                )
            return num_bytes

        read = run_on_all_ranks(fill, self.group)
        self.state.restart_average()
        fingerprint = run_on_rank_0(folder.tokenizer_fingerprint, self.group)
        self._warn_of_tokenizer(fingerprint, folder.name)
        theirs = {"family": folder.family.name, **asdict(folder.hyper_parameters)}
        for line in _of_weights(differences(theirs, self.about.facts["model"], "model")):
            log.info("Changed from the imported model: %s", line.replace("in the checkpoint", "there"))
        log.info(
            "Start: new run at step 0 with the weights of %s, %s, %.1f MiB read by rank 0, %.2f s",
            *(folder.name, folder.describe(next(iter(tensors.values())).dtype)),
            *(read[0] / 2**20, time.perf_counter() - begin),
        )

    def _warn_of_tokenizer(self, fingerprint: str | None, where: str) -> None:
        if fingerprint != self.about.facts.get("tokenizer"):
            warn_on_rank_0([f"The weights of {where} were trained with a different tokenizer"], self.group)

    def _initial(self, path: Place) -> Found:
        """The checkpoint at `path`, or the latest valid and usable one in that folder.

        Corrupted ones are not renamed, since they belong to another run.
        """
        model_only = self.section.initial_load_model_only
        steps = run_on_rank_0(lambda: None if has_manifest(path) else published_steps(path), self.group)
        for candidate in [path] if steps is None else [step_folder(path, step) for step in reversed(steps)]:
            found = verify_checkpoint(candidate, self.group, lambda manifest: model_only or manifest.content == "full")
            if isinstance(found, Found):
                return found
            if isinstance(found, str):
                message = f"checkpoint.initial_load_path: {candidate} is corrupted: {found}"
                if steps is None:
                    raise UserError(f"{message}; give another one, or its parent folder for the latest valid one")
                warn_on_rank_0([f"{message}; trying the previous one"], self.group)
        missing = "valid checkpoint" if steps else "checkpoint"
        remedy = "give a folder step-N of a run's checkpoint folder, or that folder"
        if not model_only:
            missing += " with optimizer and position in the data"
            remedy += "; for weights only: initial_load_model_only = true"
        raise UserError(f'checkpoint.initial_load_path = "{path}": no {missing} found; {remedy}')

    def _of_load_step(self, steps: list[int]) -> Found:
        """The checkpoint of load_step. Raises UserError if it is missing or corrupted, or has only the model."""
        step = self.section.load_step
        if step not in steps:
            present = ", ".join(map(str, steps)) or "no checkpoint"
            raise UserError(
                f"checkpoint.load_step = {step}: no checkpoint of this step in {self.folder}, which has: {present}; "
                "choose one of these, or -1 for the latest valid one"
            )
        path = step_folder(self.folder, step)
        found = verify_checkpoint(path, self.group, self._is_usable)
        if isinstance(found, Found):
            return found
        why = f"is corrupted: {found}" if found else "has only the model, no optimizer state or position in the data"
        raise UserError(
            f"checkpoint.load_step = {step}: {path} {why}; choose another step, or -1 for the latest valid one"
        )

    def _is_usable(self, manifest: Manifest) -> bool:
        """Whether the run can resume from it. Raises UserError if the run's facts differ from the checkpoint's."""
        path = step_folder(self.folder, manifest.step)
        self._check_facts(manifest, path)
        if manifest.content == "model":
            log.info("%s has only the model: resuming from an earlier checkpoint", path)
        return manifest.content == "full"

    def _check_facts(self, manifest: Manifest, path: Place) -> None:
        for line in check_facts(
            manifest.facts, self.about.facts, self.section.accept_changes, str(path), manifest.step
        ):
            warn_on_rank_0([line], self.group)

    def _shapes(self, found: Found) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, dtype) of the tensors of a checkpoint. Raises UserError on all ranks."""
        try:
            return run_on_rank_0(lambda: read_shapes(found.path), self.group)
        except RanksError as error:
            raise UserError(f"{found.path} cannot be loaded: {error}") from None

    def _width_of_streams(self, found: Found, shape: tuple[int, ...]) -> int:
        """The columns of the position in the data: there may be more sources now. Raises UserError if it is none."""
        stored = sum(file.bytes for file in found.manifest.files.values())
        if len(shape) != 2 or shape[0] != len(self.state.empty_streams()) or 8 * math.prod(shape) > stored:
            raise UserError(f"{found.path} cannot be loaded: {STREAMS} has the shape {shape}; choose another step")
        return shape[1]

    def _load_all(self, found: Found) -> None:
        manifest = found.manifest
        saved = self._shapes(found)
        width = self._width_of_streams(found, saved[STREAMS][0] if STREAMS in saved else ())
        restarts = bool(optimizer_differences(manifest.facts.get("optimizer"), self.about.facts.get("optimizer")))
        tensors = self.state.model() if restarts else self.state.model_and_optimizer()
        tensors |= {STREAMS: self.state.empty_streams(width)}
        tensors |= {name: tensor for name, tensor in self.state.recent().items() if name in saved}
        load(found.path, tensors, self.group, on_all=(STREAMS,))
        if any(name.startswith(LARGEST) for name in saved):
            self.state.resume_exact()
        try:
            position = self.state.load_streams(tensors[STREAMS], manifest.step)
        except UserError as error:
            raise UserError(
                f"cannot resume from {found.path}: the position in the data that it saved does not fit the data of "
                f"this run: {error}",
                "  remedy: resume with the data of the checkpoint, or start a new run from its "
                f"weights: {another_run(found.path)} --checkpoint.initial_load_path {found.path}",
            ) from None
        self.meter.load_state(MeterState(**manifest.counts))
        log.info(
            "Start: step %d, %s tokens, data at %s, from %s, %s",
            *(manifest.step, f"{manifest.counts['tokens_seen']:,}", position, found.path, found.verified),
        )
        if restarts:
            log.info("The state of the optimizers starts anew")
        if self.state.average().keys() - saved.keys():
            self.state.restart_average()
            log.info("Weight average: begins at the weights of step %d, since the checkpoint has none", manifest.step)
        section = self.about.config.get("model", {})
        for name, value in section.get("kept", {}).items():
            log.info("As in the checkpoint, unlike the flavor %s of now: model.%s = %s", section["flavor"], name, value)
        for line in changed_settings(manifest.config, self.about.config, self.about.logged):
            log.info("Changed since the checkpoint: %s", line)


def _of_weights(lines: Iterable[str]) -> list[str]:
    """The lines of `differences` without initial distributions, which weights that are loaded do not have."""
    return [line for line in lines if not line.startswith("model.init_")]


def _new_branch(step: int) -> Branch:
    return Branch(secrets.token_hex(4), step, _launch())


def _launch() -> str:
    """torchrun's run id; "" without torchrun, and for torchrun's default "none", which is not unique."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


class DamagedError(UserError):
    """A checkpoint whose damage showed when its contents were read, on all ranks. damage: which one."""

    def __init__(self, path: Place, damage: str) -> None:
        self.damage = damage
        super().__init__(f"{path} cannot be loaded: {damage}; choose another step")


def generation_config_of(path: Place, manifest: Manifest) -> bytes | None:
    """The generation_config.json of the checkpoint at `path`; None if it has none. Raises UserError."""
    if GENERATION_FILE not in manifest.files:
        return None
    try:
        content = read_listed(path, manifest, GENERATION_FILE)
        read_generation_defaults(content)
    except (OSError, JsonError, InvalidCheckpointError) as error:
        raise UserError(f"{path / GENERATION_FILE} is damaged: {error}; put the file back") from None
    return content


def load(
    path: Place, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None, *, on_all: Collection[str] = ()
) -> None:
    """Fill `tensors` in place from the checkpoint at `path`. group: None for this process alone. on_all: see
    load_tensors. Raises UserError on all ranks; DamagedError if a content in a store is damaged."""
    try:
        load_tensors(path, tensors, group, on_all=on_all)
    except dcp.CheckpointException as error:
        damage = [str(cause) for cause, _ in error.failures.values() if isinstance(cause, InvalidCheckpointError)]
        if damage and isinstance(path, Address):
            raise DamagedError(path, damage[0]) from None
        raise UserError(f"{path} cannot be loaded: {first_failure(error)}") from None


def check_tensors(
    path: Place,
    saved: Mapping[str, tuple[tuple[int, ...], str]],
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    differences: Iterable[str] = (),
) -> list[str]:
    """Check names and shapes of `tensors` against the checkpoint; returns one log line per conversion of a dtype.

    Raises UserError if the checkpoint lacks a tensor or has it in another shape. saved: see read_shapes. differences:
    between the two models, for this message.
    """
    listed = [f"  {line}" for line in differences]
    remedy = ["  remedy: use the checkpoint's [model] values and its tokenizer"] if listed else []

    def check() -> tuple[str, list[str]]:
        for name, tensor in tensors.items():
            if name not in saved:
                return f"has no {name}: it belongs to another model", []
            shape, _ = saved[name]
            if shape != tuple(tensor.shape):
                return (
                    f"has {name} of shape {shape}, but this model needs {tuple(tensor.shape)}: tensors are not padded "
                    "or cropped"
                ), []
        dtypes = {(saved[name][1], str(tensor.dtype)) for name, tensor in tensors.items()}
        return "", [f"from {old} to {new}" for old, new in dtypes if old != new]

    found = run_on_all_ranks(check, group)
    for problem, _ in found:
        if problem:
            raise UserError(f"checkpoint.initial_load_path: {path} {problem}", *listed, *remedy)
    return [f"The weights of {path} are converted {how}" for how in sorted({how for _, part in found for how in part})]
