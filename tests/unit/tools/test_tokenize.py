"""Token files: the same bytes with any number of workers and interruptions; incomplete folders are refused."""

import dataclasses
import json
import os
import shutil
import signal
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from titanlite.data.bpe import prepare_tokenizer, train_bpe
from titanlite.data.check import check_tokenizer
from titanlite.data.config import DataConfig, TokenizerConfig, ValidationConfig
from titanlite.data.fingerprint import data_fingerprint, describe_difference
from titanlite.data.kinds import open_source
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.formats import documents_file
from titanlite.data.sources.pieces import ENDS_DOCUMENT, STARTS_DOCUMENT, BadRowError
from titanlite.data.sources.tokens import Tokens, WindowCorpus
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import Problem, UserError
from titanlite.tools import encoding, tokenize
from titanlite.tools.documents import UsableRows
from titanlite.tools.encoding import Chunk, TextEncoder, encoded

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
    """Chunks of two or three pieces, so that documents and shards span several chunks."""
    monkeypatch.setattr(tokenize, "CHUNK_BYTES", 150)


def run(config: Path, out: Path, *arguments: str, workers: int = 0, shard_tokens: int = 150) -> Path:
    own = ["--out", str(out), "--workers", str(workers), "--shard_tokens", str(shard_tokens)]
    tokenize.main([str(config), *own, *arguments])
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


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
        documents += [part.tolist() for part in np.split(ids, starts[1:])]
    assert documents == [[*tokens, tokenizer.eos_id] for tokens in pieces_of_rows(tokenizer)]


def pieces_of_rows(tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of each row, cut after the last line end within 60 bytes."""
    lines = [row.splitlines(keepends=True) for row in ROWS]
    per_piece = [60 // len(row[0]) for row in lines]
    return [
        [token for n in range(0, len(row), size) for token in tokenizer.encode("".join(row[n : n + size]))]
        for row, size in zip(lines, per_piece, strict=True)
    ]


@pytest.mark.usefixtures("small_chunks")
def test_an_interrupted_run_resumes_after_the_last_complete_shard(
    config: Path,
    tmp_path: Path,
    write_jsonl: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_jsonl([b"a bad row", *ROWS])
    uninterrupted = run(config, tmp_path / "uninterrupted")
    written: list[Any] = []

    def write_two(*arguments: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(arguments)
        original(*arguments)

    original = tokenize.write_unfinished
    monkeypatch.setattr(tokenize, "write_unfinished", write_two)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(config, out)
    monkeypatch.undo()
    (problem,) = check_content(SourceConfig(kind="tokens", path=str(out)), 300)
    assert "tokens.incomplete.json shows an interrupted run" in problem.remedy
    with pytest.raises(UserError, match=r"another configuration \(see settings in tokens.incomplete.json\)"):
        run(config, out, "--data.add_eos", "false")
    encoded_before = len(list(out.glob("*.npy")))
    assert encoded_before == 3  # the last one is complete but not recorded, so it is written again
    assert contents(run(config, out)) == contents(uninterrupted)
    assert "resuming after tokens-00001.npy" in capsys.readouterr().out
    with pytest.raises(UserError, match="is complete and is not overwritten"):
        run(config, out)


def test_a_worker_that_is_killed_ends_the_command(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def start(*arguments: Any) -> Any:
        started.append(original(*arguments))
        os.kill(started[0].process.pid, signal.SIGKILL)
        return started[-1]

    original = encoding.WorkerProcess
    monkeypatch.setattr(encoding, "WorkerProcess", start)
    with pytest.raises(UserError, match=r"the worker process \d+ was killed by SIGKILL.*fewer --workers.*resume after"):
        run(config, tmp_path / "out", workers=2)
    assert [worker.process.poll() for worker in started] == [-signal.SIGKILL] * 2
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_error_in_a_worker_is_raised_in_the_parent(write_jsonl: Callable[..., Path], tokenizer: Tokenizer) -> None:
    source = SourceConfig(kind="jsonl", path=str(write_jsonl(ROWS)))
    encoder = TextEncoder(DataConfig(sources=(source,), max_piece_bytes=60), tokenizer)
    with encoded(encoder, [range(10**6)], 1) as chunks, pytest.raises(UserError, match="exit code 1"):
        next(chunks)
    tokenizer.arguments["file"] = "nowhere"
    with encoded(encoder, [range(2)], 1) as chunks, pytest.raises(UserError, match="nowhere is not a readable"):
        next(chunks)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_bad_rows_are_named_and_counted_in_their_shards(
    workers: int, config: Path, tmp_path: Path, write_jsonl: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(["one", b"{", b"[]", *ROWS[:9], b"5"])
    with pytest.raises(UserError, match=r"more than data\.max_bad_rows = 2 bad rows; the last one: .* line 13: not a"):
        run(config, tmp_path / "no", "--data.max_bad_rows", "2", workers=workers)
    with pytest.raises(UserError, match=r"bad row: .*rows\.jsonl, line 2"):
        run(config, tmp_path / "neither", "--data.on_bad_row", "error", workers=workers)
    capsys.readouterr()
    manifest = json.loads((run(config, tmp_path / "out", workers=workers) / "tokens.json").read_text())
    assert (manifest["documents"], manifest["bad_rows"], manifest["shards"][0]["bad_rows"]) == (10, 3, 2)
    named = capsys.readouterr().err.splitlines()
    assert [line.split(", ")[1].split(":")[0] for line in named] == ["line 2", "line 3", "line 13"]


def test_a_document_that_begins_with_a_bad_or_empty_piece_starts_at_the_next(tmp_path: Path) -> None:
    def chunks() -> Iterator[Chunk]:
        start, end, both = STARTS_DOCUMENT, ENDS_DOCUMENT, STARTS_DOCUMENT | ENDS_DOCUMENT
        ids = np.arange(9, dtype=np.uint16)
        yield Chunk(ids[:5], [2, 0, 3], [both, start, 0], {1: BadRowError("no text")})
        yield Chunk(ids[5:6], [1], [end], {})
        yield Chunk(ids[6:], [0, 2, 0, 1], [start, end, both, both], {})

    rows = UsableRows(DataConfig(on_bad_row="skip"))
    (shard,) = tokenize.write_shards(tmp_path, chunks(), rows, np.dtype("<u2"), 100, 0)
    starts = np.load(documents_file(tmp_path / "tokens-00000.npy"))
    assert starts.tolist() == [0, 2, 6, 8]
    assert (shard["tokens"], shard["pieces"], shard["bad_rows"]) == (9, 8, 1)


def test_a_shard_ends_with_a_document(tmp_path: Path) -> None:
    ids = np.arange(10, dtype=np.uint32)
    flags = [STARTS_DOCUMENT, 0, ENDS_DOCUMENT, STARTS_DOCUMENT | ENDS_DOCUMENT]
    rows = UsableRows(DataConfig())
    shards = list(tokenize.write_shards(tmp_path, [Chunk(ids, [2, 3, 4, 1], flags, {})], rows, ids.dtype, 3, 7))
    assert [(shard["file"], shard["tokens"]) for shard in shards] == [("tokens-00007.npy", 9), ("tokens-00008.npy", 1)]
    assert np.load(tmp_path / "tokens-00007.npy").tolist() == list(range(9))
    assert not list(tmp_path.glob("*.incomplete"))


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
        "data": {"add_bos": True, "sources": [{"kind": "tokens", "path": str(out)}]},
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
    with tokenize._own_folder(out), pytest.raises(UserError, match="another process writes into"):
        run(config, out)
    assert "tokens-00000.npy.incomplete" not in contents(run(config, out))


@pytest.mark.parametrize(("argument", "value"), [("--workers", "-1"), ("--shard-tokens", "0")])
def test_invalid_numbers(argument: str, value: str, config: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{argument} = {value}\n +rule: "):
        tokenize.main([str(config), "--out", str(tmp_path / "out"), argument, value])
