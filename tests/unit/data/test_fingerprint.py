"""The data fingerprint depends on content, order and the settings that determine tokens, and on nothing else."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanlite.data.config import DataConfig
from titanlite.data.fingerprint import data_fingerprint, describe_difference
from titanlite.data.kinds import open_source
from titanlite.data.sources import hf
from titanlite.data.sources.base import BLOCK_BYTES, SAMPLED_BLOCKS
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.hub_files import HubFiles
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import UserError

LARGE = 3 * SAMPLED_BLOCKS * BLOCK_BYTES


def fingerprint_of(section: DataConfig) -> dict[str, Any]:
    return data_fingerprint(section, [open_source(source) for source in section.sources])


def text_data(path: Path, **changes: Any) -> DataConfig:
    sources = (SourceConfig(kind="text", path=str(path)),)
    return replace(DataConfig(num_streams=4, max_piece_bytes=1000, stream_version=3, sources=sources), **changes)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("the first file")
    (folder / "deep" / "b.txt").write_text("the second file")
    (folder / "large.txt").write_bytes(bytes(range(250)) * (LARGE // 250) + b"x" * (LARGE % 250))
    return folder


def lines(before: DataConfig, after: DataConfig) -> list[str]:
    return describe_difference(fingerprint_of(before), fingerprint_of(after))


def test_a_source_has_the_files_that_it_had_when_it_was_opened(corpus: Path) -> None:
    section = text_data(corpus)
    (source,) = [open_source(one) for one in section.sources]
    assert len(source.content_facts) == 3
    facts = source.facts(document_mask=False)
    (corpus / "c.txt").write_text("a third file")
    assert source.facts(document_mask=False) == facts
    assert len(source.files()) == 3
    (corpus / "a.txt").write_text("another text")
    with pytest.raises(UserError, match=r"/a.txt was written while the run was starting: start again when "):
        source.facts(document_mask=False)
    (corpus / "a.txt").unlink()
    with pytest.raises(UserError, match=r"/a.txt cannot be read: "):
        source.facts(document_mask=False)


def test_the_fingerprint_is_small_readable_json(corpus: Path) -> None:
    for n in range(1000):
        (corpus / f"more{n:04}.txt").write_text(str(n))
    found = fingerprint_of(text_data(corpus))
    assert json.loads(json.dumps(found)) == found
    content = found["sources"][0].pop("content")
    assert content.startswith("xxh3-128:")
    assert len(content) == len("xxh3-128:") + 32
    assert found == {
        "stream_version": 3,
        "shuffle": True,
        "seed": 0,
        "max_piece_bytes": 1000,
        "add_bos": False,
        "add_eos": True,
        "packing": "concatenate",
        "document_mask": False,
        "sources": [
            {
                "name": f"text {corpus}",
                "kind": "text",
                "document": "file",
                "weight": -1.0,
                "epochs": -1,
                "files": 1003,
                "bytes": 29 + LARGE + sum(len(str(n)) for n in range(1000)),
            }
        ],
    }


def test_the_digest_of_known_files_never_changes(corpus: Path) -> None:
    """If this fails, saved runs cannot resume."""
    assert fingerprint_of(text_data(corpus))["sources"][0]["content"] == "xxh3-128:e270adc15663c3d55a37008639783eb0"


def test_moving_touching_or_renaming_in_order_keeps_the_fingerprint(corpus: Path, tmp_path: Path) -> None:
    before = fingerprint_of(text_data(corpus))
    other = Path(shutil.copytree(corpus, tmp_path / "elsewhere" / "copied", copy_function=shutil.copy))
    (other / "a.txt").rename(other / "aa.txt")
    os.utime(other / "large.txt", (1, 1))
    named = SourceConfig(kind="text", path=str(other / "**" / "*.txt"), name="copy")
    for after in (text_data(other), text_data(other, sources=(named,))):
        assert describe_difference(before, fingerprint_of(after)) == []


def overwrite(file: Path, position: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)
        opened.seek(position)
        opened.write(bytes([byte[0] ^ 1]))


SECOND_BLOCK = (LARGE - BLOCK_BYTES) // (SAMPLED_BLOCKS - 1)


def move_bytes_to_the_next_file(folder: Path) -> None:
    (folder / "a.txt").write_text("the first")
    (folder / "deep" / "b.txt").write_text(" filethe second file")


def overwrite_at_the_same_time(folder: Path) -> None:
    """Nodes may share a cache folder and have other files at the same path, of the same size, time and inode."""
    facts = os.stat(folder / "a.txt")
    overwrite(folder / "a.txt", 4)
    os.utime(folder / "a.txt", ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.parametrize(
    "edit",
    [
        *(partial(lambda at, folder: overwrite(folder / "a.txt", at), at) for at in range(len("the first file"))),
        lambda folder: overwrite(folder / "large.txt", 0),
        lambda folder: overwrite(folder / "large.txt", LARGE - 1),
        lambda folder: overwrite(folder / "large.txt", SECOND_BLOCK),
        lambda folder: overwrite(folder / "large.txt", SECOND_BLOCK + BLOCK_BYTES - 1),
        lambda folder: (folder / "a.txt").rename(folder / "z.txt"),  # another order
        move_bytes_to_the_next_file,
        overwrite_at_the_same_time,
    ],
)
def test_an_edit_that_keeps_the_size_is_detected(edit: Callable[[Path], object], corpus: Path, cache: Path) -> None:
    """Of a small file, each byte; of a large one, those of the sampled blocks."""
    before = fingerprint_of(text_data(corpus))
    edit(corpus)
    found = describe_difference(before, fingerprint_of(text_data(corpus)))
    assert found == [f"source 0 (text {corpus}): content differs"]
    assert not cache.exists()


def test_an_edit_between_sampled_blocks_is_not_detected(corpus: Path) -> None:
    """A documented limit."""
    before = fingerprint_of(text_data(corpus))
    overwrite(corpus / "large.txt", BLOCK_BYTES)
    assert describe_difference(before, fingerprint_of(text_data(corpus))) == []
    with open(corpus / "large.txt", "ab") as file:
        file.write(b"y")
    (found,) = describe_difference(before, fingerprint_of(text_data(corpus)))
    assert f"bytes {29 + LARGE:,} -> {30 + LARGE:,}; content differs" in found


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"seed": 1234}, ["seed 0 -> 1234"]),
        ({}, {"max_piece_bytes": 2000}, ["max_piece_bytes 1000 -> 2000"]),
        ({}, {"add_bos": True}, ["add_bos false -> true"]),
        ({}, {"add_eos": False}, ["add_eos true -> false"]),
        ({}, {"shuffle": False}, ["shuffle true -> false", "seed 0 -> null"]),
        ({}, {"on_bad_row": "skip", "max_bad_rows": 3, "num_streams": 8}, []),
        ({"shuffle": False}, {"shuffle": False, "seed": 1}, []),
    ],
)
def test_only_settings_that_determine_tokens_count(
    before: dict[str, Any], after: dict[str, Any], expected: list[str], corpus: Path
) -> None:
    assert lines(text_data(corpus, **before), text_data(corpus, **after)) == expected


@pytest.mark.parametrize(
    ("kind", "key", "default", "other"), [("text", "document", "file", "line"), ("jsonl", "field", "text", "body")]
)
def test_settings_of_a_source(kind: Any, key: str, default: str, other: str, write_jsonl: Callable[..., Path]) -> None:
    rows = write_jsonl(["one"])

    def section_of(**facts: Any) -> DataConfig:
        return text_data(rows, sources=(SourceConfig(kind=kind, path=str(rows), name="rows", **facts),))

    assert lines(section_of(), section_of(**{key: default})) == []
    assert lines(section_of(), section_of(**{key: other})) == [f'source 0 (rows): {key} "{default}" -> "{other}"']


def test_text_settings_do_not_apply_to_token_files(tmp_path: Path) -> None:
    np.arange(50, dtype="<u2").tofile(tmp_path / "tokens.bin")
    source = SourceConfig(kind="tokens", path=str(tmp_path / "tokens.bin"), dtype="uint16", name="ids")
    before = text_data(tmp_path, sources=(source,))
    assert lines(before, replace(before, add_eos=False, max_piece_bytes=5)) == []
    other = replace(before, sources=(replace(source, dtype="uint32"),))
    assert lines(before, other) == ['source 0 (ids): dtype "uint16" -> "uint32"']


def test_a_folder_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "dataset"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text('{"text": "one"}\n')
    source = SourceConfig(kind="hf", path=str(folder), name="rows")
    before = text_data(folder, sources=(source,))
    saved = fingerprint_of(before)
    shutil.copytree(folder, tmp_path / "copy")
    (folder / "test.jsonl").write_text('{"text": "not of this split"}\n')
    for same in (
        replace(source, split="train"),
        replace(source, field="text"),
        replace(source, path=f"{tmp_path}/copy"),
    ):
        assert describe_difference(saved, fingerprint_of(text_data(folder, sources=(same,)))) == []
    other = text_data(folder, sources=(replace(source, streaming=False, split="test"),))
    assert describe_difference(saved, fingerprint_of(other)) == [
        'source 0 (rows): split "train" -> "test"; blocks [1024, 4194304] -> null; bytes 16 -> 30; content differs'
    ]


def test_a_hub_dataset_is_identified_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = text_data(tmp_path, sources=(SourceConfig(kind="hf", path="user/dataset"),))
    found = []
    for commit in ("a" * 40, "b" * 40):
        files = HubFiles((f"hf://datasets/user/dataset@{commit}/train.parquet",), commit)
        monkeypatch.setattr(hf, "hub_files", lambda _, files=files: files)
        found.append(fingerprint_of(section))
    assert describe_difference(*found) == [f'source 0 (hf user/dataset): commit "{"a" * 40}" -> "{"b" * 40}"']


def test_new_missing_and_swapped_sources(corpus: Path) -> None:
    one, two = (SourceConfig(kind="text", path=str(corpus / name), name=name) for name in ("a.txt", "deep/b.txt"))
    single, both, swapped = (text_data(corpus, sources=sources) for sources in ((one,), (one, two), (two, one)))
    assert lines(single, both) == ["source 1 (deep/b.txt) is new: it begins at its start"]
    assert lines(both, single) == ["source 1 (deep/b.txt) is missing"]
    assert lines(both, swapped) == [
        "source 0 (deep/b.txt): it takes the place and position of a.txt; bytes 14 -> 15; content differs",
        "source 1 (a.txt): it takes the place and position of deep/b.txt; bytes 15 -> 14; content differs",
    ]


def test_the_standard_library_and_its_split(stdlib: Path, tmp_path: Path) -> None:
    train, validation = (text_data(tmp_path, sources=(SourceConfig(split=split),)) for split in ("", "validation"))
    assert lines(train, validation) == [
        "source 0 (python-stdlib (validation)): it takes the place and position of python-stdlib (train); "
        'split "train" -> "validation"'
    ]
    before = fingerprint_of(train)
    (stdlib / "test" / "left_out.py").write_text("changed = True\n")
    assert describe_difference(before, fingerprint_of(train)) == []
    (stdlib / "package0" / "new.py").write_text("new = True\n")
    (found,) = describe_difference(before, fingerprint_of(train))
    assert "files 47 -> 48" in found


def test_a_fingerprint_of_another_version_is_a_difference_not_an_error(corpus: Path) -> None:
    now = fingerprint_of(text_data(corpus))
    found = describe_difference({"stream_version": 0, "extra": 1}, now)
    assert found[:3] == ["stream_version 0 -> 3", "extra 1 -> null", "shuffle null -> true"]
    assert found[-1] == f"source 0 (text {corpus}) is new: it begins at its start"


def test_the_tokenizer_fingerprint_covers_merges_and_separators(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "copied"))
    first = Tokenizer(tokenizer_folder / "tokenizer.json")
    assert len(first.fingerprint) == 64
    assert Tokenizer(folder / "tokenizer.json").fingerprint == first.fingerprint
    (folder / "tokenizer_config.json").unlink()
    without = Tokenizer(folder / "tokenizer.json")
    with_bos = Tokenizer(folder / "tokenizer.json", bos="a")
    with_eos = Tokenizer(folder / "tokenizer.json", eos="a")
    changed = json.loads((folder / "tokenizer.json").read_text())
    changed["model"]["merges"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(changed))
    other = Tokenizer(folder / "tokenizer.json")
    assert len({one.fingerprint for one in (first, without, with_bos, with_eos, other)}) == 5
