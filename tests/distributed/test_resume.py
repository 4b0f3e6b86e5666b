"""A run that is killed and resumed three times equals the uninterrupted run bit for bit."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch

from tests.distributed.drawing import drawing_families
from tests.distributed.program import Starter
from tests.distributed.resuming import Outcome, Start, hashes, numbers, start_runs
from titanlite.assembly.run import Run
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
SINGLE = (1, ())
SHARDED = (2, ())
TENSOR = (2, ("parallelism.tp=2",))
PIPED = (2, ("parallelism.pp=2",))

Mesh = tuple[int, tuple[str, ...]]


def chain(name: str, mesh: Mesh, *settings: str) -> list[Start]:
    """The uninterrupted run, and the starts of the run that is killed and resumed."""
    ranks, axes = mesh
    settings = (*SETTINGS, *axes, *settings)
    killed = [Start(settings, ranks, kill, f"{name} killed", drawing_families) for kill in (*KILLS, None)]
    return [Start(settings, ranks, None, f"{name} uninterrupted", drawing_families), *killed]


def check_chain(folder: Path, name: str, outcomes: list[Outcome]) -> None:
    uninterrupted, *starts = outcomes
    assert [start.error for start in outcomes] == [""] * len(outcomes)
    assert [start.step for start in starts] == [0, 2, 4, 4]
    assert [start.killed for start in starts] == [True, True, True, False]
    assert starts[-1].end == uninterrupted.end
    assert any("in the optimizer" in key for key in uninterrupted.end)
    expected = numbers(folder / f"{name} uninterrupted")
    assert [row["step"] for row in expected] == list(range(1, STEPS + 1))
    assert numbers(folder / f"{name} killed") == expected
    for start in starts:
        for step, rows in start.rows.items():
            assert rows == uninterrupted.rows[step]
    epochs = [json.loads(place)[0] for key, place in uninterrupted.end.items() if key.startswith("stream ")]
    assert min(epochs) >= 1, "no epoch was crossed"


def check_chains(folder: Path, chains: dict[str, list[Start]]) -> None:
    outcomes = iter(start_runs(folder, [start for starts in chains.values() for start in starts]))
    for name, starts in chains.items():
        check_chain(folder, name, [next(outcomes) for _ in starts])


def write_text(folder: Path, vocabulary: str = "abcdefghijklmnopqrstuvwxyz ") -> tuple[str, ...]:
    """Write a corpus of texts of very different lengths and a tokenizer of letters; return their settings."""
    letters = {letter: n for n, letter in enumerate(vocabulary)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token=" "))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(5)
    with (folder / "corpus.jsonl").open("w") as file:
        for n in range(60):
            ids = torch.randint(26, (1 + 7 * (n % 9),), generator=generator)
            file.write(json.dumps({"text": "".join("abcdefghijklmnopqrstuvwxyz"[i] for i in ids)}) + "\n")
    return (
        "data.sources.0.kind=jsonl",
        f"data.sources.0.path={folder / 'corpus.jsonl'}",
        f"tokenizer.path={folder / 'tokenizer.json'}",
    )


def test_one_process(tmp_path: Path) -> None:
    check_chains(tmp_path, {"windows": chain("windows", SINGLE, "model.family=drawing")})


@pytest.mark.slow
def test_one_process_on_text(tmp_path: Path) -> None:
    """Positions of text streams can be in the middle of a piece."""
    text = write_text(tmp_path / "text")
    check_chains(tmp_path, {"text": chain("text", SINGLE, *text, "checkpoint.async_mode=async")})


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    check_chains(tmp_path, {"sharded": chain("sharded", SHARDED, *text, "model.family=torch_drawing")})


@pytest.mark.soak
def test_other_meshes(tmp_path: Path) -> None:
    chains = {"tensor": chain("tensor", TENSOR, "checkpoint.async_mode=async")}
    chains["piped"] = chain("piped", PIPED, "model.family=drawing")
    check_chains(tmp_path, chains)


def forget_moments(run: Run) -> None:
    for name, tensor in run.trainer.optimizer.named_state():
        if name.endswith("exp_avg_sq"):
            tensor.zero_()


def forget_step_counts(run: Run) -> None:
    for name, tensor in run.trainer.optimizer.named_state():
        if name.endswith("/step"):
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


FORGOTTEN = [
    *(forget_moments, forget_step_counts, forget_streams, forget_one_stream),
    *(forget_a_step, forget_counts, forget_a_weight),
]


@pytest.mark.soak
def test_each_missing_part_of_the_state_is_detected(tmp_path: Path) -> None:
    """Otherwise the comparisons above would test nothing."""
    drawing = ("model.family=drawing",)
    torch_drawing = ("model.family=torch_drawing",)
    families: list[tuple[str, ...]] = [(), drawing, torch_drawing]
    firsts = start_runs(
        tmp_path,
        [
            Start(
                (*SETTINGS, *family),
                run=f"{kind} {n}",
                kill=(7, 1) if kind == "killed" else None,
                around=drawing_families,
            )
            for n, family in enumerate(families)
            for kind in ("uninterrupted", "killed")
        ],
    )
    cases: list[tuple[int, Callable[[Run], None] | None]] = [(0, None), *((0, spoil) for spoil in FORGOTTEN)]
    cases += [(0, forget_seed), (1, None), (1, forget_seed), (2, None), (2, forget_seed)]
    starts = []
    for number, (family, spoil) in enumerate(cases):
        shutil.copytree(tmp_path / f"killed {family}", tmp_path / f"{number}")
        settings = (*SETTINGS, *families[family], "checkpoint.interval=100")
        starts.append(Start(settings, run=f"{number}", around=drawing_families, spoil=spoil))
    for number, ((family, spoil), outcome) in enumerate(zip(cases, start_runs(tmp_path, starts), strict=True)):
        uninterrupted = firsts[2 * family]
        assert outcome.step == 6
        same = (
            not outcome.error  # saving step 6 again is an error
            and outcome.end == uninterrupted.end
            and numbers(tmp_path / f"{number}") == numbers(tmp_path / f"uninterrupted {family}")
            and all(rows == uninterrupted.rows[step] for step, rows in outcome.rows.items())
        )
        # Without random draws, the seed has no effect.
        assert same == (spoil is None or (spoil is forget_seed and family == 0)), (family, spoil)


@pytest.mark.soak
def test_killed_programs_end_with_the_same_checkpoint(tmp_path: Path, start: Starter) -> None:
    """Programs started as a user does and killed at arbitrary times: their last checkpoints are equal byte for byte.

    Another start of the finished run has nothing to do, logs this and exits with 0.
    """
    arguments = ["--training.steps", "30", "--checkpoint.enable", "true", "--checkpoint.interval", "3"]
    folders = {name: tmp_path / name for name in ("uninterrupted", "killed")}
    for folder in folders.values():
        folder.mkdir()
    uninterrupted = start(folders["uninterrupted"], *arguments)
    assert uninterrupted.wait() == 0, uninterrupted.output
    for number, step in enumerate((7, 22)):
        program = start(folders["killed"], *arguments, "--checkpoint.async_mode", "async", name=f"start {number}")
        program.wait_for(rf" {step}/\d")
        program.process.kill()
        assert program.wait() == -signal.SIGKILL
        assert number == 0 or "Start: step" in program.output
    last = start(folders["killed"], *arguments, name="last")
    assert last.wait() == 0, last.output
    found, expected = (numbers(folders[name] / "out") for name in ("killed", "uninterrupted"))
    assert found == expected
    assert [row["step"] for row in found] == list(range(1, 31))
    tensors, same = ((folders[name] / "out/checkpoint/step-30/__0_0.distcp").read_bytes() for name in folders)
    assert tensors == same
    before = hashes(folders["killed"] / "out")
    finished = start(folders["killed"], *arguments, name="finished")
    assert finished.wait() == 0, finished.output
    assert "Nothing to do: the run is finished, step 30 of training.steps = 30" in finished.output
    assert hashes(folders["killed"] / "out") == before
