"""How often `titanlite compare` errs: pairs of runs without a mistake, and with known mistakes.

With -s, prints the table of docs/reproducing.md.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import titanlite
from tests.distributed.layouts import Layout
from tests.distributed.mistakes import CP, MISTAKES, PP, REPLICATE, SHARD, TP, changed
from tests.distributed.program import CONFIG, TRAIN, Starter
from titanlite.config.files import CONFIG_FILE
from titanlite.config.load import check_and_resolve, parse
from titanlite.config.schema import JobConfig
from titanlite.models.family import parameters_of
from titanlite.models.head import CrossEntropy
from titanlite.parallel.mesh import AXES
from titanlite.tools.compare.envelope import FACTOR, Compared, compare, first_outside
from titanlite.tools.compare.measure import Pairs, Trained, differences
from titanlite.tools.compare.repeats import repeats_of
from titanlite.tools.sweep.combinations import Run
from titanlite.trainer import Trainer

Plant = Callable[[JobConfig, float], tuple[JobConfig, AbstractContextManager[None]]]
"""(configuration, size) -> the configuration with a mistake that multiplies something by 1 + size, and a context."""
STEPS, REPEATS, RUNS = 20, 4, 12
PLANTED = (str(Path(__file__).with_name("planted_train.py")),)
CONFIGURATIONS = {
    "AdamW": (),
    "AdamW, lr 0.03": ("--optimizer.lr=0.03",),
    "Muon": ("--optimizer.name=Muon",),
    "bfloat16": ("--training.mixed_precision_param=bfloat16",),
}


def settings(steps: int) -> list[str]:
    interval = f"--checkpoint.interval={steps // 4}"
    return ["--training.dtype=float32", f"--training.steps={steps}", "--checkpoint.enable", interval]


def compared(pairs: Pairs, one: int, other: int, repeats: Sequence[int]) -> list[Compared]:
    return compare(
        pairs[one, other], [pairs[pair] for pair in combinations(repeats, 2)], torch.finfo(torch.float32).eps
    )


def repeats(folder: Path, name: str, count: int, steps: int = STEPS) -> Sequence[Run]:
    (folder / "config.toml").write_text(CONFIG)
    parsed = parse([f"--{CONFIG_FILE}={folder / 'config.toml'}", *settings(steps), *CONFIGURATIONS[name]])
    config = check_and_resolve(parsed.config, world_size=1, device_type="cpu")
    return repeats_of(config, folder, count, steps, 1, "cpu")


def train(config: JobConfig) -> Trained:
    folder = titanlite.run(config).folder
    return Trained(folder, folder / "checkpoint")


@pytest.mark.soak
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_runs_without_a_mistake_are_within(name: str, tmp_path: Path) -> None:
    runs = [train(run.config) for run in repeats(tmp_path, name, RUNS)]
    pairs = differences(runs, STEPS, allow_import=False)
    needed = []
    for one, other in combinations(range(RUNS - REPEATS), 2):
        found = compared(pairs, one, other, range(RUNS - REPEATS, RUNS))
        needed.append(max(FACTOR * each.difference / each.allowed for each in found))
    print(f"| {name} | {len(needed)} | {sum(each > FACTOR for each in needed)} | {max(needed):.1f} |")
    assert max(needed) <= FACTOR


@pytest.mark.soak
def test_known_mistakes_are_outside(start: Starter, tmp_path: Path) -> None:
    runs = [train(run.config) for run in repeats(tmp_path, "AdamW", REPEATS + 1)]
    right: dict[Layout, Trained] = {}
    wrong_verdicts = []

    def train_on(layout: Layout, name: str, number: int = -1) -> Trained | None:
        axes = [f"--parallelism.{axis}={degree}" for axis, degree in zip(AXES, layout.degrees, strict=True)]
        own = [*settings(STEPS), *axes, *(f"--{text}" for text in layout.settings), "--training.local_batch_size=4"]
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
            found = train_on(layout, f"right-{number}")
            assert found is not None
            right[layout] = found
            assert outside(found) is None
        wrong = train_on(layout, f"wrong-{number}", number)
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


def scaled_setting(key: str) -> Plant:
    def plant(config: JobConfig, size: float) -> tuple[JobConfig, AbstractContextManager[None]]:
        section = replace(config.optimizer, **{key: getattr(config.optimizer, key) * (1 + size)})
        return replace(config, optimizer=section), nullcontext()

    return plant


def scaled_gradient(config: JobConfig, size: float) -> tuple[JobConfig, AbstractContextManager[None]]:
    def change(trainer: Trainer) -> None:
        weight = parameters_of(trainer.model_parts)["layers.0.attention.wq.weight"]
        weight.register_hook(lambda gradient: gradient * (1 + size))

    return config, changed(change)()


def scaled_token(config: JobConfig, size: float) -> tuple[JobConfig, AbstractContextManager[None]]:
    """The weight of the first token of each microbatch."""
    right = CrossEntropy.losses_and_gradient_

    def wrong(self: CrossEntropy, scores: Tensor, labels: Tensor, weights: Tensor) -> Any:
        first = torch.arange(len(weights)) == 0
        return right(self, scores, labels, torch.where(first, weights * (1 + size), weights))

    return config, patch.object(CrossEntropy, "losses_and_gradient_", wrong)


NEAR_ROUNDING = {
    "learning rate": scaled_setting("lr"),
    "weight decay": scaled_setting("weight_decay"),
    "eps of AdamW": scaled_setting("eps"),
    "gradient of a parameter": scaled_gradient,
    "weight of a token in a microbatch": scaled_token,
}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["AdamW", "bfloat16"])
def test_mistakes_near_rounding_are_outside_from_a_size_on(name: str, tmp_path: Path) -> None:
    """Prints the smallest factor that is seen within 30 and within 100 steps."""
    steps = 100
    right, other, *further = repeats(tmp_path, name, REPEATS + 2, steps)
    runs = [train(run.config) for run in (right, *further)]

    def outside(trained: Trained) -> int:
        pairs = differences([*runs, trained], steps, allow_import=False)
        first = first_outside(compared(pairs, 0, len(runs), range(1, len(runs))))
        return steps + 1 if first is None else first.step

    assert outside(train(other.config)) > steps
    found = {}
    for mistake, plant in NEAR_ROUNDING.items():
        smallest = {30: "none", steps: "none"}
        for exponent in range(1, 8):
            folder = tmp_path / f"{mistake}-{exponent}"
            base = replace(other.config, job=replace(other.config.job, dump_folder=str(folder)))
            config, planted = plant(base, 10.0**-exponent)
            with planted:
                step = outside(train(config))
            smallest |= {limit: f"1e-{exponent}" for limit in smallest if step <= limit}
            if step > steps:
                break
        print(f"| {mistake} | {name} | {smallest[30]} | {smallest[steps]} |", flush=True)
        found[mistake] = smallest[steps]
    seen = {mistake for mistake in found if found[mistake] != "none"}
    assert seen >= {"learning rate", "weight of a token in a microbatch"}
    assert seen == {*NEAR_ROUNDING} or name == "bfloat16"
