"""Resuming with other settings: rejected if the state would have another meaning, otherwise logged or ignored."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from tests.distributed.reference import SEQ_LEN, TOKENS
from tests.distributed.resuming import CORPUS, Outcome, Start, checkpoints_of, hashes, numbers, start_runs, write_text
from titanlite.assembly import run as build_module
from titanlite.checkpoint.manifest import MANIFEST_FILE, read_manifest, write_manifest
from titanlite.generation.generate import Prompt
from titanlite.runtime.logging import log
from titanlite.tools.generate.__main__ import warn
from titanlite.tools.saved_run import open_run

pytestmark = pytest.mark.slow

EIGHT = ("training.steps=8",)
FOUR = ("training.steps=4",)


@contextmanager
def versions(*names: str) -> Iterator[None]:
    """Simulate other versions of the program."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(build_module, name, 77))
        yield


def edited_corpus(folder: Path) -> str:
    tokens = np.load(folder / CORPUS)
    tokens[500] += 1
    np.save(folder / "edited.npy", tokens)
    return f"data.sources.0.path={folder / 'edited.npy'}"


ADDED_SOURCE = ("data.sources.1.kind=tokens", f"data.sources.1.path={TOKENS}", "data.sources.1.name=added")


def edited_text(folder: Path) -> str:
    file = folder / "text" / "corpus.jsonl"
    edited = folder / "edited.jsonl"
    edited.write_text(file.read_text().replace("a", "b", 1))
    return f"data.sources.0.path={edited}"


def other_tokens(folder: Path) -> str:
    return write_text(folder / "other", "bacdefghijklmnopqrstuvwxyz ")[2]


def test_changes_to_the_meaning_of_the_state_are_rejected_with_a_remedy(tmp_path: Path) -> None:
    """tests/unit/checkpoint/test_compatibility.py has each difference alone."""
    text = write_text(tmp_path / "text")
    many = ("model.ffn_dim=64", "model.vocab_size=140", "training.seq_len=8", "data.num_streams=8", "data.seed=3")
    many = (*many, "data.stream_version=2")
    many = (*many, "training.dtype=float32", "optimizer.name=SGD", other_tokens(tmp_path))
    other_versions = partial(versions, "INIT_VERSION")
    rejected = [
        (
            Start((*text, *EIGHT, *many), around=other_versions),
            [
                *("model.ffn_dim: 48 in the checkpoint, 64 now", "model.vocab_size: 131 in the checkpoint, 140 now"),
                *("resume with the model of the checkpoint", "seq_len: 16 in the checkpoint, 8 now"),
                *("the checkpoint's training.seq_len", "num_streams: 16 in the checkpoint, 8 now"),
                *("data.num_streams: leave the key out", "dtype: float64 in the checkpoint, float32 now"),
                *("the checkpoint's training.dtype", "optimizer: AdamW in the checkpoint, SGD now"),
                *("the optimizers of the checkpoint", "data: seed", "--checkpoint.accept_changes '[\"data\"]'"),
                *("tokenizer: ", "--checkpoint.accept_changes '[\"tokenizer\"]'", "streams_version: "),
                *(
                    "data.stream_version: leave the key out",
                    "init_version: ",
                    "--checkpoint.accept_changes '[\"init_version\"]'",
                ),
            ],
        ),
        (
            Start((*text, *EIGHT, "optimizer.name=Muon", edited_text(tmp_path))),
            [
                "optimizer.layers.*.attention.wq.weight: AdamW in the checkpoint, Muon now",
                *("--checkpoint.accept_changes '[\"optimizer\"]'", "content differs"),
            ],
        ),
        (
            Start((*text, *EIGHT, "optimizer.state_dtype=bfloat16", "data.shuffle=false")),
            ["AdamW in the checkpoint, AdamW with bfloat16 moments now", "state_dtype", "data: shuffle"],
        ),
    ]
    base, *outcomes = start_runs(tmp_path, [Start((*text, *FOUR)), *(start for start, _ in rejected)])
    for (start, texts), outcome in zip(rejected, outcomes, strict=True):
        assert outcome.error.startswith(f"cannot resume from {tmp_path}/run/checkpoint/step-4: "), start
        for text_of_error in (*texts, "--checkpoint.initial_load_path"):
            assert text_of_error in outcome.error, outcome.error
        assert (outcome.step, outcome.files) == (-1, base.files), start


CHANGED, ACCEPTED = "Changed since the checkpoint: ", "accepted change since the checkpoint: "


def test_other_changes_are_logged_accepted_or_ignored(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    base, base_of_text = start_runs(tmp_path, [Start(FOUR, run="base"), Start((*text, *FOUR), run="text")])
    shutil.copy(tmp_path / CORPUS, tmp_path / "moved.npy")
    accept_data, accept_two = (
        f"checkpoint.accept_changes={names}" for names in ('["data"]', '["optimizer","tokenizer"]')
    )
    layout = ("training.local_batch_size=8", "metrics.log_freq=4", "parallelism.dp_shard=2")
    ignored = (*layout, "activation_checkpoint.mode=full", f"data.sources.0.path={tmp_path / 'moved.npy'}")
    cases: list[tuple[str, int, tuple[str, ...], list[str]]] = [
        ("base", 2, ignored, []),
        (
            *("base", 1, ("optimizer.lr=5e-3", "optimizer.beta1=0.8", "debug.seed=4")),
            [
                f"{CHANGED}optimizer.lr: 0.01 in the checkpoint, 0.005",
                *(f"{CHANGED}optimizer.beta1: ", f"{CHANGED}debug.seed: 0"),
            ],
        ),
        ("base", 1, (edited_corpus(tmp_path), accept_data), [f"{ACCEPTED}data: "]),
        (
            *("base", 2, (*ADDED_SOURCE, accept_data)),
            [f"{ACCEPTED}data: source 1 (added) is new: it begins at its start"],
        ),
        (
            *("text", 2, (*text, "optimizer.name=Muon", other_tokens(tmp_path), accept_two)),
            [
                *[f"{ACCEPTED}optimizer.layers.*."] * 7,
                f"{ACCEPTED}tokenizer: ",
                f"{CHANGED}optimizer.newton_schulz_dtype",
            ],
        ),
    ]
    starts = []
    for number, (run, ranks, settings, _) in enumerate(cases):
        shutil.copytree(tmp_path / run, tmp_path / f"{number}")
        starts.append(Start((*EIGHT, *settings), ranks, run=f"{number}"))
    outcomes = start_runs(tmp_path, starts)
    for (_, _, settings, lines), outcome in zip(cases, outcomes, strict=True):
        assert (outcome.error, outcome.step) == ("", 4), settings
        changes = [line for line in outcome.lines if "since the checkpoint" in line]
        assert len(changes) == len(lines), changes
        assert all(any(line.startswith(start) for line in changes) for start in lines), changes

    *_, added, muon = outcomes
    for stream in range(16):
        before = json.loads(base.end[f"stream {stream}"])
        assert json.loads(added.begin[f"stream {stream}"]) == [*before, 0, stream, 0, 0, 0, 0]
    assert added.logged("data at sequence 64 (tokens ")
    assert muon.logged("The state of the optimizers starts anew")
    weights = [name for name in base_of_text.end if "in the optimizer" not in name]
    assert {name: muon.begin[name] for name in weights} == {name: base_of_text.end[name] for name in weights}
    assert not any(name.endswith("exp_avg in the optimizer") and "wq" in name for name in muon.begin)


def test_bit_equal_runs_refuse_or_mark_what_changes_the_bits(tmp_path: Path) -> None:
    exact = ("training.bit_equal=true", "training.dtype=float32", "training.local_batch_size=1")
    chunks = (*exact, *EIGHT, "loss.chunk_tokens=7")
    accept = 'checkpoint.accept_changes=["bit_equal"]'
    base, *refused, marked, again, off, on = start_runs(
        tmp_path,
        [
            Start((*FOUR, *exact)),
            *(
                Start((*EIGHT, *exact, *other))
                for other in (("training.local_batch_size=2",), ("training.bit_equal=false",))
            ),
            Start((*chunks, "parallelism.dp_shard=2"), 2, kill=(7, 0)),
            Start(chunks),
            Start((*chunks, "training.steps=10", "training.bit_equal=false", accept)),
            Start((*chunks, "training.steps=12", "training.local_batch_size=2", accept), 2),
        ],
    )
    switched_off = "training.bit_equal: True in the checkpoint, False now"
    for outcome, line in zip(refused, ("bit_equal.rows: 1 in the checkpoint, 2 now", switched_off), strict=True):
        assert line in outcome.error
        assert "resume with the checkpoint's training.bit_equal, rows" in outcome.error
    warning = "From step 5 on, the bits may not be those of an uninterrupted run, since these differ:"
    changed = "  loss.chunk_tokens: 256 in the checkpoint, 7 now"
    assert f"{warning}\n{changed}" in marked.lines
    assert again.step == 6
    assert not again.logged("the bits may not")
    assert off.logged(f"{ACCEPTED}{switched_off}")
    assert on.logged(f"{ACCEPTED}training.bit_equal: False in the checkpoint, True now")
    assert (off.step, on.step) == (8, 10)
    marks = [row.get("computed_by") for row in numbers(tmp_path / "run")]
    computations = read_manifest(tmp_path / "run" / "checkpoint" / "step-12").computations
    assert [each.step for each in computations] == [0, 4, 8, 10]
    first, second, third, fourth = [each.id for each in computations]
    both = f"{first}, {second}"
    assert marks == [first] * 4 + [both] * 4 + [None] * 2 + [f"{both}, {third}, {fourth}"] * 2
    assert first != second != fourth
    assert base.logged(f"Bits: computed by {first}: torch ")


def ledger(outcome: Outcome) -> dict[int, str]:
    """Hashes of all training rows by number; fails if a row occurs twice."""
    rows = [item for step in sorted(outcome.rows) for item in outcome.rows[step].items()]
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def test_changed_global_batch_neither_skips_nor_repeats_rows(tmp_path: Path) -> None:
    """24 is not a multiple of the 16 streams, and 6 is less than the number of streams."""
    sizes = [("24", 1, "4"), ("6", 2, "3"), ("16", 1, "16")]
    constant, first, *changed = start_runs(
        tmp_path,
        [
            Start(("training.steps=12",), run="constant"),
            Start(("training.steps=3",)),
            *(
                Start(
                    (
                        *(f"training.steps={3 * n}", f"training.global_batch_size={size}"),
                        f"training.local_batch_size={local}",
                    ),
                    ranks,
                )
                for n, (size, ranks, local) in enumerate(sizes, 2)
            ),
        ],
    )
    expected, found = ledger(constant), ledger(first)
    for outcome, before, (size, _, _) in zip(changed, ("16", "24", "6"), sizes, strict=True):
        assert outcome.error == ""
        changes = [line for line in outcome.lines if line.startswith("Changed since")]
        assert changes == [
            f"Changed since the checkpoint: training.global_batch_size: {before} in the checkpoint, {size} now"
        ]
        found |= ledger(outcome)
    handed_out = 3 * (16 + 24 + 6 + 16)
    assert sorted(found) == list(range(handed_out))
    assert {n: found[n] for n in expected if n < handed_out} == {n: expected[n] for n in expected if n < handed_out}
    assert [row["tokens_seen"] for row in numbers(tmp_path / "run")][-1] == handed_out * 16


def test_sizes_derived_from_the_first_mesh_stay_if_the_mesh_changes(tmp_path: Path) -> None:
    """-1 means local_batch_size x data degree of the first start, also at later starts."""
    derived = ("training.global_batch_size=-1", "data.num_streams=-1")
    first, later = start_runs(
        tmp_path,
        [
            Start((*derived, *FOUR, "training.local_batch_size=8")),
            Start((*derived, *EIGHT, "training.local_batch_size=2"), 2),
        ],
    )
    assert (later.error, later.step) == ("", 4)
    assert not later.logged("Changed since")
    assert [len(rows) for rows in (first.rows | later.rows).values()] == [8] * 8
    assert sorted(ledger(first) | ledger(later)) == list(range(64))


def test_weights_of_a_stage_are_of_the_model_of_its_step(tmp_path: Path) -> None:
    stage = ("training.stages.0.from_step=3", "training.stages.0.rope_theta=100.0", "training.stages.0.seq_len=32")
    start_runs(tmp_path, [Start((*FOUR, *stage), run="source")])
    folder, text = tmp_path / "source/checkpoint", "Changed from the model of the weights: "
    cases = {
        (4, 100.0): "",
        (4, 500000.0): f"{text}model.rope_theta: 100.0 in the checkpoint, 500000.0 now",
        (2, 100.0): f"{text}model.rope_theta: 500000.0 in the checkpoint, 100.0 now",
    }
    path = "checkpoint.initial_load_path"
    starts = [
        Start(("training.steps=1", f"{path}={folder}/step-{step}", f"model.rope_theta={theta}"), run=f"{step}-{theta}")
        for step, theta in cases
    ]
    for outcome, expected in zip(start_runs(tmp_path, starts), cases.values(), strict=True):
        assert outcome.error == ""
        assert outcome.logged(expected or "with the weights of step")
        assert outcome.logged(text) == bool(expected)
    saved = [open_run(folder / f"step-{step}") for step in (2, 4)]
    assert [run.seq_len for run in saved] == [SEQ_LEN, 32]
    assert [run.hyper_parameters.rope_theta for run in saved] == [500000.0, 100.0]
    warnings: list[str] = []
    for run in saved:
        with patch.object(log, "warning", lambda text, *values: warnings.append(text % values)):
            warn(run, [Prompt("", "", (0,) * 30)], {0}, 3)
    text = "the run was trained on sequences of {} tokens: longer texts are extrapolated"
    assert warnings == [text.format(SEQ_LEN), text.format(32)]


def test_run_starts_from_the_weights_or_the_full_state_of_another_run(tmp_path: Path) -> None:
    steps = "lr_schedule.decay=none"
    longer, source = start_runs(tmp_path, [Start((*EIGHT, steps), run="longer"), Start((*FOUR, steps), run="source")])
    folder = tmp_path / "source/checkpoint"
    shutil.copytree(folder / "step-2", tmp_path / "gold")
    imported = Path(shutil.copytree(folder, tmp_path / "imported") / "step-4")
    manifest = replace(read_manifest(imported), content="model")  # as an import of a model has it
    (imported / MANIFEST_FILE).unlink()
    write_manifest(imported, manifest)
    for name, damaged_steps in (("damaged", (4,)), ("broken", (2, 4))):
        shutil.copytree(folder, tmp_path / name)
        for step in damaged_steps:
            file = next((tmp_path / name / f"step-{step}").glob("*.distcp"))
            file.write_bytes(file.read_bytes()[:-1] + b"?")
    path, damaged, gold, broken = (
        f"checkpoint.initial_load_path={tmp_path / name}" for name in ("source/checkpoint", "damaged", "gold", "broken")
    )
    full, unsaved = "checkpoint.initial_load_model_only=false", "checkpoint.enable=false"
    cases: dict[str, tuple[str, ...]] = {
        "weights": (path,),
        "converted": (path, "training.dtype=float32", "model.rope_theta=20000.0"),
        "vocabulary": (path, "model.vocab_size=140"),
        "all": (path, full, unsaved),
        "cut": (path, full),
        "shape": (path, full, "model.ffn_dim=64"),
        "fallen back": (damaged, full),
        "named": (f"{damaged}/step-4",),
        "renamed": (gold, full),
        "none valid": (broken,),
        "imported": (f"checkpoint.initial_load_path={imported}",),
        "no state": (f"checkpoint.initial_load_path={imported}", full),
    }
    starts = [
        Start((*EIGHT, steps, *settings), run=name, kill=(7, 0) if name == "cut" else None)
        for name, settings in cases.items()
    ]
    again = Start((*EIGHT, steps, path, full), run="cut")
    *outcomes, resumed = start_runs(tmp_path, [*starts, again])
    found = dict(zip(cases, outcomes, strict=True))

    weights = {name: value for name, value in source.end.items() if "optimizer" not in name and "stream" not in name}
    begun = found["weights"]
    assert (begun.error, begun.step) == ("", 0)
    assert {key: begun.begin[key] for key in weights} == weights
    moments = {key: value for key, value in begun.begin.items() if "in the optimizer" in key}
    assert moments.items() <= longer.begin.items()  # those of a new run
    assert begun.rows == longer.rows
    assert begun.logged(f"with the weights of step 4 in {folder}/step-4, verified in full")
    assert not begun.logged("Changed from the model of the weights")
    assert [row["step"] for row in numbers(tmp_path / "weights")] == list(range(1, 9))
    rope = "Changed from the model of the weights: model.rope_theta: 500000.0 in the checkpoint, 20000.0 now"
    assert found["converted"].error == ""
    assert found["converted"].logged(rope)
    assert found["converted"].logged("are converted from torch.float64 to torch.float32")
    assert all("torch.float32" in found["converted"].begin[name] for name in weights)
    assert "of shape (131, 32), but this model needs (140, 32)" in found["vocabulary"].error
    assert "\n  model.vocab_size: 131 in the checkpoint, 140 now\n" in found["vocabulary"].error
    assert "remedy: use the checkpoint's [model] values and its tokenizer" in found["vocabulary"].error

    assert (found["all"].error, found["all"].step) == ("", 4)
    assert found["all"].begin == found["cut"].begin == source.end
    assert found["all"].end == resumed.end == longer.end
    assert found["all"].rows == {step: longer.rows[step] for step in (5, 6, 7, 8)}
    assert numbers(tmp_path / "all") == numbers(tmp_path / "cut") == numbers(tmp_path / "longer")[4:]
    assert not any("checkpoint" in name for name in found["all"].files)
    assert (found["cut"].killed, resumed.step) == (True, 6)  # its own checkpoint, not the source's
    assert checkpoints_of(resumed) == ["step-6", "step-8"]
    assert found["shape"].error.startswith(f"cannot resume from {folder}/step-4")

    assert (found["fallen back"].step, found["renamed"].step) == (2, 2)
    assert found["fallen back"].logged(f"{tmp_path}/damaged/step-4 is corrupted: ")
    assert "step-4 is corrupted" in found["named"].error
    assert "no valid checkpoint found" in found["none valid"].error
    assert found["imported"].begin == begun.begin
    assert "checkpoint with optimizer and position in the data found" in found["no state"].error
    for name in ("damaged", "broken"):
        assert sorted(entry.name for entry in (tmp_path / name).iterdir()) == ["step-2", "step-4"]
    assert hashes(tmp_path / "source") == source.files
