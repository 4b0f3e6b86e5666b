"""Where a run starts from: its own newest checkpoint, one that it goes back to, another run's, or the beginning."""

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlite.checkpoint.compatibility import changed_settings, check_facts, differences
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.folder import newest_manifest, published_steps, step_folder, supersede_after
from titanlite.checkpoint.manifest import MANIFEST_FILE, Branch, Manifest
from titanlite.checkpoint.probe import probe
from titanlite.checkpoint.resume import (
    Found,
    Usable,
    check_tensors,
    load,
    look_at,
    newest_whole,
    nothing_usable,
    prepare_folder,
)
from titanlite.checkpoint.state import MODEL, STREAMS, RunState, first_not_finite, local_part
from titanlite.data.tokenizer import Tokenizer
from titanlite.hf.folder import ModelFolder
from titanlite.metrics.meter import Meter, MeterState
from titanlite.runtime.agreement import on_first, together, warn_once
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log


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


class StartFinder:
    """Finds, verifies and loads what a run starts from; all ranks of `group` together. Arguments as of Checkpoints."""

    def __init__(
        self,
        section: CheckpointConfig,
        folder: Path,
        state: RunState,
        meter: Meter,
        about: RunFacts,
        *,
        steps: int,
        group: dist.ProcessGroup,
        imported: ModelFolder | None,
    ) -> None:
        self._section = section
        self._folder = folder
        self._state = state
        self._meter = meter
        self._about = about
        self._steps = steps
        self._group = group
        self._imported = imported

    def find(self) -> Start:
        """Loads what the run goes on from. Raises UserError on all ranks."""
        if self._section.enable:
            steps, ever = prepare_folder(self._folder, self._group)
            finished = bool(steps) and steps[-1] >= self._steps  # what will not be saved needs no room
            probe(self._folder, 0 if finished else self._state.num_bytes(self._group), self._group)
            if steps or ever or self._section.load_step >= 0:
                return self._go_on(steps)
        return self._begin()

    def _go_on(self, steps: list[int]) -> Start:
        """From a checkpoint of this run."""
        section = self._section
        goes_back = section.load_step >= 0 and not self._has_gone_back()
        if goes_back:
            if section.load_step not in steps:
                there = ", ".join(map(str, steps)) or "none"
                raise UserError(
                    f"checkpoint.load_step = {section.load_step}: there is no such checkpoint in {self._folder}, the "
                    f"steps that are there: {there}"
                )
            found = self._whole(step_folder(self._folder, section.load_step), self._is_usable)
        else:
            newest = newest_whole(self._folder, steps, section.verify, self._group, self._is_usable)
            if newest is None:
                raise nothing_usable(self._folder)
            found = newest
        step, lineage = found.manifest.step, found.manifest.lineage
        if found.manifest.content == "model":
            log.info("Start: at the end of a finished run, step %d, %s", step, found.path)
            return Start(step, lineage, found.manifest.config, goes_on=True, model_only=True)
        self._load_all(found)
        if goes_back:
            lineage += (_new_branch(step),)
        superseded = on_first(lambda: supersede_after(self._folder, step), self._group)
        if superseded:
            log.info("Set aside as superseded: the checkpoints of steps %s", ", ".join(map(str, superseded)))
        return Start(step, lineage, found.manifest.config, goes_on=True)

    def _has_gone_back(self) -> bool:
        """Whether this launch has gone back to load_step already, and its ranks were only restarted since."""
        restarts = together(lambda: os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), self._group)

        def on_new_branch() -> bool:
            newest = newest_manifest(self._folder)
            if newest is None or newest.lineage[-1].step != self._section.load_step:
                return False
            launch = _launch()
            # A launch without a name of its own is known by the counts, each of which is of one node alone.
            return newest.lineage[-1].launch == launch if launch else set(restarts) != {"0"}

        return on_first(on_new_branch, self._group)

    def _begin(self) -> Start:
        """A new run, from initial weights, from another run's checkpoint, or from an imported model."""
        path = self._section.initial_load_path
        if self._imported is not None:
            return self._import(self._imported)
        if not path:
            log.info("Start: a new run, from step 0 with initial weights; no checkpoint in %s", self._folder)
            return Start(0, (_new_branch(0),), {})
        model_only = self._section.initial_load_model_only
        found = self._initial(Path(path), (lambda _: True) if model_only else self._is_full)
        if model_only:
            tensors = self._state.model()
            model, own = found.manifest.facts.get("model"), self._about.facts.get("model")
            for line in check_tensors(found.path, tensors, self._group, list(differences(model, own, "model"))):
                log.info("%s", line)
            self._warn_of_tokenizer(found.manifest.facts.get("tokenizer"), str(found.path))
            load(found, tensors, self._group)
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
        tensors = {name.removeprefix(MODEL): tensor for name, tensor in self._state.model().items()}

        def fill() -> int:
            num_bytes = folder.fill_(tensors)
            name = first_not_finite({name: local_part(tensor) for name, tensor in tensors.items()})
            if name is not None:  # no checkpoint of such a run could be published
                raise UserError(
                    f"checkpoint.initial_load_path: {folder.name}: {name} has values that are not finite in "
                    f"{tensors[name].dtype}: give another folder, or a wider training.dtype if they are finite there"
                )
            return num_bytes

        read = together(fill, self._group)
        file = folder.tokenizer_file
        fingerprint = on_first(lambda: Tokenizer(file).fingerprint if file else None, self._group)
        self._warn_of_tokenizer(fingerprint, folder.name)
        log.info(
            "Start: a new run, from step 0 with the weights of %s, %s, %.1f MiB read by rank 0, %.2f s",
            *(folder.name, folder.describe(next(iter(tensors.values())).dtype)),
            *(read[0] / 2**20, time.perf_counter() - begin),
        )
        return Start(0, (_new_branch(0),), {})

    def _warn_of_tokenizer(self, fingerprint: str | None, where: str) -> None:
        if fingerprint != self._about.facts.get("tokenizer"):
            warn_once(f"The weights of {where} were trained with another tokenizer than this one", self._group)

    def _initial(self, path: Path, usable: Usable) -> Found:
        """What initial_load_path means: that checkpoint, or the newest whole and usable one in that folder.

        They are somebody else's: damaged ones stay where they are.
        """
        steps = on_first(lambda: None if (path / MANIFEST_FILE).exists() else published_steps(path), self._group)
        for candidate in [path] if steps is None else [step_folder(path, step) for step in reversed(steps)]:
            found = look_at(candidate, self._section.verify, self._group, usable)
            if isinstance(found, Found):
                return found
            if isinstance(found, str):
                message = f"checkpoint.initial_load_path: {candidate} is damaged: {found}"
                if steps is None:
                    raise UserError(f"{message}; give another one, or the folder of all, for the newest that is whole")
                warn_once(f"{message}; the one before it is looked at", self._group)
        missing = "whole checkpoint" if steps else "checkpoint"
        if not self._section.initial_load_model_only:
            missing += " with optimizer and place in the data"
        raise UserError(
            f'checkpoint.initial_load_path = "{path}": there is no {missing} to start from; give a folder step-N of a '
            "run's checkpoint folder, or that folder"
            + ("" if self._section.initial_load_model_only else "; from weights alone: initial_load_model_only = true")
        )

    def _whole(self, path: Path, usable: Usable) -> Found:
        """The checkpoint that the user has chosen."""
        found = look_at(path, self._section.verify, self._group, usable)
        if isinstance(found, Found):
            return found
        why = f"is damaged: {found}" if found else "holds the model alone, without optimizer and place in the data"
        raise UserError(
            f"checkpoint.load_step = {self._section.load_step}: {path} {why}; choose another step, or -1 "
            "for the newest that is whole"
        )

    def _is_usable(self, manifest: Manifest) -> bool:
        """Whether the run can go on from it. Raises UserError where it was made with settings that must not change."""
        path = step_folder(self._folder, manifest.step)
        self._check_facts(manifest, path)
        if self._is_full(manifest):
            return True
        finished = manifest.step >= self._steps
        if not finished:
            log.info("%s holds the model alone: the run goes on from an earlier one", path)
        return finished

    @staticmethod
    def _is_full(manifest: Manifest) -> bool:
        return manifest.content == "full"

    def _check_facts(self, manifest: Manifest, path: Path) -> None:
        for line in check_facts(manifest.facts, self._about.facts, self._section.accept_changes, str(path)):
            warn_once(line, self._group)

    def _load_all(self, found: Found) -> None:
        manifest = found.manifest
        tensors = self._state.model_and_optimizer() | {STREAMS: self._state.empty_streams()}
        load(found, tensors, self._group)
        try:
            position = self._state.load_streams(tensors[STREAMS])
        except UserError as error:
            raise UserError(
                f"{found.path}: the data have no such place as the checkpoint's: {error}; resume with its "
                "data, or start a new run from its weights: --job.dump_folder ANOTHER "
                f"--checkpoint.initial_load_path {found.path}"
            ) from None
        self._meter.load_state(MeterState(**manifest.counts))
        log.info(
            "Start: step %d, %s tokens, data at %s, from %s, %s",
            *(manifest.step, f"{manifest.counts['tokens_seen']:,}", position, found.path, found.verified),
        )
        for line in changed_settings(manifest.config, self._about.config):
            log.info("Changed since the checkpoint: %s", line)


def _new_branch(step: int) -> Branch:
    return Branch(secrets.token_hex(4), step, _launch())


def _launch() -> str:
    """torchrun's name of this launch; "" without torchrun, and where it has the one that is everybody's."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name
