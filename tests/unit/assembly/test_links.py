"""Links in a dump folder that someone else made: a run writes through none of them, except checkpoint.folder."""

import shutil
from pathlib import Path

import pytest

import titanlite
from tests.distributed.program import CONFIG
from tests.unit.checkpoint.making import content_of
from titanlite.config.check import OUTPUTS, OWN_FILES
from titanlite.ranks.job_lock import JOB_LOCK_FILE
from titanlite.runtime.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_collection")]

ALL = (*OUTPUTS, "faults", "wandb", "mlruns")
FOLDERS = ("tokenizer", "ledger", "records", "traces", "memory_snapshots", "tb", "faults", "wandb", "mlruns")
INSIDE = ("ledger/0-of-1.jsonl", "records/000.npz", "tb/by_tokens", "faults/rank-0.txt", "traces/step-4")


def train(folder: Path, steps: int) -> None:
    config = folder.with_suffix(".toml")
    config.write_text(CONFIG)
    values = {
        "job.dump_folder": folder,
        "checkpoint.enable": True,
        "checkpoint.interval": 1,
        "training.steps": steps,
        "data.ledger": True,
        "profiling.enable_trace": True,
        "profiling.interval": 2,
        "profiling.wait": 0,
        "profiling.warmup": 0,
        "metrics.loggers": ["console", "jsonl", "tensorboard"],
    }
    titanlite.run(titanlite.load_config(str(config), values))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "out"
    train(folder, 2)
    return folder


def plant(folder: Path, name: str, precious: Path, *, exists: bool) -> None:
    """Replace an output by a link into `precious`: to where it was moved, or where nothing is if it is a file."""
    path, target = folder / name, precious / name.replace("/", "-")
    if path.exists():
        shutil.move(path, target)
    elif name in FOLDERS:
        target.mkdir()
    if target.is_file() and not exists:
        target.unlink()
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("names", "resumes"), [(ALL, True), pytest.param(ALL, False, marks=pytest.mark.soak), (INSIDE, True)]
)
def test_outputs_that_are_links_are_renamed_and_not_followed(
    trained: Path, tmp_path: Path, resumes: bool, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, precious = tmp_path / "out", tmp_path / "precious"
    precious.mkdir()
    shutil.copytree(trained, folder)
    if not resumes:
        shutil.rmtree(folder / "checkpoint")
    for name in names:
        plant(folder, name, precious, exists=name != "metrics.jsonl")
    before = content_of(precious)
    train(folder, 4)
    assert content_of(precious) == before
    left = [path for path in folder.rglob("*") if path.is_symlink()]
    assert {path.name.rpartition(".")[0] for path in left} == {name.rpartition("/")[2] for name in names}
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "are not followed, and were renamed to NAME.N" in line]
    assert f", and {len(names) - 3} more links" in line
    assert (folder / "metrics.jsonl").is_file()


def test_checkpoints_behind_a_link_are_used_and_their_place_is_logged(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch, folder = tmp_path / "scratch", tmp_path / "real"
    shutil.copytree(trained, folder)
    (folder / "checkpoint").rename(scratch)
    (folder / "checkpoint").symlink_to(scratch)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "x").touch()
    for name in (".step-3.writing", ".step-4.deleting"):
        (scratch / name).symlink_to(precious)
    (tmp_path / "out").symlink_to(folder)
    train(tmp_path / "out", 3)
    assert (scratch / "step-3").is_dir()
    assert [*precious.iterdir()] == [precious / "x"]
    assert f"Checkpoints: {tmp_path / 'out/checkpoint'} is a link; they are in {scratch}" in capsys.readouterr().out


def test_a_lock_file_that_is_a_link_is_refused(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "out")
    (tmp_path / "out" / JOB_LOCK_FILE).symlink_to(tmp_path / "new")
    with pytest.raises(UserError, match=r"job\.lock: it is a link to '.*/new', which is not followed; remove the link"):
        train(tmp_path / "out", 3)
    assert not (tmp_path / "new").exists()


def test_all_outputs_are_tested() -> None:
    assert {*ALL, JOB_LOCK_FILE} == {*OWN_FILES}
