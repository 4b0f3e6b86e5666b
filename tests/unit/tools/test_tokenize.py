"""Token files: the same bytes with any number of workers and interruptions; incomplete folders are refused."""

import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.stores import Bucket
from titanlite.data.bpe import prepare_tokenizer, train_bpe
from titanlite.data.check import check_tokenizer
from titanlite.data.config import DataConfig, TokenizerConfig, ValidationConfig
from titanlite.data.fingerprint import data_fingerprint, describe_difference
from titanlite.data.kinds import open_source, text_sources
from titanlite.data.sources import jsonl
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.formats import documents_file
from titanlite.data.sources.pieces import EMPTY, ENDS_DOCUMENT, STARTS_DOCUMENT, BadRowError, TokenPiece
from titanlite.data.sources.tokens import Tokens, WindowCorpus
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime import cache as runtime_cache
from titanlite.runtime.cache import cache_folder
from titanlite.runtime.errors import Problem, UserError
from titanlite.tools.tokenize import __main__ as tokenize
from titanlite.tools.tokenize import folder, local, on_ray, part, plan
from titanlite.tools.tokenize.manifest import finish
from titanlite.tools.tokenize.part import tokenize_part
from titanlite.tools.tokenize.plan import Job
from titanlite.tools.usable_rows import UsableRows

ROWS = [f"the model reads {n} words\n" * (1 + n % 7) for n in range(60)]


def fingerprint_of(section: DataConfig) -> dict[str, Any]:
    return data_fingerprint(section, [open_source(source) for source in section.sources])


def check_content(source: SourceConfig, vocab_size: int) -> list[Problem]:
    return Tokens(source).check_content("data.sources.0", vocab_size=vocab_size, needs_documents=True)


@pytest.fixture
def config(tmp_path: Path, write_jsonl: Callable[..., Path], tokenizer_folder: Path) -> Path:
    """60 documents of one to six pieces."""
    file = tmp_path / "config.toml"
    file.write_text(
        f'[tokenizer]\npath = "{tokenizer_folder}"\n[data]\nmax_piece_bytes = 60\non_bad_row = "skip"\n'
        f'[[data.sources]]\nkind = "jsonl"\npath = "{write_jsonl(ROWS)}"\n'
    )
    return file


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two or three pieces, so that documents span several chunks."""
    monkeypatch.setattr(part, "CHUNK_BYTES", 150)


def run(config: Path, out: Path | str, *arguments: str, workers: int = 0, part_bytes: int = 500) -> Path:
    own = ["--out", str(out), "--workers", str(workers), "--part-bytes", str(part_bytes)]
    tokenize.main([str(config), *own, *arguments])
    return Path(out)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def run_tasks(config: Path, out: Path | str, script: Path, order: Sequence[int], *arguments: str) -> None:
    """Plan for an array of three tasks, and do these."""
    run(config, out, "--engine", "slurm", "--script", str(script), *arguments, workers=3)
    for task in order:
        tokenize.main([str(config), "--out", str(out), *arguments, "--part", str(task), "--tasks", "3"])


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_the_files_do_not_depend_on_the_number_of_workers(config: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    out = run(config, tmp_path / "0")
    assert contents(run(config, tmp_path / "2", workers=2)) == contents(out)
    manifest = json.loads((out / "tokens.json").read_text())
    shards = manifest["shards"]
    assert len(shards) > 5
    assert {shard["file"] for shard in shards} == {file.name for file in out.glob("*.npy")}
    assert manifest["documents"] == 60
    assert manifest["tokenizer"]["fingerprint"] == tokenizer.fingerprint
    assert manifest["sources"][0]["files"] == 1
    documents: list[list[int]] = []
    for shard in shards:
        ids, starts = (np.load(file(out / shard["file"])) for file in (Path, documents_file))
        assert (shard["tokens"], shard["documents"]) == (len(ids), len(starts))
        assert shard["xxh3_128"] == xxhash.xxh3_128_hexdigest((out / shard["file"]).read_bytes())
        assert starts[0] == 0
        documents += [each.tolist() for each in np.split(ids, starts[1:])]
    assert documents == [[*tokens, tokenizer.eos_id] for tokens in pieces_of_rows(tokenizer)]


def pieces_of_rows(tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of each row, cut after the last line end within 60 bytes."""
    lines = [row.splitlines(keepends=True) for row in ROWS]
    per_piece = [60 // len(row[0]) for row in lines]
    return [
        [token for n in range(0, len(row), size) for token in tokenizer.encode("".join(row[n : n + size]))]
        for row, size in zip(lines, per_piece, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "end"), [("jsonl", b"\n"), ("text", b"\r\n")])
def test_parts_have_each_document_once(kind: str, end: bytes, config: Path, tmp_path: Path) -> None:
    """Also if a document is longer than a part, or a part begins at the first byte of one."""
    rows = [b"x" * 170, b"", b"a", *(f"row {n}".encode() for n in range(12))]
    lines = [json.dumps({"text": row.decode()}).encode() if kind == "jsonl" and row else row for row in rows]
    for name in ("a", "b"):
        (tmp_path / f"{name}.rows").write_bytes(end.join(lines))
    key = ["--data.sources.0.kind", kind, "--data.sources.0.path", f"{tmp_path}/*.rows"]
    key += ["--data.sources.0.document", "line"] if kind == "text" else []
    expected = np.load(run(config, tmp_path / "one", *key, part_bytes=10**6) / "tokens-00000.npy")
    for size in (29, 30, 150):
        out = run(config, tmp_path / str(size), *key, part_bytes=size)
        files = sorted(out.glob("*.npy"))
        assert len(files) > 1
        assert np.concatenate([np.load(file) for file in files]).tolist() == expected.tolist()
        starts = [np.load(documents_file(file)) for file in files]
        assert all(each[0] == 0 for each in starts)
        assert sum(map(len, starts)) == 28


def test_what_is_cut(tmp_path: Path) -> None:
    """Small files are one part together. Compressed files are never cut, and large ones are named."""
    for name, size in (("a", 10), ("b", 0), ("c", 60), ("d", 250), ("e", 90), ("f", 40)):
        (tmp_path / f"{name}.jsonl").write_bytes(b"x" * size)
    (tmp_path / "g.jsonl.gz").write_bytes(b"x" * 450)
    source = text_sources([SourceConfig(kind="jsonl", path=str(tmp_path))])[0]
    parts = list(plan.parts_of(source, 0, 100))
    assert [(each["files"], each["extent"]) for each in parts] == [
        ([0, 3], []),
        *[([3, 4], extent) for extent in ([0, 83], [83, 166], [166, 250])],
        ([4, 5], []),
        ([5, 6], []),
        ([6, 7], []),
    ]
    assert sum(each["bytes"] for each in parts) == 900
    files = [[{"path": str(file), "bytes": 0, "digest": ""} for file in source.files()]]
    (line,) = plan.large_parts({"settings": {"part_bytes": 100}, "parts": parts, "files": files})  # type: ignore
    assert line.startswith(f"{tmp_path}/g.jsonl.gz is one part")
    (whole,) = plan.parts_of(text_sources([SourceConfig(kind="python-stdlib")])[0], 1, 100)
    assert whole["files"] == [0, 0]


@pytest.mark.usefixtures("small_chunks")
def test_an_interrupted_run_resumes_after_the_last_complete_part(
    config: Path,
    tmp_path: Path,
    write_jsonl: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = write_jsonl([b"a bad row", *ROWS])
    uninterrupted = run(config, tmp_path / "uninterrupted")

    def write_two(job: Job, number: int) -> Any:
        if number == 2:
            raise KeyboardInterrupt
        return tokenize_part(job, number)

    monkeypatch.setattr(local, "tokenize_part", write_two)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(config, out)
    monkeypatch.undo()
    (problem,) = check_content(SourceConfig(kind="tokens", path=str(out)), 300)
    assert "tokens.incomplete.json shows an interrupted run" in problem.remedy
    with pytest.raises(UserError, match=r"another configuration \(see settings.add_eos in tokens.incomplete.json\)"):
        run(config, out, "--data.add_eos", "false")
    with pytest.raises(UserError, match=r"another configuration \(see settings.part_bytes in tokens.incomplete"):
        run(config, out, part_bytes=501)
    with pytest.raises(UserError, match=r"another configuration \(see settings.add_eos in tokens.incomplete.json\)"):
        tokenize.main([str(config), "--out", str(out), "--part", "5", "--data.add_eos", "false"])
    content = rows.read_bytes()
    rows.write_bytes(content.replace(b"model", b"MODEL"))
    with pytest.raises(UserError, match=r"another configuration \(see sources, files in tokens.incomplete.json\)"):
        run(config, out)
    with pytest.raises(UserError, match=r"rows\.jsonl has changed since the plan was written"):
        tokenize.main([str(config), "--out", str(out), "--part", "5"])
    rows.write_bytes(content)
    first = (out / "tokens-00000.npy").stat()
    tokenize.main([str(config), "--out", str(out), "--workers", "0"])  # --part-bytes is that of the plan
    assert contents(out) == contents(uninterrupted)
    assert (out / "tokens-00000.npy").stat().st_ino == first.st_ino, "a finished part is not done again"
    assert "resuming: 2 of " in capsys.readouterr().out
    with pytest.raises(UserError, match="is complete and is not overwritten"):
        run(config, out)


def test_tasks_of_an_array_in_any_order_and_twice(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one completes the folder. The script starts them, see tests/cluster/test_slurm.py."""
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"has no tokens\.incomplete\.json"):
        tokenize.main([str(config), "--out", str(out), "--part", "0"])
    run_tasks(config, out, tmp_path / "my.sbatch", (2, 0))
    first = (out / "tokens-00000.npy").stat().st_ino
    tokenize.main([str(config), "--out", str(out), "--part", "0"])
    assert (out / "tokens-00000.npy").stat().st_ino == first, "a finished part is not done again"
    with pytest.raises(UserError, match=r"--part 99: the plan has \d+ parts, numbered from 0"):
        tokenize.main([str(config), "--out", str(out), "--part", "99"])
    assert not (out / "tokens.json").exists()
    (out / "tokens-00002.json").unlink()  # as if its task had been killed before the end
    run_tasks_again = [str(config), "--out", str(out), "--tasks", "3", "--part"]
    tokenize.main([*run_tasks_again, "1"])
    assert "1 of " in capsys.readouterr().out.splitlines()[-1]
    tokenize.main([*run_tasks_again, "2"])
    assert contents(out) == contents(run(config, tmp_path / "local"))
    capsys.readouterr()
    tokenize.main([*run_tasks_again, "0"])
    assert capsys.readouterr().out == f"{out} is complete\n"


@pytest.mark.slow
def test_a_task_that_runs_twice_when_the_other_one_completes_the_folder(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_late(job: Job, number: int) -> Any:
        if job.missing() == [number]:
            tokenize_part(job, number)
            finish(job)
            tokenize_part(job, number)
            raise UserError("its files are removed")
        return tokenize_part(job, number)

    monkeypatch.setattr(tokenize, "tokenize_part", write_late)
    run_tasks(config, tmp_path / "out", tmp_path / "my.sbatch", (0, 1, 2))
    assert capsys.readouterr().out.endswith("out is complete\n")
    assert contents(tmp_path / "out") == contents(run(config, tmp_path / "local"))


def test_a_store_has_the_files_of_a_folder(
    config: Path, tmp_path: Path, write_jsonl: Callable[..., Path], store: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From local rows, and from those in the store."""
    name = ("--data.sources.0.name", "rows")
    expected = contents(run(config, tmp_path / "out", *name))
    run_tasks(config, f"{store.address}/out", tmp_path / "my.sbatch", (1, 0, 2), *name)
    store.request("PUT", "rows/a%5B1%5D.jsonl", write_jsonl(ROWS).read_bytes())  # a[1].jsonl
    store.request("POST", "other/tokens-00000.npy?uploads")  # begun by a worker that was killed
    run(config, f"{store.address}/other", *name, "--data.sources.0.path", f"{store.address}/rows")
    assert b"<UploadId>" not in store.request("GET", "?uploads")
    stored = {key: store.request("GET", key) for key in store.keys() if not key.startswith("rows/")}  # noqa: SIM118
    assert stored == {f"{out}/{file}": content for out in ("out", "other") for file, content in expected.items()}
    with pytest.raises(UserError, match="is complete and is not overwritten"):
        run(config, f"{store.address}/out", *name)
    run(config, f"{store.address}/third", "--engine", "slurm", "--script", str(tmp_path / "other.sbatch"), workers=1)
    monkeypatch.setattr(plan, "read_plan", lambda _: None)  # as if the other command had written it just afterwards
    with pytest.raises(UserError, match="another command has started to write into"):
        run(config, f"{store.address}/third", "--data.add_eos", "false")


def test_a_full_disk_under_the_copy_of_a_stored_file(cache: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    message = (
        f"cannot write s3://bucket/tokens, or its copy in the cache folder {cache}: No space left .*TITANLITE_CACHE"
    )
    with pytest.raises(UserError, match=message), folder.errors_of_writing(folder.output_folder("s3://bucket/tokens")):
        raise full


@pytest.mark.slow
def test_two_equal_commands_at_once_in_a_store(
    config: Path, tmp_path: Path, store: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One completes the folder between two parts of the other."""

    def write_after_another(job: Job, number: int) -> Any:
        if number == 1:
            monkeypatch.setattr(local, "tokenize_part", tokenize_part)
            run(config, f"{store.address}/out")
        return tokenize_part(job, number)

    monkeypatch.setattr(local, "tokenize_part", write_after_another)
    run(config, f"{store.address}/out")
    stored = {key: store.request("GET", key) for key in store.keys()}  # noqa: SIM118
    assert stored == {f"out/{name}": content for name, content in contents(run(config, tmp_path / "out")).items()}


def test_a_worker_needs_the_versions_of_the_plan(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster, its node may have others."""
    monkeypatch.setattr(local, "MADE_WITH", {"titanlite": "0.1", "tokenizers": "0.2"})
    run(config, tmp_path / "out", "--engine", "slurm", "--script", str(tmp_path / "my.sbatch"), workers=1)
    with pytest.raises(UserError, match=r"but this worker has titanlite 0\.1, tokenizers 0\.2: use one version"):
        local.opened_job(out=str(tmp_path / "out"), section={})


def test_a_worker_that_is_killed_ends_the_command(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def start(*arguments: Any) -> Any:
        started.append(original(*arguments))
        os.kill(started[0].process.pid, signal.SIGKILL)
        return started[-1]

    original = local.WorkerProcess
    monkeypatch.setattr(local, "WorkerProcess", start)
    with pytest.raises(
        UserError, match=r"the worker process \d+ was killed by SIGKILL.*fewer --workers.*not done again"
    ):
        run(config, tmp_path / "out", workers=2)
    assert [worker.process.poll() for worker in started] == [-signal.SIGKILL] * 2
    monkeypatch.undo()
    assert contents(run(config, tmp_path / "out")) == contents(run(config, tmp_path / "other"))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_bad_rows_are_named_and_counted_in_their_shards(
    workers: int, config: Path, tmp_path: Path, write_jsonl: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(["one", b"{", b"[]", *ROWS[:9], b"5"])
    arguments: dict[str, Any] = {"workers": workers, "part_bytes": 10**6}
    with pytest.raises(UserError, match=r"more than data\.max_bad_rows = 2 bad rows; the last one: .* line 13: not a"):
        run(config, tmp_path / "no", "--data.max_bad_rows", "2", **arguments)
    with pytest.raises(UserError, match=r"bad row: .*rows\.jsonl, line 2"):
        run(config, tmp_path / "neither", "--data.on_bad_row", "error", **arguments)
    capfd.readouterr()
    manifest = json.loads((run(config, tmp_path / "out", **arguments) / "tokens.json").read_text())
    assert (manifest["documents"], manifest["bad_rows"], manifest["shards"][0]["bad_rows"]) == (10, 3, 3)
    named = capfd.readouterr().err.splitlines()
    assert [line.split(", ")[1].split(":")[0] for line in named] == ["line 2", "line 3", "line 13"]


def test_bad_rows_of_all_parts_are_counted(config: Path, tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    write_jsonl([b"{", *ROWS, b"[]"])
    some = ("--data.max_bad_rows", "1")
    with pytest.raises(UserError, match=r"2 bad rows so far, more than data\.max_bad_rows = 1"):
        run(config, tmp_path / "out", *some)
    with pytest.raises(UserError, match=r"2 bad rows so far, more than data\.max_bad_rows = 1"):
        run_tasks(config, tmp_path / "tasks", tmp_path / "my.sbatch", (0, 1, 2), *some)
    assert json.loads((run(config, tmp_path / "out") / "tokens.json").read_text())["bad_rows"] == 2


def test_a_line_that_would_not_fit_into_memory_is_a_bad_row(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jsonl, "MAX_ROW_BYTES", 150)
    run(config, tmp_path / "out")
    assert re.search(
        r"line 6 after byte [\d,]+: the line has 1\d\d bytes, more than 150: divide", capsys.readouterr().err
    )


class Pieces:
    """A corpus and its encoder: tokens or the error of each piece, with its flags."""

    def __init__(self, *pieces: tuple[int, list[int] | None]) -> None:
        self.pieces, self.corpus, self.count = pieces, self, len(pieces)

    def num_bytes(self, piece: int) -> int:  # noqa: ARG002
        return part.CHUNK_BYTES // 2

    def flags(self, piece: int) -> int:
        return self.pieces[piece][0]

    def fetch(self, pieces: Iterable[int]) -> Iterator[TokenPiece | Exception]:
        for _, ids in (self.pieces[piece] for piece in pieces):
            yield BadRowError("no text") if ids is None else TokenPiece(np.array(ids, np.int64), EMPTY)


def test_a_document_that_begins_with_a_bad_or_empty_piece_starts_at_the_next(tmp_path: Path) -> None:
    start, end, both = STARTS_DOCUMENT, ENDS_DOCUMENT, STARTS_DOCUMENT | ENDS_DOCUMENT
    pieces = Pieces(
        *((both, [0, 1]), (start, None), (0, [2, 3, 4]), (end, [5])),
        *((start, []), (end, [6, 7]), (both, []), (both, [8])),
    )
    rows = UsableRows(DataConfig(on_bad_row="skip"))
    with part.TokenWriter(tmp_path / "tokens.npy", np.dtype("<u2")) as writer:
        part._write_documents(pieces, rows, writer)  # type: ignore[arg-type]
    assert writer.starts.tolist() == [0, 2, 6, 8]
    assert np.load(tmp_path / "tokens.npy").tolist() == list(range(9))
    assert rows.bad_rows == 1


def test_the_cache_of_a_killed_worker_is_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of a running one."""
    with folder.scratch_cache():
        (running,) = (cache / "scratch").iterdir()
        (cache / "scratch" / "left").mkdir()
        monkeypatch.setenv("TITANLITE_CACHE", str(cache))
        with folder.scratch_cache():
            assert {*(cache / "scratch").iterdir()} == {running, cache_folder()}
    assert not list((cache / "scratch").iterdir())


def test_a_worker_that_starts_waits_until_the_folder_of_another_is_locked(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it takes it for that of a killed one."""

    class WaitingError(Exception):
        pass

    def wait(_: object) -> None:
        raise WaitingError

    def lock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(folder, "fcntl", fcntl)
        with pytest.raises(WaitingError), folder.scratch_cache():
            pass
        fcntl.flock(descriptor, operation)

    monkeypatch.setattr(runtime_cache, "waiting", wait)
    monkeypatch.setattr(folder, "fcntl", SimpleNamespace(**vars(fcntl) | {"flock": lock}))
    with folder.scratch_cache():
        assert {*(cache / "scratch").iterdir()} == {cache_folder()}


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the manifest of a folder."""

    def edit(folder: Path) -> None:
        manifest = json.loads((folder / "tokens.json").read_text())
        change(manifest)
        (folder / "tokens.json").write_text(json.dumps(manifest))

    return edit


def dangle(name: str) -> Callable[[Path], None]:
    """Replace a file by a link whose target is lost, which is not the same as no file."""

    def replace(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("nowhere")

    return replace


def remove(folder: Path) -> None:
    (folder / "tokens-00001.npy").unlink()


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (dangle("tokens-00001.documents"), "tokens-00001.documents is a link to a file that does not exist"),
        (dangle("tokens.json"), "tokens.json is a link to a file that does not exist"),
        (edited(lambda manifest: manifest["tokenizer"].update(vocab_size=10)), "has tokens above vocab_size = 10 of"),
        (edited(lambda manifest: manifest.update(tokens=7)), "tokens.json lists a file twice or a wrong sum"),
        (edited(lambda manifest: manifest["shards"].extend(manifest["shards"][:1])), "tokens.json lists a file twice"),
        (edited(lambda manifest: manifest.update(dtype="uint32")), "tokens of uint16 instead of "),
        (edited(lambda manifest: manifest.pop("shards")), "tokens.json is invalid: shards: Field required"),
        (remove, "tokens-00001.npy is missing"),
        (lambda folder: os.truncate(folder / "tokens-00001.npy", 300), "tokens-00001.npy has 300 bytes instead of"),
        (lambda folder: os.truncate(folder / "tokens-00001.documents", 128), "tokens-00001.documents has 128 bytes"),
        (lambda folder: shutil.copy(folder / "tokens-00000.npy", folder / "tokens-99999.npy"), "99999.npy is not lis"),
        (lambda folder: (folder / "tokens.json").write_text("{"), "tokens.json is not JSON"),
    ],
)
def test_a_folder_that_differs_from_its_manifest_is_refused(
    change: Callable[[Path], None], remedy: str, config: Path, tmp_path: Path
) -> None:
    out = run(config, tmp_path / "out")
    source = SourceConfig(kind="tokens", path=str(out))
    assert check_content(source, 300) == []
    change(out)
    (problem,) = check_content(source, 300)
    assert (problem.key, problem.value) == ("data.sources.0.path", str(out))
    assert remedy in problem.remedy


def overwrite_tokens(file: Path) -> None:
    """Other tokens of the vocabulary, with the same size and time."""
    facts = file.stat()
    tokens = np.load(file)
    tokens[5:42] = tokens[5:42][::-1].copy() ^ 1
    np.save(file, tokens)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert file.stat().st_size == facts.st_size


def overwrite_documents(file: Path) -> None:
    starts = np.load(documents_file(file))
    starts[1] += 1
    with documents_file(file).open("wb") as out:
        np.save(out, starts)


def windows_of(out: Path, *, documents: bool = False) -> WindowCorpus:
    return WindowCorpus(Tokens(SourceConfig(kind="tokens", path=str(out))), 8, 300, documents=documents)


def test_overwritten_tokens_are_found_before_their_first_use(config: Path, tmp_path: Path) -> None:
    out = run(config, tmp_path / "out")
    assert not [piece for piece in windows_of(out).fetch(range(5)) if isinstance(piece, Exception)]
    first, second = sorted(out.glob("*.npy"))[:2]
    overwrite_tokens(second)
    corpus = windows_of(out)
    number = next(n for n in range(corpus.count) if corpus.locate(n).startswith(str(second)))
    (good, bad) = corpus.fetch([number - 1, number])
    assert not isinstance(good, Exception)
    assert str(bad).startswith(f"{second} has changed since it was written, by tokens.json")
    overwrite_documents(first)
    assert not isinstance(windows_of(out).fetch([0])[0], Exception), "the starts are not used"
    assert str(windows_of(out, documents=True).fetch([0])[0]).startswith(f"{documents_file(first)} has changed")


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (np.array([0, 9, 4]), "in ascending order"),
        (np.array([-1, 4]), "in ascending order"),
        (np.array([0, 10**9]), "in ascending order"),
        (np.array([0, 4], np.int32), "1-D array of int64, but is 1-D int32"),
        (np.array([[0, 4]]), "1-D array of integers: it is 2-D int64"),
    ],
)
def test_starts_of_documents_are_checked(starts: Any, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(100))
    with documents_file(tmp_path / "tokens.npy").open("wb") as out:
        np.save(out, starts)
    with pytest.raises(UserError, match=message):
        windows_of(tmp_path, documents=True)


def test_a_part_of_a_folder_may_be_used_but_not_by_a_smaller_model(config: Path, tmp_path: Path) -> None:
    out = run(config, tmp_path / "out")
    remove(out)
    some = SourceConfig(kind="tokens", path=str(out / "tokens-0000[0-3].npy"))
    assert check_content(some, 300) == []
    (problem,) = check_content(some, 299)
    assert "vocab_size = 300" in problem.remedy


def test_the_tokenizer_is_that_of_the_files(config: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    out = run(config, tmp_path / "out")
    data, section = data_of(out), TokenizerConfig(path=str(tokenizer_folder))
    assert check_tokenizer(section, data, vocab_size=300) == []
    other = dataclasses.replace(section, eos="a")
    (problem,) = check_tokenizer(other, data, vocab_size=300)
    assert (problem.key, problem.value) == ("tokenizer.path", str(tokenizer_folder))
    assert "EOS '<|endoftext|>'" in problem.rule
    assert "EOS 'a'" in problem.remedy
    assert problem.remedy.endswith(": leave [tokenizer] out")
    shutil.rmtree(out / "tokenizer")
    (problem,) = check_tokenizer(other, data, vocab_size=300)
    assert problem.remedy.endswith(": use the tokenizer of the token files")


def data_of(*folders: Path, **settings: Any) -> DataConfig:
    """A [data] section of token files."""
    return DataConfig(sources=tuple(SourceConfig(kind="tokens", path=str(out)) for out in folders), **settings)


def found_tokenizer(data: DataConfig) -> Tokenizer | None:
    """The tokenizer of a run without tokenizer.path; the configuration must be valid."""
    assert check_tokenizer(TokenizerConfig(), data, vocab_size=300) == []
    return prepare_tokenizer(TokenizerConfig(), data.sources, vocab_size=300)


def test_the_folder_has_the_tokenizer_with_its_bos_and_eos(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the printed lines, the settings that are not the defaults."""
    out = run(config, tmp_path / "out", "--tokenizer.bos", "the", "--tokenizer.eos", "a", "--data.add_bos")
    printed = capsys.readouterr().out
    assert tomllib.loads(printed[printed.index("[model]") :]) == {
        "model": {"vocab_size": 300},
        "data": {"sources": [{"kind": "tokens", "path": str(out)}]},
    }
    found = found_tokenizer(data_of(out, add_bos=True))
    assert found is not None
    manifest = json.loads((out / "tokens.json").read_text())
    assert found.fingerprint == manifest["tokenizer"]["fingerprint"]
    tokens = np.load(out / "tokens-00000.npy")
    assert (tokens[0], tokens[-1]) == (found.bos_id, found.eos_id)
    shutil.rmtree(out / "tokenizer")  # as older versions wrote it
    assert found_tokenizer(data_of(out)) is None


def test_text_is_encoded_with_the_tokenizer_of_the_token_files(config: Path, tmp_path: Path) -> None:
    tokens = data_of(run(config, tmp_path / "out"))
    for kind in ("python-stdlib", "text"):
        found = found_tokenizer(dataclasses.replace(tokens, sources=(SourceConfig(kind=kind), *tokens.sources)))
        assert found is not None
        assert found.arguments["file"] == str(tmp_path / "out" / "tokenizer" / "tokenizer.json")


def only_problem(data: DataConfig, *held_out: SourceConfig, **section: str) -> Problem:
    validation = ValidationConfig(enable=True, sources=held_out)
    (problem,) = check_tokenizer(TokenizerConfig(**section), data, validation, vocab_size=300)
    return problem


def test_settings_that_differ_from_those_of_the_token_files(
    config: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    out, other = run(config, tmp_path / "out"), run(config, tmp_path / "other", "--tokenizer.eos", "a")
    plain = run(config, tmp_path / "plain", "--data.add_eos", "false")

    problem = only_problem(data_of(out, add_eos=False), path=str(tokenizer_folder))
    assert (problem.key, problem.value) == ("data.add_eos", False)
    assert problem.rule == f"true, as in the token files in {out}"
    assert problem.remedy == "write add_eos = true in [data]"
    assert only_problem(data_of(out, add_bos=True)).remedy == "write add_bos = false in [data]"
    assert found_tokenizer(data_of(out, plain)) is not None, "one of them agrees"
    assert only_problem(data_of(out), eos="a").key == "tokenizer.eos"

    problem = only_problem(data_of(out, other))
    assert (problem.key, problem.value) == ("data.sources.1.path", str(other))
    assert f"{out}/tokenizer/tokenizer.json: 300 tokens" in problem.rule
    assert "EOS 'a'" in problem.remedy
    problem = only_problem(data_of(out), *data_of(out, other).sources)
    assert (problem.key, problem.value) == ("validation.sources.1.path", str(other))


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda folder: train_bpe(iter(["other words"]), 280, folder), "write or copy the entire folder again"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "is not a readable tokenizer.json: "),
        (dangle("tokenizer.json"), "is not a readable tokenizer.json: "),
    ],
)
def test_a_tokenizer_that_did_not_write_the_files(
    change: Callable[[Path], None], remedy: str, config: Path, tmp_path: Path
) -> None:
    out = run(config, tmp_path / "out")
    change(out / "tokenizer")
    problem = only_problem(data_of(out))
    assert (problem.key, problem.value) == ("data.sources.0.path", str(out))
    assert remedy in problem.remedy


def test_the_tokenizer_of_token_files_is_part_of_the_fingerprint(config: Path, tmp_path: Path) -> None:
    out = run(config, tmp_path / "out")
    section = DataConfig(sources=(SourceConfig(kind="tokens", path=str(out)),))
    before = fingerprint_of(section)
    manifest = json.loads((out / "tokens.json").read_text())
    manifest["tokenizer"]["fingerprint"] = "another"
    (out / "tokens.json").write_text(json.dumps(manifest))
    (line,) = describe_difference(before, fingerprint_of(section))
    assert '-> "another"' in line


def test_document_starts_are_part_of_the_fingerprint_with_document_mask(config: Path, tmp_path: Path) -> None:
    out = run(config, tmp_path / "out")
    plain = DataConfig(sources=(SourceConfig(kind="tokens", path=str(out)),))
    masked = dataclasses.replace(plain, document_mask=True)
    before = [fingerprint_of(section) for section in (plain, masked)]
    file = documents_file(out / "tokens-00001.npy")
    content = bytearray(file.read_bytes())
    content[-8] += 1
    file.write_bytes(content)
    after = [fingerprint_of(section) for section in (plain, masked)]
    assert after[0] == before[0]
    (line,) = describe_difference(before[1], after[1])
    assert line.endswith(": the starts of documents differ")


def test_two_commands_do_not_write_into_one_folder(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokens-00000.npy.incomplete").touch()  # left by a killed command
    (out / "tokenizer-1234.incomplete" / "x").mkdir(parents=True)
    with folder.LocalFolder(out).owned(), pytest.raises(UserError, match="another process writes into"):
        run(config, out)
    run(config, out)
    assert not list(out.glob("*.incomplete"))


def test_ray_that_cannot_be_used_is_found_before_the_plan_is_written(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_ray, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"--engine ray needs Ray: pip install 'titanlite\[ray\]'"):
        run(config, tmp_path / "out", "--engine", "ray", workers=1)
    monkeypatch.setattr(on_ray, "find_spec", lambda _: object())
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for prefix in ("", "ray://"):
            address = f"{prefix}127.0.0.1:{unused.getsockname()[1]}"
            monkeypatch.setenv("RAY_ADDRESS", address)
            with pytest.raises(UserError, match=rf"RAY_ADDRESS={address}: nothing answers there .*: fix it"):
                run(config, tmp_path / "out", "--engine", "ray", workers=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "cannot start Ray on this machine: timed out; run the same command again"),
        ("auto", "cannot use the Ray cluster auto: timed out; fix RAY_ADDRESS, or unset it"),
    ],
)
def test_ray_that_does_not_start(
    address: str, message: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise Exception("timed out")  # as Ray does

    monkeypatch.setattr(on_ray, "find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_NUM_REDIS_GET_RETRIES", "1")
    with pytest.raises(UserError, match=message):
        run(config, tmp_path / "out", "--engine", "ray", workers=1)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--workers -1", "--workers = -1"),
        ("--part-bytes 0", "--part-bytes = 0"),
        ("--tasks 3", "--tasks = 3\n +rule: +only with --part"),
        ("--submit", "--submit = True\n +rule: +only with --engine slurm"),
        ("--part 3 --tasks 3", "--part = 3\n +rule: +less than --tasks = 3"),
        ("--part 3 --workers 2", "--workers = 2\n +rule: +without --part"),
        ("--part 3 --part-bytes 9", "--part-bytes = 9\n +rule: +without --part"),
        ("--part 3 --engine ray", "--part = 3\n +rule: +without --engine"),
        ("--engine ray --workers 0", "--workers = 0\n +rule: +at least 1 with --engine ray"),
        ("--engine mpi", "--engine = 'mpi'"),
        ("--out s3://", "--out"),
    ],
)
def test_invalid_options(arguments: str, problem: str, config: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        tokenize.main([str(config), "--out", str(tmp_path / "out"), *arguments.split()])


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"tokens": "x"}'])
def test_a_damaged_entry_of_a_part_is_named(content: bytes, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_tasks(config, out, tmp_path / "my.sbatch", (2, 0))
    (out / "tokens-00000.json").write_bytes(content)
    with pytest.raises(UserError, match=r"out/tokens-00000\.json .*: remove it, and run the same command again"):
        tokenize.main([str(config), "--out", str(out), "--tasks", "3", "--part", "1"])
    (out / "tokens-00000.json").unlink()
    tokenize.main([str(config), "--out", str(out), "--workers", "0"])
    assert (out / "tokens.json").exists()
