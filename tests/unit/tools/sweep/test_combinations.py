"""The runs of a sweep: values, names, and the check of all runs before the first one starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from titanlite.config.load import load_config
from titanlite.config.toml import dump_config
from titanlite.runtime.errors import ConfigError, UsageError
from titanlite.tools.sweep import command
from titanlite.tools.sweep.combinations import Run, combinations, require_same_settings, split_values


def runs_of(*overrides: str, folder: Path, world_size: int = 1) -> list[Run]:
    place = f"--job.dump_folder={folder}"
    return combinations("quickstart", [*overrides, place], world_size=world_size, device_type="cpu")


def test_strict_is_that_of_each_run(tmp_path: Path) -> None:
    argv = ("--parallelism.pp_schedule", "1F1B,GPipe")
    assert len(runs_of(*argv, folder=tmp_path)) == 2
    with pytest.raises(ConfigError, match="has an effect only with"):
        runs_of(*argv, "--strict", folder=tmp_path)
    (first, _) = runs_of("--training.steps", "1,2", "--strict", folder=tmp_path)
    assert first.arguments[-1] == "--strict"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3, 3e-4", ["1e-3", "3e-4"]),
        ("512", ["512"]),
        ('["a", "b"],[]', ['["a", "b"]', "[]"]),
        ("""'x,y',"a\\",b",c""", ["'x,y'", '"a\\",b"', "c"]),
        ("1,,2,", ["1", "", "2", ""]),
    ],
)
def test_commas_separate_values(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_all_combinations_have_their_settings_and_folders(tmp_path: Path) -> None:
    texts = ["--optimizer.lr", "1e-3,3e-4", "--optimizer.weight_decay-skip", '[],["*norm*"]', "--training.steps=7"]
    runs = runs_of(*texts, folder=tmp_path / "sweep")
    assert [(run.config.optimizer.lr, run.config.optimizer.weight_decay_skip) for run in runs] == [
        (1e-3, ()),
        (1e-3, ("*norm*",)),
        (3e-4, ()),
        (3e-4, ("*norm*",)),
    ]
    assert runs[0].values == {"optimizer.lr": "0.001", "optimizer.weight_decay_skip": "[]"}
    assert {run.config.training.steps for run in runs} == {7}
    assert [run.folder.parent for run in runs] == [tmp_path / "sweep"] * 4
    assert len({run.folder for run in runs}) == 4
    assert [run.name for run in runs][2].startswith("lr-0.0003_weight_decay_skip-")
    again = [load_config(run.arguments, world_size=1, device_type="cpu") for run in runs]  # as `titanlite train`
    assert again == [run.config for run in runs]
    assert not (tmp_path / "sweep").exists()


def test_names_of_runs(tmp_path: Path) -> None:
    (run, other) = runs_of("--job.description", '"a, b/c",plain', "--model.n_layers", "2", folder=tmp_path)
    assert run.config.job.description == "a, b/c"
    assert run.name.startswith("description-a-b-c-")
    assert (other.name, other.config.model.overrides["n_layers"]) == ("description-plain", 2)
    (source, _) = runs_of("--data.seed=1,2", "--data.sources.0.epochs=3", "--debug.seed=4", folder=tmp_path)
    assert source.name == "seed-1"
    both = runs_of("--data.seed=1,2", "--debug.seed=4,5", folder=tmp_path)
    assert both[-1].name == "data.seed-2_debug.seed-5"
    in_store = runs_of("--data.seed=1,2", "--checkpoint.folder=memory://sweep", "--checkpoint.enable", folder=tmp_path)
    assert [run.config.checkpoint.folder for run in in_store] == ["memory://sweep/seed-1", "memory://sweep/seed-2"]
    (first, _) = runs_of("--data.sources.0.weight=0.5,1", folder=tmp_path)
    assert first.values == {"data.sources.0.weight": "0.5"}


def test_the_problems_of_all_runs_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        runs_of("--training.seq_len", "63,64,x", "--parallelism.tp", "2,1", folder=tmp_path, world_size=2)
    rules = {(problem.key, problem.value): problem.rule for problem in caught.value.problems}
    assert set(rules) == {("training.seq_len", 63), ("training.seq_len", "x")}
    assert rules["training.seq_len", 63].endswith("(run seq_len = 63, tp = 2)")
    assert rules["training.seq_len", "x"].endswith("(run seq_len = x, tp = 2 and 1 more)")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--optimizer.lr=1e-3"], "no key has several values"),
        (["--optimizer.lr=1e-3,"], "a value on both sides of each comma"),
        (["--optimizer.lr=1e-3,0.001"], "two runs would have the same folder"),
        (["--optimizer.lr=1,2", "--optimizer.lr=3,4"], "given once on the command line"),
        (["--optimizer.lrr=1,2"], "did you mean optimizer.lr"),
        (
            [f"--data.seed={','.join(map(str, range(40)))}", f"--debug.seed={','.join(map(str, range(40)))}"],
            "1000 runs",
        ),
    ],
)
def test_refused_sweeps(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        runs_of(*overrides, folder=tmp_path)


def test_the_folder_has_one_value() -> None:
    with pytest.raises(ConfigError, match="each run has a folder below it"):
        combinations("quickstart", ["--job.dump_folder=a,b"], world_size=1, device_type="cpu")


def test_a_finished_run_of_other_settings_is_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run, _) = runs_of("--optimizer.lr=1e-3,1e-4", folder=tmp_path)
    run.folder.mkdir(parents=True)
    (run.folder / "config.toml").write_text(dump_config(run.config))
    require_same_settings(run)
    (other_log, _) = runs_of("--optimizer.lr=1e-3,1e-4", "--metrics.log_freq=3", folder=tmp_path)
    require_same_settings(other_log)
    on_a_gpu = replace(run.config, training=replace(run.config.training, mixed_precision_param="bfloat16"))
    (run.folder / "config.toml").write_text(dump_config(on_a_gpu))
    require_same_settings(run)
    (run.folder / "config.toml").write_text(dump_config(run.config))
    (other, _) = runs_of("--optimizer.lr=1e-3,1e-4", "--optimizer.beta1=0.8", folder=tmp_path)
    with pytest.raises(ConfigError, match=r"other settings; it has one with optimizer\.beta1 = 0\.9 \(now 0\.8\)"):
        require_same_settings(other)
    monkeypatch.setattr(command, "state_of", lambda run: "finished")  # noqa: ARG005
    for options in (command.RunsOptions(results=True), command.RunsOptions(write_slurm=tmp_path / "array.sbatch")):
        with pytest.raises(ConfigError, match="other settings"):
            command.carry_out(options, [other])
    with pytest.raises(ConfigError, match=r"loss\.name = cross_entropy \(now mine\)"):
        require_same_settings(replace(run, config=replace(run.config, loss=replace(run.config.loss, name="mine"))))


def test_the_code_that_a_finished_run_names_is_compared_and_not_imported(tmp_path: Path) -> None:
    (run, _) = runs_of("--optimizer.lr=1e-3,1e-4", folder=tmp_path)
    (tmp_path / "plug.py").write_text("raise AssertionError")
    entry = f"{tmp_path}/plug.py@sha256:0123456789abcdef"
    run.folder.mkdir(parents=True)
    job = replace(run.config.job, plugins=(entry,))
    (run.folder / "config.toml").write_text(dump_config(replace(run.config, job=job)))
    with pytest.raises(ConfigError, match=r"job\.plugins = {'plug.py': '0123456789abcdef'} \(now {}\)"):
        require_same_settings(run)
