"""Command: digests of the weights of runs and model folders, and the names of the tensors that differ."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor

from titanlite.checkpoint.manifest import Computation, computed_by
from titanlite.checkpoint.state import AVERAGE, MODEL, OPTIMIZER
from titanlite.hf.folder import CONFIG_FILE, open_folder
from titanlite.parallel.digest import combine, sum_of_bits
from titanlite.runtime.environment import expand_home
from titanlite.runtime.errors import UserError
from titanlite.runtime.settings import setting
from titanlite.storage.address import place
from titanlite.tools.command import AllowImport, print_lines, run_command
from titanlite.tools.saved_run import open_run, stored_shapes, stored_tensors
from titanlite.tools.stores import read_options_of_stores

PARTS = {"weights": MODEL, "buffers": MODEL, "average": AVERAGE, "optimizer": OPTIMIZER}
"""Part of a checkpoint -> prefix of its tensors. buffers: such as the biases of experts."""
MOST_NAMES = 10


@dataclass(frozen=True)
class Options:
    """Print the digest of the weights of runs or exported model folders, and of buffers, the average and the state of
    optimizers of runs, and compare them: exit code 1 if any differ. A digest does not depend on the mesh."""

    runs: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)")
    ] = setting(is_path=True)
    """dump folders, of which the latest valid checkpoint counts, folders step-N, both also at addresses in a store, or
    folders in Hugging Face's format"""
    allow_import: AllowImport = False


@dataclass(frozen=True)
class Sums:
    """The sums of bits of a run or folder, by part and name of the tensor; see sum_of_bits. dtypes: of the weights.
    computations: of the run, with training.bit_equal."""

    where: str
    parts: Mapping[str, Mapping[str, int]]
    dtypes: Set[torch.dtype]
    computations: Sequence[Computation] = ()

    def __str__(self) -> str:
        found = [f"{part} {combine(sums, sums.values())}" for part, sums in self.parts.items() if sums]
        found += [f"computed by {computed_by(self.computations)}"] if self.computations else []
        return f"{', '.join(found)}  {self.where}"


def main(argv: Sequence[str]) -> None:
    """Print and compare the digests. Raises UserError."""
    options = read_options_of_stores(Options, argv, "digest")
    if not options.runs:
        raise UserError("no run: write titanlite digest RUN [RUN ...]")
    found = []
    for path in options.runs:
        found.append(sums_of(path, allow_import=options.allow_import))
        print_lines(str(found[-1]))
    differing = [line for other in found[1:] for line in differences(found[0], other)]
    absent = [line for other in found[1:] for line in missing(found[0], other)]
    computations = {each.id: each for sums in found for each in sums.computations}
    if len(computations) > 1:
        for each in computations.values():
            print_lines(f"{each.id}: {each}")
    if len(found) > 1:
        print_lines(*(differing or ["equal: all tensors that they have in common, bit for bit"]), *absent)
    sys.exit(bool(differing))


def sums_of(text: str, *, allow_import: bool) -> Sums:
    """Read the tensors of a run or folder. Raises UserError."""
    path = place(expand_home(text))
    if isinstance(path, Path) and (path / CONFIG_FILE).is_file():
        folder = open_folder(str(path), path)

        def fill(name: str) -> Tensor:
            tensor = torch.empty(folder.tensors[name].shape, dtype=folder.tensors[name].dtype)
            folder.fill_({name: tensor})
            return tensor

        dtypes = {folder.tensors[name].dtype for name in folder.tensors}
        return Sums(str(path), {"weights": _sums({name: partial(fill, name) for name in folder.tensors})}, dtypes)
    run = open_run(path, allow_import=allow_import)
    with torch.device("meta"):
        model = run.family.build(run.hyper_parameters)
    model.tie_weights()
    parameters = {name for name, _ in model.named_parameters()}

    stored = stored_shapes(run.path)
    parts = {}
    for part, prefix in PARTS.items():
        own = [name for name in stored if name.startswith(prefix)]
        if prefix == MODEL:
            own = [name for name in own if (name.removeprefix(prefix) in parameters) == (part == "weights")]
        parts[part] = {name.removeprefix(prefix): _sum(tensor) for name, tensor in stored_tensors(run.path, own)}
    return Sums(str(run.path), parts, {run.dtype}, run.manifest.computations)


def _sum(tensor: Tensor) -> int:
    return int(sum_of_bits(tensor, tensor.shape, (0,) * tensor.dim()))


def _sums(tensors: Mapping[str, Callable[[], Tensor]]) -> dict[str, int]:
    return {name: _sum(read()) for name, read in tensors.items()}


def differences(first: Sums, other: Sums) -> Iterable[str]:
    """A line for each part that both have, if any of its tensors differ."""
    if first.dtypes != other.dtypes:
        here, there = (", ".join(sorted(map(str, each.dtypes))) for each in (first, other))
        yield f"dtype: {here} in {first.where}, {there} in {other.where}: the same numbers have other bits"
        return
    for part, sums in first.parts.items():
        others = other.parts.get(part)
        if not sums or not others:
            continue
        names = [name for name in sorted({*sums, *others}) if sums.get(name) != others.get(name)]
        if names:
            more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
            shown = ", ".join([*names[:MOST_NAMES], *more])
            yield f"{part}: {len(names)} of {len({*sums, *others})} tensors of {other.where} differ: {shown}"


def missing(first: Sums, other: Sums) -> Iterable[str]:
    """A line for each part that only one of them has, such as an export, which has weights only."""
    for part in PARTS:
        having = [each for each in (first, other) if each.parts.get(part)]
        if len(having) == 1:
            yield f"{part}: only in {having[0].where}, not compared"


if __name__ == "__main__":
    run_command(main)
