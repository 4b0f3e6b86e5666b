"""Faults of all kinds, one after the other, at random moments of one run of the program that nobody attends to."""

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

from tests.distributed.program import PATIENCE_S, TORCHRUN, Program, Starter
from tests.distributed.recovered import saved_steps, start_saving, starts, stopped, trained_steps
from titanlite.checkpoint.folder import published_steps, step_folder
from titanlite.checkpoint.manifest import MANIFEST_FILE

START = "Job: "
INTERVAL = 3
GONE_S = 5.0
RESTARTS = 1000
SETTINGS = (
    *("--checkpoint.interval", str(INTERVAL)),
    *("--checkpoint.keep_latest_k", "3"),
    *("--checkpoint.on_save_error", "continue"),
)
LAUNCHER = (*TORCHRUN, "--max-restarts", str(RESTARTS), "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
ASYNC_MODES = ("async", "disabled")
LESS_THAN_A_SHARD = 200_000
"""Bytes; more than the log and the metrics of the longest run."""


@dataclass(frozen=True)
class Mesh:
    """What a start runs on."""

    ranks: int
    arguments: tuple[str, ...]


@dataclass
class Chaos:
    """A run with its faults. meshes: of its starts, in turn. said: of all programs that have ended, one text each."""

    start: Starter
    workplace: Path
    steps: int
    random: Random
    meshes: Sequence[Mesh]
    said: list[str] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    """Steps whose checkpoints were."""
    program: Program | None = None
    expected: int = 0
    """The step from which the start that runs, or is next, has to go on."""

    @property
    def folder(self) -> Path:
        return self.workplace / "out" / "checkpoint"

    def go_on(self) -> Program:
        """The program; started where it does not run."""
        if self.program is None:
            number = len(self.said)
            mesh = self.meshes[number % len(self.meshes)]
            self.program = start_saving(
                self.start,
                self.workplace,
                *SETTINGS,
                *("--checkpoint.async_mode", ASYNC_MODES[number % 2]),
                *("--training.steps", str(self.steps)),
                *mesh.arguments,
                ranks=mesh.ranks,
                launcher=LAUNCHER,
                name=f"output{number}",
            )
        return self.program

    def ended(self) -> str:
        """After the program has ended: what it said. It began where it had to, and nothing of it is left."""
        program, self.program = self.program, None
        assert program is not None
        program.wait()
        end = time.monotonic() + GONE_S
        while program.processes():
            assert time.monotonic() < end, program.processes()
            time.sleep(0.02)
        self.said.append(program.output)
        assert starts(program.output)[0] == self.expected, program.output
        return program.output

    def wait_until(self, condition: Callable[[], bool]) -> None:
        program = self.go_on()
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert program.process.poll() is None, program.output
            assert time.monotonic() < end, program.output
            time.sleep(0.005)

    def wait_for_step(self, step: int) -> None:
        """Until this start trains, and has come so far; then a moment longer, every other time to be in a save."""

        def has_come() -> bool:
            trained = trained_steps(self.go_on().output.split(START)[-1])
            return bool(trained) and trained[-1] >= step

        self.wait_until(has_come)
        if self.random.random() < 0.5:
            self.wait_until(lambda: any(self.folder.glob(".step-*.writing")))
        time.sleep(self.random.uniform(0.0, 0.2))

    def some_rank(self) -> int:
        """Process of a rank."""
        return self.random.choice(sorted(self.go_on().ranks().values()))

    def published(self) -> list[int]:
        return published_steps(self.folder)


Fault = Callable[[Chaos], None]


def kill_a_rank(chaos: Chaos) -> None:
    """torchrun starts all of them again."""
    begun = chaos.go_on().output.count(START)
    os.kill(chaos.some_rank(), signal.SIGKILL)
    chaos.wait_until(lambda: chaos.go_on().output.count(START) > begun)


def kill_torchrun(chaos: Chaos) -> None:
    newest = max([0, *chaos.published()])
    chaos.go_on().process.kill()
    chaos.ended()
    assert newest <= max([0, *chaos.published()])
    chaos.expected = max([0, *chaos.published()])


def signalled(number: signal.Signals, *, torchrun: bool) -> Fault:
    def fault(chaos: Chaos) -> None:
        program = chaos.go_on()
        os.kill(program.process.pid if torchrun else chaos.some_rank(), number)
        said = chaos.ended()
        assert program.wait() == (1 if torchrun else 0), said
        ((name, step),) = stopped(said)
        assert name == number.name
        assert chaos.published()[-1] == step
        chaos.expected = step

    return fault


def damaged(damage: Callable[[Path, Random], None]) -> Fault:
    """The newest checkpoint, while nothing runs. There is another one to go on from."""

    def fault(chaos: Chaos) -> None:
        chaos.wait_until(lambda: len(chaos.published()) >= 2)
        chaos.go_on().process.kill()
        chaos.ended()
        *_, chaos.expected, newest = chaos.published()
        damage(step_folder(chaos.folder, newest), chaos.random)
        chaos.damaged.append(newest)

    return fault


def a_file_of(path: Path, random: Random) -> Path:
    return random.choice([file for file in sorted(path.iterdir()) if file.name != MANIFEST_FILE])


def flip(path: Path, random: Random) -> None:
    file = a_file_of(path, random)
    data = bytearray(file.read_bytes())
    bit = random.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def truncate(path: Path, random: Random) -> None:
    file = a_file_of(path, random)
    os.truncate(file, random.randrange(file.stat().st_size))


def delete_file(path: Path, random: Random) -> None:
    a_file_of(path, random).unlink()


def delete_manifest(path: Path, random: Random) -> None:  # noqa: ARG001
    (path / MANIFEST_FILE).unlink()


def leave_half_a_save(chaos: Chaos) -> None:
    """A folder with the name of the next save, as from a machine that has lost its power in it."""
    kill_torchrun(chaos)
    newest = chaos.published()[-1] if chaos.published() else 0
    half = chaos.folder / f".step-{newest + INTERVAL}.writing"
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(chaos.random.randbytes(1000))
    (half / "__9_0.distcp").touch()


def fill_disk(chaos: Chaos) -> None:
    """For one rank: a save fails on all, training goes on, and a later save is there again."""
    rank = chaos.some_rank()
    said = len(chaos.go_on().output)
    limits = resource.prlimit(rank, resource.RLIMIT_FSIZE, (LESS_THAN_A_SHARD, resource.RLIM_INFINITY))
    chaos.wait_until(lambda: "could not be saved" in chaos.go_on().output[said:])
    failed = len(chaos.go_on().output)
    resource.prlimit(rank, resource.RLIMIT_FSIZE, limits)
    chaos.wait_until(lambda: saved_steps(chaos.go_on().output[failed:]) != [])
    assert re.search(r"step \d+ could not be saved: rank \d.*File too large.*; training goes on", chaos.go_on().output)


STOPPED = {
    "SIGTERM to torchrun": signalled(signal.SIGTERM, torchrun=True),
    "SIGTERM to a rank": signalled(signal.SIGTERM, torchrun=False),
    "SIGUSR1 to a rank": signalled(signal.SIGUSR1, torchrun=False),
    "SIGINT to a rank": signalled(signal.SIGINT, torchrun=False),
}
DAMAGED = {
    "a flipped bit": damaged(flip),
    "a truncated file": damaged(truncate),
    "a deleted file": damaged(delete_file),
    "a deleted manifest": damaged(delete_manifest),
}
FAULTS: dict[str, Fault] = {
    "a killed rank": kill_a_rank,
    "a killed torchrun": kill_torchrun,
    "a full disk": fill_disk,
    "half a save": leave_half_a_save,
    **STOPPED,
    **DAMAGED,
}


def survive(chaos: Chaos, names: Sequence[str]) -> None:
    """The faults in this order, spread over the run, which then comes to its end."""
    slot = chaos.steps / (len(names) + 1)
    for number, name in enumerate(names):
        chaos.wait_for_step(round(slot * (number + chaos.random.uniform(0.3, 1.0))))
        FAULTS[name](chaos)
    program = chaos.go_on()
    said = chaos.ended()
    assert program.wait() == 0, said
    assert said.count("Done: ") == 1
    found = [int(step) for text in chaos.said for step in re.findall(r"Checkpoint step-(\d+) is damaged: ", text)]
    assert found == chaos.damaged


def assert_gone_on_each_time(said: Sequence[str]) -> None:
    """Each start, also those by torchrun, from a checkpoint, and never from one that is newer than what was trained."""
    trained = 0
    for part in (part for text in said for part in text.split(START)[1:]):
        (begin,) = starts(part)
        assert begin <= trained, part
        assert trained_steps(part)[:1] == [begin + 1], part
        trained = max([begin, *trained_steps(part)])
