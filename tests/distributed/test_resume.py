"""Killed and resumed runs equal the uninterrupted run bit for bit; on other meshes, their state and tokens do."""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.distributed.drawing import drawing_families
from tests.distributed.layouts import ALL_OPTIMIZERS, BASE, EXPERTS, GATHER, GEMMA2, GPT_OSS
from tests.distributed.reference import TOKENS
from tests.distributed.resuming import Outcome, Start, numbers, start_runs, write_text
from titanlite.assembly.run import Run
from titanlite.data.ledger import read_ledger
from titanlite.data.streams import SourceState
from titanlite.metrics.meter import MeterState

pytestmark = pytest.mark.slow

STEPS = 10
KILLS = (
    (4, 1),  # between two microbatches of step 4; step 2 is saved
    (5, 0),  # step 4 is saved: ten of 16 streams are at the start of their second epoch
    (5, 0),  # right after the resume
)
SETTINGS = (f"training.steps={STEPS}", "training.local_batch_size=4")
CHAINS = [
    pytest.param(1, False, ("model.family=drawing",), id="windows"),
    pytest.param(  # positions in the middle of a piece
        2, True, ("model.family=torch_drawing", "checkpoint.async_mode=async", "model.base_dim=8"), id="sharded"
    ),
    pytest.param(1, True, ("checkpoint.async_mode=async",), id="text", marks=pytest.mark.soak),
    pytest.param(2, False, ("parallelism.tp=2", "checkpoint.async_mode=async"), id="tensor", marks=pytest.mark.soak),
    pytest.param(2, False, ("parallelism.pp=2", "model.family=drawing"), id="piped", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("ranks", "on_text", "settings"), CHAINS)
def test_a_run_that_is_killed_three_times_equals_the_uninterrupted_run(
    ranks: int, on_text: bool, settings: tuple[str, ...], tmp_path: Path
) -> None:
    settings = (*SETTINGS, *settings, *(write_text(tmp_path / "text") if on_text else ()))
    chain = [Start(settings, ranks, kill, "killed", drawing_families) for kill in (*KILLS, None)]
    uninterrupted, *starts = start_runs(
        tmp_path, [Start(settings, ranks, None, "uninterrupted", drawing_families), *chain]
    )
    assert [start.error for start in (uninterrupted, *starts)] == [""] * 5
    assert [start.step for start in starts] == [0, 2, 4, 4]
    assert [start.killed for start in starts] == [True, True, True, False]
    assert starts[-1].end == uninterrupted.end
    assert any("in the optimizer" in key for key in uninterrupted.end)
    expected = numbers(tmp_path / "uninterrupted")
    assert [row["step"] for row in expected] == list(range(1, STEPS + 1))
    assert numbers(tmp_path / "killed") == expected
    for start in starts:
        for step, rows in start.rows.items():
            assert rows == uninterrupted.rows[step]
    epochs = [json.loads(place)[0] for key, place in uninterrupted.end.items() if key.startswith("stream ")]
    assert min(epochs) >= 1, "no epoch was crossed"


def zero(run: Run, suffix: str) -> None:
    for name, tensor in run.trainer.optimizer.named_state():
        if name.endswith(suffix):
            tensor.zero_()


def forget_streams(run: Run) -> None:
    run.loader.load_state(torch.zeros(run.loader.num_streams, len(SourceState._fields), dtype=torch.int64))


def forget_one_stream(run: Run) -> None:
    """The sequence count of a stream is checked against the other streams; its position is not."""
    state = run.loader.state()
    state[3, :2] = 0
    run.loader.load_state(state)


def forget_a_step(run: Run) -> None:
    run.trainer.step -= 1


def forget_counts(run: Run) -> None:
    run.meter.load_state(MeterState(0, 0))


def forget_a_weight(run: Run) -> None:
    """Change the lowest bit of each element of one weight."""
    weight = next(run.trainer.model_parts[0].parameters()).data
    weight.copy_(weight.nextafter(torch.full_like(weight, 9.0)))


def forget_seed(run: Run) -> None:
    run.trainer.seed += 1


def forget_base_model(run: Run) -> None:
    for _, group in run.trainer.optimizer.param_groups:
        group["lr_factor"] = 1.0


FORGOTTEN = [
    *(partial(zero, suffix="exp_avg_sq"), partial(zero, suffix="/step"), forget_streams, forget_one_stream),
    *(forget_a_step, forget_counts, forget_a_weight, forget_base_model),
]


@pytest.mark.soak
@pytest.mark.parametrize("family", ["llama3", "drawing", "torch_drawing"])
def test_each_missing_part_of_the_state_is_detected(family: str, tmp_path: Path) -> None:
    """Otherwise the comparison above would test nothing. The seed matters to models that draw random numbers."""
    settings = (*SETTINGS, f"model.family={family}", *(["model.base_dim=8"] if family == "llama3" else []))
    uninterrupted, _ = start_runs(
        tmp_path,
        [
            Start(settings, run="uninterrupted", around=drawing_families),
            Start(settings, run="killed", kill=(7, 1), around=drawing_families),
        ],
    )
    harmless = [None, *([forget_seed] if family == "llama3" else [])]
    cases = [*harmless, *(FORGOTTEN if family == "llama3" else [forget_seed])]
    starts = []
    for number, spoil in enumerate(cases):
        shutil.copytree(tmp_path / "killed", tmp_path / f"{number}")
        unsaved = (*settings, "checkpoint.interval=100")
        starts.append(Start(unsaved, run=f"{number}", around=drawing_families, spoil=spoil))
    for number, (spoil, outcome) in enumerate(zip(cases, start_runs(tmp_path, starts), strict=True)):
        assert outcome.step == 6
        same = (
            not outcome.error  # saving step 6 again is an error
            and outcome.end == uninterrupted.end
            and numbers(tmp_path / f"{number}") == numbers(tmp_path / "uninterrupted")
            and all(rows == uninterrupted.rows[step] for step, rows in outcome.rows.items())
        )
        assert same == (spoil in harmless), spoil


# Resuming on other meshes

STEPS_EACH = 2
SYNC, ASYNC = "checkpoint.async_mode=disabled", "checkpoint.async_mode=async"
ROUND = (
    (1, (SYNC,)),
    (2, ("parallelism.dp_shard=2", ASYNC)),
    (4, ("parallelism.tp=2", "parallelism.pp=2", SYNC)),
    (2, ("parallelism.dp_replicate=2", ASYNC)),
    (2, ("parallelism.cp=2", ASYNC)),
    (1, (SYNC,)),
)
INTERLEAVED = (
    (2, ("parallelism.pp=2", "parallelism.pp_schedule=Interleaved1F1B")),
    (2, ("parallelism.dp_shard=2",)),
    (2, ("parallelism.pp=2", "parallelism.pp_schedule=Interleaved1F1B", ASYNC)),
    (1, ()),
)
FOUR = (
    (4, ("parallelism.dp_replicate=2", "parallelism.dp_shard=2")),
    (4, ("parallelism.dp_shard=2", "parallelism.tp=2", ASYNC)),
    (4, ("parallelism.dp_replicate=2", "parallelism.cp=2", *GATHER)),
    (4, ("parallelism.pp=2", "parallelism.dp_shard=2", "parallelism.pp_schedule=ZBVZeroBubble")),
    (2, ("parallelism.tp=2", ASYNC)),
)
TIED = (
    (2, ("parallelism.pp=2", SYNC)),
    (1, (ASYNC,)),
    (4, ("parallelism.pp=2", "parallelism.dp_shard=2", "parallelism.pp_schedule=ZBVZeroBubble", ASYNC)),
    (4, ("parallelism.pp=2", "parallelism.tp=2", SYNC)),
    (2, ("parallelism.dp_shard=2", SYNC)),
)

DEALT_OUT = ((2, ("parallelism.ep=2", ASYNC)), (1, (SYNC,)), (2, ("parallelism.cp=2", "parallelism.ep=2", SYNC)))
UNEVEN = (
    (2, ("parallelism.dp_shard=2", SYNC)),
    (3, ("parallelism.dp_shard=3", "parallelism.ep=3", ASYNC)),
    (5, ("parallelism.dp_replicate=5", SYNC)),
)
"""In the second one, the ranks have different numbers of streams; in the third, some have only filler rows."""
MUON = (
    (4, ("parallelism.dp_shard=2", "parallelism.tp=2", SYNC)),
    (2, ("parallelism.cp=2", "parallelism.ep=2", ASYNC)),
    (1, (SYNC,)),
    (4, ("parallelism.dp_replicate=2", "parallelism.pp=2", SYNC)),
)
BIASED = (*EXPERTS, "model.bias_rate=0.01")

STAGES = (
    # at a resume, in the middle of a start, and at its last step
    *("training.stages.0.from_step=3", "training.stages.0.global_batch_size=24", "training.stages.0.seq_len=32"),
    *("training.stages.1.from_tokens=600", "training.stages.1.seq_len=8", "training.stages.1.global_batch_size=32"),
    *("training.stages.2.from_step=6", "training.stages.2.weights={base = 1, added = 3}"),
    *("training.stages.2.seq_len=64", "training.stages.2.global_batch_size=12"),
    *("training.stages.0.rope_theta=5e4", "training.stages.2.rope_theta=2e5"),
    *("data.sources.0.name=base", "data.sources.0.weight=1", "data.sources.1.kind=tokens"),
    *(f"data.sources.1.path={TOKENS}", "data.sources.1.name=added", "data.sources.1.weight=0"),
    *("lr_schedule.over=tokens", "lr_schedule.batch_scaling=sqrt"),
)

Meshes = Sequence[tuple[int, tuple[str, ...]]]


def resume_on_meshes(folder: Path, meshes: Meshes, *settings: str) -> tuple[Outcome, list[Outcome]]:
    """The uninterrupted run on one process, and the starts of a run that trains STEPS_EACH steps on each mesh.

    Checks that each start begins with the last state of the previous one. The learning rate does not depend on the
    number of steps.
    """
    uninterrupted = Start(
        (*settings, f"training.steps={STEPS_EACH * len(meshes)}", "checkpoint.interval=100"), run="uninterrupted"
    )
    starts = [
        Start((*settings, *axes, f"training.steps={STEPS_EACH * n}", "checkpoint.interval=100"), ranks)
        for n, (ranks, axes) in enumerate(meshes, 1)
    ]
    expected, *outcomes = start_runs(folder, [uninterrupted, *starts])
    for number, outcome in enumerate(outcomes):
        assert outcome.error == ""
        assert outcome.step == STEPS_EACH * number
        if number:
            assert outcome.begin == outcomes[number - 1].end
    found = {step: rows for outcome in outcomes for step, rows in outcome.rows.items()}
    assert found == expected.rows
    assert list(found) == list(range(1, STEPS_EACH * len(meshes) + 1))
    assert outcomes[-1].end.keys() == expected.end.keys()
    return expected, outcomes


def check_numbers(folder: Path, rel: float) -> None:
    found, expected = numbers(folder / "run"), numbers(folder / "uninterrupted")
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, expected_row in zip(found, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=rel, abs=0)


@pytest.mark.parametrize(
    ("meshes", "settings"),
    [
        pytest.param(ROUND, (), id="round", marks=pytest.mark.soak),
        pytest.param(INTERLEAVED, ("model.n_layers=4",), id="interleaved", marks=pytest.mark.soak),
        pytest.param(
            TIED,
            (*GEMMA2, *BASE, "model.tie_embeddings=true", "optimizer.ema_decay=0.8"),
            id="gemma2, tied, base model",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            DEALT_OUT,
            (*BIASED, *ALL_OPTIMIZERS, "optimizer.ema_decay=0.8", *STAGES),
            id="experts, all optimizers, an average, and stages",
        ),
        pytest.param(MUON, (*BIASED, *ALL_OPTIMIZERS), id="muon", marks=pytest.mark.soak),
        pytest.param(FOUR, ("model.n_layers=4",), id="four", marks=pytest.mark.soak),
        pytest.param(FOUR, ("model.n_layers=4", *STAGES), id="four, stages", marks=pytest.mark.soak),
        pytest.param(ROUND, (*STAGES, "optimizer.qk_clip=0.02"), id="round, stages", marks=pytest.mark.soak),
        pytest.param((*DEALT_OUT, *MUON), GPT_OSS, id="gpt_oss", marks=pytest.mark.soak),
        pytest.param(
            (ROUND[1], (2, ("parallelism.tp=2", SYNC))),
            ("training.dtype=bfloat16",),
            id="bfloat16",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_every_mesh_resumes_the_last_state_of_the_previous_mesh(
    meshes: Meshes, settings: tuple[str, ...], tmp_path: Path
) -> None:
    resume_on_meshes(tmp_path, meshes, *settings)
    check_numbers(tmp_path, 2e-2 if "training.dtype=bfloat16" in settings else 1e-12)
    if set(STAGES) <= set(settings):  # an absolute check: the runs above would be wrong in the same way
        tokens = [0, 256, 512, 1280, 1536, 1792, 2560]
        rows = numbers(tmp_path / "run")[: len(tokens) - 1]
        assert [row["tokens_seen"] for row in rows] == tokens[1:]
        factors = [min(tokens[n] / tokens[3], 1) * ((tokens[n] - tokens[n - 1]) / 256) ** 0.5 for n in range(1, 7)]
        assert [row["lr"] for row in rows] == pytest.approx([1e-2 * factor for factor in factors], rel=1e-12)
        assert [row["share/added"] > 0 for row in rows] == [False] * 5 + [True]


@pytest.mark.soak
def test_stages_have_the_same_bits_on_other_meshes(tmp_path: Path) -> None:
    exact = (*STAGES, "training.bit_equal=true", "training.dtype=float32", "training.local_batch_size=1")
    exact = (*exact, "parallelism.pp_microbatch_size=1", "metrics.log_freq=2")
    meshes = [(1, ()), (2, ("parallelism.dp_shard=2",)), (2, ("parallelism.pp=2",))]
    starts = [Start((*exact, *mesh), ranks, run=f"{n}") for n, (ranks, mesh) in enumerate(meshes)]
    starts.append(Start((*exact, *meshes[1][1]), 2, kill=(5, 0), run="killed"))
    starts.append(Start((*exact, *meshes[2][1]), 2, run="killed"))
    assert [outcome.error for outcome in start_runs(tmp_path, starts)] == [""] * 5
    first, *others = (
        [{key: value for key, value in row.items() if not key.startswith("epoch/")} for row in numbers(tmp_path / name)]
        for name in ("0", "1", "2", "killed")
    )
    assert first[-1]["step"] == 8
    assert others == [first] * 3


def test_data_degrees_that_divide_nothing(tmp_path: Path) -> None:
    """Ledger, experts' biases and the state of the data are those of one process, in the middle of an epoch, also if
    steps change their size."""
    batch = ("training.global_batch_size=7", "data.num_streams=8", "data.ledger=true")
    batch = (*batch, "training.stages.0.from_step=4", "training.stages.0.global_batch_size=10")
    batch = (*batch, "training.stages.1.from_step=5", "training.stages.1.seq_len=8")
    _, outcomes = resume_on_meshes(tmp_path, UNEVEN, *BIASED, *batch)
    check_numbers(tmp_path, 1e-12)
    ledger = list(read_ledger(tmp_path / "run"))
    assert ledger == list(read_ledger(tmp_path / "uninterrupted"))
    assert [row[0] for _, rows in ledger for row in rows] == list(range(3 * 7 + 3 * 10))
    shares = [outcome.lines for outcome in outcomes]
    assert [[line for line in lines if "of the work is filler" in line] != [] for lines in shares] == [True] * 3
