"""A run that has begun keeps the values that its flavor had, whatever the flavor has by now."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.making import make
from titanlite.checkpoint.compatibility import check_facts
from titanlite.checkpoint.folder import latest_manifest
from titanlite.checkpoint.manifest import Manifest
from titanlite.config.check import resolve_config
from titanlite.config.load import check_and_resolve, config_from_values, keep_earlier, parse
from titanlite.config.schema import JobConfig
from titanlite.config.toml import dump_config, print_config
from titanlite.models.losses import LOSSES, Loss
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.tools.compare.__main__ import _config_of
from titanlite.tools.compare.repeats import setting_differences
from titanlite.tools.sweep.combinations import _learned

LATER = {"norm_eps": 0.5, "balance_loss": 0.25, "z_loss": 0.125, "max_seq_len": 8192, "init_std": 1.0}
"""Values of a flavor in a later version."""
FLAVOR = FAMILIES["olmoe"].flavors["debug"]
SECTIONS = {"training": {"global_batch_size": 8}, "data": {"num_streams": 8}}


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES["olmoe"].flavors, "debug", replace(FLAVOR, **LATER))


def save(folder: Path, without: tuple[str, ...] = (), step: int = 5, **overrides: Any) -> Manifest:
    """A checkpoint of this version. without: hyper-parameters that its titanlite had not."""
    model = {"family": "olmoe", "flavor": "debug", "overrides": overrides}
    facts = {"family": "olmoe", **asdict(replace(FLAVOR, **overrides))}
    facts = {"model": {key: value for key, value in facts.items() if key not in without}}
    make(folder / "checkpoint", step, config={"model": model, **SECTIONS}, facts=facts)
    found = latest_manifest(folder / "checkpoint")
    assert found is not None
    return found


def configuration(folder: Path, *arguments: str, family: str = "olmoe") -> JobConfig:
    parsed = parse([f"--job.dump_folder={folder}", "--checkpoint.enable=true", f"--model.family={family}", *arguments])
    assert not parsed.problems
    return parsed.config


@pytest.mark.usefixtures("later")
def test_a_resume_keeps_what_only_the_flavor_gave(tmp_path: Path) -> None:
    new = configuration(tmp_path)
    assert keep_earlier(new) == new
    assert new.hyper_parameters == replace(FLAVOR, **LATER)
    manifest = save(tmp_path, dim=128, z_loss=0.01)
    given = configuration(tmp_path, "--model.dim=128", "--model.balance_loss=0.75")
    found = keep_earlier(given).model
    assert found.overrides == {"dim": 128, "balance_loss": 0.75}
    assert found.kept == {name: getattr(FLAVOR, name) for name in ("norm_eps", "max_seq_len", "init_std")}
    kept = keep_earlier(given).hyper_parameters  # z_loss, which was given, is no value of the flavor
    assert kept == replace(FLAVOR, dim=128, balance_loss=0.75, z_loss=LATER["z_loss"])
    facts = {"model": {"family": "olmoe", **asdict(kept)}}
    assert check_facts(manifest.facts, facts, (), "here", 5) == []
    another = keep_earlier(configuration(tmp_path, "--model.dim=128", "--model.norm_eps=1e-3")).hyper_parameters
    with pytest.raises(UserError, match="differ") as caught:
        check_facts(manifest.facts, {"model": {"family": "olmoe", **asdict(another)}}, (), "here", 5)
    assert "model.norm_eps: 1e-05 in the checkpoint, 0.001 now" in str(caught.value)


@pytest.mark.usefixtures("later")
def test_hyper_parameters_that_the_checkpoint_has_not_yet_are_those_of_its_time(tmp_path: Path) -> None:
    save(tmp_path, without=("init_std", "init_by_depth", "base_dim"))
    found = keep_earlier(configuration(tmp_path)).hyper_parameters
    assert (found.init_std, found.init_by_depth, found.base_dim) == (0.02, True, 0)
    assert (FLAVOR.init_std, FLAVOR.init_by_depth) == (0.02, False)


@pytest.mark.usefixtures("later")
def test_kept_values_are_stored_and_read_by_the_next_start(tmp_path: Path) -> None:
    save(tmp_path)
    first = keep_earlier(configuration(tmp_path))
    assert first.model.kept == {name: getattr(FLAVOR, name) for name in LATER}
    facts = {"model": {"family": "olmoe", **asdict(first.hyper_parameters)}}
    make(tmp_path / "checkpoint", 9, config={"model": asdict(first.model), **SECTIONS}, facts=facts)
    assert keep_earlier(configuration(tmp_path)).model == first.model
    (tmp_path / "copy.toml").write_text(dump_config(first))
    parsed = parse([f"--job.config_file={tmp_path / 'copy.toml'}"])
    assert (parsed.problems, parsed.config.model) == ([], first.model)
    assert read_again(first).model == first.model
    (tmp_path / "copy.toml").write_text('[model]\nfamily = "olmoe"\n[model.kept]\nnope = 1\ndim = "x"\n')
    problems = parse([f"--job.config_file={tmp_path / 'copy.toml'}"]).problems
    assert {problem.key for problem in problems} == {"model.kept.nope", "model.kept.dim"}


@pytest.mark.usefixtures("later")
def test_a_copy_with_another_flavor_has_the_values_of_that_flavor(tmp_path: Path) -> None:
    save(tmp_path)
    copy = tmp_path / "copy.toml"
    first = keep_earlier(configuration(tmp_path))
    copy.write_text(dump_config(first))
    (tmp_path / "own.toml").write_text('extends = "copy.toml"\n[model]\nflavor = "1B-7B"\n')
    for words in (
        [f"--job.config_file={copy}", "--model.flavor=1B-7B"],
        [f"--job.config_file={copy}", "--model.family=qwen2"],
        [f"--job.config_file={tmp_path / 'own.toml'}"],
    ):
        parsed = parse(words)
        assert (parsed.problems, parsed.config.model.kept) == ([], {})
    parsed = parse([f"--job.config_file={copy}"])
    lines = print_config(parsed.config, parsed.config, resolved(parsed.config), parsed.origins, ()).splitlines()
    assert "norm_eps = 1e-05  # flavor debug, when the run began" in lines
    assert "n_layers = 4  # flavor debug" in lines


def read_again(config: JobConfig) -> JobConfig:
    """As a program that changes a configuration in Python."""
    elsewhere = replace(config, job=replace(config.job, dump_folder=f"{config.job.dump_folder}/another"))
    tokens = replace(elsewhere.data, sources=parse(["--data.sources.0.kind=tokens"]).config.data.sources)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titanlite.config.load.check_config", lambda *_, **__: [])
        return check_and_resolve(replace(elsewhere, data=tokens), world_size=1, device_type="cpu")


@pytest.mark.usefixtures("later")
def test_a_stored_configuration_has_the_values_of_its_checkpoint(tmp_path: Path) -> None:
    manifest = save(tmp_path, dim=128)
    values = {**manifest.config, "training": {}, "data": {}}
    found = config_from_values(values, begun=manifest).hyper_parameters
    assert found == replace(FLAVOR, dim=128)
    assert config_from_values(values).hyper_parameters == replace(FLAVOR, dim=128, **LATER)
    given = config_from_values(values, ["--model.norm_eps=0.1"], manifest).hyper_parameters
    assert given == replace(FLAVOR, dim=128, norm_eps=0.1)


def resolved(config: JobConfig) -> JobConfig:
    return resolve_config(keep_earlier(config), world_size=1, device_type="cpu")


def test_the_logit_z_loss_of_a_family_is_that_of_new_runs(tmp_path: Path) -> None:
    def z_loss(config: JobConfig) -> float:
        return resolved(config).loss.z_loss

    new = configuration(tmp_path, family="olmo2")
    assert (new.loss.z_loss, "z_loss" in new.loss.chosen.terms, z_loss(new)) == (-1, False, 1e-5)
    assert z_loss(configuration(tmp_path, family="olmo3")) == 1e-5
    assert z_loss(configuration(tmp_path)) == 0
    assert z_loss(configuration(tmp_path, "--loss.z_loss=0", family="olmo2")) == 0
    other = Loss("other", lambda logits, labels: logits[:, 0] * labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LOSSES, "other", other)
        assert z_loss(configuration(tmp_path, "--loss.name=other", family="olmo2")) == 0
    assert FAMILIES["olmo2"].variant("another", lambda _: None).logit_z_loss == 0  # type: ignore[arg-type, return-value]
    model = {"family": "olmo2", "flavor": "debug", "overrides": {}}
    for step, (stored, expected) in enumerate((({}, 0.0), ({"z_loss": 0.0}, 0.0), ({"z_loss": 1e-4}, 1e-4)), 1):
        make(tmp_path / "checkpoint", step, config={"model": model, "loss": stored, **SECTIONS})
        assert z_loss(new) == expected
        assert z_loss(configuration(tmp_path, "--loss.z_loss=0.5", family="olmo2")) == 0.5
        assert config_from_values({"model": model, "loss": stored}).loss.z_loss == expected


@pytest.mark.usefixtures("later")
def test_runs_are_compared_with_the_values_of_their_checkpoints(tmp_path: Path) -> None:
    """config.toml of an earlier version has no kept values."""
    (tmp_path / "config.toml").write_text('[model]\nfamily = "olmoe"\n[loss]\nz_loss = 0.0\n')
    a = _config_of(tmp_path, tmp_path / "checkpoint", (), allow_import=False)
    assert a.hyper_parameters == replace(FLAVOR, **LATER)  # a run without checkpoints does not store them
    save(tmp_path)
    a = _config_of(tmp_path, tmp_path / "checkpoint", (), allow_import=False)
    assert a.hyper_parameters == FLAVOR
    same = replace(a.model, overrides=a.model.kept, kept={})
    assert setting_differences(a, replace(a, model=same)) == []
    lines = setting_differences(a, replace(a, model=replace(a.model, kept={})))
    assert "model.norm_eps: 1e-05 in A, unset in B" in lines
    assert _learned(a) == _learned(replace(a, model=replace(a.model, kept={})))  # a sweep continues


def test_another_flavor_and_values_of_a_wrong_type_are_not_kept(tmp_path: Path) -> None:
    facts = {"model": {"family": "olmoe", **asdict(FLAVOR), "norm_eps": "x", "dim": 12}}
    model = {"family": "olmoe", "flavor": "debug", "overrides": {}}
    make(tmp_path / "checkpoint", 5, config={"model": model, **SECTIONS}, facts=facts)
    assert keep_earlier(configuration(tmp_path)).model.kept == {"dim": 12}
    assert keep_earlier(configuration(tmp_path, "--model.flavor=1B-7B")).model.kept == {}
    assert keep_earlier(configuration(tmp_path, family="olmo2")).model.kept == {}


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        *(("loss", "z_loss", value) for value in ("x", -5.0)),
        *(("data", name, []) for name in ("num_streams", "add_bos", "document_mask", "stream_version")),
        ("training", "global_batch_size", "x"),
    ],
)
def test_stored_values_that_do_not_fit_their_keys_are_named(
    section: str, name: str, value: Any, tmp_path: Path
) -> None:
    model = {"family": "olmoe", "flavor": "debug", "overrides": {}}
    config = {"model": model, **SECTIONS, section: {**SECTIONS.get(section, {}), name: value}}
    make(tmp_path / "checkpoint", 5, config=config)
    with pytest.raises(ConfigError, match="this is in the checkpoint") as caught:
        keep_earlier(configuration(tmp_path))
    assert [(each.key, each.value) for each in caught.value.problems] == [(f"{section}.{name}", value)]


def test_stored_values_that_are_missing_are_chosen_anew(tmp_path: Path) -> None:
    model = {"family": "olmoe", "flavor": "debug", "overrides": {}}
    make(tmp_path / "checkpoint", 5, config={"model": model})
    found = keep_earlier(configuration(tmp_path))
    assert (found.data.num_streams, found.training.global_batch_size, found.data.stream_version) == (-1, -1, 2)
