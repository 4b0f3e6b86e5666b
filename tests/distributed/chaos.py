"""Faults of all kinds, injected one after another at random times into one unattended run."""

import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.distributed.faulty_train import ORDER_FILE
from tests.distributed.program import FAULTY, TORCHRUN, Program, Starter
from tests.distributed.recovered import saved_steps, start_saving, starts, stopped, trained_steps
from titanlite.checkpoint.folder import published_steps, step_folder
from titanlite.checkpoint.manifest import MANIFEST_FILE
from titanlite.metrics.config import METRICS_FILE

START = "Job: "
INTERVAL = 3
GONE_S = 5.0
RESTARTS = 1000
SETTINGS = (
    *("--checkpoint.interval", str(INTERVAL)),
    *("--checkpoint.keep_latest_k", "3"),
    *("--checkpoint.on_save_error", "continue"),
    *("--faults.max_skipped_steps", "0"),
    *("--faults.check_replicas_every", "1"),
    *("--comm.train_timeout_s", "20"),
    *("--comm.save_timeout_s", "20"),
)
LAUNCHER = (*TORCHRUN, "--max-restarts", str(RESTARTS), "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
ASYNC_MODES = ("async", "disabled")
LESS_THAN_A_SHARD = 200_000
"""Bytes; more than the log and the metrics of the longest run."""


@dataclass(frozen=True)
class Mesh:
    """Ranks and arguments of a start."""

    ranks: int
    arguments: tuple[str, ...]


@dataclass
class Chaos:
    """A run with injected faults. meshes: used by its starts in turn. outputs: one text per ended program."""

    start: Starter
    workplace: Path
    steps: int
    random: Random
    meshes: Sequence[Mesh]
    outputs: list[str] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    """Steps of damaged checkpoints."""
    program: Program | None = None
    expected: int = 0
    """Step from which the current or next start must resume."""

    @property
    def folder(self) -> Path:
        return self.workplace / "out" / "checkpoint"

    def ensure_running(self) -> Program:
        """Return the program; start it if it is not running."""
        if self.program is None:
            number = len(self.outputs)
            mesh = self.meshes[number % len(self.meshes)]
            self.program = start_saving(
                self.start,
                self.workplace,
                *SETTINGS,
                *("--checkpoint.async_mode", ASYNC_MODES[number % 2]),
                *("--training.steps", str(self.steps)),
                *mesh.arguments,
                ranks=mesh.ranks,
                program=FAULTY,
                environment={"FAULT": "orders", "FAULTY_RANK": "all"},
                launcher=LAUNCHER,
                name=f"output{number}",
            )
        return self.program

    def wait_for_end(self) -> str:
        """Wait for the program; check its start step and that no process is left; return its output."""
        program, self.program = self.program, None
        assert program is not None
        program.wait()
        program.wait_until_gone(GONE_S)
        self.outputs.append(program.output)
        assert starts(program.output)[0] == self.expected, program.output
        return program.output

    def wait_until(self, condition: Callable[[], bool]) -> None:
        self.ensure_running().wait_until(condition)

    def wait_for_step(self, step: int) -> None:
        """Wait until this start has trained `step`, in half of the cases until a save runs, and up to 0.2 s more."""

        def reached() -> bool:
            trained = trained_steps(self.ensure_running().output.split(START)[-1])
            return bool(trained) and trained[-1] >= step

        self.wait_until(reached)
        if self.random.random() < 0.5:
            self.wait_until(lambda: any(self.folder.glob(".step-*.writing")))
        time.sleep(self.random.uniform(0.0, 0.2))

    def some_rank(self) -> int:
        """PID of a random rank."""
        return self.random.choice(sorted(self.ensure_running().ranks().values()))

    def published(self) -> list[int]:
        return published_steps(self.folder)


Fault = Callable[[Chaos], None]


def kill_a_rank(chaos: Chaos) -> None:
    """Kill a rank; torchrun restarts all ranks."""
    begun = chaos.ensure_running().output.count(START)
    os.kill(chaos.some_rank(), signal.SIGKILL)
    chaos.wait_until(lambda: chaos.ensure_running().output.count(START) > begun)


def kill_torchrun(chaos: Chaos) -> None:
    latest = max([0, *chaos.published()])
    chaos.ensure_running().process.kill()
    chaos.wait_for_end()
    assert latest <= max([0, *chaos.published()])
    chaos.expected = max([0, *chaos.published()])


def signaled(number: signal.Signals, *, torchrun: bool) -> Fault:
    def fault(chaos: Chaos) -> None:
        program = chaos.ensure_running()
        os.kill(program.process.pid if torchrun else chaos.some_rank(), number)
        output = chaos.wait_for_end()
        assert program.wait() == (1 if torchrun else 0), output
        ((name, step),) = stopped(output)
        assert name == number.name
        assert chaos.published()[-1] == step
        chaos.expected = step

    return fault


def damaged(damage: Callable[[Path, Random], None]) -> Fault:
    """Damage the latest checkpoint while no program runs; an earlier checkpoint exists."""

    def fault(chaos: Chaos) -> None:
        chaos.wait_until(lambda: len(chaos.published()) >= 2)
        chaos.ensure_running().process.kill()
        chaos.wait_for_end()
        *_, chaos.expected, latest = chaos.published()
        damage(step_folder(chaos.folder, latest), chaos.random)
        chaos.damaged.append(latest)

    return fault


def flip(path: Path, random: Random) -> None:
    file = random.choice([file for file in sorted(path.iterdir()) if file.name != MANIFEST_FILE])
    data = bytearray(file.read_bytes())
    bit = random.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def delete_manifest(path: Path, random: Random) -> None:  # noqa: ARG001
    (path / MANIFEST_FILE).unlink()


def planted(order: str, message: str) -> Fault:
    """Give an order to the program's last rank, see faulty_train.py. All ranks stop with `message`; torchrun restarts
    them."""

    def fault(chaos: Chaos) -> None:
        before = chaos.ensure_running().output
        (chaos.workplace / ORDER_FILE).write_text(order)
        chaos.wait_until(lambda: chaos.ensure_running().output.count(START) > before.count(START))
        assert message in chaos.ensure_running().output[len(before) :]

    return fault


def stop_a_rank(chaos: Chaos) -> None:
    """Stop a rank, which then hangs: another one names it, and torchrun restarts all ranks."""
    before, ranks = chaos.ensure_running().output, chaos.ensure_running().ranks()
    rank, pid = chaos.random.choice(sorted(ranks.items()))
    os.kill(pid, signal.SIGSTOP if len(ranks) > 1 else signal.SIGKILL)  # no other rank notices a single one that hangs
    chaos.wait_until(lambda: chaos.ensure_running().output.count(START) > before.count(START))
    if len(ranks) > 1:
        assert re.search(rf"titanlite: rank {rank} ", chaos.ensure_running().output[len(before) :])


def start_a_second_job(chaos: Chaos) -> None:
    """Start another job in the same dump folder: it is refused, and the run continues."""
    chaos.ensure_running()
    second = start_saving(chaos.start, chaos.workplace, *SETTINGS, ranks=1, name="second")
    assert second.wait() == 1, second.output
    assert "another job" in second.output


def write_garbage_into_metrics(chaos: Chaos) -> None:
    kill_torchrun(chaos)
    with (chaos.workplace / "out" / METRICS_FILE).open("ab") as file:
        file.write(b'{"step": 1, "loss": \0\xff\n[1]\n{"step": "x"}\n')


def leave_half_a_save(chaos: Chaos) -> None:
    """Leave an incomplete folder of the next save, as after a power failure."""
    kill_torchrun(chaos)
    latest = chaos.published()[-1] if chaos.published() else 0
    half = chaos.folder / f".step-{latest + INTERVAL}.writing"
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(chaos.random.randbytes(1000))
    (half / "__9_0.distcp").touch()


def fill_disk(chaos: Chaos) -> None:
    """Limit the file size of one rank: a save fails on all ranks, training continues, a later save succeeds."""
    rank = chaos.some_rank()
    before = len(chaos.ensure_running().output)
    limits = resource.prlimit(rank, resource.RLIMIT_FSIZE, (LESS_THAN_A_SHARD, resource.RLIM_INFINITY))
    chaos.wait_until(lambda: "cannot save step" in chaos.ensure_running().output[before:])
    failed = len(chaos.ensure_running().output)
    resource.prlimit(rank, resource.RLIMIT_FSIZE, limits)
    chaos.wait_until(lambda: saved_steps(chaos.ensure_running().output[failed:]) != [])
    message = r"cannot save step \d+: rank \d.*File too large.*; training continues"
    assert re.search(message, chaos.ensure_running().output)


STOPPED = {
    "SIGTERM to torchrun": signaled(signal.SIGTERM, torchrun=True),
    "SIGTERM to a rank": signaled(signal.SIGTERM, torchrun=False),
    "SIGUSR1 to a rank": signaled(signal.SIGUSR1, torchrun=False),
    "SIGINT to a rank": signaled(signal.SIGINT, torchrun=False),
}
DAMAGED = {"a flipped bit": damaged(flip), "a deleted manifest": damaged(delete_manifest)}
FULL_DISK = "a full disk"
REPLICA = "a drifted replica"
FAULTS: dict[str, Fault] = {
    "a killed rank": kill_a_rank,
    "a killed torchrun": kill_torchrun,
    FULL_DISK: fill_disk,
    "half a save": leave_half_a_save,
    "a stopped rank": stop_a_rank,
    "a second job": start_a_second_job,
    "garbage in the metrics": write_garbage_into_metrics,
    "a loss that is not finite": planted("nan", "loss that is not finite: rank "),
    REPLICA: planted("flip", "ranks that must hold the same values hold different ones"),
    **STOPPED,
    **DAMAGED,
}


def survive(chaos: Chaos, names: Sequence[str]) -> None:
    """Inject the faults in this order, spread over the first 0.8 of the run, and wait for the end of the run."""
    slot = 0.8 * chaos.steps / (len(names) + 1)
    for number, name in enumerate(names):
        chaos.wait_for_step(round(slot * (number + chaos.random.uniform(0.3, 1.0))))
        FAULTS[name](chaos)
    program = chaos.ensure_running()
    output = chaos.wait_for_end()
    assert program.wait() == 0, output
    assert output.count("Done: ") == 1
    found = [int(step) for text in chaos.outputs for step in re.findall(r"Checkpoint step-(\d+) is corrupted: ", text)]
    assert found == chaos.damaged


def assert_resumed_each_time(chaos: Chaos) -> None:
    """Check that each start, also by torchrun, resumes from a trained step, and loses no save that is not damaged."""
    saved, trained = 0, 0
    for part in (part for text in chaos.outputs for part in text.split(START)[1:]):
        (begin,) = starts(part)
        assert begin <= trained, part
        assert saved <= begin or chaos.damaged, part
        assert trained_steps(part)[:1] == [begin + 1], part
        saved, trained = max([begin, *saved_steps(part)]), max([begin, *trained_steps(part)])
