"""The average of the weights of a run: on every mesh, in checkpoints and in commands."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.gradients import build_on_mesh, difference, full_tensor, local_batches
from tests.distributed.layouts import EXPERTS
from tests.distributed.program import start_command, start_program, write_text
from tests.distributed.reference import global_batch, small_config
from tests.distributed.resuming import Outcome, Start, start_runs
from tests.pool import run_ranks
from titanlite.checkpoint.folder import published_steps, step_folder
from titanlite.checkpoint.manifest import read_manifest, write_manifest
from titanlite.checkpoint.state import AVERAGE, MODEL
from titanlite.checkpoint.storage import load_tensors, read_shapes, save_tensors
from titanlite.runtime.errors import ConfigError
from titanlite.tools.convert.__main__ import main as convert
from titanlite.tools.generate.__main__ import main as generate
from titanlite.tools.saved_run import open_run

pytestmark = pytest.mark.usefixtures("own_log")

DECAY = 0.8
AVERAGED = (f"optimizer.ema_decay={DECAY}", "checkpoint.interval=1", "checkpoint.keep_latest_k=0")
MASKS = ("uneven", "uneven", "none", "uneven")
"""Of the labels in each step; the third one has no valid token, so it is skipped."""

Weights = Mapping[str, Tensor]


def averages(of_steps: Sequence[Weights]) -> list[dict[str, Tensor]]:
    """The averages after each step, by hand. of_steps: the weights that it begins at, and those after each step."""
    found = [dict(of_steps[0])]
    for weights in of_steps[1:]:
        found.append({name: DECAY * tensor + (1 - DECAY) * weights[name] for name, tensor in found[-1].items()})
    return found


def require_close(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    worst = max(difference(found[name].double(), expected[name].double()) for name in expected)
    assert worst <= 1e-12, worst


def average_after_steps(settings: tuple[str, ...]) -> dict[str, Any]:
    """The average of this rank's parameters, each in full, as lists, after the steps of MASKS; checked by hand."""
    chosen = (
        f"optimizer.ema_decay={DECAY}",
        "optimizer.name=AdamW",
        "optimizer.lr=1e-2",
        "training.local_batch_size=8",
    )
    config = small_config(dist.get_world_size(), *chosen, *settings)
    trainer, mesh = build_on_mesh(config)

    def weights() -> dict[str, Tensor]:
        named = (item for part in trainer.model_parts for item in part.named_parameters())
        return {name: full_tensor(parameter.detach()).clone() for name, parameter in named}

    taken = [weights()]
    for step, masks in enumerate(MASKS):
        skipped = trainer.train_step(local_batches(config, mesh, global_batch(masks, step))).skipped
        assert bool(skipped) == (masks == "none")
        if not skipped:
            taken.append(weights())
    found = {name: full_tensor(tensor) for name, tensor in trainer.average.tensors.items()}
    for name, parameter in (item for part in trainer.model_parts for item in part.named_parameters()):
        assert getattr(trainer.average.tensors[name], "placements", None) == getattr(parameter, "placements", None)
    require_close(found, averages(taken)[-1])
    return {name: tensor.tolist() for name, tensor in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, ("parallelism.pp=2", "parallelism.pp_microbatch_size=4")),
        pytest.param(4, ("parallelism.dp_shard=2", "parallelism.tp=2"), marks=pytest.mark.soak),
    ],
)
def test_it_is_the_same_on_every_mesh(ranks: int, settings: tuple[str, ...]) -> None:
    expected, *found = (
        {name: torch.tensor(values, dtype=torch.float64) for name, values in average.items()}
        for size, axes in ((1, ()), (ranks, settings))
        for average in run_ranks(average_after_steps, size, axes)
    )
    for own in found:
        require_close(own, {name: expected[name] for name in own})
    assert {name for own in found for name in own} == expected.keys()


def saved(folder: Path, step: int, prefix: str = MODEL) -> dict[str, Tensor]:
    """Tensors of a checkpoint, by name without the prefix."""
    path = step_folder(folder / "checkpoint", step)
    shapes = {name: shape for name, (shape, _) in read_shapes(path).items() if name.startswith(prefix)}
    tensors = {name: torch.empty(shape, dtype=torch.float64) for name, shape in shapes.items()}
    load_tensors(path, tensors, None)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def require_averages(folder: Path, first: int, last: int, begin: Weights | None = None) -> None:
    """Check the averages of all checkpoints. begin: what the average of step `first` is; None: the weights then."""
    of_steps = [saved(folder, step) for step in range(first + 1, last + 1)]
    expected = averages([begin or saved(folder, first), *of_steps])
    for step, average in zip(range(first + 1, last + 1), expected[1:], strict=True):
        require_close(saved(folder, step, AVERAGE), average)


def all_right(outcomes: Sequence[Outcome]) -> None:
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)


@pytest.mark.slow
def test_it_begins_when_a_run_switches_it_on(tmp_path: Path) -> None:
    off = "optimizer.ema_decay=0.0"
    new = (*AVERAGED, "checkpoint.initial_load_path=" + str(tmp_path / "run" / "checkpoint" / "step-4"))
    outcomes = start_runs(
        tmp_path,
        [
            Start((*AVERAGED, off, "training.steps=2")),
            Start((*AVERAGED, "parallelism.dp_shard=2", "training.steps=4"), 2),
            Start((*AVERAGED, off, "training.steps=5")),
            Start((*AVERAGED, "training.steps=6")),
            Start((*new, "training.steps=2"), run="new"),
            Start((*new, "checkpoint.initial_load_model_only=false", "training.steps=5"), run="branch"),
            Start((*AVERAGED, f"checkpoint.initial_load_path={tmp_path}/run/checkpoint/step-4", off), run="without"),
        ],
    )
    all_right(outcomes)
    begins = [line for outcome in outcomes for line in outcome.lines if line.startswith("Weight average")]
    assert begins == [
        f"Weight average: begins at the weights of step {step}, since the checkpoint has none" for step in (2, 5)
    ]
    assert outcomes[1].logged(f"optimizer.ema_decay: 0.0 in the checkpoint, {DECAY} now")
    assert outcomes[2].logged(f"optimizer.ema_decay: {DECAY} in the checkpoint, 0.0 now")
    run = tmp_path / "run"
    assert [step for step in published_steps(run / "checkpoint") if saved(run, step, AVERAGE)] == [3, 4, 6]
    require_averages(run, 2, 4)
    require_averages(run, 5, 6)
    require_averages(tmp_path / "new", 0, 2, saved(run, 4))  # new optimizer, step and average
    require_averages(tmp_path / "branch", 4, 5, saved(run, 4, AVERAGE))
    assert saved(tmp_path / "without", 8, AVERAGE) == {}
    convert(["export", str(step_folder(run / "checkpoint", 4)), "--out", str(tmp_path / "folder"), "--no-verify"])
    imported = f"checkpoint.initial_load_path=hf:{tmp_path}/folder"
    all_right(start_runs(tmp_path, [Start((*AVERAGED, imported, "training.steps=1"), run="imported")]))
    require_averages(tmp_path / "imported", 0, 1, saved(run, 4))


@pytest.mark.soak
def test_biases_of_experts_have_no_average(tmp_path: Path) -> None:
    settings = (*AVERAGED, *EXPERTS, "model.bias_rate=0.01", "training.steps=2", "parallelism.ep=2")
    all_right(start_runs(tmp_path, [Start(settings, 2)]))
    weights, average = saved(tmp_path / "run", 2), saved(tmp_path / "run", 2, AVERAGE)
    biases = weights.keys() - average.keys()
    assert biases
    assert all("bias" in name for name in biases)
    found = open_run(tmp_path / "run").with_weights("ema").model(torch.device("cpu"), torch.float64).state_dict()
    for name, tensor in (weights | average).items():
        assert torch.equal(found[name], tensor), name
        assert name in biases or not torch.equal(found[name], weights[name])


HELD_OUT = "it says what it reads: né, the model!\n" * 9
STEPS = 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `out`, a run of two ranks that averages its weights from step 1 on, and `by_hand`, a copy whose
    weights are the averages of these weights."""
    folder = tmp_path_factory.mktemp("trained")
    on_text = write_text(folder)
    (folder / "held_out.txt").write_text(HELD_OUT)
    for steps, decay in ((1, 0.0), (STEPS, DECAY)):
        start_program(
            folder,
            *(*on_text, "--model.flavor", "debug"),
            *("--training.steps", str(steps), "--optimizer.ema_decay", str(decay), "--parallelism.tp", "2"),
            *("--checkpoint.enable", "true", "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "0"),
            ranks=2,
        ).succeed()
    shutil.copytree(folder / "out", folder / "by_hand")
    average = averages([saved(folder / "out", step) for step in range(1, STEPS + 1)])[-1]
    path = step_folder(folder / "by_hand" / "checkpoint", STEPS)
    manifest = read_manifest(path)
    shutil.rmtree(path)
    path.mkdir()
    tensors = {MODEL + name: tensor for name, tensor in average.items()}
    write_manifest(path, replace(manifest, content="model", files=save_tensors(path, tensors, tensors, None)))
    return folder


def evaluated(folder: Path, run: str, *arguments: str, ranks: int = 0) -> Any:
    start_command(
        folder,
        *(str(folder / run), "--data", str(folder / "held_out.txt"), "--json", str(folder / "result.json")),
        *arguments,
        ranks=ranks,
        program=("-m", "titanlite.tools.evaluate"),
    ).succeed()
    return json.loads((folder / "result.json").read_text())


@pytest.mark.soak  # default suite: test_generate_reads_the_average
@pytest.mark.parametrize(("ranks", "settings"), [(2, ("--parallelism.tp", "2")), (0, ()), (2, ())])
def test_evaluate_reads_the_average(trained: Path, ranks: int, settings: tuple[str, ...]) -> None:
    found = evaluated(trained, "out", "--weights", "ema", *settings, ranks=ranks)
    expected, last = evaluated(trained, "by_hand"), evaluated(trained, "out")
    assert [result["weights"] for result in (found, expected, last)] == ["ema", "last", "last"]
    assert found["all"]["loss"] == pytest.approx(expected["all"]["loss"], rel=1e-12, abs=0)
    assert last["all"]["loss"] != pytest.approx(expected["all"]["loss"], rel=1e-6, abs=0)


@pytest.mark.slow
def test_generate_reads_the_average(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(run: str, *arguments: str) -> tuple[str, str]:
        drawn = ("--prompt", "the model", "--temperature", "3", "--max-new-tokens", "40", "--ignore-eos")
        generate([str(trained / run), *drawn, *arguments])
        printed = capsys.readouterr()
        return printed.out, printed.err

    (found, told), (expected, _), (last, not_told) = text("out", "--weights", "ema"), text("by_hand"), text("out")
    assert found == expected != last
    assert f"step-{STEPS}: average of the weights, llama3" in told
    assert "average" not in not_told
    weights = [
        open_run(trained / run).with_weights(kind).model(torch.device("cpu"), torch.float64).state_dict()
        for run, kind in (("out", "ema"), ("by_hand", "last"))
    ]
    require_close(*weights)


@pytest.mark.slow
def test_export_writes_the_average_and_verifies_it(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(["export", str(trained / "out"), "--out", str(tmp_path / "ema"), "--weights", "ema"])
    printed = capsys.readouterr().out
    assert "average of the weights, float64" in printed
    assert "Verified: logits of the folder" in printed
    for run in ("by_hand", "out"):
        convert(["export", str(trained / run), "--out", str(tmp_path / run)])
    found, expected, last = (load_file(tmp_path / name / "model.safetensors") for name in ("ema", "by_hand", "out"))
    require_close(found, expected)
    assert difference(last["model.norm.weight"], expected["model.norm.weight"]) > 1e-6


@pytest.mark.slow
def test_a_checkpoint_without_an_average_is_refused(trained: Path) -> None:
    rule = r"--weights = 'ema'\n.*optimizer.ema_decay above 0: .*step-1 has no average .*\n.*leave it out .*0\.999"
    with pytest.raises(ConfigError, match=rule):
        generate([str(step_folder(trained / "out" / "checkpoint", 1)), "--prompt", "the", "--weights", "ema"])


@pytest.mark.soak
def test_a_step_is_replayed_with_the_average_and_across_its_begin(tmp_path: Path) -> None:
    """The earlier checkpoint was saved without an average, so steps are computed again with another setting."""
    settings = ("--training.dtype", "float32", "--checkpoint.enable", "true", "--checkpoint.interval", "2")
    for steps, decay in ((2, 0.0), (6, DECAY)):
        start_program(
            tmp_path, *settings, "--training.steps", str(steps), "--optimizer.ema_decay", str(decay), ranks=2
        ).succeed()
    for step in (4, 6):  # from the checkpoints of steps 2 and 4
        program = start_command(
            tmp_path, str(tmp_path / "out"), "--step", str(step), program=("-m", "titanlite.tools.replay")
        ).succeed()
        assert "\nreproduced" in program.output
        assert ("Weight average: begins" in program.output) == (step == 4)
