"""Sources in object stores: the files, the order and the batches of a local copy, through a bounded cache."""

import errno
import gzip
import json
import os
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.store_proxy import Fault, Proxy
from tests.stores import Bucket
from tests.unit.conftest import SENTENCE
from tests.unit.data.conversations import write_conversations
from tests.unit.data.ranks import build
from titanlite.data import segments
from titanlite.data.check import check_source
from titanlite.data.config import DataConfig
from titanlite.data.fingerprint import data_fingerprint, describe_difference
from titanlite.data.kinds import open_source, source_from_path
from titanlite.data.loader import Loader
from titanlite.data.sources import parquet, stored
from titanlite.data.sources.config import SourceConfig
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime import parts
from titanlite.runtime.durability import PARTIAL
from titanlite.runtime.errors import DataError, UserError
from titanlite.runtime.parts import Parts
from titanlite.storage.address import Address
from titanlite.storage.store import Store

pytestmark = pytest.mark.slow

WORDS = SENTENCE.split()


def write_corpus(root: Path) -> None:
    """Files of each kind, of 3 to 20 KB: names whose order differs from that of their creation, hidden ones, and a
    damaged one."""
    rng = random.Random(0)

    def document() -> str:
        return " ".join(rng.choices(WORDS, k=rng.choice((3, 20, 90))))

    def rows(count: int) -> bytes:
        lines = [json.dumps({"text": document(), "n": n}) for n in range(count)]
        return "\r\n".join([*lines[:5], "", "  ", *lines[5:]]).encode()

    for name in ("lines/c.jsonl", "lines/a.jsonl", "lines/deep/b.jsonl", "lines/.hidden.jsonl", "lines/.h/d.jsonl"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(rows(30))
    (root / "lines/read.me").write_text("not data")
    (root / "packed").mkdir()
    (root / "packed/a.jsonl.gz").write_bytes(gzip.compress(rows(60)))
    with pa.CompressedOutputStream(str(root / "packed/b.jsonl.zst"), "zstd") as out:
        out.write(rows(60))
    (root / "damaged.jsonl.gz").write_bytes(gzip.compress(rows(400))[:-3000])
    (root / "text").mkdir()
    for name in "ba":
        (root / f"text/{name}.txt").write_text("\n\n\n".join(document() + "\n" + document() for _ in range(20)))
    table = pa.table({"other": [rng.randbytes(500) for _ in range(120)], "text": [document() for _ in range(120)]})
    (root / "tables").mkdir()
    pq.write_table(table, root / "tables/a.parquet", row_group_size=25)
    with pa.ipc.new_stream(str(root / "tables/a.arrow"), table.schema) as stream:
        stream.write_table(table, 30)
    (root / "tables/a.csv").write_text("n,text\n" + "".join(f'{n},"{document()}\n{n}"\n' for n in range(50)))
    write_conversations(root / "chat.jsonl", [3, 5, 2, 9, 4, 7, 1, 30])
    (root / "tokens").mkdir()
    for name in "ba":
        ids = np.array([rng.randrange(300) for _ in range(3000)], np.uint16)
        np.save(root / f"tokens/{name}.npy", ids)
        with (root / f"tokens/{name}.documents").open("wb") as starts:
            np.save(starts, np.arange(0, 3000, 37))
        ids.tofile(root / f"tokens/{name}.bin")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    write_corpus(root)
    return root


def upload(corpus: Path, address: str) -> str:
    store = Store(Address.parse(address))
    for file in sorted(corpus.rglob("*")):
        if file.is_file():
            store.write(file.relative_to(corpus).as_posix(), file.read_bytes())
    return address


@pytest.fixture
def memory(corpus: Path) -> str:
    """The address of a copy of the corpus."""
    return upload(corpus, f"memory://{uuid4().hex}/corpus")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and ranges that cut lines, rows and windows."""
    monkeypatch.setattr(stored, "HEAD_BYTES", 150)
    monkeypatch.setattr(stored, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(stored, "FIRST_RANGE_BYTES", 100)
    monkeypatch.setattr(parquet, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(parquet, "FOOTER_BYTES", 600)
    monkeypatch.setattr(segments, "FETCHED_TOKENS", 300)


SOURCES: tuple[dict[str, Any], ...] = (
    {"kind": "jsonl", "path": "lines"},
    {"kind": "jsonl", "path": "lines/*.jsonl"},
    {"kind": "jsonl", "path": "packed"},
    {"kind": "jsonl", "path": "damaged.jsonl.gz"},
    {"kind": "text", "path": "text/**"},
    {"kind": "text", "path": "text", "document": "paragraph"},
    {"kind": "csv", "path": "tables"},
    {"kind": "arrow", "path": "tables"},
    {"kind": "parquet", "path": "tables/a.parquet"},
    {"kind": "chat", "path": "chat.jsonl"},
    {"kind": "tokens", "path": "tokens/*.npy"},
    {"kind": "tokens", "path": "tokens/*.bin", "dtype": "uint16"},
    {"kind": "tokens", "path": "tokens/*.bin", "dtype": "uint16", "eos": 7},
)


def section_of(root: Path | str, source: dict[str, Any], **changes: Any) -> DataConfig:
    config = SourceConfig(**source | {"path": f"{root}/{source['path']}", "name": "source"})
    has_starts = source["path"] == "tokens/*.npy"
    settings: dict[str, Any] = {"num_streams": 4, "max_piece_bytes": 300, "stream_version": 4, "num_workers": 0}
    return DataConfig(**settings | {"document_mask": has_starts, "on_bad_row": "skip", "sources": (config,)} | changes)


def batches(section: DataConfig, tokenizer: Tokenizer, steps: int = 8) -> list[Any]:
    """The first steps, their origins in words, and the fingerprint."""
    loader = build(section, tokenizer, seq_len=48)
    try:
        found = []
        for _ in range(steps):
            rows = [(batch.tokens.tolist(), batch.labels.tolist()) for batch in loader.next_step()]
            found.append((rows, loader.origins, loader.bad_rows))
        return [found, data_fingerprint(section, loader.sources, tokenizer)]
    finally:
        loader.close()


def all_tokens(section: DataConfig, tokenizer: Tokenizer) -> list[Any]:
    loader, found = build(section, tokenizer, seq_len=48), []
    while not all(loader.ended):
        found.append([batch.tokens.tolist() for batch in loader.next_step()])
    loader.close()
    return found


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source['kind']} {source['path']}")
def test_batches_and_fingerprint_are_those_of_a_local_copy(
    source: dict[str, Any], corpus: Path, memory: str, chat_tokenizer: Tokenizer
) -> None:
    for version in (3, 4) if source["kind"] == "tokens" else (4,):  # version 3 reads blocks of files
        sections = (section_of(root, source, stream_version=version) for root in (corpus, memory))
        expected, found = (batches(section, chat_tokenizer) for section in sections)
        assert found == expected


MIXTURE = (
    {"kind": "jsonl", "path": "packed", "weight": 2.0},
    {"kind": "parquet", "path": "tables", "weight": 1.0},
    {"kind": "tokens", "path": "tokens/*.npy", "weight": 1.0},
)


def test_a_run_moves_between_a_disk_and_a_server_with_workers(
    corpus: Path, store: Bucket, chat_tokenizer: Tokenizer
) -> None:
    """The steps of one loader, of which the first half is read from a disk and the rest from a server, and reversed."""
    address = upload(corpus, f"{store.address}/corpus")

    def section(root: Path | str, workers: int) -> DataConfig:
        sources = tuple(section_of(root, source).sources[0] for source in MIXTURE)
        return section_of(root, MIXTURE[0], sources=sources, num_workers=workers)

    def steps(of: DataConfig, count: int, state: Any = None) -> tuple[list[Any], Any]:
        loader = build(of, chat_tokenizer)
        try:
            if state is not None:
                loader.load_state(state)
            found = [[batch.tokens.tolist() for batch in loader.next_step()] for _ in range(count)]
            return found, loader.state()
        finally:
            loader.close()

    local, stored_ = section(corpus, 0), section(address, 2)
    expected, _ = steps(local, 12)
    for before, after in ((local, stored_), (stored_, local)):
        first, state = steps(before, 6)
        assert first + steps(after, 6, state)[0] == expected
    prints = [data_fingerprint(each, [open_source(one) for one in each.sources]) for each in (local, stored_)]
    assert describe_difference(*prints) == []


@pytest.mark.parametrize(
    ("name", "kind", "most"),
    [pytest.param("a.jsonl", "jsonl", 1.0, marks=pytest.mark.soak), ("a.parquet", "parquet", 0.1)],
)
def test_all_processes_of_a_node_fetch_a_part_once(
    name: str,
    kind: str,
    most: float,
    corpus: Path,
    tmp_path: Path,
    faulty_store: tuple[Bucket, Proxy],
    chat_tokenizer: Tokenizer,
) -> None:
    """In two epochs, by a loader with two workers and another one. Of Parquet, the column of the text only."""
    bucket, proxy = faulty_store
    texts = [json.loads(line)["text"] for line in (corpus / "lines/a.jsonl").read_bytes().splitlines() if line.strip()]
    (tmp_path / "a.jsonl").write_bytes((corpus / "lines/a.jsonl").read_bytes() * 20)
    table = pa.table({"text": texts * 2, "other": [random.Random(n).randbytes(20_000) for n in range(60)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=25)
    content = (tmp_path / name).read_bytes()
    bucket.request("PUT", name, content)
    source = {"kind": kind, "path": name, "epochs": 2}
    section = section_of(bucket.address, source, num_workers=2)
    expected = all_tokens(section_of(tmp_path, source), chat_tokenizer)
    build(section, chat_tokenizer).close()  # the index
    log = r"fetched (\d\.\d) MiB of stored files in \d\.\d s; .*/cache/parts has 0.00 of at most [1-9][\d,.]* GiB"
    found = re.fullmatch(log, stored.stored_parts().describe())
    assert found
    assert float(found[1]) == round(proxy.received / 2**20, 1) > 0
    proxy.clear()
    assert [all_tokens(section, chat_tokenizer) for _ in range(2)] == [expected] * 2
    assert proxy.received <= most * len(content)


@pytest.mark.usefixtures("small_blocks")
def test_a_damaged_part_is_fetched_again(
    corpus: Path, memory: str, chat_tokenizer: Tokenizer, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section = section_of(memory, SOURCES[0])
    assert batches(section, chat_tokenizer) == batches(section_of(corpus, SOURCES[0]), chat_tokenizer)
    stored._parts.cache_clear()  # as in another process
    for part in part_files(cache):
        damaged = bytearray(part.read_bytes())
        damaged[len(damaged) // 2] ^= 4
        part.write_bytes(damaged)
    assert batches(section, chat_tokenizer) == batches(section_of(corpus, SOURCES[0]), chat_tokenizer)
    assert "is damaged and is fetched again" in caplog.text


LISTED = [
    ("lines", "jsonl", ["a.jsonl", "c.jsonl", "b.jsonl"]),
    ("lines/", "jsonl", ["a.jsonl", "c.jsonl", "b.jsonl"]),
    ("lines/*.jsonl", "jsonl", ["a.jsonl", "c.jsonl"]),
    ("lines/**/*.jsonl", "jsonl", ["a.jsonl", "c.jsonl", "b.jsonl"]),
    ("**/[bc].jsonl", "jsonl", ["c.jsonl", "b.jsonl"]),
    ("l*/?.jsonl", "jsonl", ["a.jsonl", "c.jsonl"]),
    ("lines/.h*", "jsonl", [".hidden.jsonl"]),
    ("lines/a.jsonl", "jsonl", ["a.jsonl"]),
    ("lines/a.jsonl", "text", ["a.jsonl"]),
    ("lines", "text", []),
    ("lines/a", "jsonl", []),
    ("nothing", "jsonl", []),
    ("nothing/*.jsonl", "jsonl", []),
]


@pytest.mark.parametrize(("path", "kind", "expected"), LISTED)
def test_an_address_selects_the_files_of_a_path(
    path: str, kind: str, expected: list[str], corpus: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of their names, whatever the order in which the store lists them."""
    listed = Store.list
    monkeypatch.setattr(Store, "list", lambda store, name="": dict(reversed(listed(store, name).items())))
    for root in (corpus, memory):
        source = open_source(SourceConfig(kind, f"{root}/{path}"))
        assert [file.name for file in source.files()] == expected, root
        assert [str(file).removeprefix(str(root)) for file in source.files()] == [
            str(file).removeprefix(str(corpus)) for file in open_source(SourceConfig(kind, f"{corpus}/{path}")).files()
        ]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("part[1].jsonl", ["part[1].jsonl"]),
        ("part[12].jsonl", ["part1.jsonl"]),
        ("part[[]1].jsonl", ["part[1].jsonl"]),
        ("part*.jsonl", ["part1.jsonl", "part[1].jsonl"]),
        ("day[1]", ["day[1]/a.jsonl", "day[1]/hour[1]/b.jsonl"]),
        ("day[1]/", ["day[1]/a.jsonl", "day[1]/hour[1]/b.jsonl"]),
        ("day[1]/a.jsonl", ["day[1]/a.jsonl"]),
        ("day[1]/hour[1]/b.jsonl", ["day[1]/hour[1]/b.jsonl"]),
        ("day[1]/*.jsonl", ["day[1]/a.jsonl"]),
        ("day[1]/**/[ab].jsonl", ["day[1]/a.jsonl", "day[1]/hour[1]/b.jsonl"]),
        ("day[12]/*", ["day1/c.jsonl"]),
        ("day[1]/none.jsonl", []),
    ],
)
def test_an_object_or_folder_that_exists_is_no_pattern(path: str, expected: list[str], tmp_path: Path) -> None:
    for name in ("part1.jsonl", "part[1].jsonl", "day1/c.jsonl", "day[1]/a.jsonl", "day[1]/hour[1]/b.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(lines_of(name[-7]))
    for root in (str(tmp_path), upload(tmp_path, f"memory://{uuid4().hex}/data")):
        source = open_source(SourceConfig("jsonl", f"{root}/{path}"))
        assert [str(file).removeprefix(f"{root}/") for file in source.files()] == expected
        assert (source.check_files("data.sources.0") == []) == bool(expected)
        found = source_from_path(f"{root}/{path}", "--data")
        assert found == SourceConfig("jsonl", f"{root}/{path}") if expected else not isinstance(found, SourceConfig)


def write(address: str, content: bytes) -> None:
    Store(Address.parse(address)).write("", content)


def lines_of(letter: str) -> bytes:
    return b"".join(json.dumps({"text": letter * 9 + str(n % 10)}).encode() + b"\n" for n in range(400))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, "written") for name in ("a.jsonl", "a.jsonl.gz", "a.parquet", "a.bin")),
        ("a.jsonl", "deleted"),
        *(pytest.param(name, "deleted", marks=pytest.mark.soak) for name in ("a.jsonl.gz", "a.parquet", "a.bin")),
    ],
)
def test_content_that_changes_under_a_run_is_refused(
    name: str, change: str, tmp_path: Path, cache: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the cache is of the old content; the rest is refused. The next start has the new content only."""
    kind = {".gz": "jsonl", ".bin": "tokens"}.get(Path(name).suffix, Path(name).suffix[1:])

    def content(letter: str) -> bytes:
        if kind == "parquet":
            pq.write_table(pa.table({"text": [letter * 9] * 400}), tmp_path / name, row_group_size=100)
            return (tmp_path / name).read_bytes()
        if kind == "tokens":
            return np.full(8000, ord(letter), np.uint16).tobytes()
        return gzip.compress(lines_of(letter), 0) if name.endswith(".gz") else lines_of(letter)

    def ids(loader: Loader) -> set[int]:
        return {token for batch in loader.next_step() for token in batch.tokens.flatten().tolist()}

    old, new = (97, 98) if kind == "tokens" else (tokenizer.encode("a")[0], tokenizer.encode("b")[0])
    monkeypatch.setattr(parts, "MAPPED_BYTES", 0)
    stored._parts.cache_clear()  # a thread of an earlier test that reads ahead may have made it already
    monkeypatch.setattr(parquet, "CACHE_BYTES", 0)
    address = f"memory://{uuid4().hex}/{name}"
    source = SourceConfig(kind, address, dtype="uint16" if kind == "tokens" else "")
    section = DataConfig(num_streams=2, max_piece_bytes=300, document_mask=False, num_workers=0, sources=(source,))
    write(address, content("a"))
    loader = build(section, tokenizer)
    assert old in ids(loader)
    if change == "written":
        write(address, content("b"))
    else:
        Store(Address.parse(address)).delete([""])
    removed = {part: part.read_bytes() for part in part_files(cache) if not part.name.endswith(PARTIAL)}
    for part in removed:
        part.unlink()
    refused = ""
    for _ in range(1000):
        try:
            assert new not in ids(loader)
        except DataError as error:
            refused = str(error)
            break
    loader.close()
    assert f"{name} was {change} while it was in use: " in refused
    assert "restore the object, and start again: the run resumes from its latest checkpoint" in refused
    if change == "deleted":
        (problem,) = check_source(source, "data.sources.0", section, vocab_size=300, checks_files=True)
        assert (problem.key, problem.value) == ("data.sources.0.path", address)
        assert problem.remedy == f"nothing matches below {address}: fix the address"
        return
    for part, of_old_content in removed.items():
        part.write_bytes(of_old_content)
    loader = build(section, tokenizer)
    assert not any(old in ids(loader) for _ in range(20))
    loader.close()


@pytest.mark.parametrize("place", ["memory", "store"])
def test_a_source_has_the_files_that_it_had_when_it_was_opened(place: str, request: pytest.FixtureRequest) -> None:
    """A later source has those of the store at that time: no listing is of a cache. Another program writes them."""
    bucket = request.getfixturevalue("store") if place == "store" else None
    base = f"{bucket.address if bucket else f'memory://{uuid4().hex}'}/corpus"
    config = SourceConfig("jsonl", base)

    def put(name: str, content: bytes) -> None:
        if bucket:
            bucket.request("PUT", f"corpus/{name}", content)
        else:
            write(f"{base}/{name}", content)

    put("a.jsonl", lines_of("a"))
    source = open_source(config)
    assert len(source.content_facts) == 1
    facts = source.facts(document_mask=False)
    put("b.jsonl", lines_of("a"))
    assert source.facts(document_mask=False) == facts
    assert len(source.files()) == 1
    assert open_source(config).facts(document_mask=False)["files"] == 2
    put("a.jsonl", lines_of("b"))
    with pytest.raises(UserError, match=r"/a.jsonl was written while the run was starting: start again when "):
        source.facts(document_mask=False)
    again = open_source(config).facts(document_mask=False)
    assert (again["bytes"], again["content"] == facts["content"]) == (2 * facts["bytes"], False)


def part_files(cache: Path) -> list[Path]:
    return [*(cache / "parts").glob("*/*")]


def size_of_parts(cache: Path) -> int:
    return sum(file.stat().st_size for file in part_files(cache))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "source",
    [*(SOURCES[n] for n in (0, 8, 10)), *(pytest.param(SOURCES[n], marks=pytest.mark.soak) for n in (2, 3, 6))],
    ids=lambda source: str(source["path"]),
)
def test_the_cache_keeps_its_bound_and_removed_parts_are_fetched_again(
    source: dict[str, Any],
    corpus: Path,
    memory: str,
    chat_tokenizer: Tokenizer,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With room for three parts, and none that stays mapped."""
    limit = 9000 if source["kind"] == "parquet" else 4000  # the metadata of Parquet is a part of 6,695 bytes
    expected = batches(section_of(corpus, source), chat_tokenizer, 12)
    monkeypatch.setattr(parts, "MAPPED_BYTES", 0)
    monkeypatch.setattr(parquet, "CACHE_BYTES", 0)
    monkeypatch.setenv("TITANLITE_CACHE_BYTES", str(limit))
    sizes = []
    add, one_at_a_time = Parts._written, threading.Lock()

    def written(*arguments: Any) -> Any:
        with one_at_a_time:  # another thread would remove parts while the size is counted
            part = add(*arguments)
            sizes.append(size_of_parts(cache))
        return part

    monkeypatch.setattr(Parts, "_written", written)
    assert batches(section_of(memory, source), chat_tokenizer, 12) == expected
    made = len(sizes)
    assert max(sizes) <= limit
    assert made > len(part_files(cache)) > 0


def problem_of(source: SourceConfig) -> str:
    """The only problem of data.sources.0.path."""
    (problem,) = check_source(source, "data.sources.0", DataConfig(), vocab_size=300, checks_files=True)
    assert (problem.key, problem.value) == ("data.sources.0.path", source.path)
    return f"{problem.rule}: {problem.remedy}"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"status": 403, "code": "AccessDenied"}, "credentials are valid and may list, read"),
        ({"status": 400, "code": "ExpiredToken"}, "expired"),
    ],
)
@pytest.mark.parametrize("path", ["corpus", "corpus/a.jsonl", "corpus/*.jsonl"])
def test_a_store_that_refuses_is_one_problem_with_its_remedy(
    path: str, fault: dict[str, Any], expected: str, faulty_store: tuple[Bucket, Proxy]
) -> None:
    bucket, proxy = faulty_store
    bucket.request("PUT", "corpus/a.jsonl", lines_of("a"))
    source = SourceConfig("jsonl", f"{bucket.address}/{path}")
    assert check_source(source, "data.sources.0", DataConfig(), vocab_size=0, checks_files=True) == []
    proxy.add(Fault("refuse", "GET HEAD", **fault))
    text = problem_of(source)
    assert "objects that can be listed and read" in text
    assert expected in text


@pytest.mark.usefixtures("store")
def test_other_problems_of_addresses(memory: str) -> None:
    missing = f"s3://no-{uuid4().hex}"
    assert f"the bucket {missing[5:]} does not exist: create it, or fix" in problem_of(SourceConfig("jsonl", missing))
    found = problem_of(SourceConfig("hf", f"{memory}/lines"))
    assert found.startswith("a path: kind = 'hf' reads no object stores: copy the files to a disk, or read them with ")
    assert "is not the address of a store" in problem_of(SourceConfig("jsonl", "ftp://host/a.jsonl"))
    (problem,) = check_source(
        SourceConfig("text", f"{memory}/packed"), "data.sources.0", DataConfig(), vocab_size=0, checks_files=True
    )
    assert problem.remedy == 'write kind = "jsonl", or add --data.sources.0.kind jsonl'
    write(f"{memory}/wide/a.txt", "a text in UTF-16".encode("utf-16"))
    remedy = "write it again from cat FILE | iconv -f UTF-16 -t UTF-8"
    assert remedy in problem_of(SourceConfig("text", f"{memory}/wide"))


@pytest.mark.parametrize(
    ("path", "kind"), [("lines", "jsonl"), ("tables/*.parquet", "parquet"), ("text/a.txt", "text"), ("nothing", "")]
)
def test_the_kind_of_an_address_follows_from_its_files(path: str, kind: str, memory: str) -> None:
    found = source_from_path(f"{memory}/{path}", "--data")
    assert found.kind == kind if isinstance(found, SourceConfig) else not kind


def test_parts_keep_their_bound_when_many_processes_write(tmp_path: Path) -> None:
    """Each thread has its own Parts of the same folder, as a process has."""

    def fetch(thread: int) -> None:
        cache = Parts(tmp_path / "parts", 2**23)
        for n in range(30):
            number = n * 8 + thread if n % 2 else n  # of their own, and shared ones
            content = b"%d" % (number % 10) * (2**14 * (1 + number % 30))
            assert cache.get(["part", number], len(content), partial(bytes, content))[: len(content)] == content

    with ThreadPoolExecutor(8) as threads:
        [*threads.map(fetch, range(8))]
    assert 2**22 < size_of_parts(tmp_path) == int((tmp_path / "parts/total").read_text()) <= 2**23


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "write a smaller data.cache_bytes, or set TITANLITE_CACHE to a folder with more space"),
        (
            errno.EROFS,
            "set the environment variable TITANLITE_CACHE to a folder that is writable and supports file locks",
        ),
    ],
)
def test_a_disk_that_is_full_or_read_only_is_named(
    number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Parts(tmp_path / "parts", 1000)

    def rename(path: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(path), None, str(target))

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(UserError, match=rf"^cannot write parts of files into {tmp_path}/parts: .*; {remedy}$"):
        cache.get(["part"], 3, lambda: b"abc")
    assert part_files(tmp_path) == []
    monkeypatch.undo()
    assert cache.get(["part"], 3, lambda: b"abc")[:3] == b"abc"
