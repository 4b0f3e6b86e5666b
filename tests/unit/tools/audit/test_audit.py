"""titanlite audit: an untouched run is reproduced, and each falsified one is found out, with what was changed."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import titanlite
from tests.distributed.program import CONFIG
from tests.distributed.reference import TOKENS
from tests.in_process import TrainingHere
from titanlite.checkpoint.manifest import MANIFEST_FILE, read_manifest, write_manifest
from titanlite.checkpoint.start import load
from titanlite.checkpoint.storage import read_shapes
from titanlite.metrics.about import Started
from titanlite.metrics.jsonl import read_rows
from titanlite.runtime.cache import hash_of
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.tools.audit import __main__ as audit
from titanlite.tools.audit.computer import starts_of
from titanlite.tools.audit.result import read_results
from titanlite.tools.audit.rounding import within_rounding
from titanlite.tools.compare.measure import Trained
from titanlite.tools.report import __main__ as report

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_collection")]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "start_run", TrainingHere)


def trained(folder: Path, **settings: Any) -> Path:
    """The dump folder of a run with two intervals of two steps."""
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    data = shutil.copy(TOKENS, folder / "tokens.npy")
    np.save(folder / "validation.npy", np.load(TOKENS)[:100])
    values = {
        "job.dump_folder": folder / "out",
        "checkpoint.enable": True,
        "checkpoint.interval": 2,
        "training.steps": 4,
        "training.bit_equal": True,
        "training.dtype": "float32",
        "training.global_batch_size": 4,
        "training.local_batch_size": 2,
        "data.ledger": True,
        "data.sources": [{"kind": "tokens", "path": data}],
        "validation.enable": True,
        "validation.interval": 2,
        "validation.sources": [{"kind": "tokens", "path": folder / "validation.npy"}],
    }
    return titanlite.run(folder / "config.toml", {**values, **settings}).folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run, to falsify."""
    return shutil.copytree(whole, tmp_path / "out")


def audited(run: Path, *options: str) -> list[str]:
    """The lines of what an audit of all intervals finds, without those of intervals that are reproduced."""
    with pytest.raises(SystemExit) as end:
        audit.main([str(run), "--intervals", "0", *options])
    assert end.value.code == 1
    return [str(each) for each in read_results(run / "audit") if each.verdict != "reproduced"]


def test_all_intervals_of_an_untouched_run_are_reproduced(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = shutil.copy(TOKENS, run.parent / "moved.npy")
    audit.main([str(run), "--intervals", "0", "--data.sources.0.path", str(moved)])
    found = [str(each) for each in read_results(run / "audit")]
    assert found == [f"steps {first} to {first + 1}: reproduced, bit for bit" for first in (1, 3)]
    device = read_manifest(run / "checkpoint" / "step-2").versions["device"]
    assert [each.hardware for each in read_results(run / "audit")] == [f"{device}, one process"] * 2
    report.main([str(run), "--out", str(run.parent / "report.html")])
    page = (run.parent / "report.html").read_text()
    assert f"<td>{device}, one process</td><td><pre>reproduced, bit for bit</pre></td>" in page
    again = r"has steps-1-2, steps-3-4 of an earlier audit: compare again with --results"
    with pytest.raises(UserError, match=again):
        audit.main([str(run), "--intervals", "0"])
    capsys.readouterr()
    audit.main([str(run), "--results"])
    assert capsys.readouterr().out.splitlines()[1:3] == found


@pytest.mark.parametrize("name", ["audit", "audit/steps-1-2.toml", "audit/steps-1-2-repeats", "audit/a-repeats/b"])
def test_an_audit_does_not_write_through_links(name: str, tmp_path: Path) -> None:
    precious, link = tmp_path / "precious", tmp_path / "out" / name
    precious.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(precious)
    with pytest.raises(UserError, match=f"{link} is a link to '{precious}', through which an audit does not write"):
        audit.main([str(tmp_path / "out")])
    assert not [*precious.iterdir()]


def test_a_configuration_in_the_folder_of_an_audit_needs_permission_for_its_plugins(tmp_path: Path) -> None:
    """The folder may have come with the run."""
    (tmp_path / "evil.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'pwned')!r}).touch()\n")
    (tmp_path / "steps-1-2.toml").write_text(f'[job]\nplugins = ["{tmp_path}/evil.py"]\n')
    sides, options = [Trained(tmp_path, tmp_path)] * 2, audit.Options(run=str(tmp_path))
    with pytest.raises(UserError, match=r"needs code that job.plugins of its run names: '.*evil.py'; .*--allow-import"):
        within_rounding(sides, range(1, 3), tmp_path, 3, options, TrainingHere, allow_import=False)
    assert not (tmp_path / "pwned").exists()


def test_intervals_are_drawn_by_the_seed_that_is_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit.main([str(run)])
    shown = capsys.readouterr().out
    (first,) = read_results(run / "audit")
    assert f" drawn with --seed {first.command.split()[4]}\n" in shown
    audit.main([*shlex.split(first.command)[2:], "--out", str(run / "again")])
    (second,) = read_results(run / "again")
    assert replace(first, created="") == replace(second, created="")


def test_changed_weights_are_found_on_both_sides_of_the_checkpoint(run: Path) -> None:
    name = "model/layers.1.attention.wo.weight"
    falsify(run / "checkpoint" / "step-2", name)
    before, after = audited(run)
    assert "steps 1 to 2: NOT reproduced\n  weights: 1 of " in before
    assert before.endswith("differ: layers.1.attention.wo.weight")
    assert after.startswith("steps 3 to 4: NOT reproduced\n  step 3: loss was 4.")


def test_without_bit_equal_differences_are_set_against_rounding(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", **{"training.bit_equal": False})
    falsify(run / "checkpoint" / "step-4", "model/layers.1.attention.wo.weight")
    with pytest.raises(SystemExit):
        audit.main([str(run), "--intervals", "0", "--training.local_batch_size", "4", "--repeats", "3"])
    first, second = read_results(run / "audit")
    assert [first.verdict, second.verdict] == ["within", "differs"]
    line = r"step {} {} differs by \S+, rounding explains \S+ \(3 repeats\)"
    assert re.fullmatch("at most, in " + line.format("2,", r"\S+"), "\n".join(first.differences))
    assert re.match(line.format("4:", "layers.1.attention.wo.weight"), second.differences[0])


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW, lr 0.03": {"optimizer.lr": 0.03},
    "Muon": {"optimizer.name": "Muon"},
    "bfloat16": {"training.mixed_precision_param": "bfloat16"},
}


@pytest.mark.soak
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_intervals_without_a_mistake_are_within_rounding(name: str, tmp_path: Path) -> None:
    """The intervals of 8 steps, with two other sizes of microbatches. For docs/reproducing.md."""
    settings = {"training.bit_equal": False, "training.steps": 24, "checkpoint.interval": 8, **CONFIGURATIONS[name]}
    run = trained(tmp_path / "run", **settings)
    for rows in ("2", "8"):
        audit.main([str(run), "--intervals", "0", "--out", str(run / rows), "--training.local_batch_size", rows])
        assert [each.verdict for each in read_results(run / rows)] == ["within"] * 3


@pytest.mark.soak
def test_another_device_may_round_differently_with_bit_equal(run: Path) -> None:
    """Repeats resume without training.bit_equal."""
    checkpoint = run / "checkpoint" / "step-4"
    manifest = read_manifest(checkpoint)
    facts = [replace(each, facts={**each.facts, "device": "other"}) for each in manifest.computations]
    (checkpoint / MANIFEST_FILE).unlink()
    write_manifest(checkpoint, replace(manifest, computations=tuple(facts)))
    falsify(checkpoint, "optimizer/norm.weight/exp_avg")
    (found,) = audited(run, "--repeats", "3")
    assert "\n  computed with another device: other, here " in found
    assert "\n  step 4: optimizer/norm.weight/exp_avg differs by " in found


def falsify(checkpoint: Path, name: str) -> None:
    """Change a number of a float32 tensor of a checkpoint, and the hashes with it."""
    manifest = read_manifest(checkpoint)
    shape, _ = read_shapes(checkpoint)[name]
    tensor = torch.empty(shape)
    load(checkpoint, {name: tensor}, None)
    before, after = tensor.numpy().tobytes(), tensor.flatten().index_fill(0, torch.tensor([3]), 0.5).numpy().tobytes()
    (file,) = checkpoint.glob("*.distcp")
    content = file.read_bytes()
    assert content.count(before) == 1
    file.write_bytes(content.replace(before, after))
    record = replace(manifest.files[file.name], hash=hash_of(file))
    (checkpoint / MANIFEST_FILE).unlink()
    write_manifest(checkpoint, replace(manifest, files={**manifest.files, file.name: record}))


def test_a_setting_that_was_changed_for_one_step_is_named(tmp_path: Path) -> None:
    """Also if its column is falsified."""
    run = trained(tmp_path / "run", **{"checkpoint.stop_after": 2, "training.bit_equal": False})
    config = titanlite.load_config(run / "config.toml")
    for lr, last in ((0.02, 3), (0.01, -1)):
        section = replace(config.checkpoint, stop_after=last)
        titanlite.run(replace(config, checkpoint=section, optimizer=replace(config.optimizer, lr=lr)))
    shutil.rmtree(run / "checkpoint" / "step-3")
    (found,) = audited(run)
    assert found.startswith("steps 3 to 4: NOT reproduced\n  step 3: lr was 0.011")
    assert "\n  step 4: the loss of sequence" in found
    rows = read_rows(run / "metrics.jsonl")
    lines = [json.dumps({key: value for key, value in row.items() if key != "lr"}) for row in rows]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    with pytest.raises(SystemExit):
        audit.main([str(run), "--results", "--repeats", "3"])
    assert re.match(r"step 4: \S+ differs by \S+, rounding explains ", read_results(run / "audit")[-1].differences[0])


def test_a_changed_token_is_named(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", **{"training.bit_equal": False})
    tokens = np.load(run.parent / "tokens.npy")
    tokens[5] += 1
    np.save(run.parent / "tokens.npy", tokens)
    first, *others = audited(run)
    assert first.startswith("steps 1 to 2: NOT reproduced\n  data: source 0 (tokens ")
    assert all("since it cannot be computed\n  cannot resume from " in each for each in others)
    assert all("\n    data: source 0 (tokens " in each for each in others)


def test_a_changed_row_of_the_metrics_is_named(run: Path) -> None:
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    (validation,) = (row for row in rows if row["step"] == 2 and "loss" not in row)
    (third,) = (row for row in rows if row["step"] == 3)
    third["grad_norm"] = validation["validation/loss"] = 0.5
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = audited(run)
    assert found[0].startswith("steps 1 to 2: NOT reproduced\n  step 2: validation/loss was 0.5, recomputed ")
    assert found[1].startswith("steps 3 to 4: NOT reproduced\n  step 3: grad_norm was 0.5, recomputed ")
    assert [len(each.splitlines()) for each in found] == [2, 2]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows if row["step"] not in (2, 3)))
    audit.main([str(run), "--intervals", "0", "--results"])
    assert [each.notes for each in read_results(run / "audit")] == [
        ("metrics.jsonl of the run has no row of step 2, 2 (validation): not compared",),
        ("metrics.jsonl of the run has no row of step 3: not compared",),
    ]


def test_a_checkpoint_of_another_run_or_another_step_is_named(run: Path, tmp_path: Path) -> None:
    steps = run / "checkpoint"
    shutil.copytree(trained(tmp_path / "other") / "checkpoint" / "step-4", steps / "step-4", dirs_exist_ok=True)
    shutil.copytree(steps / "step-2", steps / "step-6")
    second, last = audited(run)
    assert second.startswith("steps 3 to 4: NOT reproduced, since it cannot be computed\n  ")
    assert "step-4 does not continue " in second
    assert "step-6 is the checkpoint of step 2: it was renamed or swapped" in last


def test_the_meshes_of_an_interval_are_those_of_the_starts_that_computed_it() -> None:
    starts = [Started(step, datetime.now(UTC), {"dp_shard": shard}) for shard, step in ((1, 0), (2, 4), (3, 2), (4, 6))]
    found = [[start.mesh["dp_shard"] for start in starts_of(starts, steps)] for steps in
             (range(1, 3), range(2, 5), range(3, 7), range(5, 9), range(7, 9))]  # fmt: skip
    assert found == [[1], [1, 3], [3], [3, 4], [4]]
    assert starts_of([], range(1, 3)) == []


def test_the_step_of_an_export_is_named_and_audited(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 4):
        folder = tmp_path / f"export-{step}"
        titanlite.export_run(run / "checkpoint" / f"step-{step}", folder, dtype="bfloat16", verify=False)
    audit.main([str(run), "--export", str(tmp_path / "export-2")])
    assert capsys.readouterr().out.splitlines()[0] == f"{tmp_path / 'export-2'} has the weights of step 2"
    assert [(each.first, each.last) for each in read_results(run / "audit")] == [(1, 2)]
    file = tmp_path / "export-4" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] *= -1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        UserError, match=r"the weights of no checkpoint in .*: step 4, .* differs first in norm\.weight"
    ):
        audit.main([str(run), "--export", str(tmp_path / "export-4")])


def test_other_code_is_named_before_the_training(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run / "checkpoint" / "step-4"
    manifest = read_manifest(checkpoint)
    (checkpoint / MANIFEST_FILE).unlink()
    write_manifest(checkpoint, replace(manifest, versions={**manifest.versions, "code": "other"}))
    audit.main([str(run), "--intervals", "0"])
    line = f"computed with another code: other, here {manifest.versions['code']}"
    assert capsys.readouterr().out.splitlines()[1] == f"steps 3 to 4: {line}"
    assert [each.notes for each in read_results(run / "audit")] == [(), (line,)]


def test_only_keys_that_change_no_number_are_accepted(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"a key that changes no number") as error:
        audit.main([str(run), "--optimizer.lr", "1", "--training.seq_len", "8", "--parallelism.dp_shard", "1"])
    assert [problem.key for problem in error.value.problems] == ["optimizer.lr", "training.seq_len"]
