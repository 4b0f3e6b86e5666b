"""Datasets of the Hugging Face hub: in folders with its layout, and from a local server with its API."""

import gzip
import json
import logging
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data.small_hub import COMMIT, small_hub
from titanlite.data import blocks
from titanlite.data.blocks import BlockPieces, Division, Position
from titanlite.data.check import check_data, check_source
from titanlite.data.config import DataConfig
from titanlite.data.corpus import Encoder, open_index
from titanlite.data.sources import hf
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.hub_files import hub_files, import_datasets
from titanlite.data.sources.jsonl import Jsonl
from titanlite.data.sources.pieces import BadRowError, Place, TokenPiece
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import UserError
from titanlite.runtime.retry import retrying

README = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
- config_name: french
  data_files: french/*.jsonl.gz
- config_name: table
  data_files: table/*.csv
---
"""


pytestmark = pytest.mark.usefixtures("hugging_face_home")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Two Parquet files of 10 rows in row groups of 4, 4 and 2; 6 gzipped JSON lines; a CSV table; a test split."""
    root = tmp_path / "hub" / "user" / "dataset"
    for folder in ("data", "french", "table"):
        (root / folder).mkdir(parents=True)
    for file in range(2):
        table = pa.table({"text": [f"file {file} row {row}" for row in range(1, 11)], "number": range(10)})
        pq.write_table(table, root / f"data/train-0000{file}-of-00002.parquet", row_group_size=4)
    pq.write_table(pa.table({"text": ["test"], "number": [1]}), root / "data/test-00000-of-00001.parquet")
    with gzip.open(root / "french" / "train.jsonl.gz", "wt") as lines:
        lines.writelines(json.dumps({"text": f"ligne {line}"}) + "\n" for line in range(1, 7))
    (root / "table" / "train.csv").write_text("text,number\none,1\ntwo,2\n")
    (root / "README.md").write_text(README)
    return root


def source_of(dataset: Path, **changes: object) -> SourceConfig:
    return replace(SourceConfig(kind="hf", path=str(dataset)), **changes)  # type: ignore[arg-type]


def problems(source: SourceConfig) -> list[str]:
    found = check_source(source, "data.sources.0", DataConfig(), vocab_size=0, checks_files=True)
    return [f"{problem.key.removeprefix('data.sources.0.')}: {problem.rule}; {problem.remedy}" for problem in found]


def test_lines_of_the_libraries_show_control_characters() -> None:
    import_datasets()
    for library in ("datasets", "huggingface_hub"):
        (handler,) = logging.getLogger(library).handlers
        record = logging.makeLogRecord({"levelno": logging.WARNING, "levelname": "WARNING", "msg": "split \x1b[2J"})
        assert handler.format(record).endswith(f"{library}: warning: split \\x1b[2J")


def test_files_of_a_relative_folder(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(dataset / "data")
    assert problems(source_of(Path(".."))) == problems(source_of(Path("../../dataset/"))) == []
    names = [os.path.basename(file) for file in hub_files(source_of(dataset)).files]
    assert names == [f"train-0000{n}-of-00002.parquet" for n in range(2)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        *((valid, "") for valid in ({"subset": "french"}, {"split": "test"}, {"subset": "table", "streaming": False})),
        ({"subset": "german"}, "subset: one of the dataset's subsets; write subset = 'default' or 'french' or 'table'"),
        ({"split": "dev"}, "split: one of the dataset's splits; write split = 'train' or 'test'"),
        ({"field": "body"}, "field 'body' is missing; the file has 'text', 'number'"),
        ({"field": "number"}, "field 'number' is not text but int64"),
        ({"subset": "french", "field": "body"}, "field 'body' is missing; the row has 'text'"),
        ({"subset": "table"}, "streaming: only for .parquet"),
        ({"revision": "main"}, "revision: only with a name on the hub"),
        ({"path": ""}, "path: a folder in the layout of the hub"),
        ({"path": "/nowhere/at all"}, "there is no folder /nowhere/at all"),
        ({"path": "../nowhere"}, "there is no folder"),
        ({"path": "DATASET/README.md"}, "write its folder"),
        ({"path": "DATASET/empty"}, "doesn't contain any data files"),
        ({"path": "DATASET/outside"}, "a dataset whose files are inside it"),
        ({"document": "line"}, "document: only with kind = 'text'"),
        ({"kind": "jsonl", "subset": "french"}, "subset: only with kind = 'hf'"),
        ({"kind": "jsonl", "streaming": False}, "streaming: only with kind = 'hf'"),
        ({"kind": "python-stdlib", "path": "", "split": "dev"}, 'split: "train" or "validation"'),
    ],
)
def test_settings_of_a_source(changes: dict[str, Any], expected: str, dataset: Path) -> None:
    (dataset / "empty").mkdir()
    (dataset / "outside").mkdir()
    outside = "---\nconfigs:\n- config_name: default\n  data_files: ../data/train-*\n---\n"
    (dataset / "outside" / "README.md").write_text(outside)
    if "path" in changes:
        changes = changes | {"path": changes["path"].replace("DATASET", str(dataset))}
    found = problems(source_of(dataset, **changes))
    assert len(found) == bool(expected)
    assert expected in "".join(found)


def test_a_snapshot_folder_of_links_needs_no_network(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder written by the hub client: its files are links to blobs in another folder."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection"))
    snapshot = dataset.parent / "snapshot"
    (snapshot / "data").mkdir(parents=True)
    for n, file in enumerate(sorted((dataset / "data").glob("train*"))):
        (file.parent / f"blob{n}").write_bytes(file.read_bytes())
        (snapshot / "data" / file.name).symlink_to(file.parent / f"blob{n}")
    assert problems(source_of(snapshot)) == []
    assert texts_of(source_of(snapshot), 1) == [ALL_ROWS]


def test_a_missing_file_is_named(dataset: Path) -> None:
    pieces = open_stream(divided(source_of(dataset), 2), stream=1)
    (dataset / "data" / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(UserError, match=r"00002\.parquet of the source .* can no longer be read"):
        pieces.fetch(pieces.first(), 1)


def test_a_streamed_dataset_in_a_mixture_needs_a_weight(dataset: Path) -> None:
    facts = {"global_batch_size": 8, "data_degree": 1, "vocab_size": 300}
    sources = (source_of(dataset), source_of(dataset, split="test"))
    (found,) = check_data(DataConfig(sources=sources), **facts)
    assert found.key == "data.sources.0.weight"
    weighted = tuple(replace(source, weight=1.0) for source in sources)
    on_disk = tuple(replace(source, streaming=False) for source in sources)
    assert check_data(DataConfig(sources=weighted), **facts) == check_data(DataConfig(sources=on_disk), **facts) == []
    unknown = replace(weighted[1], subset="german")
    assert [found.key for found in check_data(DataConfig(sources=(weighted[0], unknown)), **facts)] == [
        "data.sources.1.subset"
    ]


class Letters:
    """A tokenizer with one token per character."""

    bos_id = eos_id = None

    def encode_parts(self, parts: list[tuple[str, str, str]]) -> list[list[int]]:
        return [[ord(letter) for letter in text] for _, text, _ in parts]

    def has_text(self, ids: list[int]) -> bool:
        return bool(ids)


def open_stream(division: Division, stream: int = 0, max_piece_bytes: int = 100) -> BlockPieces:
    encoder = Encoder(cast(Tokenizer, Letters()), add_bos=False, add_eos=False)
    return BlockPieces(division, stream, encoder=encoder, max_piece_bytes=max_piece_bytes)


def divided(source: SourceConfig, num_streams: int, seed: int | None = None) -> Division:
    return Division(hf.StreamedDataset(source), num_streams, () if seed is None else (seed,))


def test_too_many_files_are_refused_at_the_start(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_UNIT_BITS", 0)
    with pytest.raises(UserError, match=r"^hf .* has \d files or row groups, and streaming supports up to 1; set"):
        divided(source_of(dataset), 1)


def walk(pieces: BlockPieces, epoch: int = 0, place: Place | None = None) -> list[tuple[Place, str]]:
    """(place, text or fault) of each piece from `place`, by default the first one, to the end of the epoch."""
    found = []
    place = place or pieces.first()
    while place.epoch <= epoch:
        piece = pieces.fetch(place, 20)
        if isinstance(piece, TokenPiece):
            text = "".join(map(chr, piece.tokens))
        else:
            assert isinstance(piece, BadRowError), piece
            text = f"BAD {piece}"
        if text and place.epoch == epoch:
            found.append((place, text))
        place = pieces.after(place)
    return found


def texts_of(source: SourceConfig, num_streams: int, epoch: int = 0, seed: int | None = None) -> list[list[str]]:
    """The pieces of an epoch in order, per stream."""
    division = divided(source, num_streams, seed)
    return [[text for _, text in walk(open_stream(division, stream), epoch)] for stream in range(num_streams)]


ALL_ROWS = [f"file {file} row {row}" for file in range(2) for row in range(1, 11)]


SHARED = "2 files, streamed; too few for {0} streams: {1} streams read each one"
KEPT = SHARED + " and keep one row in {1}, so the data is read {1} "


@pytest.mark.parametrize(
    ("num_streams", "description"),
    [
        *((count, "2 files, streamed, each read by one stream") for count in (1, 2)),
        *((count, "6 row groups of 2 files, streamed, each read by one stream") for count in (3, 5)),
        *((8, KEPT.format(8, 4)), (9, KEPT.format(9, 9)), (24, SHARED.format(24, 12))),
    ],
)
@pytest.mark.parametrize("seed", [None, pytest.param(7, marks=pytest.mark.slow)])
def test_streams_cover_each_row_once(num_streams: int, description: str, seed: int | None, dataset: Path) -> None:
    """Within an epoch, the shares of the streams differ; over the epochs, they even out."""
    assert description in divided(source_of(dataset), num_streams, seed).description
    served = [0] * num_streams
    for epoch in range(num_streams if num_streams in (5, 8) else 3):
        streams = texts_of(source_of(dataset), num_streams, epoch, seed)
        assert Counter(text for stream in streams for text in stream) == Counter(ALL_ROWS)
        if seed is None and num_streams == 1:
            assert streams == [ALL_ROWS]
        if "one stream" in description:  # no other stream reads rows of the same row group
            owned = [{text.split(" row")[0] + str((int(text.split()[-1]) - 1) // 4) for text in one} for one in streams]
            assert sum(map(len, owned)) == len(set.union(*owned)) == 6
        served = [count + len(texts) for count, texts in zip(served, streams, strict=True)]
    assert num_streams not in (5, 8) or max(served) <= 1.6 * min(served)


def test_each_epoch_has_its_own_order(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_BLOCK_ROWS", 5)
    epochs = [texts_of(source_of(dataset), 1, epoch, seed=1)[0] for epoch in range(6)]
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert {epoch[0].split(" row")[0] for epoch in epochs} == {"file 0", "file 1"}  # files are shuffled, too
    for epoch in epochs:
        for begin in range(0, 20, 5):  # a block is shuffled internally: its rows are adjacent in the file
            rows = sorted(int(text.split()[-1]) for text in epoch[begin : begin + 5])
            assert rows in ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])


@pytest.mark.parametrize("subset", ["default", "french"])
@pytest.mark.parametrize("num_streams", [1, 4])
def test_a_stream_resumes_at_any_piece(
    subset: str, num_streams: int, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MAX_BLOCK_ROWS", 3)
    division = divided(source_of(dataset, subset=subset), num_streams, seed=5)
    for stream in range(num_streams):
        expected = walk(open_stream(division, stream, max_piece_bytes=16), epoch=2)
        assert len({place for place, _ in expected}) == len(expected)
        for n, (place, _) in enumerate(expected):
            pieces = open_stream(division, stream, max_piece_bytes=16)
            assert pieces.has(place)
            assert walk(pieces, 2, place) == expected[n:]
        used = open_stream(division, stream, max_piece_bytes=16)
        for place, text in random.Random(0).sample(expected, len(expected)):
            piece = used.fetch(place, 1)
            assert isinstance(piece, TokenPiece)
            assert "".join(map(chr, piece.tokens)) == text


def test_long_rows_are_cut_and_end_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_BLOCK_BYTES", 100)
    rows = ["a\n" * 100, "short", "b\n" * 30, "end"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    division = divided(source_of(tmp_path), 1)
    pieces = open_stream(division, max_piece_bytes=50)
    found = walk(pieces)
    assert "".join(text for _, text in found) == "".join(rows)
    assert [Position.of(place.position) for place, _ in found] == [
        *[(0, 1, piece) for piece in range(4)],
        *[(0, 2, piece) for piece in range(4)],
    ]
    first = pieces.fetch(found[0][0], 20)
    numbers = [pieces.number(found[n][0]) for n in range(2) if n == 0 or pieces.fetch(found[n][0], 20)]
    assert isinstance(first, TokenPiece)
    assert numbers[1] == numbers[0] + 1  # pieces of one document
    assert first.starts.tolist() == [0]
    monkeypatch.setattr(blocks, "MAX_ROW_PIECES", 3)
    (bad, *_) = walk(open_stream(division, max_piece_bytes=50))
    assert bad[1].endswith(
        "train.jsonl, line 1: the text has 4 pieces of data.max_piece_bytes; at most 3 are supported"
    )


def test_a_place_of_other_data(dataset: Path) -> None:
    pieces = open_stream(divided(source_of(dataset), 2), stream=1)
    assert [unit for unit in range(3) if pieces.has(Place(0, Position(unit, 1, 0).packed()))] == [1]
    for position in (Position(1, 1, 10), Position(1, 11, 1)):
        fault = pieces.fetch(Place(0, position.packed()), 10)
        assert isinstance(fault, UserError)
        assert "of the run that is resumed" in str(fault)
    assert Position.of(Position(2**17 - 1, 2**29 - 1, 2**17 - 1).packed()) == (2**17 - 1, 2**29 - 1, 2**17 - 1)
    with pytest.raises(UserError, match="set streaming = false"):
        Position(2**17, 1, 0).packed()


def test_a_finite_source_ends_with_its_last_row(dataset: Path) -> None:
    pieces = open_stream(divided(source_of(dataset, epochs=2), 1))
    place, texts = pieces.first(), []
    while not pieces.has_ended(place):
        assert isinstance(pieces.fetch(place, 1), TokenPiece)
        texts.append(place)
        place = pieces.after(place)
    assert len(texts) == 40
    assert pieces.patience == 1000  # the minimum; two epochs for a larger source


def test_temporary_read_failures_lose_no_rows(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is reopened, and reading resumes at the block that failed."""
    monkeypatch.setattr(blocks, "MAX_BLOCK_ROWS", 3)
    monkeypatch.setattr(blocks, "retrying", partial(retrying, delays_s=(0, 0)))
    rows, failures = hf.StreamedDataset.rows, iter([2, 4, 0])

    def failing(*arguments: object) -> object:
        limit = next(failures, 10**6)
        for n, row in enumerate(rows(*arguments)):  # type: ignore[arg-type]
            if n == limit:
                raise ConnectionResetError("the server went away")
            yield row

    monkeypatch.setattr(hf.StreamedDataset, "rows", failing)
    assert texts_of(source_of(dataset, split="train"), 1) == [ALL_ROWS]
    assert next(failures, None) is None


@pytest.mark.parametrize("folder", ["data", "french", "table"])
def test_arrow_files_of_a_dataset_are_indexed(
    folder: str, dataset: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hf.ConvertedDataset(source_of(dataset / folder, streaming=False))
    index = open_index(source, 8)
    expected = {"data": ALL_ROWS, "french": [f"ligne {line}" for line in range(1, 7)], "table": ["one", "two"]}
    pieces = [index[n] for n in range(len(index))]
    assert "".join(source.read(index.files[piece.file], piece) for piece in pieces) == "".join(expected[folder])
    assert max(piece.length for piece in pieces) <= 8
    assert cache in index.files[0].parents
    monkeypatch.setattr("datasets.DatasetBuilder.download_and_prepare", lambda *_, **__: pytest.fail("built twice"))
    assert len(open_index(source, 8)) == len(index)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (['{"text": "one"}', '{"text": 2}'], "field 'text' is not text in all rows: `datasets` reads it as"),
        (['{"text": "one"}', '{"text": "open'], "cannot be converted to Arrow files: JSON parse error"),
    ],
)
def test_datasets_that_cannot_be_converted_to_text(lines: list[str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match=reason):
        open_index(hf.ConvertedDataset(source_of(tmp_path / "rows", streaming=False)), 100)


def test_zstd_files_are_converted_with_the_package_zstandard_or_python_3_14(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.jsonl.zst").write_bytes(pa.compress(b'{"text": "one"}\n', "zstd", asbytes=True))
    source = source_of(folder, streaming=False)
    if find_spec("zstandard") or sys.version_info >= (3, 14):  # the latter has compression.zstd
        assert len(open_index(hf.ConvertedDataset(source), 100)) == 1
        return
    with pytest.raises(UserError, match='install the package zstandard, or read local files with kind = "jsonl"'):
        open_index(hf.ConvertedDataset(source), 100)
    assert len(open_index(Jsonl(replace(source, kind="jsonl")), 100)) == 1


ON_THE_HUB = """
import json, sys
from dataclasses import replace
from titanlite.data.config import SourceConfig
from titanlite.data.sources.hf import StreamedDataset
from titanlite.data.blocks import Division
from titanlite.runtime.errors import ConfigError
from tests.unit.data.test_hub import texts_of

source = SourceConfig(kind="hf", path="user/dataset")
pinned = replace(source, revision=StreamedDataset(source).pinned_revision("data.sources.3"))
division = Division(StreamedDataset(pinned), 3, (7,))
found = texts_of(pinned, 3, epoch=1, seed=7)
faults = []
changes = [{"path": "user/missing"}, {"subset": "german"}, {"split": "dev"}, {"path": "user/script"}, {"field": "body"}]
for change in changes:
    try:
        StreamedDataset(replace(source, **change)).pinned_revision("data.sources.3")
    except ConfigError as error:
        faults.append(str(error))
print(json.dumps([pinned.revision, division.description, found, faults]))
"""


@pytest.mark.slow
def test_a_hub_with_temporary_failures(dataset: Path, tmp_path: Path) -> None:
    """Same rows and order as from the folder; the access token is sent only to the hub."""
    (dataset.parent / "script").mkdir()
    (dataset.parent / "script" / "script.py").write_text("raise SystemExit('code from a dataset was run')")
    with small_hub(tmp_path / "hub") as hub:
        hub.failures = 2
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": "hf_canary",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        program = [sys.executable, "-c", ON_THE_HUB]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    commit, description, found, faults = json.loads(done.stdout.splitlines()[-1])
    assert commit == COMMIT
    assert f"hf user/dataset at commit {COMMIT}: 6 row groups of 2 files" in description
    assert found == texts_of(source_of(dataset), 3, epoch=1, seed=7)
    assert hub.failures == 0
    assert "Bearer hf_canary" in hub.authorizations
    assert "write subset = 'default' or 'french' or 'table'" in faults[1]
    assert "write split = 'train' or 'test'" in faults[2]
    assert "HF_TOKEN" in faults[0]
    assert "scripts are no longer supported" in faults[3]
    assert "add --data.sources.3.field text" in faults[4]
    for place in [tmp_path / "home", tmp_path / "cache"]:
        assert not any(b"hf_canary" in file.read_bytes() for file in place.rglob("*") if file.is_file())
    assert "hf_canary" not in done.stdout + done.stderr
