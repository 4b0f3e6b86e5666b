"""Many token files: one process of a node looks at them, the others read its table, and no file is read unnoticed after
a change."""

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.unit.data.test_windows import SEQ_LEN, build, rows
from titanlite.assembly import data_files
from titanlite.assembly.data_files import looks_of, resolve_with_data, resolve_without_data
from titanlite.assembly.facts import content_facts
from titanlite.config.load import parse, resolve
from titanlite.config.schema import JobConfig
from titanlite.data.check import check_source
from titanlite.data.config import DataConfig
from titanlite.data.loader import Loader
from titanlite.data.preparation import Assignment, content_keys
from titanlite.data.sources import token_look, token_table, tokens
from titanlite.data.sources.base import sampled_digest
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.formats import CHECKED_TOKENS, DocumentStarts, Format, Head, Seen
from titanlite.data.sources.token_look import look_at
from titanlite.data.sources.token_table import use_looks
from titanlite.data.sources.tokens import Tokens, opened_once
from titanlite.data.steps import BatchStage
from titanlite.data.workers import prepared_steps
from titanlite.ranks.agreement import DifferentRanksError, require_equal
from titanlite.ranks.distributed import World
from titanlite.runtime.cache import cache_folder
from titanlite.runtime.errors import ConfigError, DataError, Problem, UsageError, UserError

FILES = 5
RAW = {"dtype": "uint16", "eos": 7}


@pytest.fixture(autouse=True)
def small_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables of more than two files, of which two stay prepared, in an empty cache."""
    monkeypatch.setattr(tokens, "TABLE_FILES", 2)
    monkeypatch.setattr(token_table, "KEPT_FILES", 2)
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    yield
    use_looks([])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files with documents, of which the first has a type of its own."""
    made, rng = tmp_path / "data", np.random.default_rng(0)
    made.mkdir()
    for n in range(FILES):
        ids = rng.integers(0, 5000, SEQ_LEN * 7 + n).astype(">u2" if n == 0 else "<u4")
        np.save(made / f"{n}.npy", ids)
        with open(made / f"{n}.documents", "wb") as file:
            np.save(file, np.sort(rng.integers(0, len(ids), 12)))
    return made


def source(path: Path, **keys: Any) -> SourceConfig:
    return SourceConfig(kind="tokens", path=str(path), **keys)


def job(path: Path, *, document_mask: bool = True, **keys: Any) -> JobConfig:
    return JobConfig(data=DataConfig(document_mask=document_mask, sources=(source(path, **keys),)))


def look(path: Path, **keys: Any) -> None:
    """As another process of the node, whose table this one has from now on."""
    use_looks(looks_of(job(path, **keys)))


def read_steps(loader: Loader) -> None:
    for _ in range(20):
        loader.next_step()


_opened: list[str] = []
_watching: list[bool] = []


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Records the files that are opened inside the block."""

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and _watching and isinstance(args[0], str | bytes | os.PathLike):
            _opened.append(os.fsdecode(args[0]))

    if not hasattr(sys, "_noted_for_tables"):
        sys.addaudithook(note)  # an audit hook cannot be removed
        sys._noted_for_tables = True  # type: ignore[attr-defined]
    _opened.clear()
    _watching.append(True)
    yield _opened
    _watching.clear()


@pytest.mark.parametrize("kind", ["numpy", "raw"])
def test_a_table_changes_no_token(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does another process's table: documents from files, and from an id that separates them."""
    keys: dict[str, Any] = {}
    if kind == "raw":
        for n in range(FILES):
            (folder / f"{n}.bin").write_bytes(np.load(folder / f"{n}.npy").astype("<u2").tobytes())
            (folder / f"{n}.npy").unlink()
            (folder / f"{n}.documents").unlink()
        keys = RAW
    kinds: dict[str, Any] = {"shuffle": True, "document_mask": True}
    monkeypatch.setattr(tokens, "TABLE_FILES", 100)
    loader = build(source(folder, **keys), **kinds)
    facts, content = loader.sources[0].facts(document_mask=True), content_keys(loader.sources, None)
    expected = rows(loader, 20)
    monkeypatch.setattr(tokens, "TABLE_FILES", 2)
    assert rows(build(source(folder, **keys), **kinds), 20) == expected
    look(folder, **keys)
    other = build(source(folder, **keys), **kinds)
    assert other.sources[0].facts(document_mask=True) == facts
    assert content_keys(other.sources, None) == content
    begin = other.state().tolist()
    assert rows(other, 20) == expected
    steps = prepared_steps(iter(()), **arguments(source(folder, **keys), content, begin))
    assert [next(steps)[1]["tokens"].tolist() for _ in range(3)] == [
        [tokens for tokens, _ in expected[2 * step : 2 * step + 2]] for step in range(3)
    ]


def arguments(config: SourceConfig, content: dict[str, str], states: list[list[int]]) -> dict[str, Any]:
    """Those of a worker."""
    section = DataConfig(num_streams=2, max_piece_bytes=100, document_mask=True, sources=(config,))
    settings = asdict(Assignment(section, None, 5000, (BatchStage(1, 2, SEQ_LEN, 1),)))
    looks = json.loads(json.dumps(token_table.looks_in_use()))
    begin = {"streams": [0, 1], "states": states, "next_sequence": 0, "last_step": 0}
    return {"assignment": settings, "content": content, "looks": looks, **begin}


def test_another_process_opens_files_when_it_reads_them(folder: Path) -> None:
    look(folder)
    with opened_files() as opened:
        found = check_source(source(folder), "s", DataConfig(document_mask=True), vocab_size=5000, checks_files=True)
        loader = build(source(folder), document_mask=True)
        assert found == []
        assert loader.sources[0].facts(document_mask=True)
        assert [path for path in opened if str(folder) in path] == []
        loader.next_step()  # and one ahead
        read = {path for path in opened if path.endswith(".npy")}
    assert read
    assert read < {str(folder / f"{n}.npy") for n in range(FILES)}
    loader.close()


@pytest.mark.parametrize("suffix", ["npy", "documents"])
@pytest.mark.parametrize("change", ["touched", "deleted"])
def test_a_file_that_changes_after_the_look_is_refused(folder: Path, suffix: str, change: str) -> None:
    look(folder)
    loader = build(source(folder), document_mask=True)
    file = folder / f"4.{suffix}"
    os.utime(file, (0, 0)) if change == "touched" else file.unlink()
    message = "was written while it was in use: it has" if change == "touched" else "can no longer be read: No such"
    with pytest.raises(DataError, match=f"{file} {message}"):
        read_steps(loader)
    loader.close()


def test_a_file_that_changes_after_it_was_read_is_refused(folder: Path) -> None:
    """At the first step that reads it again, also if two other files are open by then."""
    loader = build(source(folder), document_mask=True)
    read_steps(loader)  # an epoch is 18 steps
    os.utime(folder / "1.npy", (0, 0))
    with pytest.raises(DataError, match=r"1.npy was written while it was in use"):
        read_steps(loader)
    loader.close()


def test_the_table_of_older_files_is_not_used(folder: Path) -> None:
    before = Tokens(source(folder))
    assert before.table is not None
    assert before.starts_folder.is_dir()
    os.utime(folder / "2.documents", (0, 0))
    after = Tokens(source(folder))
    assert after.table is not None
    assert before.table.folder != after.table.folder
    assert before.starts_folder != after.starts_folder
    np.save(folder / "3.npy", np.arange(2 * SEQ_LEN))
    assert Tokens(source(folder)).opened(documents=False).counts[3] == 2 * SEQ_LEN
    assert Tokens(source(folder)).table.paths[3:] == [folder / "3.npy", folder / "4.npy"]  # type: ignore[union-attr]


def test_files_that_are_written_while_a_process_looks_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = token_table._row_of

    def row_of(found: Format, head: Head, *arguments: Any) -> Any:
        os.utime(folder / "1.npy", (head.size, 0))
        return original(found, head, *arguments)

    monkeypatch.setattr(token_table, "_row_of", row_of)
    with pytest.raises(UserError, match=r"1.npy was written while the run was starting: start again"):
        looks_of(job(folder))


@pytest.mark.parametrize("suffix", ["npy", "documents"])
def test_files_that_are_written_after_the_check_are_refused(folder: Path, suffix: str) -> None:
    """The look has what the checks of the configuration have found, and not of other files."""
    with opened_once(digests=True):
        assert not check_source(source(folder), "s", DataConfig(), vocab_size=5000, checks_files=True)
        with opened_files() as opened:
            assert looks_of(job(folder, document_mask=False))
        assert [path for path in opened if path.startswith(str(folder))] == []
        shutil.rmtree(cache_folder())
        with open(folder / f"3.{suffix}", "wb") as file:
            np.save(file, np.arange(SEQ_LEN))
        with pytest.raises(UserError, match=rf"3.{suffix} was written while the run was starting: start again"):
            looks_of(job(folder))


def test_a_look_reads_nothing_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of token files: not when their first tokens and their digests are read."""
    advised, original = list[str](), os.posix_fadvise

    def advise(descriptor: int, begin: int, size: int, advice: int) -> None:
        assert (begin, size, advice) == (0, 0, os.POSIX_FADV_RANDOM)
        advised.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        original(descriptor, begin, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    names = [f"{n}.npy" for n in range(FILES)]
    for times, digests in ((1, True), (2, False)):
        advised.clear()
        with opened_once(digests=digests):
            assert not check_source(source(folder), "s", DataConfig(), vocab_size=5000, checks_files=True)
            assert looks_of(job(folder))
        assert sorted(Path(each).name for each in advised if each.endswith(".npy")) == sorted(times * names)


def of_many_kinds(folder: Path) -> None:
    """Token files of all that a look reads by one opening, and of others."""
    rng = np.random.default_rng(0)
    ids = {
        **{name: rng.integers(0, 5000, CHECKED_TOKENS + 9).astype(name) for name in ("<u2", ">u2", "<u4", "<i8")},
        "short": np.arange(5, dtype="<u2"),
        "empty": np.arange(0, dtype="<u2"),
    }
    for name, values in ids.items():
        np.save(folder / f"a {name}.npy", values)
        (folder / f"b {name}.bin").write_bytes(values.tobytes())
    starts = {"<u2": [0, 5, 5, 2000], "<u4": [], ">u2": [*range(20_000)], "<i8": [3, 2], "short": [6], "empty": [-1, 0]}
    for name, positions in starts.items():
        for letter in "ab":
            with open(folder / f"{letter} {name}.documents", "wb") as file:
                np.save(file, np.array(positions, np.int32 if name == "empty" else np.int64))
    with open(folder / "second header.npy", "wb") as file:
        np.lib.format.write_array(file, ids["<u2"], version=(2, 0))
    (folder / "c.npy").write_bytes(b"")
    (folder / "d.npy").write_bytes((folder / "a <u4.npy").read_bytes()[:-1])


def test_a_look_by_one_opening_finds_what_several_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_many_kinds(tmp_path)
    files = sorted(file for file in tmp_path.iterdir() if file.suffix in Tokens.suffixes)
    fast = dict[Path, tuple[Seen, Any]]()
    for file in files:
        with opened_files() as opened:
            fast[file] = look_at(file, "uint16", reads_ids=True, digests=True, of_documents=True)
        assert opened.count(str(file)) == 1 or fast[file][0].digest is None
    assert sum(seen.digest is None for seen, _ in fast.values()) == 4  # the last three, and an empty .bin
    assert sum(seen.pages is not None for seen, _ in fast.values()) == 4
    monkeypatch.setattr(token_look, "_look_once", lambda *_, **__: None)
    for file, (seen, ids) in fast.items():
        other, expected = look_at(file, "uint16", reads_ids=True, digests=True, of_documents=True)
        assert other == seen._replace(digest=None, digest_of_documents=None, pages=None), file
        assert ids.dtype == expected.dtype
        assert ids.tolist() == expected.tolist()
        if seen.digest:
            assert seen.digest == sampled_digest(file)
        if seen.documents and seen.digest_of_documents:
            assert seen.digest_of_documents == sampled_digest(seen.documents)
        try:
            assert seen.head
            pages = DocumentStarts(seen.format.positions(file), seen.head.tokens).pages.tobytes()
        except (UserError, AssertionError):
            pages = None
        assert seen.pages in (pages, None), file


@pytest.mark.parametrize("wait_s", [-1.0, 100.0])
def test_the_first_file_with_a_problem_is_named(folder: Path, wait_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By several threads as by one. Of the files behind it, no ids are read."""
    monkeypatch.setattr(token_look, "WAIT_S", wait_s)
    monkeypatch.setattr(token_look, "TIMED_FILES", 1)
    for n in (3, 4):
        np.save(folder / f"{n}.npy", np.array([5000 + n]))
    with opened_once(digests=True):
        found = check_source(source(folder), "s", DataConfig(), vocab_size=5000, checks_files=True)
    assert "3.npy has 5003 at position 0" in str(found)


def test_wrong_starts_of_documents_are_refused_before_the_first_step(folder: Path) -> None:
    with open(folder / "4.documents", "wb") as file:
        np.save(file, np.array([5, 3]))
    assert looks_of(job(folder, document_mask=False))
    for use in (lambda: looks_of(job(folder)), lambda: build(source(folder), document_mask=True)):
        with pytest.raises(UserError, match=r"4.documents must have positions from 0 to .* in ascending order"):
            use()


def test_folders_may_have_names_that_are_not_utf_8(folder: Path) -> None:
    other = Path(os.fsdecode(os.fsencode(folder) + b"/\xff"))
    other.mkdir()
    np.save(other / "5.npy", np.arange(2 * SEQ_LEN))
    found = Tokens(source(folder))
    assert found.table is not None
    assert found.table.folders == [folder, other]
    assert found.table.paths[-1] == other / "5.npy"


@pytest.mark.parametrize("damaged", ["zz", "abcd", ""])
def test_a_damaged_hash_of_a_manifest_refuses_the_file(
    folder: Path, damaged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without a table, at the first window of the file."""
    hashes = {folder / f"{n}.npy": (damaged, damaged) for n in range(FILES)}
    monkeypatch.setattr(token_table, "hashes_of", lambda _: hashes)
    monkeypatch.setattr(tokens, "hashes_of", lambda _: hashes)
    for least in (100, 2):
        monkeypatch.setattr(tokens, "TABLE_FILES", least)
        loader = build(source(folder))
        with pytest.raises(DataError, match=r"npy has changed since it was written, by tokens.json"):
            read_steps(loader)
        loader.close()


def test_a_table_that_cannot_be_read_is_an_error(folder: Path, tmp_path: Path) -> None:
    look(folder)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match="let TITANLITE_CACHE name one folder on all ranks of a node"):
        build(source(folder))


def on_ranks(work: Callable[[World, dist.Store], Any], ranks: int = 4) -> list[Any]:
    """What `work` returns or raises on each rank, a thread each: two nodes of two ranks."""
    store, found = dist.HashStore(), dict[int, Any]()

    def start(rank: int) -> None:
        try:
            found[rank] = work(World(rank, rank % 2, ranks, "cpu", 2), store)
        except UserError as error:
            found[rank] = error

    threads = [Thread(target=start, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(ranks)]


def test_one_rank_of_each_node_looks(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has changed on one node only is refused on all ranks, with the facts that differ."""
    of_nodes = [folder, tmp_path / "second"]
    shutil.copytree(folder, of_nodes[1])
    np.save(of_nodes[1] / "3.npy", np.load(folder / "3.npy")[::-1])
    looks, looking = dict[int, Any](), list[int]()
    monkeypatch.setattr(data_files, "use_looks", lambda values: looks.update({threading.get_ident(): values}))

    def facts(world: World, store: dist.Store) -> tuple[dict[str, str], bool]:
        def resolve() -> JobConfig:
            if threading.get_ident() not in looks:
                looking.append(world.rank)
            return job(of_nodes[world.rank // 2])

        config = resolve_with_data(resolve, world, store, 20)
        with _CHANGING:  # what this rank does in a process of its own
            use_looks(looks[threading.get_ident()])
            return content_facts(config, None, [Tokens(config.data.sources[0])], [], []), bool(
                token_table.looks_in_use()
            )

    found = on_ranks(facts)
    assert sorted(looking) == [0, 2]
    assert all(has_look for _, has_look in found)
    assert found[0] == found[1] != found[2] == found[3]
    refused = on_ranks(lambda world, store: require_equal("content", found[world.rank][0], world, store, 20))
    for error in refused:
        assert isinstance(error, DifferentRanksError)
        assert "data.sources.0: content: xxh3-128" in str(error)
        assert "data.sources.0: documents" not in str(error)


def test_ranks_are_connected_before_one_of_them_reads_data(tmp_path: Path) -> None:
    """With all defaults. One process has nobody to wait for."""
    missing = tmp_path / "missing"
    parsed = parse(["--data.sources.0.kind=tokens", f"--data.sources.0.path={missing}", "--model.vocab_size=128"])
    resolved = partial(resolve, parsed, world_size=2, device_type="cpu")
    assert resolve_without_data(resolved, World(0, 0, 2, "cpu", 2)).data.sources[0].path == str(missing)
    with pytest.raises(ConfigError, match="missing"):
        resolve_without_data(resolved, World(0, 0, 1, "cpu", 1))


def test_all_ranks_of_a_node_raise_the_error_of_the_rank_that_looks() -> None:
    def look(world: World, store: dist.Store) -> JobConfig:
        def resolve() -> JobConfig:
            if world.rank == 2:
                raise ConfigError([Problem("data.sources.0.path", "here", "token files", "write them")])
            return JobConfig()

        return resolve_with_data(resolve, world, store, 20)

    found = on_ranks(look)
    assert found[:2] == [JobConfig()] * 2
    assert isinstance(found[2], ConfigError)
    assert isinstance(found[3], UsageError)
    assert str(found[2]) == str(found[3])
    assert found[3].is_shared
    assert not found[2].is_shared


_CHANGING = threading.Lock()
