"""Where a run starts from: its own newest checkpoint, one that it goes back to, another run's, or the beginning.

All ranks decide, verify and load together.
"""

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from titanlite.checkpoint.compatibility import changed_settings, check_facts, differences
from titanlite.checkpoint.config import CheckpointConfig, Verify
from titanlite.checkpoint.folder import (
    clear_leftovers,
    ever_published,
    invalid_kind,
    newest_manifest,
    published_steps,
    set_aside,
    step_folder,
    step_of,
    supersede_after,
)
from titanlite.checkpoint.manifest import MANIFEST_FILE, Branch, Manifest, UnknownFormatError, read_manifest
from titanlite.checkpoint.saver import probe, size_of
from titanlite.checkpoint.state import MODEL, STREAMS, RunState, first_not_finite, local_part
from titanlite.checkpoint.storage import InvalidCheckpointError, check_file, first_failure, load_tensors, read_shapes
from titanlite.hf.folder import ModelFolder
from titanlite.metrics.meter import Meter, MeterState
from titanlite.runtime.agreement import on_first, together, warn_once
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log

Usable = Callable[[Manifest], bool]
"""Decides by the manifest, the same on all ranks, before files are looked at; may raise UserError."""


@dataclass(frozen=True)
class RunFacts:
    """What a checkpoint says about the run, as JSON values; see Manifest."""

    facts: Mapping[str, Any]
    config: Mapping[str, Any]
    versions: Mapping[str, Any]


@dataclass(frozen=True)
class Start:
    """After `step`; 0: a new run. lineage: see Manifest. config: of the checkpoint, by section; {}: there is none.

    goes_on: whether the run has been in this folder before, and its files there are its own. model_only: whether the
    checkpoint is one of a finished run that nothing can go on from.
    """

    step: int
    lineage: tuple[Branch, ...]
    config: Mapping[str, Any]
    goes_on: bool = False
    model_only: bool = False


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole. verified: how that is known, for the log."""

    path: Path
    manifest: Manifest
    verified: str


@dataclass(frozen=True)
class StartFinder:
    """Finds, verifies and loads what a run starts from; all ranks of `group` together. Fields as of Checkpoints."""

    section: CheckpointConfig
    folder: Path
    state: RunState
    meter: Meter
    about: RunFacts
    steps: int
    group: dist.ProcessGroup
    imported: ModelFolder | None

    def find(self) -> Start:
        """Loads what the run goes on from. Raises UserError on all ranks."""
        if self.section.enable:
            steps, ever = prepare_folder(self.folder, self.group)
            finished = bool(steps) and steps[-1] >= self.steps  # what will not be saved needs no room
            probe(self.folder, 0 if finished else self.state.num_bytes(self.group), self.group)
            if steps or ever or self.section.load_step >= 0:
                return self._go_on(steps)
        return self._begin()

    def _go_on(self, steps: list[int]) -> Start:
        """From a checkpoint of this run."""
        section = self.section
        goes_back = section.load_step >= 0 and not self._has_gone_back()
        if goes_back:
            if section.load_step not in steps:
                there = ", ".join(map(str, steps)) or "none"
                raise UserError(
                    f"checkpoint.load_step = {section.load_step}: there is no such checkpoint in {self.folder}, the "
                    f"steps that are there: {there}"
                )
            found = self._whole(step_folder(self.folder, section.load_step), self._is_usable)
        else:
            newest = newest_whole(self.folder, steps, section.verify, self.group, self._is_usable)
            if newest is None:
                raise nothing_usable(self.folder)
            found = newest
        step, lineage = found.manifest.step, found.manifest.lineage
        if found.manifest.content == "model":
            log.info("Start: at the end of a finished run, step %d, %s", step, found.path)
            return Start(step, lineage, found.manifest.config, goes_on=True, model_only=True)
        self._load_all(found)
        if goes_back:
            lineage += (_new_branch(step),)
        superseded = on_first(lambda: supersede_after(self.folder, step), self.group)
        if superseded:
            log.info("Set aside as superseded: the checkpoints of steps %s", ", ".join(map(str, superseded)))
        return Start(step, lineage, found.manifest.config, goes_on=True)

    def _has_gone_back(self) -> bool:
        """Whether this launch has gone back to load_step already, and its ranks were only restarted since."""
        restarts = together(lambda: os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), self.group)

        def on_new_branch() -> bool:
            newest = newest_manifest(self.folder)
            if newest is None or newest.lineage[-1].step != self.section.load_step:
                return False
            launch = _launch()
            # A launch without a name of its own is known by the counts, each of which is of one node alone.
            return newest.lineage[-1].launch == launch if launch else set(restarts) != {"0"}

        return on_first(on_new_branch, self.group)

    def _begin(self) -> Start:
        """A new run, from initial weights, from another run's checkpoint, or from an imported model."""
        path = self.section.initial_load_path
        if self.imported is not None:
            return self._import(self.imported)
        if not path:
            log.info("Start: a new run, from step 0 with initial weights; no checkpoint in %s", self.folder)
            return Start(0, (_new_branch(0),), {})
        model_only = self.section.initial_load_model_only
        found = self._initial(Path(path), (lambda _: True) if model_only else self._is_full)
        if model_only:
            tensors = self.state.model()
            model, own = found.manifest.facts.get("model"), self.about.facts.get("model")
            for line in check_tensors(found.path, tensors, self.group, list(differences(model, own, "model"))):
                log.info("%s", line)
            self._warn_of_tokenizer(found.manifest.facts.get("tokenizer"), str(found.path))
            load(found, tensors, self.group)
            log.info(
                "Start: a new run, from step 0 with the weights of step %d in %s, %s",
                *(found.manifest.step, found.path, found.verified),
            )
            return Start(0, (_new_branch(0),), {})
        self._check_facts(found.manifest, found.path)
        self._load_all(found)
        step = found.manifest.step
        return Start(step, (*found.manifest.lineage, _new_branch(step)), found.manifest.config)

    def _import(self, folder: ModelFolder) -> Start:
        """With the weights of a folder, of which each rank reads its own part."""
        begin = time.perf_counter()
        tensors = {name.removeprefix(MODEL): tensor for name, tensor in self.state.model().items()}

        def fill() -> int:
            num_bytes = folder.fill_(tensors)
            name = first_not_finite({name: local_part(tensor) for name, tensor in tensors.items()})
            if name is not None:  # no checkpoint of such a run could be published
                raise UserError(
                    f"checkpoint.initial_load_path: {folder.name}: {name} has values that are not finite in "
                    f"{tensors[name].dtype}: give another folder, or a wider training.dtype if they are finite there"
                )
            return num_bytes

        read = together(fill, self.group)
        fingerprint = on_first(folder.tokenizer_fingerprint, self.group)
        self._warn_of_tokenizer(fingerprint, folder.name)
        log.info(
            "Start: a new run, from step 0 with the weights of %s, %s, %.1f MiB read by rank 0, %.2f s",
            *(folder.name, folder.describe(next(iter(tensors.values())).dtype)),
            *(read[0] / 2**20, time.perf_counter() - begin),
        )
        return Start(0, (_new_branch(0),), {})

    def _warn_of_tokenizer(self, fingerprint: str | None, where: str) -> None:
        if fingerprint != self.about.facts.get("tokenizer"):
            warn_once(f"The weights of {where} were trained with another tokenizer than this one", self.group)

    def _initial(self, path: Path, usable: Usable) -> Found:
        """What initial_load_path means: that checkpoint, or the newest whole and usable one in that folder.

        They are somebody else's: damaged ones stay where they are.
        """
        steps = on_first(lambda: None if (path / MANIFEST_FILE).exists() else published_steps(path), self.group)
        for candidate in [path] if steps is None else [step_folder(path, step) for step in reversed(steps)]:
            found = look_at(candidate, self.section.verify, self.group, usable)
            if isinstance(found, Found):
                return found
            if isinstance(found, str):
                message = f"checkpoint.initial_load_path: {candidate} is damaged: {found}"
                if steps is None:
                    raise UserError(f"{message}; give another one, or the folder of all, for the newest that is whole")
                warn_once(f"{message}; the one before it is looked at", self.group)
        missing = "whole checkpoint" if steps else "checkpoint"
        if not self.section.initial_load_model_only:
            missing += " with optimizer and place in the data"
        raise UserError(
            f'checkpoint.initial_load_path = "{path}": there is no {missing} to start from; give a folder step-N of a '
            "run's checkpoint folder, or that folder"
            + ("" if self.section.initial_load_model_only else "; from weights alone: initial_load_model_only = true")
        )

    def _whole(self, path: Path, usable: Usable) -> Found:
        """The checkpoint that the user has chosen."""
        found = look_at(path, self.section.verify, self.group, usable)
        if isinstance(found, Found):
            return found
        why = f"is damaged: {found}" if found else "holds the model alone, without optimizer and place in the data"
        raise UserError(
            f"checkpoint.load_step = {self.section.load_step}: {path} {why}; choose another step, or -1 "
            "for the newest that is whole"
        )

    def _is_usable(self, manifest: Manifest) -> bool:
        """Whether the run can go on from it. Raises UserError where it was made with settings that must not change."""
        path = step_folder(self.folder, manifest.step)
        self._check_facts(manifest, path)
        if self._is_full(manifest):
            return True
        finished = manifest.step >= self.steps
        if not finished:
            log.info("%s holds the model alone: the run goes on from an earlier one", path)
        return finished

    @staticmethod
    def _is_full(manifest: Manifest) -> bool:
        return manifest.content == "full"

    def _check_facts(self, manifest: Manifest, path: Path) -> None:
        for line in check_facts(manifest.facts, self.about.facts, self.section.accept_changes, str(path)):
            warn_once(line, self.group)

    def _load_all(self, found: Found) -> None:
        manifest = found.manifest
        tensors = self.state.model_and_optimizer() | {STREAMS: self.state.empty_streams()}
        load(found, tensors, self.group)
        try:
            position = self.state.load_streams(tensors[STREAMS])
        except UserError as error:
            raise UserError(
                f"{found.path}: the data have no such place as the checkpoint's: {error}; resume with its "
                "data, or start a new run from its weights: --job.dump_folder ANOTHER "
                f"--checkpoint.initial_load_path {found.path}"
            ) from None
        self.meter.load_state(MeterState(**manifest.counts))
        log.info(
            "Start: step %d, %s tokens, data at %s, from %s, %s",
            *(manifest.step, f"{manifest.counts['tokens_seen']:,}", position, found.path, found.verified),
        )
        for line in changed_settings(manifest.config, self.about.config):
            log.info("Changed since the checkpoint: %s", line)


def _new_branch(step: int) -> Branch:
    return Branch(secrets.token_hex(4), step, _launch())


def _launch() -> str:
    """torchrun's name of this launch; "" without torchrun, and where it has the one that is everybody's."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def prepare_folder(folder: Path, group: dist.ProcessGroup) -> tuple[list[int], bool]:
    """(published steps from the oldest, whether anything was ever published); clears what interrupted saves left."""

    def look() -> tuple[list[int], bool]:
        cleared = clear_leftovers(folder)
        if cleared:
            log.info("Removed what an interrupted save or deletion had left: %s", ", ".join(cleared))
        return published_steps(folder), ever_published(folder)

    return on_first(look, group)


def newest_whole(
    folder: Path, steps: list[int], verify: Verify, group: dist.ProcessGroup, usable: Usable
) -> Found | None:
    """The newest of `steps` that is whole and usable; damaged ones are set aside on the way, with a line each."""
    for step in reversed(steps):
        found = look_at(step_folder(folder, step), verify, group, usable)
        if isinstance(found, Found):
            return found
        if found is not None:
            on_first(partial(_set_aside, folder, step, found), group)
    return None


def _set_aside(folder: Path, step: int, damage: str) -> None:
    moved = set_aside(folder, step, invalid_kind())
    log.warning("Checkpoint step-%d is damaged: %s. Set aside as %s", step, damage, moved.name)


def look_at(path: Path, verify: Verify, group: dist.ProcessGroup, usable: Usable) -> Found | str | None:
    """The checkpoint at `path`; or what is damaged about it; or None where it is not usable."""
    manifest = on_first(lambda: _read(path), group)
    if isinstance(manifest, str):
        return manifest
    if not usable(manifest):
        return None
    start = time.perf_counter()
    damages = [damage for damage in together(lambda: _damage(path, manifest, verify, group), group) if damage]
    if damages:
        return damages[0]
    how = {"full": "verified in full", "size": "sizes verified", "off": "not verified"}[verify]
    return Found(path, manifest, f"{how} ({size_of(manifest.files)}, {time.perf_counter() - start:.2f} s)")


def load(found: Found, tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Fills the tensors in place. Raises UserError on all ranks."""
    try:
        load_tensors(found.path, tensors, group)
    except dcp.CheckpointException as error:
        raise UserError(f"{found.path} cannot be loaded: {first_failure(error)}") from None


def nothing_usable(folder: Path) -> UserError:
    """What to do where there were checkpoints and the run can go on from none."""
    names = sorted(name for name in os.listdir(folder) if name.startswith("step-"))
    models = published_steps(folder)  # what was damaged is set aside by now
    remedy = (
        f"step-{models[-1]} holds the model alone: start a new run from its weights with --job.dump_folder ANOTHER "
        f"--checkpoint.initial_load_path {step_folder(folder, models[-1])}"
        if models
        else "to use one that was set aside, mend it and take the suffix off its name"
    )
    return UserError(
        f"no checkpoint in {folder} can be used, and there were some: {', '.join(names)}. To start anew all the same, "
        f"give another --job.dump_folder or move that folder away; {remedy}"
    )


def check_tensors(
    path: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup, differences: Sequence[str] = ()
) -> list[str]:
    """A line where the checkpoint at `path` has them in another dtype, to which they are converted when it is loaded.

    Raises UserError where it lacks one of the tensors or has it in another shape. differences: between the two models,
    for that case.
    """

    what = "\n".join(f"  {line}" for line in differences)
    remedy = f"\n{what}\n  remedy: write in [model] what is in the checkpoint, and use its tokenizer" if what else ""

    def check() -> tuple[str, list[str]]:
        there = read_shapes(path)
        for name, tensor in tensors.items():
            if name not in there:
                return f"has no {name}: it is of another model{remedy}", []
            shape, _ = there[name]
            if shape != tuple(tensor.shape):
                return (
                    f"has {name} of shape {shape}, and this model needs {tuple(tensor.shape)}: no row or column is "
                    f"made up or left out{remedy}"
                ), []
        dtypes = {(there[name][1], str(tensor.dtype)) for name, tensor in tensors.items()}
        return "", [f"from {saved} to {now}" for saved, now in dtypes if saved != now]

    found = together(check, group)
    for problem, _ in found:
        if problem:
            raise UserError(f"checkpoint.initial_load_path: {path} {problem}")
    return [f"The weights of {path} are converted {how}" for how in sorted({how for _, part in found for how in part})]


def _read(path: Path) -> Manifest | str:
    try:
        manifest = read_manifest(path)
    except InvalidCheckpointError as error:
        return str(error)
    except UnknownFormatError as error:
        raise UserError(f"{path}: {error}") from None
    named = step_of(path)
    return manifest if named in (None, manifest.step) else f"{MANIFEST_FILE} is that of step {manifest.step}"


def _damage(path: Path, manifest: Manifest, verify: Verify, group: dist.ProcessGroup) -> str | None:
    """What is wrong with this rank's share of the files; every file is looked at by one rank."""
    if verify == "off":
        return None
    by_size = sorted(manifest.files.items(), key=lambda item: -item[1].bytes)
    try:
        for name, record in by_size[dist.get_rank(group) :: group.size()]:
            check_file(path, name, record, verify)
    except InvalidCheckpointError as error:
        return str(error)
    return None
