"""What computed the steps before a checkpoint: software, device, meshes, and what else decides the bits."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from titanlite.assembly.facts import computer_facts
from titanlite.metrics.about import Started, mesh_text, read_starts
from titanlite.tools.audit.result import MESH
from titanlite.tools.saved_run import SavedRun


def computer_of(run: SavedRun, folder: Path, steps: range) -> dict[str, str]:
    """What computed these steps before a checkpoint, by name. folder: the run's dump folder."""
    versions = {name: str(value) for name, value in run.manifest.versions.items()}
    facts = run.manifest.computations[-1].facts if run.manifest.computations else {}
    meshes = dict.fromkeys(mesh_text(start.mesh) for start in starts_of(read_starts(folder), steps))
    return {**versions, **facts, MESH: ", then ".join(meshes) or "unknown"}


def starts_of(starts: Sequence[Started], steps: range) -> Sequence[Started]:
    """The starts that computed these steps, in order. A start that resumed before another one has replaced it."""
    kept: list[Started] = []
    for start in starts:
        while kept and kept[-1].step >= start.step:
            kept.pop()
        kept.append(start)
    if not kept:  # run.json is lost or damaged
        return []
    ends = [*(start.step for start in kept[1:]), steps.stop]
    return [start for start, end in zip(kept, ends, strict=True) if start.step < steps[-1] and end >= steps[0]]


def this_computer(device_type: str) -> dict[str, str]:
    """What would compute steps here: the software and the device."""
    return {name: str(value) for name, value in computer_facts(torch.device(device_type)).items()}


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> Sequence[str]:
    """A line for each name of both whose value differs. The mesh may differ."""
    return [
        f"computed with another {name}: {before[name]}, here {after[name]}"
        for name in before
        if name != MESH and name in after and before[name] != after[name]
    ]
