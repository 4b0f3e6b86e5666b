import bz2
import gzip
import json
import lzma
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from titanlite.data.check import check_source
from titanlite.data.config import DataConfig
from titanlite.data.corpus import PieceIndex, open_index
from titanlite.data.kinds import KINDS, open_source, source_from_path, source_names, text_sources
from titanlite.data.sources.base import TextSource, wide_encoding
from titanlite.data.sources.config import SourceConfig
from titanlite.runtime.errors import Problem


def problems(source: SourceConfig, key: str = "data.sources.0") -> list[Problem]:
    return check_source(source, key, DataConfig(), vocab_size=0, checks_files=True)


def keys(source: SourceConfig) -> list[str]:
    return [problem.key for problem in problems(source)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    names = ("b.txt", "a.txt", "sub/deep/c.TXT", "sub/d.md", "sub/e.jsonl", "sub/f.ndjson.GZ", "g.gz", ".hidden.txt")
    for name in (*names, "[x].txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("text")
    return root


def index_of(source: SourceConfig) -> PieceIndex:
    return open_index(*text_sources([source]), 1000)


@pytest.mark.parametrize(
    ("path", "kind", "expected"),
    [
        ("", "text", ["[x].txt", "a.txt", "b.txt", "d.md", "c.TXT"]),
        ("", "jsonl", ["e.jsonl", "f.ndjson.GZ"]),
        ("/**/*.jsonl", "text", ["e.jsonl"]),
        ("/?.txt", "text", ["a.txt", "b.txt"]),
        ("/[x].txt", "text", ["[x].txt"]),
        ("/nothing*", "text", []),
    ],
)
def test_a_path_is_a_folder_a_glob_or_a_file(path: str, kind: Any, expected: list[str], folder: Path) -> None:
    source = open_source(SourceConfig(kind=kind, path=f"{folder}{path}"))
    assert [file.name for file in source.files()] == expected


def test_a_glob_below_a_folder_whose_name_is_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d[1] x" / "sub").mkdir(parents=True)
    (tmp_path / "d[1] x" / "sub" / "a.txt").touch()
    monkeypatch.chdir(tmp_path)
    for path in ("d[1] x/**/*.txt", f"{tmp_path}/d[1] x/sub/?.txt", "./d[1] x/s*/a.txt", "d*/sub/*.txt"):
        assert [file.name for file in open_source(SourceConfig(kind="text", path=path)).files()] == ["a.txt"], path


@pytest.mark.parametrize(
    ("source", "key"),
    [
        *((source, "") for source in (SourceConfig(), SourceConfig(split="validation"))),
        (SourceConfig(kind="text", path="F", document="line", name="mine"), ""),
        (SourceConfig(kind="jsonl", path="F", field="body"), ""),
        (SourceConfig(kind="text", path="F", field="text"), "field"),
        (SourceConfig(kind="text", path="F", dtype="uint16"), "dtype"),
        (SourceConfig(kind="text", path="F", split="train"), "split"),
        (SourceConfig(kind="jsonl", path="F", document="line"), "document"),
        (SourceConfig(kind="python-stdlib", path="F"), "path"),
        (SourceConfig(kind="text"), "path"),
        (SourceConfig(kind="text", path="F/nothing"), "path"),
        (SourceConfig(kind="parquet", path="F"), "kind"),
        (SourceConfig(kind="tokens", path="F/a.txt"), "path"),
        (SourceConfig(kind="tokens", path="F/tokens.bin"), "dtype"),
        (SourceConfig(kind="tokens", path="F/tokens.npy", dtype="uint16"), "dtype"),
    ],
)
@pytest.mark.usefixtures("stdlib")
def test_settings_of_a_source(source: SourceConfig, key: str, folder: Path) -> None:
    (folder / "tokens.bin").write_bytes(b"12")
    np.save(folder / "tokens.npy", np.zeros(2, int))
    source = replace(source, path=source.path.replace("F", str(folder)))
    assert keys(source) == ([f"data.sources.0.{key}"] if key else [])


def test_the_error_for_a_missing_file_names_the_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (problem,) = problems(SourceConfig(kind="text", path="data/*.txt"), "data.sources.3")
    assert (problem.key, problem.value) == ("data.sources.3.path", "data/*.txt")
    assert str(tmp_path / "data" / "*.txt") in problem.remedy


ROWS = [{"n": 1, "content": "one", "title": "x"}, {"n": 2, "content": "two", "title": "y"}]


def write_rows(file: Path) -> Path:
    """Write ROWS in the format of the file's name."""
    lines = "".join(f"{json.dumps(row)}\n" for row in ROWS)
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    elif file.suffix == ".gz":
        file.write_bytes(gzip.compress(lines.encode()))
    else:
        file.write_text(lines)
    return file


@pytest.mark.usefixtures("hugging_face_home")
@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz", "train.parquet"])
@pytest.mark.parametrize("is_hf", [False, True])
def test_a_missing_field_is_reported_with_the_fields_of_text(is_hf: bool, name: str, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    file = write_rows(tmp_path / "corpus" / name)
    source = SourceConfig("hf" if is_hf else name.split(".")[1], str(file.parent))
    for key in ("data.sources.2", "validation.sources.0"):
        (problem,) = problems(source, key)
        assert (problem.key, problem.value) == (f"{key}.field", "text")
        assert problem.remedy.startswith(f"{file}: field 'text' is missing; the ")
        assert f'write field = "content", or add --{key}.field content; other fields' in problem.remedy
    assert keys(replace(source, field="n")) == ["data.sources.0.field"]
    assert keys(replace(source, field="title")) == []


@pytest.mark.parametrize(
    ("first", "valid"),
    [('{"text": "x"}', True), ("no JSON", True), ("", True), ('{"n": 1}\n{"text": "x"}', True), ('{"n": 1}', False)],
)
def test_single_bad_rows_are_not_problems_of_the_field(first: str, valid: bool, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"{first}\n")
    (tmp_path / "b.jsonl").write_text('{"content": "x"}')
    found = problems(SourceConfig("jsonl", str(tmp_path)))
    assert [problem.key for problem in found] == ([] if valid else ["data.sources.0.field"])
    assert valid or "use files that have a field of text" in found[0].remedy


def test_an_interpreter_without_library_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python.zip")})
    assert keys(SourceConfig()) == ["data.sources.0.kind"]


def test_the_standard_library_is_split(stdlib: Path) -> None:
    train = index_of(SourceConfig()).files
    held_out = index_of(SourceConfig(split="validation")).files
    everything = sorted([*train, *held_out], key=lambda file: file.relative_to(stdlib).as_posix())
    assert everything == sorted(stdlib.glob("package*/module*.py"), key=lambda file: file.as_posix())
    assert [everything.index(file) for file in held_out] == [19, 39]


def test_the_index_of_files(write_jsonl: Callable[..., Path]) -> None:
    write_jsonl(["one", "two"], "a.jsonl")
    folder = write_jsonl(["three"], "b.jsonl").parent
    index = index_of(SourceConfig(kind="jsonl", path=str(folder)))
    assert [(piece.file, piece.row) for piece in map(index.__getitem__, range(len(index)))] == [(0, 1), (0, 2), (1, 1)]


def test_source_names_are_unique() -> None:
    sources = [SourceConfig(name=name) for name in ("a", "b", "a", "a 2", "a")]
    assert source_names(sources) == ("a", "b", "a 2", "a 2 2", "a 3")
    assert source_names([SourceConfig("jsonl", "x", field=field) for field in "ab"]) == ("jsonl x", "jsonl x 2")


@pytest.mark.parametrize(
    ("kind", "path", "names", "found"),
    [
        ("jsonl", ".", "a.csv b.csv README.md", "csv"),
        ("jsonl", "a.arrow", "a.arrow", "arrow"),
        ("jsonl", ".", "a.json b.json README.md", None),
        ("csv", "*", "a.json.gz b.json.gz", "jsonl"),
        ("parquet", ".", "below/a.jsonl.zst", "jsonl"),
        ("text", "a.jsonl.gz", "a.jsonl.gz", "jsonl"),
        ("text", ".", "a.csv", "csv"),
        ("text", "a.csv", "a.csv", ""),
        ("jsonl", "*", "a.txt b.gz c.zst", ""),
        ("parquet", "*", "a.parquet README.md", ""),
        ("jsonl", "*", "a.jsonl b.jsonl.bz2", "bzip2"),
        ("text", "*", "a.txt b.txt.xz c.txt.xz d.txt.gz", "xz"),
        ("text", "a.txt.gz", "a.txt.gz", "gzip"),
        ("text", ".", "below/a.txt.zst", "zstd"),
        ("csv", ".", "a.csv.lz4", "lz4"),
    ],
)
def test_other_formats_are_named(kind: str, path: str, names: str, found: str | None, tmp_path: Path) -> None:
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}')
    source = SourceConfig(kind, str(tmp_path / path))
    reported = problems(source, "data.sources.1")
    if found is None:  # no kind is certain
        (problem,) = reported
        assert "nothing matches" in problem.remedy
    elif not found:
        assert not reported
    elif found in KINDS:
        (problem,) = reported
        assert (problem.key, problem.value) == ("data.sources.1.kind", kind)
        assert problem.remedy == f'write kind = "{found}", or add --data.sources.1.kind {found}'
        assert check_source_kind(replace(source, kind=found)) == []
    else:
        (problem,) = reported
        assert (problem.key, problem.value) == ("data.sources.1.path", str(tmp_path / path))
        assert f"is compressed with {found}" in problem.rule


def check_source_kind(source: SourceConfig) -> list[str]:
    """Keys of the problems of the kind."""
    return [problem.key for problem in problems(source) if problem.key.endswith("kind")]


@pytest.mark.parametrize(
    ("suffix", "pack", "program"),
    [(".gz", gzip.compress, "gunzip"), (".bz2", bz2.compress, "bunzip2"), (".xz", lzma.compress, "unxz")],
)
def test_the_command_that_unpacks(suffix: str, pack: Callable[[bytes], bytes], program: str, tmp_path: Path) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    folder = tmp_path / "my corpus"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt{suffix}").write_bytes(pack(name.encode()))
    source = SourceConfig("text", str(folder))
    (problem,) = problems(source)
    subprocess.run(problem.remedy.partition(": ")[2], shell=True, check=True)
    assert problems(source) == []
    assert [file.read_text() for file in sorted(folder.glob("*.txt"))] == ["a", "b"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        *(("text", ".txt"), ("jsonl", ".jsonl"), ("jsonl", ".jsonl.gz"), ("parquet", ".parquet"), ("tokens", ".bin")),
        *(("csv", ".csv"), ("arrow", ".arrow")),
    ],
)
def test_pipes_devices_and_dangling_links_are_named(kind: str, suffix: str, tmp_path: Path) -> None:
    """Alone, and among other files, where they would be left out without a word."""
    (tmp_path / f"a{suffix}").write_bytes(b"ab")
    path = tmp_path / f"b{suffix}"
    settings = {"tokens": {"dtype": "uint16"}, "csv": {"field": "ab"}}.get(kind, {})
    for target in ("pipe", "/dev/zero", "nowhere"):
        if target == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(target)
        for given in (str(path), str(tmp_path), f"{tmp_path}/*{suffix}"):
            (problem,) = problems(SourceConfig(kind=kind, path=given, **settings))  # type: ignore[arg-type]
            assert problem.key == "data.sources.0.path"
            assert problem.remedy.startswith(f"{path} is a ")
        path.unlink()
    path.mkdir()  # a folder whose name has the suffix is not read
    found = problems(SourceConfig(kind=kind, path=str(tmp_path), **settings))  # type: ignore[arg-type]
    assert found == []


@pytest.mark.timeout(30)
def test_a_listing_stays_in_the_data(tmp_path: Path) -> None:
    """Otherwise the data of a stranger lists all files of the machine, and those of processes without an end."""
    for path in ("/", "/**/*.jsonl", "/*/**", "/proc/**/*.jsonl", "/proc/1", "/sys/**", "//**"):
        (problem,) = problems(SourceConfig("jsonl", path), "data.sources.0")
        assert problem.remedy.endswith("this path would list all files of the machine")
    folder = tmp_path / "data"
    (folder / "part").mkdir(parents=True)
    (folder / "disk").mkdir()
    (folder / "part" / "a.jsonl").write_text("{}\n")
    for name, target in (("above", ".."), ("itself", "."), ("root", "/"), ("processes", "/proc/self/root")):
        (folder / name).symlink_to(target)
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "b.jsonl").write_text("{}\n")
    (folder / "part" / "shards").symlink_to(shards)
    source = open_source(SourceConfig("jsonl", str(folder)))
    assert [file.name for file in source.files()] == ["a.jsonl", "b.jsonl"]


def test_a_json_array_is_reported_before_the_start(tmp_path: Path) -> None:
    file = tmp_path / "my rows.json"
    file.write_text('\n[\n  {"text": "a"},\n  {"text": "b"}\n]\n')
    (problem,) = problems(SourceConfig("jsonl", str(file)), "data.sources.0")
    assert (problem.key, problem.rule) == ("data.sources.0.path", "files with one JSON object per line")
    assert problem.remedy.endswith(f"jq -c '.[]' '{file}' > lines.jsonl")


def test_files_of_a_folder_that_are_not_read_are_counted(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for name in ("a.jsonl", "b.csv", "below/c.csv", "below/LICENSE", ".hidden"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    for path, unread in ((tmp_path, "2 .csv, 1 LICENSE"), (tmp_path / "a.jsonl", ""), (tmp_path / "*.jsonl", "")):
        source = open_source(SourceConfig("jsonl", str(path)))
        assert isinstance(source, TextSource)
        assert source.describe_unread() == unread


@pytest.mark.parametrize(
    ("names", "path", "kind"),
    [
        (["a.txt"], "a.txt", "text"),
        (["a.MD"], "a.MD", "text"),
        (["a.jsonl.gz", "b.txt"], "*.gz", "jsonl"),
        (["a.json.gz", "b.json.gz"], ".", "jsonl"),
        (["a.jsonl.zst", "b.ndjson.zst", "c.json.zst"], ".", "jsonl"),
        (["below/a.parquet"], ".", "parquet"),
        (["a.npy"], "*", "tokens"),
        (["tokens.json", "tokens-00000.npy", "notes.txt"], ".", "tokens"),
    ],
)
def test_the_kind_of_a_path(tmp_path: Path, names: list[str], path: str, kind: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = source_from_path(str(tmp_path / path), "--data")
    assert isinstance(found, SourceConfig)
    assert (found.kind, found.path) == (kind, str(tmp_path / path))


def test_a_path_of_no_kind_or_several(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl", "c.rst"):
        (tmp_path / name).touch()
    for path, reason in ((".", "text and jsonl"), ("*", "text and jsonl"), ("c.rst", "no known"), ("d.txt", "matches")):
        found = source_from_path(str(tmp_path / path), "--data")
        assert isinstance(found, Problem)
        assert (found.key, found.value) == ("--data", str(tmp_path / path))
        assert reason in found.rule


TEXT = "Ein Satz.\n多くの言語で 書かれた文。\nÄrger, Öl 😀\n" * 200
ENCODINGS = {"utf-16": "UTF-16", "utf-32": "UTF-32"} | {
    f"utf-{bits}-{order}": f"UTF-{bits}{order.upper()}" for bits in (16, 32) for order in ("le", "be")
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", ["text", "jsonl", "csv", "jsonl.gz"])
def test_wide_encodings_are_refused_with_the_command_that_converts(kind: str, encoding: str, tmp_path: Path) -> None:
    text = {"text": TEXT, "csv": "text\n" + TEXT}.get(kind, json.dumps({"text": TEXT}, ensure_ascii=False) + "\n")
    write = gzip.compress if kind.endswith(".gz") else bytes
    source = SourceConfig(kind.partition(".")[0], path=str(tmp_path))  # type: ignore[arg-type]
    suffix = "txt" if kind == "text" else kind
    (tmp_path / f"a.{suffix}").write_bytes(write(text.encode()))
    assert problems(source) == []
    wide = tmp_path / f"it's b.{suffix}"
    wide.write_bytes(write(text.encode(encoding)))
    (problem,) = problems(source)
    assert problem.key == "data.sources.0.path"
    assert f"{wide} is {ENCODINGS[encoding]}: " in problem.remedy
    subprocess.run(problem.remedy.partition(": ")[2], shell=True, check=True)
    assert problems(source) == []
    read = gzip.decompress if kind.endswith(".gz") else bytes
    assert read(wide.read_bytes()).decode() == text


@pytest.mark.parametrize("kind", ["jsonl", "chat", "jsonl.gz", "hf"])
def test_lines_that_end_with_cr_alone_are_refused_with_the_command_that_converts(kind: str, tmp_path: Path) -> None:
    turns = [{"role": role, "content": "one\rtwo"} for role in ("user", "assistant")]
    line = json.dumps({"messages": turns} if kind == "chat" else {"text": "one\rtwo"})
    pack, unpack = (gzip.compress, gzip.decompress) if kind.endswith(".gz") else (bytes, bytes)
    file = tmp_path / f"it's b.jsonl{'.gz' if kind.endswith('.gz') else ''}"
    source = SourceConfig(kind.partition(".")[0], path=str(tmp_path))  # type: ignore[arg-type]
    for end in ("\n", "\r\n"):
        file.write_bytes(pack((line + end).encode() * 3))
        assert problems(source) == []
    file.write_bytes(pack((line + "\r").encode() * 3))
    (problem,) = problems(source)
    assert (problem.key, problem.rule) == ("data.sources.0.path", "lines that end with LF, or CR and LF")
    subprocess.run(problem.remedy.partition(": ")[2], shell=True, check=True)
    assert problems(source) == []
    assert unpack(file.read_bytes()).decode() == (line + "\n") * 3


@pytest.mark.parametrize("document", ["file", "paragraph", "line"])
def test_text_whose_lines_end_with_cr_alone_is_refused_with_the_command_that_converts(
    document: Literal["file", "paragraph", "line"], tmp_path: Path
) -> None:
    file = tmp_path / "it's a.txt"
    source = SourceConfig("text", path=str(tmp_path), document=document)
    for text in (b"one\rtwo\nthree\n", b"one\r\n" * 3, b"10 %\r" * 999 + b"\n", b"one\r", b"one\r\r"):
        file.write_bytes(text)
        assert problems(source) == []
    file.write_bytes(b"one\r\rtwo\rthree")
    if document == "file":
        assert problems(source) == []
    else:
        (problem,) = problems(source)
        assert (problem.key, problem.rule) == ("data.sources.0.path", "lines that end with LF, or CR and LF")
        subprocess.run(problem.remedy.partition(": ")[2], shell=True, check=True)
        assert problems(source) == []
        assert file.read_bytes() == b"one\n\ntwo\nthree"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"a",
        b"\xff",
        b"\n" * 99,
        b"plain text\0" * 50,
        b"from find -print0 \0" * 50,
        b"\0" * 5000,
        bytes(range(256)) * 9,
        os.urandom(999),
    ],
)
def test_other_files_are_of_no_wide_encoding(data: bytes) -> None:
    assert wide_encoding(data) == ""
