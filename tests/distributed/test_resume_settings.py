"""Resuming with other settings: rejected if the state would have another meaning, otherwise logged or ignored."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.gradients import replaced
from tests.distributed.reference import TOKENS
from tests.distributed.resuming import CORPUS, Outcome, Start, checkpoints_of, hashes, numbers, start_runs
from tests.distributed.test_resume import write_text
from titanlite.assembly import run as build_module
from titanlite.checkpoint.manifest import MANIFEST_FILE, read_manifest, write_manifest

pytestmark = pytest.mark.slow

EIGHT = ("training.steps=8",)
FOUR = ("training.steps=4",)


@contextmanager
def version(name: str) -> Iterator[None]:
    """Simulate another version of the program."""
    with replaced(build_module, name, 77):
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


REJECTED = [
    ("model.ffn_dim=64", "model.ffn_dim: 48 in the checkpoint, 64 now", "resume with the model of the checkpoint"),
    ("model.n_layers=3", "model.n_layers: 2 in the checkpoint, 3 now", "resume with the model of the checkpoint"),
    ("model.vocab_size=140", "model.vocab_size: 131 in", "resume with the model of the checkpoint"),
    ("training.seq_len=8", "seq_len: 16 in the checkpoint, 8 now", "the checkpoint's training.seq_len"),
    ("data.num_streams=8", "num_streams: 16 in the checkpoint, 8 now", "data.num_streams: leave the key out"),
    ("training.dtype=float32", "dtype: float64 in the checkpoint, float32 now", "the checkpoint's training.dtype"),
    ("optimizer.name=SGD", "optimizer: AdamW in the checkpoint, SGD now", "the optimizers of the checkpoint"),
    (
        "optimizer.name=Muon",
        "optimizer.layers.*.attention.wq.weight: AdamW in the checkpoint, Muon now",
        "--checkpoint.accept_changes '[\"optimizer\"]'",
    ),
    ("optimizer.state_dtype=bfloat16", "AdamW in the checkpoint, AdamW with bfloat16 moments now", "state_dtype"),
    ("data.seed=3", "data: ", "--checkpoint.accept_changes '[\"data\"]'"),
    ("data.shuffle=false", "data: ", "--checkpoint.accept_changes '[\"data\"]'"),
]


def test_changes_to_the_meaning_of_the_state_are_rejected_with_a_remedy(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    other_tokens = write_text(tmp_path / "other", "bacdefghijklmnopqrstuvwxyz ")[2]
    edits = [
        ((*text, edited_text(tmp_path)), "content differs", "--checkpoint.accept_changes '[\"data\"]'"),
        ((*text, other_tokens), "tokenizer: ", "--checkpoint.accept_changes '[\"tokenizer\"]'"),
    ]
    versions = [
        ("STREAM_VERSION", "streams_version: ", "a titanlite of that version"),
        ("INIT_VERSION", "init_version: ", "--checkpoint.accept_changes '[\"init_version\"]'"),
    ]
    base, *outcomes = start_runs(
        tmp_path,
        [
            Start((*text, *FOUR)),
            *(Start((*text, *EIGHT, setting)) for setting, _, _ in REJECTED),
            *(Start((*EIGHT, *settings)) for settings, _, _ in edits),
            *(Start((*text, *EIGHT), around=partial(version, name)) for name, _, _ in versions),
            Start((*text, *EIGHT, "model.ffn_dim=64", "training.seq_len=8")),
        ],
    )
    for (changed, difference, remedy), outcome in zip([*REJECTED, *edits, *versions], outcomes, strict=False):
        assert outcome.error.startswith(f"cannot resume from {tmp_path}/run/checkpoint/step-4: "), changed
        assert difference in outcome.error, changed
        assert remedy in outcome.error, changed
        assert "--checkpoint.initial_load_path" in outcome.error
        assert (outcome.step, outcome.files) == (-1, base.files), changed
    assert all(text in outcomes[-1].error for text in ("model.ffn_dim", "seq_len: 16 in the checkpoint, 8 now"))


@pytest.mark.slow
def test_other_changes_are_logged_accepted_or_ignored(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    other_tokens = write_text(tmp_path / "other", "bacdefghijklmnopqrstuvwxyz ")[2]
    base_run, _ = start_runs(tmp_path, [Start(FOUR, run="base"), Start((*text, *FOUR), run="text")])
    shutil.copy(tmp_path / CORPUS, tmp_path / "moved.npy")
    cases: list[tuple[str, tuple[str, ...], int, tuple[str, ...]]] = [
        ("base", (), 1, ()),
        ("base", ("training.local_batch_size=8", "metrics.log_freq=4", "parallelism.dp_shard=2"), 2, ()),
        ("base", (f"data.sources.0.path={tmp_path / 'moved.npy'}", "activation_checkpoint.mode=full"), 1, ()),
        (
            "base",
            ("optimizer.lr=5e-3",),
            1,
            ("Changed since the checkpoint: optimizer.lr: 0.01 in the checkpoint, 0.005",),
        ),
        (
            "base",
            ("optimizer.beta1=0.8", "debug.seed=4"),
            1,
            ("Changed since the checkpoint: optimizer.beta1: ", "Changed since the checkpoint: debug.seed: 0"),
        ),
        (
            "base",
            (edited_corpus(tmp_path), 'checkpoint.accept_changes=["data"]'),
            1,
            ("accepted change since the checkpoint: data: ",),
        ),
        (
            "base",
            (*ADDED_SOURCE, 'checkpoint.accept_changes=["data"]'),
            2,
            ("accepted change since the checkpoint: data: source 1 (added) is new: it begins at its start",),
        ),
        (
            "base",
            ("optimizer.name=Muon", 'checkpoint.accept_changes=["optimizer"]'),
            2,
            ("accepted change since the checkpoint: optimizer.layers.*.attention.wk.weight: AdamW in",) * 7,
        ),
        (
            "text",
            (*text, other_tokens, 'checkpoint.accept_changes=["tokenizer"]'),
            1,
            ("accepted change since the checkpoint: tokenizer: ",),
        ),
    ]
    starts = []
    for number, (base, settings, ranks, _) in enumerate(cases):
        shutil.copytree(tmp_path / base, tmp_path / f"{number}")
        starts.append(Start((*EIGHT, *settings), ranks, run=f"{number}"))
    for (_, settings, _, lines), outcome in zip(cases, start_runs(tmp_path, starts), strict=True):
        assert (outcome.error, outcome.step) == ("", 4), settings
        changes = [line for line in outcome.lines if "since the checkpoint" in line]
        assert len(changes) == len(lines), changes
        assert all(any(line.startswith(start) for line in changes) for start in lines), changes
        if "optimizer.name=Muon" in settings:
            assert outcome.logged("The state of the optimizers starts anew")
            weights = [name for name in base_run.end if "in the optimizer" not in name]
            assert {name: outcome.begin[name] for name in weights} == {name: base_run.end[name] for name in weights}
            assert not any(name.endswith("exp_avg in the optimizer") and "wq" in name for name in outcome.begin)
        if set(ADDED_SOURCE) <= set(settings):
            for stream in range(16):
                before = json.loads(base_run.end[f"stream {stream}"])
                assert json.loads(outcome.begin[f"stream {stream}"]) == [*before, 0, stream, 0, 0, 0, 0]
            assert outcome.logged("data at sequence 64 (tokens ")


def ledger(outcome: Outcome) -> dict[int, str]:
    """Hashes of all training rows by number; fails if a row occurs twice."""
    rows = [item for step in sorted(outcome.rows) for item in outcome.rows[step].items()]
    assert len(dict(rows)) == len(rows)
    return dict(rows)


@pytest.mark.slow
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


@pytest.mark.slow
def test_run_starts_from_the_weights_or_the_full_state_of_another_run(tmp_path: Path) -> None:
    steps = "lr_schedule.decay=none"
    longer, source = start_runs(tmp_path, [Start((*EIGHT, steps), run="longer"), Start((*FOUR, steps), run="source")])
    folder = tmp_path / "source/checkpoint"
    path = f"checkpoint.initial_load_path={folder}"
    full, disabled = "checkpoint.initial_load_model_only=false", "checkpoint.enable=false"
    shutil.copytree(folder / "step-2", tmp_path / "gold")
    for name, step in (("damaged", 4), ("broken", 4), ("broken", 2)):
        if not (tmp_path / name).exists():
            shutil.copytree(folder, tmp_path / name)
        file = next((tmp_path / name / f"step-{step}").glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    damaged = f"checkpoint.initial_load_path={tmp_path / 'damaged'}"
    names = ["model", "plain", "all", "all plain", "cut", "float32", "vocabulary", "shape", "fallen back"]
    names += ["named", "renamed", "none valid", "nothing", "rotary"]
    settings: list[tuple[str, ...]] = [
        *((path,), (path, disabled), (path, full), (path, full, disabled), (path, full)),
        *((path, "training.dtype=float32"), (path, "model.vocab_size=140"), (path, full, "model.ffn_dim=64")),
        *((damaged, full), (f"{damaged}/step-4",), (f"checkpoint.initial_load_path={tmp_path / 'gold'}", full)),
        (f"checkpoint.initial_load_path={tmp_path / 'broken'}",),
        (f"checkpoint.initial_load_path={tmp_path / 'nowhere'}",),
        (path, "model.rope_theta=20000.0"),
    ]
    starts = [
        Start((*EIGHT, steps, *case), run=name, kill=(7, 0) if name == "cut" else None)
        for name, case in zip(names, settings, strict=True)
    ]
    again = Start((*EIGHT, steps, path, full), run="cut")
    *outcomes, resumed = start_runs(tmp_path, [*starts, again])
    found = dict(zip(names, outcomes, strict=True))

    weights = {name: value for name, value in source.end.items() if "optimizer" not in name and "stream" not in name}
    for name in ("model", "plain"):
        assert (found[name].error, found[name].step) == ("", 0)
        assert {key: found[name].begin[key] for key in weights} == weights
        moments = {key: value for key, value in found[name].begin.items() if "in the optimizer" in key}
        assert moments.items() <= longer.begin.items()  # those of a new run
        assert found[name].rows == longer.rows
        assert found[name].logged(f"with the weights of step 4 in {folder}/step-4, verified in full")
        assert [row["step"] for row in numbers(tmp_path / name)] == list(range(1, 9))
    assert found["rotary"].logged(
        "Changed from the model of the weights: model.rope_theta: 500000.0 in the checkpoint, 20000.0 now"
    )
    assert not found["model"].logged("Changed from the model of the weights")
    for name in ("all", "all plain"):
        assert (found[name].error, found[name].step) == ("", 4)
        assert found[name].begin == source.end
        assert found[name].end == longer.end
        assert found[name].rows == {step: longer.rows[step] for step in (5, 6, 7, 8)}
        assert numbers(tmp_path / name) == numbers(tmp_path / "longer")[4:]
    assert checkpoints_of(found["all"]) == ["step-6", "step-8"]
    assert not any("checkpoint" in name for name in found["all plain"].files)
    assert (found["cut"].killed, resumed.step) == (True, 6)  # its own checkpoint, not the source's
    assert resumed.end == longer.end

    assert found["float32"].error == ""
    assert found["float32"].logged("are converted from torch.float64 to torch.float32")
    assert all("torch.float32" in value for name, value in found["float32"].begin.items() if name in weights)
    assert re.search(r"of shape \(131, 32\), but this model needs \(140, 32\)", found["vocabulary"].error)
    assert "\n  model.vocab_size: 131 in the checkpoint, 140 now\n" in found["vocabulary"].error
    assert "remedy: use the checkpoint's [model] values and its tokenizer" in found["vocabulary"].error
    assert found["shape"].error.startswith(f"cannot resume from {folder}/step-4")
    assert (found["fallen back"].step, found["renamed"].step) == (2, 2)
    assert found["fallen back"].logged(f"{tmp_path}/damaged/step-4 is corrupted: ")
    assert "step-4 is corrupted" in found["named"].error
    assert "no valid checkpoint found" in found["none valid"].error
    assert f"initial_load_path = '{tmp_path / 'nowhere'}'" in found["nothing"].error
    for name in ("damaged", "broken"):
        assert sorted(entry.name for entry in (tmp_path / name).iterdir()) == ["step-2", "step-4"]
    assert hashes(tmp_path / "source") == source.files


def test_model_only_checkpoint_provides_only_weights(tmp_path: Path) -> None:
    path = f"checkpoint.initial_load_path={tmp_path / 'source/checkpoint/step-4'}"
    full = "checkpoint.initial_load_model_only=false"
    (source,) = start_runs(tmp_path, [Start(FOUR, run="source")])
    saved = tmp_path / "source/checkpoint/step-4"
    manifest = replace(read_manifest(saved), content="model")  # as an import of a model has it
    (saved / MANIFEST_FILE).unlink()
    write_manifest(saved, manifest)
    weights, everything = start_runs(
        tmp_path, [Start((*FOUR, path), run="weights"), Start((*FOUR, path, full), run="everything")]
    )
    assert (source.error, weights.error, weights.step) == ("", "", 0)
    assert "checkpoint with optimizer and position in the data found" in everything.error
    assert everything.rows == {}
