"""How often `titanlite compare` errs: pairs of runs without a mistake, and with known mistakes.

With -s, prints the table of docs/reproducing.md.
"""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
import torch

import titanlite
from tests.distributed.layouts import Layout
from tests.distributed.mistakes import CP, MISTAKES, PP, REPLICATE, SHARD, TP
from tests.distributed.program import CONFIG, TRAIN, Starter
from titanlite.config.files import CONFIG_FILE
from titanlite.config.load import check_and_resolve, parse
from titanlite.parallel.mesh import AXES
from titanlite.tools.compare.envelope import FACTOR, Compared, compare, first_outside
from titanlite.tools.compare.measure import Pairs, Trained, differences
from titanlite.tools.compare.repeats import repeats_of

STEPS, REPEATS, RUNS = 20, 4, 12
PLANTED = (str(Path(__file__).with_name("planted_train.py")),)
CONFIGURATIONS = {
    "AdamW": (),
    "AdamW, lr 0.03": ("--optimizer.lr=0.03",),
    "Muon": ("--optimizer.name=Muon",),
    "bfloat16": ("--training.mixed_precision_param=bfloat16",),
}
SETTINGS = ("--training.dtype=float32", f"--training.steps={STEPS}", "--checkpoint.enable", "--checkpoint.interval=5")


def compared(pairs: Pairs, one: int, other: int, repeats: Sequence[int]) -> list[Compared]:
    return compare(
        pairs[one, other], [pairs[pair] for pair in combinations(repeats, 2)], torch.finfo(torch.float32).eps
    )


def repeats(folder: Path, settings: Sequence[str], count: int) -> list[Trained]:
    (folder / "config.toml").write_text(CONFIG)
    parsed = parse([f"--{CONFIG_FILE}={folder / 'config.toml'}", *settings])
    runs = repeats_of(check_and_resolve(parsed.config, world_size=1, device_type="cpu"), folder, count, STEPS, 1, "cpu")
    for run in runs:
        titanlite.run(run.config)
    return [Trained(run.folder, run.folder / "checkpoint") for run in runs]


@pytest.mark.soak
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_runs_without_a_mistake_are_within(name: str, tmp_path: Path) -> None:
    runs = repeats(tmp_path, (*SETTINGS, *CONFIGURATIONS[name]), RUNS)
    pairs = differences(runs, STEPS, allow_import=False)
    needed = []
    for one, other in combinations(range(RUNS - REPEATS), 2):
        found = compared(pairs, one, other, range(RUNS - REPEATS, RUNS))
        needed.append(max(FACTOR * each.difference / each.allowed for each in found))
    print(f"| {name} | {len(needed)} | {sum(each > FACTOR for each in needed)} | {max(needed):.1f} |")
    assert max(needed) <= FACTOR


@pytest.mark.soak
def test_known_mistakes_are_outside(start: Starter, tmp_path: Path) -> None:
    runs = repeats(tmp_path, SETTINGS, REPEATS + 1)
    right: dict[Layout, Trained] = {}
    wrong_verdicts = []

    def train(layout: Layout, name: str, number: int = -1) -> Trained | None:
        axes = [f"--parallelism.{axis}={degree}" for axis, degree in zip(AXES, layout.degrees, strict=True)]
        own = [*SETTINGS, *axes, *(f"--{text}" for text in layout.settings), "--training.local_batch_size=4"]
        program = TRAIN if number == -1 else PLANTED
        arguments, environment = ["--job.dump_folder", str(tmp_path / name), *own], {"MISTAKE": str(number)}
        started = start(tmp_path, *arguments, ranks=layout.world_size, program=program, environment=environment)
        return None if started.wait() else Trained(tmp_path / name, tmp_path / name / "checkpoint")

    def outside(trained: Trained) -> Compared | None:
        pairs = differences([*runs, trained], STEPS, allow_import=False)
        return first_outside(compared(pairs, 0, len(runs), range(1, len(runs))))

    for number, mistake in enumerate(MISTAKES):
        layout = mistake.layout
        if layout not in (SHARD, REPLICATE, TP, CP, PP) or mistake.documents or ".float()" in mistake.name:
            continue
        if layout not in right:
            found = train(layout, f"right-{number}")
            assert found is not None
            right[layout] = found
            assert outside(found) is None
        wrong = train(layout, f"wrong-{number}", number)
        if wrong is None:
            continue  # it ends with an error
        between = differences([right[layout], wrong], STEPS, allow_import=False)[0, 1]
        if not any(each for by_step in between.values() for each in by_step.values()):
            continue  # without effect: all tokens of these data are valid
        first = outside(wrong)
        shown = "missed" if first is None else f"{first.step} | {first.name} | {first.difference:.1e}"
        print(f"| {mistake.name} | {layout.name} | {shown} |", flush=True)
        if first is None:
            wrong_verdicts.append(mistake.name)
    assert wrong_verdicts == []
