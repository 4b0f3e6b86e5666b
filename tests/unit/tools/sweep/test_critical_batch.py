"""titanlite critical-batch: branches continue a run with other batches, and what is concluded from their losses."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import titanlite
from tests.distributed.program import CONFIG
from tests.distributed.reference import GLOBAL_BATCH, SEQ_LEN, TOKENS
from tests.unit.tools.sweep.test_training import FakeProcess
from titanlite.checkpoint.manifest import MANIFEST_FILE, manifest_text, read_manifest
from titanlite.config.load import parse
from titanlite.metrics.jsonl import read_rows, read_series
from titanlite.runtime.errors import UserError
from titanlite.storage.config import StorageConfig
from titanlite.storage.store import apply_settings
from titanlite.tools.sweep import command, critical_batch
from titanlite.tools.sweep.combinations import Run
from titanlite.tools.sweep.critical_batch import Options, branches, compared, main
from titanlite.tools.sweep.training import state_of

pytestmark = pytest.mark.usefixtures("one_collection")

HALF = {"warmup_steps": 2, "decay": "linear", "decay_steps": 1, "min_lr_factor": 0.5}
"""A learning rate that is half of optimizer.lr from step 3 on."""


def train(folder: Path, **overrides: Any) -> Path:
    (folder / "config.toml").write_text(CONFIG)
    settings = {f"lr_schedule.{key}": value for key, value in HALF.items()}
    settings |= {"checkpoint.enable": True, "checkpoint.interval": 3, "checkpoint.keep_latest_k": 0}
    settings |= {"validation.enable": True, "validation.steps": 1}
    settings |= {"validation.sources": [{"kind": "tokens", "path": TOKENS}], "job.dump_folder": folder / "run"}
    return titanlite.run(folder / "config.toml", {**settings, **overrides}).folder


def options(run: Path, *batches: int, step: int = 3) -> Options:
    return Options(run=str(run), batches=batches or (4, 8), tokens=1, step=step)


@pytest.mark.slow
def test_branches_continue_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(run: Run, **_: int) -> FakeProcess:
        titanlite.run(run.config)
        return FakeProcess(0)

    folder = train(tmp_path)
    monkeypatch.setattr(command, "start_run", start)
    sizes = [GLOBAL_BATCH // 2, GLOBAL_BATCH, 2 * GLOBAL_BATCH]
    batches, tokens = (str(size) for size in reversed(sizes)), str(2 * GLOBAL_BATCH * SEQ_LEN - 1)
    main([str(folder), "--step", "3", "--tokens", tokens, "--tolerance", "9", "--batches", *batches])
    assert f"with a tolerance of 9: at least {sizes[-1]} sequences: add larger ones" in capsys.readouterr().out
    runs = branches(Options(run=str(folder), batches=tuple(sizes), tokens=int(tokens), step=3), [])
    found = {size: read_series(run.folder / "metrics.jsonl") for size, run in zip(sizes, runs, strict=True)}
    for size, series in found.items():
        steps = 2 * GLOBAL_BATCH // size
        assert series["lr"].steps.tolist() == [*range(4, 4 + steps)]
        expected = 0.5e-2 * math.sqrt(size / GLOBAL_BATCH)
        assert series["lr"].values.tolist() == pytest.approx([expected] * steps, rel=1e-12)
        assert series["tokens_seen"].values[-1] == 5 * GLOBAL_BATCH * SEQ_LEN

    def losses(path: Path) -> list[float]:
        return [row["loss"] for row in read_rows(path / "metrics.jsonl") if "loss" in row and row["step"] in (4, 5)]

    assert losses(runs[1].folder) == losses(folder), "the same batch: the steps of the run"
    # the first step of the largest batch has the sequences of two steps of the run, and the weights before them
    first = read_series(runs[2].folder / "metrics.jsonl")["loss"].values[0]
    assert first == pytest.approx(sum(losses(folder)) / 2, rel=0.02)
    with pytest.raises(UserError, match=r"step-4: no checkpoint with optimizer .* choose --step of: 3, 6"):
        branches(options(folder, step=4), [])
    with pytest.raises(UserError, match="true: the branches are compared by their validation losses"):
        branches(options(folder), ["--validation.enable=false"])
    with pytest.raises(UserError, match=r"cannot resume from .*step-3.*\n.*AdamW in the checkpoint, Lion now"):
        branches(options(folder), ["--optimizer.name=Lion"])
    longer = branches(Options(run=str(folder), batches=tuple(sizes), tokens=2 * int(tokens), step=3), [])
    assert [state_of(run) for run in (*runs, *longer)] == ["finished"] * 3 + ["new"] * 3
    require_own_stores_and_tasks(folder)


def require_own_stores_and_tasks(folder: Path) -> None:
    """The run may come from another person: its store would get this user's keys, and files of tasks may be code."""
    file, task = folder / "config.toml", folder / "task.yaml"
    text = file.read_text()
    task.write_text("")
    file.write_text(text.replace('\nendpoint = ""\n', '\nendpoint = "http://stranger:1"\n'))
    assert "http://stranger:1" in file.read_text()
    for overrides, endpoint in ([], ""), (["--storage.endpoint=http://mine:1"], "http://mine:1"):
        for run in branches(options(folder), overrides):
            assert run.config.storage.endpoint == parse(run.arguments).config.storage.endpoint == endpoint
    apply_settings(StorageConfig())
    file.write_text(text.replace("\ntasks = []\n", f'\ntasks = ["{task}"]\n'))
    with pytest.raises(UserError, match=r"names files of tasks: '.*task.yaml'.*add --allow-import, or leave them out"):
        branches(options(folder), [])


def test_plugins_of_the_run_need_permission(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'pwned')!r}).touch()\n")
    (tmp_path / "config.toml").write_text(f'[job]\nplugins = ["{tmp_path}/evil.py"]\n')
    with pytest.raises(UserError, match=r"needs code that job.plugins of its run names: '.*evil.py'; .*--allow-import"):
        main([str(tmp_path), "--batches", "4", "8", "--tokens", "1"])
    assert not (tmp_path / "pwned").exists()


@pytest.mark.slow
def test_runs_with_stages(tmp_path: Path) -> None:
    stage = {"from_step": 4, "global_batch_size": 2 * GLOBAL_BATCH}
    folder = train(tmp_path, **{"training.stages": [stage], "lr_schedule.batch_scaling": "sqrt"})
    with pytest.raises(UserError, match="a stage of the run begins later, at step 4: choose a --step"):
        branches(options(folder), [])
    run, _ = branches(options(folder, 2 * GLOBAL_BATCH, 8 * GLOBAL_BATCH, step=6), [])
    assert run.values["lr"] == f"{0.5e-2 * math.sqrt(2):.3g}"
    assert run.values["tokens"] == f"{8 * GLOBAL_BATCH * SEQ_LEN:,}"
    saved = read_manifest(path := folder / "checkpoint" / "step-6")
    for section, key, value, message in (
        ("lr_schedule", "batch_scaling", "none", "the learning rates of its branches are not known"),
        ("lr_schedule", "min_lr_factor", 0.0, "the learning rate of step 6 is 0"),
        ("optimizer", "weight_decay_end", 0.0, "the weight decay of a step depends on"),
    ):
        assert saved.config[section][key] != value
        changed = {**saved.config, section: {**saved.config[section], key: value}}
        (path / MANIFEST_FILE).write_bytes(manifest_text(replace(saved, config=changed)))
        with pytest.raises(UserError, match=message):
            branches(options(folder, step=6), [])


@pytest.mark.slow
def test_the_learning_rate_is_that_of_the_step(tmp_path: Path) -> None:
    """And not that of a later start, whose configuration the folder has."""
    folder = train(tmp_path, **{"training.steps": 3, "lr_schedule.decay": "none"})
    train(tmp_path, **{"optimizer.lr": 0.5, "lr_schedule.warmup_steps": 1, "optimizer.weight_decay": 0.3})
    for step, lr, weight_decay in ((3, 1e-2, 0.1), (6, 0.25, 0.3)):
        run, _ = branches(options(folder, GLOBAL_BATCH, 2 * GLOBAL_BATCH, step=step), [])
        assert run.config.optimizer.weight_decay == weight_decay
        assert critical_batch.schedule_of(run.config)(step + 1) == pytest.approx(lr, rel=1e-12)
    run, _ = branches(options(folder, GLOBAL_BATCH, 2 * GLOBAL_BATCH, step=3), ["--optimizer.weight_decay=0.2"])
    assert run.config.optimizer.weight_decay == 0.2


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((2.0, 1.9, 2.009, 2.02, 2.0), "16 sequences"),
        ((2.0, 2.011, 2.0, 2.0, 2.0), "below 8 sequences: add smaller ones"),
        ((2.0, 2.0, 2.0, 2.0, 2.01), "at least 64 sequences: add larger ones"),
        ((2.0, 2.0, 2.0, 2.0, None), "No result yet"),
    ],
)
def test_the_largest_batch_without_loss(
    losses: tuple[float | None, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: Any = [Run(str(size), {"batch": str(size)}, [], None) for size in (4, 8, 16, 32, 64)]  # type: ignore[arg-type]
    known = dict(zip([run.name for run in given], losses, strict=True))
    monkeypatch.setattr(critical_batch, "final_loss", lambda run: known[run.name])
    assert expected in compared(given, 0.01)[-1]


def test_a_branch_needs_another(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two or more numbers of sequences"):
        main([str(tmp_path), "--tokens", "5", "--batches", "8"])
    with pytest.raises(UserError, match=r"has no config\.toml: pass the dump folder of a run"):
        main([str(tmp_path), "--tokens", "5", "--batches", "8", "16"])
