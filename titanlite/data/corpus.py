"""Tokenized pieces of indexed text. An index is built once, stored in the cache folder and memory-mapped."""

import json
import logging
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from typing_extensions import TypedDict

from titanlite.data.chat.encoder import ChatEncoder, EncodedChat
from titanlite.data.chat.messages import Conversation
from titanlite.data.chat.source import conversation
from titanlite.data.config import DataConfig
from titanlite.data.indexing import processes_for, scan, scan_in_processes, write_pieces
from titanlite.data.sources.base import TextSource
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.pieces import (
    AT_BEGIN,
    BYTES_PER_TOKEN,
    CONTEXT,
    EMPTY,
    ENDS_DOCUMENT,
    STARTS_DOCUMENT,
    BadRowError,
    EpochSize,
    Piece,
    PieceEncoder,
    PieceText,
    TokenPiece,
)
from titanlite.data.sources.stored import SourceFile, StoredFile, size_of
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.cache import built_once, cached_folder
from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import read_json
from titanlite.runtime.progress import tqdm
from titanlite.runtime.retry import retrying
from titanlite.runtime.text import counted, is_visible

FORMAT_VERSION = 3

SAMPLED_BYTES = 2**18
MIN_SAMPLED_PIECES = 4
"""Text that is tokenized at the start to estimate the tokens of an epoch: tenths of a second."""

logger = logging.getLogger("titanlite")


class PieceIndex:
    """The pieces of one source, in the order of its files.

    records: int64 (pieces, len(Piece._fields)), memory-mapped. files: the files that Piece.file indexes.
    """

    def __init__(self, folder: Path, files: Sequence[SourceFile] = ()) -> None:
        """files: of the source, which may be stored."""
        meta = read_json(folder / "meta.json", _Meta)
        stored = {str(file): file for file in files if isinstance(file, StoredFile)}
        self.files: list[SourceFile] = [
            stored.get(file) or folder / file for file in meta["files"]
        ]  # relative paths: files made with the index
        self.text_bytes: int = meta["text_bytes"]
        shape = (meta["pieces"], len(Piece._fields))
        self.records: npt.NDArray[np.int64] = (
            np.memmap(folder / "pieces.bin", np.int64, "r", shape=shape) if shape[0] else np.empty(shape, np.int64)
        )

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, n: int) -> Piece:
        return Piece(*self.records[n].tolist())


def open_index(source: TextSource, max_piece_bytes: int) -> PieceIndex:
    """Open the index of a text source in the cache, or build it; other processes wait for the one that builds.

    Converts a dataset of the hub to Arrow files first. Raises UserError if the cache folder cannot be written or a file
    cannot be read.
    """
    facts = ["pieces", FORMAT_VERSION, source.index_settings(), max_piece_bytes, source.content_facts]
    what = f"the index of {source.name}"
    build = partial(_build, source, max_piece_bytes, what)
    folder = built_once(cached_folder("index", facts), what, build)
    return PieceIndex(folder, source.files() if source.is_stored else ())


class _Meta(TypedDict):
    """The schema of meta.json. files: names of files in the index's folder, or paths."""

    pieces: int
    text_bytes: int
    files: list[str]


def _build(source: TextSource, max_piece_bytes: int, what: str, into: Path) -> None:
    """Write pieces.bin and meta.json, by several processes if the source is large. The memory is bounded."""
    start = time.monotonic()
    files = source.indexed_files(into)
    total = sum(map(size_of, files))
    processes = processes_for(source, files, total)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=not sys.stderr.isatty(), leave=False)
    with bar, open(into / "pieces.bin", "wb") as out:
        if processes > 1:
            scanned = scan_in_processes(source, files, max_piece_bytes, out, into, processes, bar.update)
        else:
            scanned = write_pieces(scan(source, dict(enumerate(files)), max_piece_bytes, bar.update), out)
    names = [file.name if file.parent == into else str(file) for file in files]
    meta = _Meta(pieces=scanned.pieces, text_bytes=scanned.text_bytes, files=names)
    (into / "meta.json").write_text(json.dumps(meta))
    seconds, by = time.monotonic() - start, f" by {processes} processes" if processes > 1 else ""
    counts = counted(len(files), "file"), counted(scanned.pieces, "piece")
    logger.info("built %s in %.1f s%s: %s, %s", what, seconds, by, *counts)


class Encoder:
    """A PieceEncoder of documents; adds BOS and EOS only at the start and end of one."""

    def __init__(self, tokenizer: Tokenizer, *, add_bos: bool, add_eos: bool, reads_context: bool = True) -> None:
        self.reads_context = reads_context
        self._tokenizer = tokenizer
        self._bos = [tokenizer.bos_id] if add_bos and tokenizer.bos_id is not None else []
        self._eos = [tokenizer.eos_id] if add_eos and tokenizer.eos_id is not None else []

    def encode(self, pieces: Sequence[PieceText], locate: Callable[[int], str]) -> list[TokenPiece | Exception]:
        """Tokenize pieces in one batch. An exception in place of a text is returned unchanged.

        A text that the tokenizer cannot encode is a bad row, also a document that its normalizer removes. locate: file
        and row of the n-th of the pieces.
        """
        texts = [(piece.before, piece.text, piece.after) for piece in pieces if isinstance(piece.text, str)]
        try:
            encoded = iter(self._tokenizer.encode_parts(texts))
        except UserError as error:
            if len(pieces) == 1:
                return [BadRowError(f"{locate(0)}: {error}")]

            def encode_one(n: int) -> TokenPiece | Exception:
                return self.encode(pieces[n : n + 1], lambda _: locate(n))[0]

            return [encode_one(n) for n in range(len(pieces))]
        results: list[TokenPiece | Exception] = []
        for n, piece in enumerate(pieces):
            if isinstance(piece.text, Exception):
                results.append(piece.text)
                continue
            ids = next(encoded)
            if not self._tokenizer.has_text(ids) and is_visible(piece.text) and self._is_removed(piece):
                fault = f"the tokenizer {self._tokenizer.arguments['file']} removes all of its text"
                results.append(BadRowError(f"{locate(n)}: {fault}"))
            else:
                results.append(self._piece(piece.flags, ids))
        return results

    def _is_removed(self, piece: PieceText) -> bool:
        """Whether no piece of the document has tokens with text. A normalizer may remove the text of some of them."""
        if piece.flags & STARTS_DOCUMENT and piece.flags & ENDS_DOCUMENT:
            return True
        texts = (text for text in piece.document() if isinstance(text, str))
        with suppress(UserError):  # a piece that cannot be encoded is a bad row of its own
            return not any(self._tokenizer.has_text(self._tokenizer.encode(text)) for text in texts)
        return False

    def _piece(self, flags: int, ids: list[int]) -> TokenPiece:
        starts = bool(flags & STARTS_DOCUMENT)
        tokens = np.array(
            (self._bos if starts else []) + ids + (self._eos if flags & ENDS_DOCUMENT else []), dtype=np.int64
        )
        return TokenPiece(tokens, AT_BEGIN if starts else EMPTY)


class ConversationEncoder:
    """Tokenizes conversations by the chat template of the tokenizer. Raises UserError if it has none.

    loss_on: turns whose tokens are targets. reads_fields: see DataConfig.
    """

    reads_context = False  # conversations are not cut

    def __init__(
        self, tokenizer: Tokenizer, loss_on: Literal["assistant", "all"], *, reads_fields: bool = True
    ) -> None:
        self._chat = ChatEncoder(tokenizer)
        self._loss_on = loss_on
        self._reads_fields = reads_fields

    def encode(self, pieces: Sequence[PieceText], locate: Callable[[int], str]) -> list[TokenPiece | Exception]:
        """The texts are rows of JSON; one that is not a conversation is a bad row."""
        texts = [piece.text for piece in pieces]
        parsed = [text if isinstance(text, Exception) else self._conversation(text) for text in texts]
        conversations = [found for found in parsed if not isinstance(found, Exception)]
        encoded = iter(self._chat.encode(conversations, self._loss_on))
        results: list[TokenPiece | Exception] = []
        for n, (text, found) in enumerate(zip(texts, parsed, strict=True)):
            result = found if isinstance(found, Exception) else next(encoded)
            if isinstance(result, EncodedChat):
                results.append(TokenPiece(result.tokens, AT_BEGIN, result.trained))
            else:
                results.append(result if isinstance(text, Exception) else BadRowError(f"{locate(n)}: {result}"))
        return results

    def _conversation(self, row: str) -> Conversation | BadRowError:
        try:
            return conversation(row.encode(), reads_fields=self._reads_fields)
        except BadRowError as bad:
            return bad


def build_encoder(source: SourceConfig, tokenizer: Tokenizer, section: DataConfig) -> PieceEncoder:
    """The encoder of the pieces of a source. section: has the settings of documents. Raises UserError."""
    if source.is_chat:
        return ConversationEncoder(tokenizer, source.loss_on, reads_fields=section.reads_fields)
    settings = {"add_bos": section.adds_bos, "add_eos": section.add_eos, "reads_context": section.reads_context}
    return Encoder(tokenizer, **settings)


class TextCorpus:
    """Corpus of the documents or conversations of several sources, numbered one source after the other.

    encoder: tokenizes the pieces; None if only their text is read. counts: pieces of each source.
    """

    windows = False

    def __init__(
        self, sources: Sequence[TextSource], max_piece_bytes: int, encoder: PieceEncoder | None = None
    ) -> None:
        self._encoder = encoder
        self._sources = [(source, open_index(source, max_piece_bytes)) for source in sources]
        self.counts = tuple(len(index) for _, index in self._sources)
        self.count = sum(self.counts)
        self.size = sum(index.text_bytes for _, index in self._sources)
        self._ends = list(accumulate(self.counts))
        self.description = "; ".join(
            f"{source.name}: {counted(len(index.files), 'file')}, {counted(len(index), 'piece')}, "
            f"{index.text_bytes / 2**20:,.1f} MiB"
            for source, index in self._sources
        )

    def num_bytes(self, piece: int) -> int:
        """Approximate size of the text; the size of the row for an uncut row of JSON."""
        record = self._find(piece)[2]
        return record.size if record.length < 0 else record.length

    def flags(self, piece: int) -> int:
        """Piece.flags."""
        return self._find(piece)[2].flags

    def read(self, piece: int) -> str | Exception:
        """The text of a piece, or the error for its consumer to raise: BadRowError, UserError."""
        return self._read(piece, lambda _, text: text)

    def plain_text(self, piece: int) -> str | Exception:
        """As read, what people wrote in the text of a piece, see TextSource.plain_text."""
        return self._read(piece, lambda source, text: source.plain_text(text))

    def _read(self, piece: int, convert: Callable[[TextSource, str], str]) -> str | Exception:
        source, path, record = self._find(piece)
        what = f"{path} of the source {source.name!r}"
        try:
            return retrying(what, lambda: convert(source, source.read(path, record)))
        except BadRowError as bad:
            return BadRowError(f"{self.locate(piece)}: {bad}")
        except UserError as error:
            return error
        except OSError as error:
            return UserError(f"{what} can no longer be read: {error.strerror or error}; restore it, then start again")

    def locate(self, piece: int) -> str:
        source, path, record = self._find(piece)
        return f"{path}, {source.row_place(record.row)}"

    def _find(self, piece: int) -> tuple[TextSource, SourceFile, Piece]:
        """The source of a piece, its file and its record in the index."""
        number = bisect_right(self._ends, piece)
        source, index = self._sources[number]
        record = index[piece - (self._ends[number] - self.counts[number])]
        return source, index.files[record.file], record

    def epoch_size(self, count_sequences: Callable[[Sequence[TokenPiece]], float]) -> EpochSize | None:
        """Estimate the size of an epoch from evenly spaced pieces; None if none of them has tokens.

        count_sequences: the sequences that these pieces fill.
        """
        count = min(self.count, max(MIN_SAMPLED_PIECES, SAMPLED_BYTES * self.count // self.size))
        sample = [n * self.count // count for n in range(count)]
        pieces = [piece for piece in self.fetch(sample) if isinstance(piece, TokenPiece)]
        num_tokens = sum(len(piece.tokens) for piece in pieces)
        if not num_tokens:
            return None
        scale = self.size / sum(map(self.num_bytes, sample))
        return EpochSize(round(num_tokens * scale), count_sequences(pieces) * scale, is_exact=count == self.count)

    def prepare(self, pieces: Sequence[int]) -> None:
        """Do nothing: pieces are read in one batch, see ahead."""

    def ahead(self, pieces: Iterator[int], num_tokens: int) -> list[int]:
        taken, num_bytes = list[int](), 0
        for piece in pieces:
            taken.append(piece)
            num_bytes += self.num_bytes(piece)
            if num_bytes >= BYTES_PER_TOKEN * num_tokens:
                break
        return taken

    def fetch(self, pieces: Sequence[int]) -> list[TokenPiece | Exception]:
        assert self._encoder is not None, "a corpus that is tokenized has an encoder"
        read = [self._with_context(piece) for piece in pieces]
        return self._encoder.encode(read, lambda n: self.locate(pieces[n]))

    def _with_context(self, piece: int) -> PieceText:
        flags, text, document = self.flags(piece), self.read(piece), partial(self._document, piece)
        if isinstance(text, Exception) or self._encoder is None or not self._encoder.reads_context:
            return PieceText(flags, text, document)
        return PieceText(flags, text, document, self._beside(piece, -1), self._beside(piece, 1))

    def _document(self, piece: int) -> Iterator[str | Exception]:
        """The text of all pieces of the document of a piece."""
        while not self.flags(piece) & STARTS_DOCUMENT:
            piece -= 1
        yield self.read(piece)
        while not self.flags(piece) & ENDS_DOCUMENT:
            piece += 1
            yield self.read(piece)

    def _beside(self, piece: int, step: Literal[-1, 1]) -> str:
        """Up to CONTEXT characters of the piece's document before (-1) or after (1) it; without those of bad rows."""
        edge, text = STARTS_DOCUMENT if step < 0 else ENDS_DOCUMENT, ""
        while len(text) < CONTEXT and not self.flags(piece) & edge:
            piece += step
            found = self.read(piece)
            if isinstance(found, Exception):
                break
            text = found + text if step < 0 else text + found
        return text[-CONTEXT:] if step < 0 else text[:CONTEXT]
