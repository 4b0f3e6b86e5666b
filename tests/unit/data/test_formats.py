"""Token files of other programs: their ids, types and documents, and files that contradict themselves."""

import gzip
import itertools
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from titanlite.data.check import check_source
from titanlite.data.config import DataConfig
from titanlite.data.kinds import source_from_path
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.formats import format_of, open_tokens
from titanlite.data.sources.tokens import Tokens, WindowCorpus
from titanlite.runtime.errors import Problem, UserError
from titanlite.storage.address import Address
from titanlite.storage.store import Store
from titanlite.tools.inspect import describe_token_files

SEQ_LEN = 10
VOCAB_SIZE = 60_000
RECORDED = ("datatrove", "Megatron", "OLMo-core")
"""Formats that record where documents start."""
LENGTHS = (7, 1, 0, 40, 23, 12, 0)


def documents(count: int = 1) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS * count]


def write(name: str, width: int, folder: Path, texts: list[list[int]]) -> Path:
    """Write the documents in a format; the writers of datatrove and Megatron are those of datatrove."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.concatenate([np.array(text, f"<u{width}") for text in texts])
    if name == "Megatron":
        module = pytest.importorskip("datatrove.pipeline.tokens.megatron_tokenizer")
        megatron = module.MegatronTokenizedFile(str(folder), "a", token_size=width)
        for text in texts:
            megatron.write(text)
        megatron.close()
        return folder / "a.bin"
    if name == "datatrove":
        module = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
        nanotron = module.TokenizedFile(str(folder), "a.ds", save_final_metadata=True, token_size=width)
        for text in texts:
            nanotron.write(text, None)
        nanotron.close()
        return folder / "a.ds"
    if name == "OLMo-core":
        ids.tofile(folder / "a.npy")
        ends = np.cumsum([*map(len, texts)])
        rows = (f"{end - len(text)},{end},id,file.jsonl,1\n" for text, end in zip(texts, ends, strict=True))
        (folder / "a.csv.gz").write_bytes(gzip.compress("".join(rows).encode()))
        return folder / "a.npy"
    header = np.zeros(256 if name == "llm.c" else 0, "<i4")
    header[:3] = {2: (20240520, 1, len(ids)), 4: (20240801, 7, len(ids))}[width][: len(header)]
    (folder / "a.bin").write_bytes(header.tobytes() + ids.tobytes())
    return folder / "a.bin"


def source(path: Path | str, **keys: Any) -> SourceConfig:
    return SourceConfig(kind="tokens", path=str(path), name="source", epochs=1, **keys)


def problems(path: Path | str, *, document_mask: bool = False, **keys: Any) -> list[Problem]:
    section = DataConfig(document_mask=document_mask)
    return check_source(source(path, **keys), "s", section, vocab_size=VOCAB_SIZE, checks_files=True)


@pytest.mark.parametrize("place", ["disk", "store"])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("name", [*RECORDED, "llm.c", "raw"])
def test_ids_and_documents_are_those_that_were_written(name: str, width: int, place: str, tmp_path: Path) -> None:
    texts = documents(200)
    write(name, width, tmp_path / "in", texts)
    keys = {"dtype": {2: "uint16", 4: "uint32"}[width]} if name == "raw" else {}
    path: Path | str = tmp_path / "in"
    if place == "store":
        path = f"memory://{uuid4().hex}/in"
        for file in (tmp_path / "in").iterdir():
            Store(Address.parse(path)).write(file.name, file.read_bytes())
    assert problems(path, document_mask=name in RECORDED, **keys) == []
    opened = Tokens(source(path, **keys))
    (file,) = opened.files()
    assert format_of(file).name == name
    assert open_tokens(file, opened.config.dtype).dtype.itemsize == width
    corpus = WindowCorpus(opened, SEQ_LEN, VOCAB_SIZE, documents=name in RECORDED)
    ids, starts, expected = np.concatenate(texts), [], np.cumsum([0, *map(len, texts)])
    for n, piece in enumerate(corpus.fetch(range(corpus.count))):
        assert not isinstance(piece, Exception)
        begin, end = n * SEQ_LEN, n * SEQ_LEN + SEQ_LEN + 1
        np.testing.assert_array_equal(piece.tokens, ids[begin:end])
        starts.append((piece.starts + begin).tolist())
        within = expected[(expected >= begin) & (expected < min(end, len(ids)))]
        assert starts[-1] == (within.tolist() if name in RECORDED else [])
    assert sum(map(len, starts)) > 1000 or name not in RECORDED


@pytest.mark.parametrize(("name", "shift"), [("raw", 1), ("llm.c", 0), ("numpy", 1)])
def test_an_id_separates_documents(name: str, shift: int, tmp_path: Path) -> None:
    """It is the last one of a document, in files of llm.c the first one."""
    texts, eos = [text for text in documents(50) if text], 0
    texts = [[*text, eos] if shift else [eos, *text] for text in texts]
    if name == "numpy":
        np.save(tmp_path / "a.npy", np.concatenate(texts).astype(np.uint16))
    else:
        write(name, 2, tmp_path, texts)
    keys: dict[str, Any] = {"eos": eos, **({"dtype": "uint16"} if name == "raw" else {})}
    assert problems(tmp_path, document_mask=True, **keys) == []
    opened = Tokens(source(tmp_path, **keys))
    corpus, found = WindowCorpus(opened, SEQ_LEN, VOCAB_SIZE, documents=True), []
    for n, piece in enumerate(corpus.fetch(range(corpus.count))):
        assert not isinstance(piece, Exception)
        found.append([start + n * SEQ_LEN for start in piece.starts.tolist()])
    begins = np.cumsum([0, *map(len, texts)])
    windows = [(begin, min(begin + SEQ_LEN + 1, begins[-1])) for begin in range(0, SEQ_LEN * corpus.count, SEQ_LEN)]
    assert found == [begins[(begins >= begin) & (begins < end)].tolist() for begin, end in windows]
    assert opened.facts(document_mask=True)["eos"] == eos
    assert "eos" not in opened.facts(document_mask=False)


def test_the_id_that_separates_documents_is_checked(tmp_path: Path) -> None:
    file = write("llm.c", 2, tmp_path / "without", documents())
    (problem,) = problems(file, document_mask=True)
    assert problem.key == "data.document_mask"
    assert problem.remedy.startswith("write s.eos, the id that separates documents")
    (problem,) = problems(file, document_mask=True, eos=VOCAB_SIZE)
    assert (problem.key, problem.rule) == ("s.eos", "less than model.vocab_size = 60000")
    file = write("OLMo-core", 2, tmp_path / "with", documents())
    (problem,) = problems(file, document_mask=True, eos=5)
    assert (problem.key, problem.remedy) == ("s.eos", "leave it out")


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    """Megatron may write a sentence per sequence: the documents are those of its last table."""
    file = write("Megatron", 2, tmp_path, documents())
    index = (tmp_path / "a.idx").read_bytes()
    head, sequences, rows = index[:34], len(LENGTHS), np.array([0, 2, 4, 7, 7], "<i8")
    changed = head[:26] + struct.pack("<Q", len(rows)) + index[34 : 34 + 12 * sequences] + rows.tobytes()
    (tmp_path / "a.idx").write_bytes(changed)
    assert problems(file, document_mask=True) == []
    positions = format_of(file).positions(file)
    begins = np.cumsum([0, *LENGTHS])
    np.testing.assert_array_equal(positions.read(0, positions.num_documents), begins[[0, 2, 4, 7]])


def test_a_file_without_tokens_is_read(tmp_path: Path) -> None:
    """A task of datatrove may have no documents."""
    for name, folder in itertools.product(("Megatron", "datatrove"), ("empty", "full")):
        write(name, 2, tmp_path / folder / name, documents() if folder == "full" else [[]])
    assert problems(tmp_path, document_mask=True) == []
    corpus = WindowCorpus(Tokens(source(tmp_path)), SEQ_LEN, VOCAB_SIZE, documents=True)
    assert corpus.size == 2 * sum(LENGTHS)


def change(suffix: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda folder: (folder / f"a{suffix}").write_bytes(edit((folder / f"a{suffix}").read_bytes()))


def put(position: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda old: old[:position] + new + old[position + len(new) :]


FAULTS: tuple[tuple[str, Callable[[Path], Any], str], ...] = (
    ("Megatron", change(".bin", lambda data: data[:-2]), "a.bin has 164 bytes, but .*a.idx describes 83 ids of 2 b"),
    ("Megatron", change(".idx", lambda data: data[:-1]), "a.idx has 181 bytes, but its 7 sequences and 8 documents"),
    ("Megatron", change(".idx", lambda data: data[:20]), "a.idx is not an index of Megatron: move it"),
    ("Megatron", change(".idx", put(0, b"TNTIDX")), "a.idx is not an index of Megatron: move it"),
    ("Megatron", change(".idx", put(9, b"\2")), "a.idx has version 2 and type 8; only version 1"),
    ("Megatron", change(".idx", put(17, b"\7")), "a.idx has version 1 and type 7; only version 1 with integers"),
    ("Megatron", change(".idx", put(17, b"\4")), "a.idx has sequences of other lengths than"),
    ("Megatron", change(".idx", put(18, b"\xff" * 7)), "a.idx has 182 bytes, but its 72,057,594,037,927,935 sequences"),
    ("datatrove", change(".ds", lambda data: data[:-2]), "a.ds has 164 bytes, but .*index describes 83 ids of 2 b"),
    ("datatrove", change(".ds.index", lambda data: data[:-3]), "a.ds.index has 53 bytes, which are not a multiple"),
    ("datatrove", change(".ds.index", lambda data: data[:-16]), "a.ds has 166 bytes, but .* describes 71 ids"),
    ("datatrove", change(".ds.metadata", lambda data: data.replace(b"|2\n", b"|4\n")), "describes 83 ids of 4 bytes"),
    ("datatrove", change(".ds.metadata", lambda data: data.replace(b"|", b" ")), "must have 2 or 4"),
    ("datatrove", lambda folder: (folder / "a.ds.loss").touch(), "a.ds.loss excludes tokens from the loss"),
    ("OLMo-core", change(".csv.gz", lambda data: data[:-20]), "a.csv.gz is damaged: "),
    ("OLMo-core", change(".csv.gz", lambda _: b"0,7\n"), "a.csv.gz is damaged: Not a gzipped file"),
    ("OLMo-core", change(".csv.gz", lambda _: gzip.compress(b"start,end\n0,83\n")), "must have a line START,END"),
    ("OLMo-core", change(".csv.gz", lambda _: gzip.compress(b"0,0\n" * 170)), "must have a line START,END"),
    ("OLMo-core", change(".csv.gz", lambda _: gzip.compress(b"0,7\n8,83\n")), "last one ends, but line 2 is different"),
    ("OLMo-core", change(".csv.gz", lambda _: gzip.compress(b"0,60\n")), "a.npy has 166 bytes, but .* 60 ids"),
    ("llm.c", change(".bin", lambda data: data[:-2]), "a.bin has 1,188 bytes, but its 83 ids need 1,190"),
    ("llm.c", change(".bin", lambda data: data[:10]), "a.bin has 10 bytes, but its 83 ids need 1,190"),
    ("llm.c", change(".bin", put(4, b"\3")), "a.bin has a header of llm.c of version 3; only 1 is read for 20240520"),
)


@pytest.mark.parametrize(("name", "fault", "message"), FAULTS)
def test_files_that_contradict_each_other_are_refused(
    name: str, fault: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    write(name, 2, tmp_path, documents())
    fault(tmp_path)
    (problem,) = problems(tmp_path)
    assert problem.key == "s.path"
    assert re.search(message, problem.remedy), problem.remedy


@pytest.mark.parametrize("name", [*RECORDED, "llm.c"])
def test_a_type_that_the_files_contain_is_not_given(name: str, tmp_path: Path) -> None:
    write(name, 2, tmp_path, documents())
    (problem,) = problems(tmp_path, dtype="uint16")
    assert (problem.key, problem.remedy) == ("s.dtype", "leave it out")
    assert f"as those of {name} do" in problem.rule


def test_raw_files_need_their_type(tmp_path: Path) -> None:
    for suffix in (".npy", ".bin", ".ds"):
        ids = np.concatenate(documents(20)).astype("<u4")
        ids.tofile(file := tmp_path / f"a{suffix}")
        (problem,) = problems(file)
        assert (problem.key, problem.remedy[:26]) == ("s.dtype", 'write "uint16" or "uint32"')
        assert problems(file, dtype="uint32") == []
        (problem,) = problems(file, dtype="uint16")
        assert problem.remedy.endswith('its ids have 32 bits: write dtype = "uint32"')


@pytest.mark.parametrize("name", RECORDED)
def test_damaged_files_are_user_errors(name: str, tmp_path: Path) -> None:
    """Changed bytes give other ids or documents, or a UserError."""
    file = write(name, 2, tmp_path, documents())
    beside = format_of(file).documents(file)
    assert isinstance(beside, Path)
    good, rng = beside.read_bytes(), random.Random(0)
    for _ in range(100):
        bad = bytearray(good)
        for _ in range(rng.choice((1, 2, 10))):
            bad[rng.randrange(len(bad))] = rng.choice(b"\x00\xff\x01\x7f\x80")
        beside.write_bytes(bad[: rng.choice((len(bad), len(bad), rng.randrange(len(bad))))])
        try:
            corpus = WindowCorpus(Tokens(source(file)), SEQ_LEN, VOCAB_SIZE, documents=True)
        except UserError:
            continue
        assert corpus.size == sum(LENGTHS)


def test_inspect_names_format_and_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("Megatron", 4, tmp_path / "m", documents())
    write("datatrove", 2, tmp_path / "d", documents())
    describe_token_files(Tokens(source(tmp_path)), SEQ_LEN)
    shown = capsys.readouterr().out
    assert "  format        Megatron, int32; datatrove, uint16\n" in shown
    assert "  tokens        166\n  documents     14\n" in shown


def test_a_folder_of_olmo_core_is_of_the_kind_tokens(tmp_path: Path) -> None:
    write("OLMo-core", 2, tmp_path, documents())
    assert source_from_path(str(tmp_path), "--data") == SourceConfig("tokens", str(tmp_path))
    (tmp_path / "table.csv.gz").touch()
    assert isinstance(source_from_path(str(tmp_path), "--data"), Problem)
