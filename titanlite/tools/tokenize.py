"""Command: tokenize the sources of a configuration into token files."""

import fcntl
import io
import json
import os
from array import array
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import tyro

from titanlite.config.schema import JobConfig
from titanlite.config.value_types import literal
from titanlite.data.bpe import prepare_tokenizer
from titanlite.data.config import DataConfig
from titanlite.data.corpus import TextCorpus
from titanlite.data.kinds import open_source
from titanlite.data.order import STREAM_VERSION
from titanlite.data.sources.formats import documents_file
from titanlite.data.sources.pieces import ENDS_DOCUMENT
from titanlite.data.sources.tokens import FORMAT_VERSION, HEADER_BYTES, MANIFEST, UNFINISHED, read_manifest
from titanlite.data.tokenizer import TOKENIZER_FOLDER, Tokenizer
from titanlite.runtime.cache import hash_of
from titanlite.runtime.durability import PARTIAL, appears_complete, publish, replace_file, sync_path
from titanlite.runtime.errors import UserError
from titanlite.runtime.settings import setting
from titanlite.runtime.text import counted
from titanlite.tools.command import ConfigFile, Count, Folder, cannot_write, read_options_and_overrides, run_command
from titanlite.tools.documents import UsableRows, config_of_data, piece_bytes, pieces_with_progress
from titanlite.tools.encoding import CHUNK_BYTES, Chunk, TextEncoder, encoded

SHARD_TOKENS = 10**8


@dataclass(frozen=True)
class Options:
    """Tokenize the text of a configuration into token files, in parallel.

    An interrupted command resumes if it is started again. --section.key VALUE overrides a key of CONFIG, as for
    training.
    """

    config: ConfigFile
    """TOML file, or the name of a shipped configuration"""
    out: Folder
    """new folder, or that of an interrupted command"""
    workers: Count = setting(len(os.sched_getaffinity(0)), "write 0 to tokenize in this process", least=0)
    """worker processes; 0: none, tokenize in this process"""
    shard_tokens: Annotated[int, tyro.conf.arg(metavar="M")] = setting(SHARD_TOKENS, least=1)
    """minimum tokens of a shard, which ends with the document that reaches it"""


def main(argv: Sequence[str]) -> None:
    """Write token files of uint16, or of uint32 if the vocabulary needs it. Raises UserError.

    The tokens are those of all documents once, in source order, with BOS and EOS as in training: the tokens that one
    unshuffled stream reads. Tokens and shards depend neither on the number of workers nor on interruptions.
    """
    options, overrides, problems = read_options_and_overrides(Options, argv, "tokenize")
    config = config_of_data(options, overrides, problems, needs_tokenizer=True, reads_chat=False)
    with _own_folder(options.out):
        manifest, description = tokenize(config, options.out, options.workers, options.shard_tokens)
    print(
        f"{options.out}: {counted(manifest['tokens'], 'token')} of {counted(manifest['documents'], 'document')}, "
        f"{manifest['dtype']}, {counted(len(manifest['shards']), 'shard')}, from {description}; "
        f"{counted(manifest['bad_rows'], 'bad row')}\nto use it, instead of [tokenizer] and the sources of text:\n"
    )
    print(toml_lines(options.out, manifest))


def toml_lines(out: Path, manifest: Mapping[str, Any]) -> str:
    """The TOML of a run on the token files: vocabulary, source, and the settings that are not the defaults."""
    settings, default = manifest["settings"], DataConfig()
    different = [key for key in ("add_bos", "add_eos") if settings[key] != getattr(default, key)]
    tables = [
        f"[model]\nvocab_size = {manifest['tokenizer']['vocab_size']}",
        *(["\n".join(["[data]", *(f"{key} = {literal(settings[key])}" for key in different)])] if different else []),
        f'[[data.sources]]\nkind = "tokens"\npath = {literal(str(out))}',
    ]
    return "\n\n".join(tables)


def tokenize(config: JobConfig, out: Path, num_workers: int, shard_tokens: int) -> tuple[dict[str, Any], str]:
    """Fill the folder; return its manifest and a one-line description of the sources. Raises UserError."""
    data = config.data
    vocab_size = config.hyper_parameters.vocab_size
    tokenizer = prepare_tokenizer(config.tokenizer, data.sources, vocab_size=vocab_size)
    assert tokenizer is not None, "sources of text have a tokenizer"
    encoder = TextEncoder(replace(data, max_piece_bytes=piece_bytes(config)), tokenizer)
    print(f"tokenizer: {tokenizer.description}")
    facts = {
        "format": FORMAT_VERSION,
        "dtype": encoder.dtype.name,
        "tokenizer": {
            "description": tokenizer.description,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
        },
        "settings": {
            "add_bos": data.add_bos,
            "add_eos": data.add_eos,
            "max_piece_bytes": encoder.section.max_piece_bytes,
            "stream_version": STREAM_VERSION if data.stream_version == -1 else data.stream_version,
            "shard_tokens": shard_tokens,
        },
        "sources": [open_source(source).facts(document_mask=data.masks_documents) for source in data.sources],
    }
    shards = _shards_so_far(out, facts)
    rows = UsableRows(data, sum(shard["bad_rows"] for shard in shards))
    first = sum(shard["pieces"] for shard in shards)
    with (
        closing(_chunks(encoder.corpus, first)) as chunks,  # the progress bar ends before an error message is printed
        encoded(encoder, chunks, num_workers) as in_order,
    ):
        for shard in write_shards(out, in_order, rows, encoder.dtype, shard_tokens, len(shards)):
            shards.append(shard)
            write_unfinished(out, facts | {"shards": shards})
    if not shards:
        raise UserError(f"there is nothing to tokenize: {encoder.corpus.description}")
    totals = {name: sum(shard[name] for shard in shards) for name in ("tokens", "documents")}
    manifest = facts | totals | {"bad_rows": rows.bad_rows, "shards": shards}
    write_tokenizer(out, tokenizer)
    write_manifest(out, manifest)
    return manifest, encoder.corpus.description


@contextmanager
def _own_folder(out: Path) -> Iterator[None]:
    """Create and lock the folder; remove it again if nothing was written. Raises UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out):
            left = {file.name for file in out.iterdir() if file.suffix != PARTIAL}
            if left and UNFINISHED not in left:
                what = "is complete" if MANIFEST in left else "has other files"
                raise UserError(f"{out} {what} and is not overwritten: remove it, or choose another --out")
            try:
                yield
            finally:
                if not any(out.iterdir()):
                    out.rmdir()
    except OSError as error:
        raise cannot_write(out, error) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system releases if the process dies. Raises UserError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process writes into {folder}: wait for it, or choose another --out") from None
    else:
        yield
    finally:
        os.close(descriptor)


def _shards_so_far(out: Path, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The shards that an interrupted run of the same command has completed. Raises UserError if the settings differ."""
    unfinished = read_manifest(out / UNFINISHED)
    if unfinished is None:
        return []
    facts = json.loads(json.dumps(facts))
    different = [key for key in facts if unfinished.get(key) != facts[key]]
    if different:
        raise UserError(
            f"{out} was started with another configuration (see {', '.join(different)} in {UNFINISHED}): resume with "
            "the same one, remove the folder, or choose another --out"
        )
    shards: list[dict[str, Any]] = unfinished["shards"]
    print(f"resuming after {shards[-1]['file']}")
    return shards


def _chunks(texts: TextCorpus, first: int) -> Generator[range, None, None]:
    """The pieces from `first` to the end, in ranges of about CHUNK_BYTES, with a progress bar."""
    begin, size = first, 0
    for piece in pieces_with_progress(texts, "tokenizing", first):
        size += texts.num_bytes(piece)
        if size >= CHUNK_BYTES:
            yield range(begin, piece + 1)
            begin, size = piece + 1, 0
    if begin < texts.count:
        yield range(begin, texts.count)


def write_shards(
    out: Path, chunks: Iterable[Chunk], rows: UsableRows, dtype: Any, shard_tokens: int, number: int
) -> Iterator[dict[str, Any]]:
    """Write shards, numbered from `number`; yield each one's manifest entry. The first chunk begins a document.

    If a document's first piece is a bad row or empty, the document starts with its next piece.
    """
    writer, pieces, bad_rows = ShardWriter(out, number, dtype), 0, rows.bad_rows
    is_start = True
    try:
        for chunk in chunks:
            begin = end = 0  # range of the chunk's tokens that are not written yet
            for place, (length, flags) in enumerate(zip(chunk.lengths, chunk.flags, strict=True)):
                pieces += 1
                if place in chunk.errors:
                    rows.check(chunk.errors[place])
                if is_start and length:
                    writer.start_document(end - begin)
                end += length
                ends = bool(flags & ENDS_DOCUMENT)
                is_start = ends or place in chunk.errors or (is_start and not length)
                if ends and writer.tokens + end - begin >= shard_tokens:
                    writer.write(chunk.ids[begin:end])
                    begin = end
                    yield writer.finish() | {"pieces": pieces, "bad_rows": rows.bad_rows - bad_rows}
                    number, pieces, bad_rows = number + 1, 0, rows.bad_rows
                    writer = ShardWriter(out, number, dtype)
            writer.write(chunk.ids[begin:end])
        if writer.tokens:
            yield writer.finish() | {"pieces": pieces, "bad_rows": rows.bad_rows - bad_rows}
    finally:
        writer.discard()


def write_unfinished(folder: Path, facts: Mapping[str, Any]) -> None:
    """Record the shards that are complete so far. facts: as in a manifest."""
    replace_file(folder / UNFINISHED, (json.dumps(facts, indent=1) + "\n").encode())


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Keep the tokenizer with the token files. Call before write_manifest: a complete folder has its tokenizer."""
    kept = folder / TOKENIZER_FOLDER
    tokenizer.save(kept)
    for file in kept.iterdir():
        sync_path(file)
    sync_path(kept)


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Mark the folder as complete."""
    write_unfinished(folder, facts)
    publish(folder / UNFINISHED, folder / MANIFEST)


class ShardWriter:
    """Writes one shard. The shard gets its final name in finish()."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype[Any]) -> None:
        self._path = folder / f"tokens-{number:05}.npy"
        self._dtype = dtype
        self._temporary = folder / f"{self._path.name}{PARTIAL}"
        self._file = self._temporary.open("wb")
        self._file.write(_npy_header(0, dtype))
        self._starts = array("q")
        self.tokens = 0

    def start_document(self, tokens_ahead: int) -> None:
        """Record that a document starts `tokens_ahead` tokens after those written so far."""
        self._starts.append(self.tokens + tokens_ahead)

    def write(self, ids: npt.NDArray[np.integer]) -> None:
        self._file.write(ids.data)
        self.tokens += len(ids)

    def finish(self) -> dict[str, Any]:
        """Publish the shard and its document starts; returns its entry in the manifest."""
        self._file.seek(0)
        self._file.write(_npy_header(self.tokens, self._dtype))
        self._file.close()
        starts = documents_file(self._path)
        with appears_complete(starts) as temporary, temporary.open("wb") as file:
            np.save(file, np.frombuffer(self._starts, np.int64).astype("<i8"))
        digest = hash_of(self._temporary)
        publish(self._temporary, self._path)
        return {
            "file": self._path.name,
            "bytes": self._path.stat().st_size,
            "tokens": self.tokens,
            "documents": len(self._starts),
            "xxh3_128": digest,
            "xxh3_128_of_documents": hash_of(starts),
        }

    def discard(self) -> None:
        """Delete the unfinished shard."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def _npy_header(count: int, dtype: np.dtype[Any]) -> bytes:
    """The header of a .npy file of `count` elements. Its size does not depend on `count`."""
    header = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(header, description)
    assert len(header.getvalue()) == HEADER_BYTES
    return header.getvalue()


if __name__ == "__main__":
    run_command(main)
