"""Flat arrays of token ids on disk: a piece is a window of seq_len + 1 tokens, and is one sequence."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from titanlite.data.corpus import NOWHERE, TokenPiece
from titanlite.data.sources import SourceConfig, find_files, source_name
from titanlite.data.token_files import check_manifests, documents_file
from titanlite.runtime.errors import Problem, UserError

CHECKED_TOKENS = 2**16
"""Tokens at the start of each file that are looked at before a run starts."""


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


def check_tokens(source: SourceConfig, key: str, vocab_size: int, *, needs_documents: bool) -> list[Problem]:
    """Problems of the token files themselves, as far as their beginnings and the tokens.json beside them show them.

    needs_documents: whether it has to be known where their documents start.
    """
    rule = f"token ids from 0 to {vocab_size - 1} (model.vocab_size = {vocab_size})"
    files = find_files(source)
    if problems := check_manifests(source, key, files, vocab_size):
        return problems
    for file in files:
        try:
            tokens = open_tokens(file, source.dtype)
        except UserError as error:
            remedy = f"{error}: python -m titanlite.tools.tokenize makes files that are"
            return [Problem(f"{key}.path", source.path, "1-D arrays of integers", remedy)]
        position = find_invalid(tokens[:CHECKED_TOKENS], vocab_size)
        if position is not None:
            found = f"{file} has {tokens[position]} at position {position}"
            remedy = f"{found}: use the tokenizer and vocab_size of the model, and the dtype it was written as"
            return [Problem(f"{key}.path", source.path, rule, remedy)]
        if needs_documents and not documents_file(file).is_file():
            rule = f"not with token files of which it is not known where documents start ({file} of {key})"
            remedy = "use files that titanlite.tools.tokenize has written, or the text itself"
            return [Problem("data.document_mask", True, rule, remedy)]
    return []


class WindowCorpus:
    """Window n of a file is its tokens [n * seq_len, n * seq_len + seq_len + 1); windows do not cross files.

    keep_tail: the tokens after a file's last full window are one more window, shorter than the others; without it
    they are not used, and the description says how many these are. documents: whether it says where they start.
    """

    windows = True

    def __init__(
        self, source: SourceConfig, *, seq_len: int, vocab_size: int, keep_tail: bool, documents: bool
    ) -> None:
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._files = find_files(source)
        self._tokens = [np.asarray(open_tokens(file, source.dtype)) for file in self._files]  # a memmap slices slowly
        self._starts = [np.load(documents_file(file), mmap_mode="r") for file in self._files] if documents else []
        targets = [max(0, len(tokens) - 1) for tokens in self._tokens]
        windows = [-(-count // seq_len) if keep_tail else count // seq_len for count in targets]
        self._ends = list(accumulate(windows))
        self.count = sum(windows)
        self.size = sum(len(tokens) for tokens in self._tokens)
        unused = 0 if keep_tail else sum(count % seq_len for count in targets)
        self.description = (
            f"{source_name(source)}: {len(self._files):,} files, {self.size:,} tokens, {self.count:,} windows of "
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
