"""Record of a run's last steps, in its dump folder: gradient norms by parameter, losses by sequence.

`titanlite replay` compares a step that it computes again with this record.
"""

import io
import json
import shlex
import zipfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import TypedDict

from titanlite.batch import StepStats
from titanlite.checkpoint.manifest import StoredConfig
from titanlite.data.preparation import Int64s
from titanlite.faults.replicas import is_replicated
from titanlite.models.family import copies_in, parameters_of
from titanlite.parallel.mesh import PARAMETER_AXES, Mesh
from titanlite.ranks.agreement import run_on_all_ranks
from titanlite.runtime.durability import replace_file
from titanlite.runtime.json_files import parse_json, read_regular
from titanlite.runtime.logging import log

RECORD_FOLDER = "records"
"""In the dump folder: a file per launch of the run."""

UNFINISHED = "unfinished.new"
"""Name of a file that is being written: always the same, so that a kill leaves at most one."""

RECORDED_STEPS = 100
"""Steps that a record keeps: the last ones of its launch."""

MAX_RECORDS = 8
"""Launches whose records are kept."""

MAX_BYTES = 2**30
"""Size above which a file is no record: 1,000 steps with 131,072 parameters and sequences."""


@dataclass(frozen=True)
class RecordedStep:
    """The numbers of one step.

    num_valid: valid tokens of the global batch. grad_norm: global norm before clipping. gradient_norms: norm of each
    parameter's gradient, over all shards. row_losses: the share of each sequence in the mean loss. first_sequence: the
    number in the run of the first of them.
    """

    step: int
    num_valid: int
    skipped: bool
    grad_norm: float
    gradient_norms: dict[str, float]
    row_losses: list[float]
    first_sequence: int


@dataclass(frozen=True)
class Record:
    """The record of one launch. about: what the launch was, see StepRecorder. steps: by number."""

    file: Path
    about: Mapping[str, Any]
    steps: Mapping[int, RecordedStep]


@dataclass(frozen=True)
class NotedStep:
    """A step whose numbers are still on the device. first_sequence: of all ranks. sequences, origins: of this rank, see
    Loader."""

    number: int
    stats: StepStats
    first_sequence: int
    sequences: Sequence[int]
    origins: Int64s


class StepRecorder:
    """Records the last `capacity` steps of this launch in a file, which rank 0 writes at log points.

    The file is in numpy's npz format. Arrays with a row per step: the fields of RecordedStep. `about`: UTF-8 of a JSON
    object with the names of the parameters and what describes the launch.

    model_parts, stages: this rank's parts, and the pipeline stage of each. sequences: per step. group: all ranks.
    counts_loss: whether this rank counts the loss of its rows. about: describes the launch, as JSON values.
    """

    def __init__(
        self,
        dump_folder: str,
        model_parts: Sequence[nn.Module],
        stages: Sequence[int],
        mesh: Mesh,
        group: dist.ProcessGroup,
        *,
        sequences: int,
        counts_loss: bool,
        about: Mapping[str, Any],
    ) -> None:
        parameters = parameters_of(model_parts)
        uncounted = copies_in(model_parts, mesh.coordinate["pp"])
        own: dict[int, list[str]] = {}
        for stage, part in zip(stages, model_parts, strict=True):
            own[stage] = [name for name, _ in part.named_parameters() if name not in uncounted]
            uncounted |= {*own[stage]}
        names = {stage: found for each in run_on_all_ranks(lambda: own, group) for stage, found in each.items()}
        begins, count = {}, 0
        for stage in sorted(names):
            begins[stage], count = count, count + len(names[stage])
        columns = {name: begins[stage] + index for stage in own for index, name in enumerate(own[stage])}
        # Ranks that hold the same shard have the same norm of it: the first of them counts.
        counted = [
            (position, columns[name])
            for position, (name, parameter) in enumerate(parameters.items())
            if name in columns
            and mesh.is_first(axis for axis in PARAMETER_AXES if axis != "pp" and is_replicated(parameter, axis))
        ]
        self._own, self._columns = torch.tensor(counted, dtype=torch.int64).view(-1, 2).unbind(1)
        self._shape = (count, sequences)
        self._counts_loss = counts_loss
        self._group = group
        self._rows: deque[dict[str, Tensor]] = deque(maxlen=RECORDED_STEPS)
        self.replay_command = f"titanlite replay {shlex.quote(dump_folder)} --step"
        """Without the number of the step."""
        self._file: Path | None = None
        if group.rank() == 0:
            self._file = Path(dump_folder, RECORD_FOLDER, f"{datetime.now():%Y%m%d-%H%M%S-%f}.npz")
        everything = [name for stage in sorted(names) for name in names[stage]]
        self._about = json.dumps({"parameters": everything, **about}).encode()

    def write(self, steps: Sequence[NotedStep]) -> None:
        """Add steps to the record. A collective over all ranks: two all-reduces, however many steps. Waits for the
        device. A file that cannot be written is reported once; training continues without a record."""
        steps = steps[-RECORDED_STEPS:]
        if not steps:
            return
        stats = [step.stats for step in steps]
        num_parameters, num_sequences = self._shape
        device = stats[0].shard_norms.device
        norms = torch.zeros(len(steps), num_parameters, dtype=torch.float64, device=device)
        own = torch.stack([each.shard_norms for each in stats])
        norms[:, self._columns.to(device)] = own[:, self._own.to(device)] ** 2
        losses = torch.zeros(len(steps), num_sequences, dtype=torch.float64, device=device)
        if self._counts_loss:
            for row, step in zip(losses, steps, strict=True):
                own = torch.tensor(step.sequences, dtype=torch.int64) - step.first_sequence
                row[own.to(device)] = step.stats.row_losses.double()
        dist.all_reduce(norms, group=self._group)
        dist.all_reduce(losses, group=self._group)
        if self._file is None:
            return
        scalars = [
            torch.stack([number.double() for number in (each.num_valid, each.skipped, each.grad_norm)])
            for each in stats
        ]
        values = torch.cat([torch.stack(scalars), norms.sqrt(), losses], dim=1).cpu()  # one transfer
        columns = {
            "step": torch.tensor([step.number for step in steps]),
            "first_sequence": torch.tensor([step.first_sequence for step in steps]),
            "num_valid": values[:, 0].long(),
            "skipped": values[:, 1].bool(),
            "grad_norm": values[:, 2],
            "gradient_norms": values[:, 3 : 3 + num_parameters],
            "row_losses": values[:, 3 + num_parameters :],
        }
        self._rows += [{name: column[index] for name, column in columns.items()} for index in range(len(steps))]
        try:
            self._write_file()
        except OSError as error:
            log.warning("The record of steps is not written any more: %s: %s", self._file, error.strerror)
            self._file = None

    def _write_file(self) -> None:
        """Replace the file. Not synced: its loss in a power failure does no harm."""
        assert self._file is not None
        if not self._file.parent.is_dir():
            self._file.parent.mkdir()
        for old in sorted(self._file.parent.glob("*.npz"))[:-MAX_RECORDS]:
            old.unlink()
        arrays: dict[str, Any] = {"about": np.frombuffer(self._about, np.uint8)}
        arrays |= {name: torch.stack([row[name] for row in self._rows]).numpy() for name in self._rows[0]}
        content = io.BytesIO()
        np.savez(content, **arrays)
        replace_file(self._file, content.getvalue(), self._file.with_name(UNFINISHED), synced=False)


def read_records(dump_folder: Path) -> list[Record]:
    """The records of a run's latest launches, the latest first. A file that cannot be read is reported, and left
    out."""
    records = []
    for file in sorted((dump_folder / RECORD_FOLDER).glob("*.npz"), reverse=True)[: MAX_RECORDS + 1]:
        try:
            records.append(_read_record(file))
        except Exception as error:  # numpy and zipfile raise errors of many kinds
            log.warning("%s is not a record of steps: %s", file, error)
    return records


class _About(TypedDict):
    """Schema of `about` in a record."""

    parameters: list[str]
    config: StoredConfig
    code: dict[str, str]
    world_size: int
    device: str


_COLUMNS = {
    "step": (np.int64, 1),
    "first_sequence": (np.int64, 1),
    "num_valid": (np.int64, 1),
    "skipped": (np.bool_, 1),
    "grad_norm": (np.float64, 1),
    "gradient_norms": (np.float64, 2),
    "row_losses": (np.float64, 2),
}
"""Type and number of dimensions of each array of a record but `about`."""


def _read_record(file: Path) -> Record:
    content = io.BytesIO(read_regular(file, MAX_BYTES))
    with zipfile.ZipFile(content) as checked:
        # np.savez does not compress.
        if sum(member.file_size for member in checked.infolist()) > content.getbuffer().nbytes:
            raise ValueError("its arrays are larger than it")
        if checked.testzip() is not None:
            raise ValueError("its checksums do not match")
    content.seek(0)
    with np.load(content, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    about = parse_json(arrays.pop("about").tobytes(), _About)
    names = about.pop("parameters")
    if {name: (array.dtype.type, array.ndim) for name, array in arrays.items()} != _COLUMNS:
        raise ValueError("its arrays have other names, types or dimensions than those of steps")
    steps = {}
    for row in range(len(arrays["step"])):
        values = {name: column[row].tolist() for name, column in arrays.items()}
        values["gradient_norms"] = dict(zip(names, values["gradient_norms"], strict=True))
        steps[values["step"]] = RecordedStep(**values)
    return Record(file, about, steps)
