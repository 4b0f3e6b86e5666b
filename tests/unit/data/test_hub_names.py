"""Names in the files of a local folder in the hub's layout: no request is sent, and no file outside is read."""

import json
import os
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.data.small_hub import SmallHub, small_hub
from titanlite.data.check import check_source
from titanlite.data.config import DataConfig
from titanlite.data.corpus import open_index
from titanlite.data.sources import hf
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.hub_files import hub_files
from titanlite.runtime.errors import ConfigError, UserError

pytestmark = pytest.mark.usefixtures("hugging_face_home")

ROW = '{"text": "a row"}\n'
CARD = "---\nconfigs:\n- config_name: default\n  data_files: train.jsonl\n- config_name: other\n  %s\n---\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallHub]:
    with small_hub(tmp_path_factory.mktemp("hub")) as started:
        yield started


@pytest.fixture
def hub(server: SmallHub, monkeypatch: pytest.MonkeyPatch) -> SmallHub:
    """A server that notes the requests: the hub, and a stranger's server."""
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", server.endpoint)
    server.requests.clear()
    return server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset of one file, and a file outside of it."""
    (tmp_path / "dataset" / "sub").mkdir(parents=True)
    for place in ("dataset", "dataset/sub", "."):
        (tmp_path / place / "train.jsonl").write_text(ROW)
    with zipfile.ZipFile(tmp_path / "outside.zip", "w") as archive:
        archive.writestr("train.jsonl", ROW)
    return tmp_path / "dataset"


def source_of(folder: Path, **changes: object) -> SourceConfig:
    return replace(SourceConfig(kind="hf", path=str(folder)), **changes)  # type: ignore[arg-type]


def remedies(source: SourceConfig) -> list[str]:
    found = check_source(source, "data.sources.0", DataConfig(), vocab_size=0, checks_files=True)
    return [problem.remedy for problem in found]


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "parameters",
    [
        "data_files: SERVER/x.jsonl",
        "data_files: [train.jsonl, SERVER/x.jsonl]",
        "data_files: [{split: train, path: train.jsonl}, {split: test, path: SERVER/x.jsonl}]",
        "data_files: [{split: train, path: [train.jsonl, 'hf://datasets/user/dataset/x.jsonl']}]",
        "data_files: simplecache::SERVER/x.jsonl",
        "data_files: zip://train.jsonl::FOLDER/../outside.zip",
        "data_files: 'file:OUTSIDE/train.jsonl'",
        "data_files: OUTSIDE/train.jsonl",
        "data_files: sub/../../train.jsonl",
        "data_files: disk/../train.jsonl",
        "data_files: [{split: train, path: train.jsonl}, {split: test, path: OUTSIDE/train.jsonl}]",
        "data_dir: x::SERVER/",
        "data_dir: OUTSIDE",
        "data_dir: ..",
    ],
)
def test_names_are_checked_before_they_are_resolved(
    parameters: str, file: str, folder: Path, hub: SmallHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved: list[object] = []
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *given, **_: resolved.append(given))
    (folder / "disk").symlink_to(folder.parent.parent)
    given = parameters.replace("SERVER", hub.endpoint).replace("OUTSIDE", str(folder.parent))
    card = CARD % given.replace("FOLDER", str(folder))
    (folder / file).write_text(card if file == "README.md" else card.strip("-\n"))
    (remedy,) = remedies(source_of(folder))
    assert "is outside: fix the README.md" in remedy
    with pytest.raises(ConfigError, match="is outside"):
        open_index(hf.ConvertedDataset(source_of(folder, streaming=False)), 100)
    assert hub.requests == resolved == []


@pytest.mark.parametrize("name", ["data_files: SERVER/x.jsonl", "data_files: hf://datasets/user/dataset/x.jsonl"])
@pytest.mark.parametrize("subset", ["", "other", "missing"])
def test_no_request_for_any_subset(name: str, subset: str, folder: Path, hub: SmallHub) -> None:
    (folder / "README.md").write_text(CARD % name.replace("SERVER", hub.endpoint))
    assert len(remedies(source_of(folder, subset=subset))) == 1
    assert hub.requests == []


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("data_files: FOLDER/train.jsonl", "train.jsonl"),
        ("data_files: ./sub/*.jsonl", "sub/train.jsonl"),
        ("data_dir: ./sub", "sub/train.jsonl"),
        ("data_files: [{split: train, path: [sub/*]}]", "sub/train.jsonl"),
        ("data_files: disk/*.jsonl", "disk/train.jsonl"),
        ("data_files: 'on disk.jsonl'", "on disk.jsonl"),
    ],
)
def test_names_and_links_inside_work(parameters: str, expected: str, folder: Path) -> None:
    """Links of a data folder to another disk are followed."""
    (folder / "disk").symlink_to(folder.parent)
    (folder / "on disk.jsonl").symlink_to(folder.parent / "train.jsonl")
    (folder / "README.md").write_text(CARD % parameters.replace("FOLDER", str(folder)))
    source = source_of(folder, subset="other")
    assert remedies(source) == []
    assert [os.path.normpath(file) for file in hub_files(source).files] == [str(folder / expected)]


def test_a_file_whose_name_is_a_chain(folder: Path) -> None:
    """`datasets` would unpack another file, whose path follows `::`."""
    (folder / "train.jsonl::file:train.jsonl.gz").write_text(ROW)
    assert "no name may contain '::'" in "".join(remedies(source_of(folder)))


@pytest.mark.parametrize("archive", ["train.zip", "train.jsonl"])
def test_names_in_a_zip_file(archive: str, folder: Path) -> None:
    """A member `a::/b.zip/c` would be read from /b.zip. `datasets` unpacks zip files of any suffix."""
    for file in ("train.jsonl", "sub/train.jsonl"):
        (folder / file).unlink()
    source = source_of(folder, streaming=False)
    with zipfile.ZipFile(folder / archive, "w") as opened:
        opened.writestr("rows.jsonl", ROW * 3)
    into = folder.parent / "into"
    into.mkdir()
    assert len(hf.ConvertedDataset(source).indexed_files(into)) == 1
    with zipfile.ZipFile(folder / archive, "a") as opened:
        opened.writestr(f"a::{folder.parent}/outside.zip/train.jsonl", ROW)
    with pytest.raises(
        UserError, match=r"contains 'a::.*outside\.zip/train\.jsonl', which `datasets` takes for a path"
    ):
        hf.ConvertedDataset(source).indexed_files(into)


def test_cards_that_are_not_read(folder: Path) -> None:
    """Lists of references, of 9 ** 20 entries in a few lines; a pipe; a text that is no card."""
    lists = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}' if n else 'x'] * 9)}]" for n in range(20)]
    (folder / "README.md").write_text("---\n" + "\n".join(lists) + "\n" + (CARD % "data_files: *l19").strip("-"))
    assert remedies(source_of(folder)) == [
        "fix the data_files and data_dir of its README.md or .huggingface.yaml: one is a list"
    ]
    (folder / "README.md").write_text("---\nconfigs: [\n---\n")
    assert "while parsing a flow node" in "".join(remedies(source_of(folder)))
    (folder / "README.md").unlink()
    os.mkfifo(folder / ".huggingface.yaml")
    assert "not a regular file but a pipe" in "".join(remedies(source_of(folder)))


def test_paths_in_rows_are_not_read(folder: Path, hub: SmallHub) -> None:
    """Columns of images, audio and videos keep the paths of a stranger; `dataset_infos.json` may name URLs."""
    kinds = ("image", "audio")
    features = "".join(f"  - name: {kind}\n    dtype: {kind}\n" for kind in kinds)
    (folder / "README.md").write_text(
        f"---\ndataset_info:\n  features:\n  - name: text\n    dtype: string\n{features}---\n"
    )
    row = {"text": "a row", "image": f"{hub.endpoint}/x.png", "audio": str(folder / "pipe")}
    os.mkfifo(folder / "pipe")  # reading it would wait
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "sub" / "train.jsonl").unlink()
    checksums = {f"{hub.endpoint}/x.jsonl": {"num_bytes": 1, "checksum": "0"}}
    infos = {"default": {"homepage": hub.endpoint, "download_checksums": checksums, "builder_name": "json"}}
    (folder / "dataset_infos.json").write_text(json.dumps(infos))
    assert len(open_index(hf.ConvertedDataset(source_of(folder, streaming=False)), 100)) == 1
    assert hub.requests == []
