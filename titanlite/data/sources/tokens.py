"""Token files: flat arrays of token ids. A piece is a window of seq_len + 1 tokens, and is one sequence.

A folder that `titanlite tokenize` has written also has a tokens.json, which says what it holds, and beside each shard
the places at which documents start.
"""

import json
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titanlite.data.sources.base import TokenSource
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.pieces import NOWHERE, TokenPiece
from titanlite.runtime.errors import Problem, UserError

FORMAT_VERSION = 1
MANIFEST = "tokens.json"
UNFINISHED = "tokens.incomplete.json"
HEADER_BYTES = 128

CHECKED_TOKENS = 2**16
"""Tokens at the start of each file that are looked at before a run starts."""


class Tokens(TokenSource):
    """1-D arrays of integers: .npy files, or raw little-endian .bin files."""

    kind = "tokens"
    keys = ("dtype",)
    suffixes = (".npy", ".bin")

    def settings(self) -> dict[str, Any]:
        return {"dtype": self.config.dtype}

    def check_files(self, key: str) -> list[Problem]:
        files = self.files() if self.config.path else []
        raw = [file for file in files if file.suffix.lower() == ".bin"]
        other = [file for file in files if file.suffix.lower() not in self.suffixes]
        if other:
            rule = ".npy or raw .bin files"
            return [
                Problem(f"{key}.path", self.config.path, rule, f"{other[0]} is neither: make it by titanlite tokenize")
            ]
        if raw and not self.config.dtype:
            remedy = f'write dtype = "uint16" or "uint32", whichever {raw[0].name} was written as'
            return [Problem(f"{key}.dtype", self.config.dtype, "required for .bin files", remedy)]
        if self.config.dtype and not raw:
            remedy = f"leave it out: {files[0].name} says it itself"
            return [Problem(f"{key}.dtype", self.config.dtype, "only for .bin files", remedy)]
        return super().check_files(key)

    def check_content(self, key: str, *, vocab_size: int, needs_documents: bool) -> list[Problem]:
        """Problems of the files themselves, as far as their beginnings and the tokens.json beside them show them."""
        if vocab_size <= 0:
            return []
        rule = f"token ids from 0 to {vocab_size - 1} (model.vocab_size = {vocab_size})"
        files = self.files()
        if problems := _check_manifests(self.config, key, files, vocab_size):
            return problems
        for file in files:
            try:
                tokens = open_tokens(file, self.config.dtype)
            except UserError as error:
                remedy = f"{error}: python -m titanlite tokenize makes files that are"
                return [Problem(f"{key}.path", self.config.path, "1-D arrays of integers", remedy)]
            position = find_invalid(tokens[:CHECKED_TOKENS], vocab_size)
            if position is not None:
                found = f"{file} has {tokens[position]} at position {position}"
                remedy = f"{found}: use the tokenizer and vocab_size of the model, and the dtype it was written as"
                return [Problem(f"{key}.path", self.config.path, rule, remedy)]
            if needs_documents and not documents_file(file).is_file():
                rule = f"not with token files of which it is not known where documents start ({file} of {key})"
                remedy = "use files that titanlite tokenize has written, or the text itself"
                return [Problem("data.document_mask", True, rule, remedy)]
        return []

    def facts(self, *, document_mask: bool) -> dict[str, Any]:
        files = self.files()
        made_by = sorted({manifest["tokenizer"]["fingerprint"] for manifest in manifests_of(files).values()})
        facts = self._settings_facts() | ({"tokenizer": ", ".join(made_by)} if made_by else {})
        if document_mask:
            facts["documents"] = self._content_digest([documents_file(file) for file in files])
        return facts | self._file_facts(files)

    def windows(self, seq_len: int, vocab_size: int, *, documents: bool) -> "WindowCorpus":
        """Its pieces. documents: whether they say where documents start."""
        keep_tail = self.config.epochs != -1
        return WindowCorpus(self, seq_len=seq_len, vocab_size=vocab_size, keep_tail=keep_tail, documents=documents)


class WindowCorpus:
    """Window n of a file is its tokens [n * seq_len, n * seq_len + seq_len + 1); windows do not cross files.

    keep_tail: the tokens after a file's last full window are one more window, shorter than the others; without it
    they are not used, and the description says how many these are. documents: whether it says where they start.
    """

    windows = True

    def __init__(self, source: Tokens, *, seq_len: int, vocab_size: int, keep_tail: bool, documents: bool) -> None:
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._files = source.files()
        self._tokens = [
            np.asarray(open_tokens(file, source.config.dtype)) for file in self._files
        ]  # a memmap slices slowly
        self._starts = [np.load(documents_file(file), mmap_mode="r") for file in self._files] if documents else []
        targets = [max(0, len(tokens) - 1) for tokens in self._tokens]
        windows = [-(-count // seq_len) if keep_tail else count // seq_len for count in targets]
        self._ends = list(accumulate(windows))
        self.count = sum(windows)
        self.size = sum(len(tokens) for tokens in self._tokens)
        unused = 0 if keep_tail else sum(count % seq_len for count in targets)
        self.description = (
            f"{source.name}: {len(self._files):,} files, {self.size:,} tokens, {self.count:,} windows of "
            f"{seq_len} tokens"
            + (f" ({unused:,} tokens at the ends of files fill no window and are not used)" if unused else "")
        )

    def ahead(self, pieces: Iterator[int], num_tokens: int) -> list[int]:  # noqa: ARG002
        return [next(pieces)]

    def fetch(self, pieces: Sequence[int]) -> list[TokenPiece | Exception]:
        return [self._window(piece) for piece in pieces]

    def _window(self, piece: int) -> TokenPiece | Exception:
        number = bisect_right(self._ends, piece)
        first = self._ends[number - 1] if number else 0
        begin = (piece - first) * self._seq_len
        window = self._tokens[number][begin : begin + self._seq_len + 1]
        if window.max() >= self._vocab_size or (window.dtype.kind == "i" and window.min() < 0):
            wrong = find_invalid(window, self._vocab_size)
            assert wrong is not None
            return UserError(
                f"{self._files[number]}: token {window[wrong]} at position {begin + wrong} is not in the model's "
                f"vocabulary of {self._vocab_size}; use the tokenizer and model.vocab_size that belong to this file"
            )
        if not self._starts:
            return TokenPiece(window, NOWHERE)
        starts = self._starts[number]
        inside = np.searchsorted(starts, (begin, begin + len(window)))
        return TokenPiece(window, starts[inside[0] : inside[1]] - begin)


def open_tokens(path: Path, dtype: str) -> npt.NDArray[np.integer]:
    """The tokens of a .npy file, or of a raw little-endian .bin file of `dtype`; memory-mapped, 1-D.

    Raises UserError where the file is no such array.
    """
    try:
        if path.suffix.lower() == ".npy":
            array: npt.NDArray[np.integer] = np.lib.format.open_memmap(path, mode="r")
        else:
            array = np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r")
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not an array of tokens: {error}") from None
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"{path} has to be a 1-D array of integers, and is {array.ndim}-D {array.dtype}")
    return array


def find_invalid(tokens: npt.NDArray[np.integer], vocab_size: int) -> int | None:
    """The position of the first token id that the model does not have."""
    ids = tokens.astype(np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    return int(wrong[0]) if len(wrong) else None


def documents_file(file: Path) -> Path:
    """Where it stands at which tokens of a token file documents start: a .npy of int64, ascending."""
    return file.with_suffix(".documents")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The tokens.json of a folder, None where there is none. Raises UserError where it cannot be read."""
    return read_json(folder / MANIFEST)


def read_json(file: Path) -> dict[str, Any] | None:
    """A tokens.json, or what an interrupted tokenization has left in its form; None if the file is not there."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT_VERSION:
        raise UserError(f"{file} is not of the format {FORMAT_VERSION} that this version of titanlite knows")
    shards = found.get("shards")
    shards_are_whole = isinstance(shards, list) and all(
        isinstance(shard, dict) and {"file", "bytes", "documents"} <= shard.keys() for shard in shards
    )
    if not shards_are_whole or not isinstance(found.get("tokenizer"), dict):
        raise UserError(f"{file} does not list its shards and its tokenizer: make the files again")
    return found


def manifests_of(files: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """The manifests of the folders in which these files lie, by folder. Raises UserError where one cannot be read."""
    found = {folder: read_manifest(folder) for folder in dict.fromkeys(file.parent for file in files)}
    return {folder: manifest for folder, manifest in found.items() if manifest is not None}


def _check_manifests(source: SourceConfig, key: str, files: Sequence[Path], vocab_size: int) -> list[Problem]:
    """Problems of folders that say what they hold: not finished, not as they say, for a larger vocabulary.

    files: those of the source. Folders without a tokens.json, made by something else, have no such problems.
    """
    by_folder: dict[Path, list[Path]] = defaultdict(list)
    for file in files:
        by_folder[file.parent].append(file)
    try:
        for folder, inside in by_folder.items():
            _check_folder(folder, inside, whole=os.path.isdir(os.path.expanduser(source.path)), vocab_size=vocab_size)
    except _MismatchError as mismatch:
        rule, remedy = mismatch.args
        return [Problem(f"{key}.path", source.path, rule, remedy)]
    except UserError as error:
        return [Problem(f"{key}.path", source.path, f"a {MANIFEST} that can be read", str(error))]
    return []


class _MismatchError(Exception):
    """args: the rule that does not hold, and the remedy."""


def _check_folder(folder: Path, files: Sequence[Path], *, whole: bool, vocab_size: int) -> None:
    """whole: all shards have to be among `files`; else those that were named. Raises _MismatchError, UserError."""
    manifest = read_manifest(folder)
    if manifest is None:
        if (folder / UNFINISHED).exists():
            remedy = f"{folder / UNFINISHED} says that it was interrupted: run the same command again to its end"
            raise _MismatchError("token files whose tokenization has finished", remedy)
        return
    rule = f"the files that {folder / MANIFEST} lists"
    sizes: dict[str, int] = {shard["file"]: shard["bytes"] for shard in manifest["shards"]}
    documents: dict[str, int] = {shard["file"]: shard["documents"] for shard in manifest["shards"]}
    for file in files:
        if file.name not in sizes:
            raise _MismatchError(rule, f"{file} is not one of them: move it to a folder of its own")
        _check_size(rule, file, sizes[file.name])
        if (starts := documents_file(file)).exists():  # only data.document_mask needs it
            _check_size(rule, starts, HEADER_BYTES + np.dtype(np.int64).itemsize * documents[file.name])
    missing = sorted(sizes.keys() - {file.name for file in files})
    if whole and missing:
        raise _MismatchError(rule, f"{folder / missing[0]} is missing: copy it there, or make the files again")
    needed = manifest["tokenizer"]["vocab_size"]
    if needed > vocab_size:
        rule = f"tokens of a tokenizer of at most model.vocab_size = {vocab_size} tokens"
        raise _MismatchError(rule, f"{folder / MANIFEST} says {needed}: write vocab_size = {needed} in [model]")


def _check_size(rule: str, file: Path, listed: int) -> None:
    """Raises _MismatchError where the file has not as many bytes as are listed."""
    size = file.stat().st_size
    if size != listed:
        raise _MismatchError(rule, f"{file} has {size:,} bytes instead of {listed:,}: copy or make it again")
