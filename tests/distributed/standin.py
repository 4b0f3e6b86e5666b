"""Stand-in for a training run: real checkpoints, values that depend on step and branch only."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed.forked import logged, on_ranks
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.manager import Checkpoints
from titanlite.checkpoint.start import RunFacts, StartFinder
from titanlite.checkpoint.state import STREAMS
from titanlite.metrics.meter import MeterState
from titanlite.ranks.signals import StopRequest
from titanlite.runtime.torch_internals import local_part

SHAPES = {"model/weight": (7, 3), "model/norm": (5,), "optimizer/weight/exp_avg": (7, 3), "optimizer/weight/step": ()}
SHARDED = ("model/weight", "optimizer/weight/exp_avg")
NUM_STREAMS = 4


def content(name: str, step: int, branch: str) -> Tensor:
    """Value of a tensor after `step`. All elements differ between steps and between branches."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step} {branch}".encode()))
    if name == STREAMS:
        return torch.randint(2**40, (NUM_STREAMS, 3), generator=generator)
    return torch.randn(SHAPES[name], generator=generator)


class StandIn:
    """Stand-in for RunState and Meter."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._tensors = {
            name: distribute_tensor(torch.zeros(shape), mesh, [Shard(0)], src_data_rank=None)
            if name in SHARDED
            else torch.zeros(shape)
            for name, shape in SHAPES.items()
        }
        self._streams = torch.zeros(NUM_STREAMS, 3, dtype=torch.int64)
        self._counts = MeterState(0, 0)
        self._mesh = mesh

    def update_to(self, step: int, branch: str) -> None:
        """Set the values of `step` in place, as training does."""
        for name, tensor in self._tensors.items():
            local_part(tensor).copy_(self._own(name, step, branch))
        self._streams.copy_(content(STREAMS, step, branch))
        self._counts = MeterState(100 * step + len(branch), 0)

    def matches(self, step: int, branch: str) -> bool:
        """Whether all values on this rank are those of `step`, bit for bit."""
        return (
            all(local_part(t).equal(self._own(name, step, branch)) for name, t in self._tensors.items())
            and self._streams.equal(content(STREAMS, step, branch))
            and self._counts == MeterState(100 * step + len(branch), 0)
        )

    def _own(self, name: str, step: int, branch: str) -> Tensor:
        full = content(name, step, branch)
        if name not in SHARDED:
            return full
        return local_part(distribute_tensor(full, self._mesh, [Shard(0)], src_data_rank=None))

    def poison(self) -> None:
        local_part(self._tensors["optimizer/weight/exp_avg"]).fill_(float("nan"))

    def model(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._tensors.items() if name.startswith("model/")}

    def average(self) -> dict[str, Tensor]:
        return {}

    def restart_average(self) -> None:
        pass

    def model_and_optimizer(self) -> dict[str, Tensor]:
        return dict(self._tensors)

    def streams(self, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG002
        return self._streams.clone()

    def recent(self) -> dict[str, Tensor]:
        return {}

    def digest(self) -> str:
        return ""

    def empty_streams(self, width: int | None = None) -> Tensor:
        assert width in (None, self._streams.shape[1])
        return torch.zeros_like(self._streams)

    def load_streams(self, state: Tensor, step: int) -> str:
        del step
        self._streams.copy_(state)
        return "some sequence"

    def num_bytes(self, group: dist.ProcessGroup) -> int:  # noqa: ARG002
        return 1000

    def state(self) -> MeterState:
        return self._counts

    def load_state(self, state: MeterState) -> None:
        self._counts = state


class Run:
    """A run on this rank: state, checkpoints and last finished step."""

    def __init__(self, folder: Path, steps: int = 1000, **section: Any) -> None:
        self.state = StandIn()
        control_group, saving_group = (dist.new_group(backend="gloo") for _ in range(2))
        finder = StartFinder(
            CheckpointConfig(enable=True, **{"interval": 1, "keep_latest_k": 0} | section),
            folder,
            self.state,  # type: ignore[arg-type]
            self.state,  # type: ignore[arg-type]
            RunFacts({}, {}, {}),
            steps,
            saving_group,
            lambda: None,
        )
        self.checkpoints = Checkpoints(finder, control_group, torch.device("cpu"), StopRequest(), lambda _: None)
        self.step = self.checkpoints.resume().step
        self.steps = steps

    def train(self, branch: str, steps: int, before_save: Callable[[int], None] | None = None) -> None:
        """Take steps with a save after each. Values change to those of the next step while the save still runs.

        before_save: called with the step before each save.
        """
        try:
            for _ in range(steps):
                self.step += 1
                self.state.update_to(self.step, branch)
                if before_save:
                    before_save(self.step)
                self.checkpoints.after_step(self.step, self.step == self.steps)
            self.state.update_to(self.step + 1, branch)
        finally:
            self.checkpoints.close()


def train_run(folder: Path, branch: str, steps: int) -> None:
    """Resume from the folder and train, as one process does."""
    Run(folder).train(branch, steps)


def save_steps(folder: Path, steps: int) -> None:
    """Train and save steps of branch "a" on two ranks."""
    on_ranks(train_run, 2, folder, "a", steps)


def starts(folders: list[Path], section: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Start a run in each folder. Returns for each: step and branch, or error (type and text); and log lines.

    branch: "" if values are mixed or no checkpoint was loaded. steps: then trained by each run, on branch "c".
    """
    found = []
    for folder in folders:
        logged().clear()
        try:
            run = Run(folder, **section)
            branch = next((b for b in "abc" if run.state.matches(run.step, b)), "")
            answer: dict[str, Any] = {"step": run.step, "branch": branch}
            lines = list(logged())
            run.train("c", steps)
        except (Exception, dcp.CheckpointException) as error:
            answer = {"error": [type(error).__name__, str(error)]}
            lines = list(logged())
        found.append(answer | {"lines": lines})
    return found


BATCH = 20
"""Maximum number of runs in one process: process groups of each run keep threads until the process ends."""


def start_in(folders: list[Path], section: dict[str, Any] | None = None, steps: int = 0) -> list[list[dict[str, Any]]]:
    """Results of `starts` by folder and rank."""
    found = []
    for first in range(0, len(folders), BATCH):
        by_rank = on_ranks(starts, 2, folders[first : first + BATCH], section or {}, steps)
        found += [list(answers) for answers in zip(*by_rank, strict=True)]
    return found
