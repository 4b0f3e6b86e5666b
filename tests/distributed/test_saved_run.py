"""Opening a saved run."""

import logging
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from tests.distributed.program import REPOSITORY, TEXT, clean_environment, start_program, write_text
from titanlite.checkpoint.folder import step_folder
from titanlite.checkpoint.manifest import MANIFEST_FILE, read_manifest, write_manifest
from titanlite.data.bpe import train_bpe
from titanlite.data.tokenizer import Tokenizer
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import UserError
from titanlite.storage.address import Address
from titanlite.storage.config import StorageConfig
from titanlite.storage.store import Store, apply_settings
from titanlite.tools.saved_run import checkpoints_in, name_storage, open_run

TEMPLATE = "{{ messages[0].content }}"
STEPS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with checkpoints of 3 steps in out/saved/here; its tokenizer is next to out."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "chat.jinja").write_text(TEMPLATE)
    program = start_program(
        folder,
        *write_text(folder),
        *("--tokenizer.bos", "<|endoftext|>", "--data.add_bos", "true"),
        *("--tokenizer.chat_template", str(folder / "chat.jinja")),
        *("--model.flavor", "debug", "--model.tie_embeddings", "true"),
        *("--model.max_seq_len", "40"),  # less than the default number of new tokens
        *("--training.steps", str(STEPS), "--checkpoint.enable", "true", "--checkpoint.interval", "1"),
        *("--checkpoint.folder", "saved/here", "--checkpoint.keep_latest_k", "0"),
    ).succeed()
    assert f"--job.dump_folder {folder}/out-2" in program.output
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Copy of the run that a test may change."""
    return Path(shutil.copytree(trained / "out", tmp_path / "out"))


@pytest.mark.slow
def test_command_printed_at_the_end_of_a_run_works(trained: Path) -> None:
    printed = re.search(r"Next: generate text +(.*)", (trained / "output").read_text())
    assert printed is not None
    command = printed[1]
    environment = clean_environment() | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, shell=True, cwd=trained, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The")


def test_open_run_takes_a_dump_folder_checkpoint_folder_or_step(run: Path) -> None:
    checkpoints = run / "saved" / "here"
    for path, step in ((run, STEPS), (checkpoints, STEPS), (step_folder(checkpoints, 2), 2)):
        found = open_run(path)
        assert found.path == step_folder(checkpoints, step)
        assert found.manifest.step == step
    copy = Address.parse(f"memory://{uuid4().hex}/run")
    for file in filter(Path.is_file, run.rglob("*")):
        Store(copy).write(str(file.relative_to(run)), file.read_bytes())
    assert open_run(copy).path == copy / "saved/here" / f"step-{STEPS}"
    assert found.dtype == torch.float64
    assert found.hyper_parameters.vocab_size == 300
    assert found.hyper_parameters.tie_embeddings
    assert found.config.training.seq_len == 16
    assert found.config.model.overrides["tie_embeddings"] is True


def test_model_is_unsharded_and_has_the_weights_of_its_step(run: Path) -> None:
    models = [
        open_run(step_folder(run / "saved" / "here", step)).model(torch.device("cpu"), torch.float64) for step in (2, 3)
    ]
    logits = [model(torch.arange(20).view(2, 10)) for model in models]
    assert all(found.isfinite().all() for found in logits)
    assert not torch.equal(*logits)
    assert models[0].output.weight is models[0].tok_embeddings.weight
    assert not models[0].training
    rounded = open_run(run).model(torch.device("cpu"), torch.bfloat16)
    assert torch.equal(rounded.norm.weight, models[1].norm.weight.to(torch.bfloat16))


def test_tensors_are_read_one_by_one(run: Path) -> None:
    found, weight = open_run(run), torch.zeros(32, dtype=torch.float64)
    found.load({"norm.weight": weight})
    assert torch.equal(weight, found.model(torch.device("cpu"), torch.float64).norm.weight)
    with pytest.raises(UserError, match=r"step-3 cannot be loaded: .*nowhere\.weight"):
        found.load({"nowhere.weight": weight})


def test_damaged_checkpoint_is_skipped_or_rejected(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    latest = step_folder(run / "saved" / "here", STEPS)
    file = max(latest.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="titanlite"):
        assert open_run(run).manifest.step == STEPS - 1
    assert f"step-{STEPS} is damaged: {file.name}" in caplog.text
    with pytest.raises(UserError, match=f"step-{STEPS} is damaged: {file.name}"):
        open_run(latest)
    for folder in (run / "saved" / "here").iterdir():
        (folder / "MANIFEST.json").write_text("{}")
    with pytest.raises(UserError, match="contains no valid checkpoint"):
        open_run(run)


def test_hyper_parameters_of_another_version(run: Path) -> None:
    path = step_folder(run / "saved" / "here", STEPS)
    manifest = read_manifest(path)
    (path / MANIFEST_FILE).unlink()
    model = manifest.facts["model"] | {"number_to_come": 1}
    write_manifest(path, replace(manifest, facts=manifest.facts | {"model": model}))
    with pytest.raises(
        UserError, match=r"step-3: another version of .* wrote this model .*'number_to_come'; use that version"
    ):
        open_run(run)


def edited(path: Path, model: Mapping[str, Any] | None = None, storage: Mapping[str, Any] | None = None) -> Path:
    """The checkpoint with other hyper-parameters or another [storage], as a stranger can seal it again."""
    manifest = read_manifest(path)
    (path / MANIFEST_FILE).unlink()
    facts = {**manifest.facts, "model": {**manifest.facts["model"], **(model or {})}}
    config = {**manifest.config, "storage": {**manifest.config["storage"], **(storage or {})}}
    write_manifest(path, replace(manifest, facts=facts, config=config))
    return path


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("n_layers", 10_000_000, "it must be at most 20, the number of tensors in the checkpoint"),
        ("max_seq_len", 1_000_000_000, "its tables of positions would be larger than the model"),
        ("vocab_size", 2_000_000_000, r"needs tok_embeddings.weight in shape \(2000000000, "),
        ("dim", -1, "model.dim = -1; it must be from 1 to"),
        ("n_heads", 0, "model.n_heads = 0; it must be from 1 to"),
        ("n_layers", 1, "has no layers.1.attention.wk.weight, which the checkpoint has"),
        ("norm_eps", "x", "model.norm_eps = 'x'; it must be a number"),
        ("tie_embeddings", [True], r"model.tie_embeddings = \[True\]; it must be"),
        ("family", ["llama3"], "MANIFEST.json has no model among its facts"),
    ],
)
def test_hyper_parameters_must_be_valid_and_those_of_the_tensors(run: Path, key: str, value: Any, message: str) -> None:
    path = edited(step_folder(run / "saved" / "here", STEPS), {key: value})
    with pytest.raises(UserError, match=message):
        open_run(path)


def test_a_saved_storage_is_not_used_but_for_anonymous(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its server would get the credentials of the user."""
    theirs = {"endpoint": "http://stranger:1", "region": "there", "profile": "other", "ca_file": "/x", "timeout_s": 1}
    saved = open_run(edited(step_folder(run / "saved" / "here", STEPS), storage={**theirs, "anonymous": True}))
    own = StorageConfig(endpoint="http://mine:1", timeout_s=7)
    try:
        assert saved.config.storage == StorageConfig(anonymous=True)
        apply_settings(own)
        assert saved.config.storage == replace(own, anonymous=True)
        with caplog.at_level(logging.WARNING, logger="titanlite"):
            name_storage(saved.path, saved.storage)
            name_storage(saved.path, saved.storage)
            name_storage(saved.path, own)
    finally:
        apply_settings(StorageConfig())
    (line,) = caplog.messages
    assert "storage.endpoint = 'http://stranger:1', storage.region = 'there', storage.profile = 'other'" in line
    assert "not used here: if you trust it, add --storage.endpoint http://stranger:1 --storage.region there" in line


@pytest.mark.parametrize("place", ["/nowhere", "../other", "s3://bucket/run"])
def test_checkpoints_outside_of_the_dump_folder_need_permission(run: Path, place: str) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace('folder = "saved/here"', f'folder = "{place}"'))
    with pytest.raises(UserError, match=f"checkpoint.folder of its config.toml is '{place}', outside of it; .*--allow"):
        checkpoints_in(run, run, allow_import=False)
    assert str(checkpoints_in(run, run, allow_import=True)).endswith(place)


def test_a_family_that_is_not_there_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = open_run(run)
    before = dict(FAMILIES)
    monkeypatch.delitem(FAMILIES, found.family.name)
    with pytest.raises(UserError, match=rf"there is no family '{found.family.name}': a program has registered it, or"):
        open_run(run)
    with pytest.raises(UserError, match=r"model\.family = "):
        _ = found.config
    monkeypatch.undo()
    FAMILIES.clear()
    FAMILIES.update(before)  # in the same order


def test_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=rf"{path} contains no checkpoint; pass the dump folder"):
            open_run(path)


def test_tokenizer_is_the_copy_in_the_dump_folder(trained: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Tokenizer(trained / "tokenizer.json", bos="<|endoftext|>")
    found = open_run(run).tokenizer()
    assert found is not None
    assert str(run) in found.description
    assert (found.fingerprint, found.bos_id) == (original.fingerprint, original.eos_id)
    assert found.chat_template == TEMPLATE
    monkeypatch.chdir(run / "saved" / "here")
    (run.parent / "link").symlink_to(Path("step-1").absolute())
    for path in (Path("step-1"), Path("step-2", "..", "step-1"), run.parent / "link"):
        relative = open_run(path).tokenizer()
        assert relative is not None
        assert str(run) in relative.description
    scratch = shutil.move(run / "saved", run.parent / "scratch")
    (run / "saved").symlink_to(scratch)
    linked = open_run(run).tokenizer()
    assert linked is not None
    assert str(run) in linked.description


def test_tokenizer_falls_back_to_the_configuration(trained: Path, run: Path) -> None:
    shutil.rmtree(run / "tokenizer")
    found = open_run(run).tokenizer()
    assert found is not None
    assert found.description.startswith(str(trained))
    assert found.chat_template == TEMPLATE


def test_different_tokenizer_is_rejected(run: Path) -> None:
    train_bpe(iter([TEXT] * 4), 270, run / "tokenizer")
    with pytest.raises(UserError, match=r"was trained with a different tokenizer than .*tokenizer\.json: 270 tokens"):
        open_run(run).tokenizer()


def test_config_of_another_version_is_reported_as_such(run: Path) -> None:
    found = open_run(run)
    found.manifest.config["optimizer"]["gone"] = 1
    with pytest.raises(UserError, match=r"step-3: this version .* saved; use that version[\s\S]*optimizer\.gone"):
        _ = found.config
