"""Token files: flat arrays of token ids. A piece is a window of seq_len + 1 tokens, which is one sequence.

A folder written by `titanlite tokenize` also has a manifest, tokens.json, beside each shard a file of the positions at
which documents start, and a copy of the tokenizer.
"""

import codecs
import shlex
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NotRequired, TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import TypedDict

from titanlite.data.sources.arrays import ArrayFile
from titanlite.data.sources.base import Source
from titanlite.data.sources.pieces import EMPTY, EpochSize, TokenPiece
from titanlite.data.sources.stored import SourceFile, StoredFile, facts_of, for_each, size_of
from titanlite.runtime.cache import has_hash
from titanlite.runtime.errors import Problem, Rules, UserError
from titanlite.runtime.json_files import JsonError, parse_json, read_regular

FileT = TypeVar("FileT", Path, StoredFile, SourceFile)

FORMAT_VERSION = 1
MANIFEST = "tokens.json"
UNFINISHED = "tokens.incomplete.json"
HEADER_BYTES = 128

CHECKED_TOKENS = 2**16
"""Tokens at the start of each file that are checked before a run starts."""

STARTS_PER_PAGE = 2**9
"""Starts of documents in 4 KiB of a .documents file. The first of each page is kept in memory."""
PAGES_PER_READ = 2**7


class Tokens(Source):
    """1-D arrays of integers: .npy files, or raw little-endian .bin files."""

    kind = "tokens"
    holds = "tokens"
    keys = ("dtype",)
    suffixes = (".npy", ".bin")
    reads_stores = True

    def settings(self) -> dict[str, Any]:
        return {"dtype": self.config.dtype}

    def check_files(self, key: str) -> list[Problem]:
        if problems := super().check_files(key):
            return problems
        rules, files = Rules(key, self.config), self.files()
        raw = [file for file in files if file.suffix.lower() == ".bin"]
        other = [file for file in files if file.suffix.lower() not in self.suffixes]
        remedy = f"write {', '.join(map(str, other[:1]))} with titanlite tokenize"
        if rules.require("path", not other, ".npy or raw .bin files", remedy):
            remedy = 'write "uint16" or "uint32", the type of the ids'
            rules.require("dtype", self.config.dtype or not raw, "required for .bin files", remedy)
            rules.needs("dtype", raw or not self.config.dtype, ".bin files: others contain their dtype")
        return rules.problems

    def check_content(self, key: str, *, vocab_size: int, needs_documents: bool) -> list[Problem]:
        """Problems of the files' content, from the start of each file and the tokens.json beside it."""
        if vocab_size <= 0:
            return []
        rule = f"token ids from 0 to {vocab_size - 1} (model.vocab_size = {vocab_size})"
        files = self.files()
        for_each(files, _fetch_head)
        if problems := _check_manifests(self, key, vocab_size):
            return problems
        for file in files:
            try:
                opened = open_tokens(file, self.config.dtype)
                tokens = opened.read(0, min(CHECKED_TOKENS, len(opened)))
            except UserError as error:
                remedy = f"{error}; write token files with titanlite tokenize"
                return [Problem(f"{key}.path", self.config.path, "1-D arrays of integers", remedy)]
            if file.suffix.lower() == ".bin" and (fault := raw_fault(file, tokens, vocab_size)):
                return [Problem(f"{key}.dtype", self.config.dtype, "the type of the ids in each file", fault)]
            position = find_invalid(tokens, vocab_size)
            if position is not None:
                found = f"{file} has {tokens[position]} at position {position}"
                remedy = f"{found}: use the tokenizer and vocab_size of the model, and the dtype of the file"
                return [Problem(f"{key}.path", self.config.path, rule, remedy)]
            if needs_documents and not documents_file(file).is_file():
                rule = f"needs the starts of documents; {key}: {file} has no .documents file"
                remedy = (
                    "use files written by titanlite tokenize, or the text instead of token files, or write "
                    "data.document_mask = false, so that all tokens of a sequence see each other"
                )
                return [Problem("data.document_mask", True, rule, remedy)]
        return []

    def _current_facts(self) -> list[Any]:
        documents = [documents_file(file) for file in self.files()]
        return [*super()._current_facts(), *facts_of([file for file in documents if file.is_file()])]

    def facts(self, *, document_mask: bool) -> dict[str, Any]:
        files = self.files()
        made_by = sorted({manifest["tokenizer"]["fingerprint"] for manifest in manifests_of(files).values()})
        facts = self._settings_facts() | ({"tokenizer": ", ".join(made_by)} if made_by else {})
        if document_mask:
            facts["documents"] = self._content_digest([documents_file(file) for file in files])
        return facts | self._file_facts(files)


class WindowCorpus:
    """Corpus of windows. Window n of a file is its tokens [n * seq_len, n * seq_len + seq_len + 1).

    Windows do not cross files. The tokens after a file's last full window form another, shorter window if the number of
    epochs is finite; otherwise they are not used, and the description shows their number. documents: whether to include
    the starts of documents.
    """

    windows = True

    def __init__(self, source: Tokens, seq_len: int, vocab_size: int, *, documents: bool) -> None:
        keep_tail = source.config.epochs != -1
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._files = source.files()
        self._tokens = for_each(self._files, lambda file: open_tokens(file, source.config.dtype))
        sizes = dict(zip(self._files, map(len, self._tokens), strict=True)) if documents else {}
        self._starts = for_each([*sizes], lambda file: DocumentStarts(documents_file(file), sizes[file]))
        self._unverified = self._recorded_hashes()
        self._read: set[int] = set()
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

    def epoch_size(self) -> EpochSize:
        return EpochSize(self.size, self.count, is_exact=True)

    def ahead(self, pieces: Iterator[int], num_tokens: int) -> list[int]:  # noqa: ARG002
        return [next(pieces)]

    def fetch(self, pieces: Sequence[int]) -> list[TokenPiece | Exception]:
        return [self._window(piece) for piece in pieces]

    def check_unchanged(self) -> None:
        """Raise UserError if a file that was read since the last call has changed since it was opened."""
        for number in self._read:
            self._tokens[number].check_unchanged()
            if self._starts:
                self._starts[number].check_unchanged()
        self._read.clear()

    def _recorded_hashes(self) -> dict[int, list[tuple[Path, str]]]:
        """The files and hashes to verify before the first window of each file, by its number. Not of stored files,
        which would be fetched entirely."""
        shards = {
            folder / shard["file"]: shard
            for folder, manifest in manifests_of(self._files).items()
            for shard in manifest["shards"]
        }
        found = {}
        for number, file in enumerate(self._files):
            if isinstance(file, Path) and file in shards:
                found[number] = [(file, shards[file]["xxh3_128"])]
                if self._starts:
                    found[number].append((documents_file(file), shards[file]["xxh3_128_of_documents"]))
        return found

    def locate(self, piece: int) -> str:
        number, begin = self._place(piece)
        return f"{self._files[number]}, token {begin}"

    def _place(self, piece: int) -> tuple[int, int]:
        """(number of the file, index of the window's first token in it)."""
        number = bisect_right(self._ends, piece)
        first = self._ends[number - 1] if number else 0
        return number, (piece - first) * self._seq_len

    def _window(self, piece: int) -> TokenPiece | Exception:
        number, begin = self._place(piece)
        for file, digest in self._unverified.pop(number, ()):
            try:
                is_same = has_hash(file, digest)
            except OSError as error:
                return UserError(f"{file} can no longer be read: {error.strerror}")
            if not is_same:
                return UserError(f"{file} has changed since it was written, by {MANIFEST}: copy or write it again")
        self._read.add(number)
        tokens = self._tokens[number]
        end = min(begin + self._seq_len + 1, len(tokens))
        try:
            window = tokens.read(begin, end)
            starts = self._starts[number].between(begin, end) - begin if self._starts else EMPTY
        except UserError as error:
            return error
        if window.max() >= self._vocab_size or (window.dtype.kind == "i" and window.min() < 0):
            wrong = find_invalid(window, self._vocab_size)
            assert wrong is not None
            return UserError(
                f"{self._files[number]}: token {window[wrong]} at position {begin + wrong} is not in the model's "
                f"vocabulary of {self._vocab_size}; use the tokenizer and model.vocab_size of this file"
            )
        return TokenPiece(window, starts)


def _fetch_head(file: SourceFile) -> None:
    """Fetch what is checked before a run starts."""
    if isinstance(file, StoredFile) and file.facts.bytes:
        file.block(0)


def open_tokens(path: SourceFile, dtype: str) -> ArrayFile:
    """Open the tokens of a .npy file, or of a raw little-endian .bin file of `dtype`. Raises UserError."""
    return ArrayFile(path, "" if path.suffix.lower() == ".npy" else dtype)


def find_invalid(tokens: npt.NDArray[np.integer], vocab_size: int) -> int | None:
    """Position of the first token id outside the vocabulary; None if all are valid."""
    ids = tokens.astype(np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    return int(wrong[0]) if len(wrong) else None


def raw_fault(file: SourceFile, sample: npt.NDArray[np.unsignedinteger], vocab_size: int) -> str:
    """What shows that a raw file is not of the dtype it is read as, with the remedy; "" if nothing does.

    sample: its beginning, uint16 or uint32.
    """
    raw, skipped = sample.tobytes(), 0
    if what := next((what for magic, what in _MAGICS.items() if raw.startswith(magic)), ""):
        return f"{file} is {what}: unpack it, or write token files with titanlite tokenize"
    if len(raw) >= _MIN_SAMPLE and _is_text(raw):
        return f"{file} is text: write token files with titanlite tokenize, or read it with another kind"
    if header := _header(raw, size_of(file), 0 if sample.dtype == np.uint16 else vocab_size):
        found, dtype, skipped = header
    else:
        found, dtype = _other_type(sample, vocab_size)
    if not found:
        return ""
    if (own := {"<u2": "uint16", "<u4": "uint32"}.get(dtype)) and not skipped:
        return f'{file}: {found}: write dtype = "{own}"'
    wanted = "uint16" if dtype.endswith("u2") else "uint32"
    read = f"numpy.fromfile({str(file)!r}, {dtype!r}, offset={skipped})"
    code = f"import numpy; numpy.save({str(file.with_suffix('.npy'))!r}, {read}.astype({wanted!r}))"
    if isinstance(file, StoredFile):
        code = code.replace(f"{file.parent}/", "")
        return f"{file}: {found}: convert a local copy with python -c {shlex.quote(code)}, and replace it by that"
    return f"{file}: {found}: convert it with python -c {shlex.quote(code)}, and remove it"


def _is_text(raw: bytes) -> bool:
    """Whether all bytes are those of UTF-8; the last character may be incomplete."""
    with suppress(UnicodeDecodeError):
        return all(each.isprintable() or each.isspace() for each in codecs.getincrementaldecoder("utf-8")().decode(raw))
    return False


def _header(raw: bytes, size: int, min_tokens: int) -> tuple[str, str, int] | None:
    """(description, type of the ids, its bytes) of a header; None if there is none.

    It has the number of the tokens that follow, among its first numbers of 32 bits. size: of the file, in bytes.
    min_tokens: a smaller number may be an id.
    """
    fields = np.frombuffer(raw[: len(raw) // 4 * 4], "<u4").tolist()
    number = fields[0] if fields else 0
    for skipped in _HEADERS:
        for dtype in ("<u2", "<u4"):
            count, rest = divmod(size - skipped, np.dtype(dtype).itemsize)
            if count >= max(min_tokens, _MIN_SAMPLE) and not rest and count in fields[: min(8, skipped // 4)]:
                what = "a header of llm.c" if number in _LLM_C else f"a header of {skipped} bytes"
                return f"it begins with {what}", dtype, skipped
    return ("it begins with a header of llm.c", _LLM_C[number], 1024) if number in _LLM_C else None


def _other_type(sample: npt.NDArray[np.unsignedinteger], vocab_size: int) -> tuple[str, str]:
    """What shows that a sample is of another type, and the type; ("", "") if nothing does.

    In ids of twice the size or more, every other element is 0, or for vocabularies above 65,536 a small number. The
    order of bytes is judged for uint16 only: in uint32, most ids of the other order are in no vocabulary. The upper
    bytes of the distinct ids of a text vary less than the lower ones: low ids are used more.
    """
    if len(sample) < _MIN_SAMPLE or not sample.any():
        return "", ""
    is_uint16, columns, ids = (
        sample.dtype == np.uint16,
        sample[: len(sample) // 4 * 4].reshape(-1, 4),
        np.unique(sample),
    )
    if is_uint16 and not columns[:, 2:].any() and columns[:, 1].max() < _FEW:
        return "its ids have 64 bits", "<u8"
    if is_uint16 and not columns[:, :2].any() and columns[:, 2].byteswap().max() < _FEW:
        return "its ids have 64 bits, in big-endian order", ">u8"
    if (most := columns[:, 1::2].max()) < _FEW and (columns[:, ::2] >= (_FEW if most else 1)).mean() > 0.05:
        return ("its ids have 32 bits", "<u4") if is_uint16 else ("its ids have 64 bits", "<u8")
    if is_uint16 and columns[:, ::2].byteswap().max() < _FEW and (columns[:, 1::2] >= _FEW).mean() > 0.05:
        return "its ids have 32 bits, in big-endian order", ">u4"
    if not is_uint16 and find_invalid(sample, vocab_size) is not None:
        found, dtype = _other_type(halves := sample.view(np.uint16), vocab_size)
        if not found and find_invalid(halves, vocab_size) is None:
            return "its ids have 16 bits", "<u2"
        return ("", "") if dtype == "<u4" else (found, dtype)
    if is_uint16 and len(ids) >= _MIN_SAMPLE and _entropy(ids & 255) + 1 < _entropy(ids >> 8):
        fits = find_invalid(sample.byteswap(), vocab_size) is None
        return ("its bytes are in big-endian order", ">u2") if fits else ("", "")
    return "", ""


def _entropy(values: npt.NDArray[np.integer]) -> float:
    """In bits, of the distribution of the values, bytes."""
    counts = np.bincount(values)
    shares = counts[counts > 0] / len(values)
    return float(-(shares * np.log2(shares)).sum())


_HEADERS = (4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 128, 256, 512, 1024, 2048, 4096)
"""Usual sizes of headers, in bytes."""
_LLM_C = {20240520: "<u2", 20240801: "<u4"}
"""First number of llm.c's headers, of 256 numbers of 32 bits -> type of the ids after it."""
_MAGICS = {
    b"\x93NUMPY": "a .npy file",
    b"\x1f\x8b\x08": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"PK\x03\x04": "a zip archive",
    b"\x89HDF": "an HDF5 file",
}
_MIN_SAMPLE, _FEW = 64, 16


class DocumentStarts:
    """The positions at which documents start in a token file, in ascending order. They are read from their file."""

    def __init__(self, path: SourceFile, num_tokens: int) -> None:
        """Read the file once. Raises UserError if it does not have positions from 0 to num_tokens in order."""
        self._starts = ArrayFile(path)
        self.check_unchanged = self._starts.check_unchanged
        if self._starts.dtype != np.dtype("<i8"):
            raise UserError(f"{path} must be a 1-D array of int64, but is 1-D {self._starts.dtype}")
        firsts, last = [np.empty(0, np.int64)], 0
        for begin in range(0, len(self._starts), PAGES_PER_READ * STARTS_PER_PAGE):
            block = self._starts.read(begin, min(begin + PAGES_PER_READ * STARTS_PER_PAGE, len(self._starts)))
            if block[0] < last or (np.diff(block) < 0).any() or block[-1] > num_tokens:
                raise UserError(
                    f"{path} must have positions from 0 to {num_tokens:,} in ascending order: write it again"
                )
            firsts.append(block[::STARTS_PER_PAGE].copy())
            last = block[-1]
        self._first_of_pages = np.concatenate(firsts)

    def between(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """The starts from `begin` to `end` - 1. Raises UserError if the file has become shorter."""
        pages = np.searchsorted(self._first_of_pages, (begin, end))
        first = max(0, int(pages[0]) - 1) * STARTS_PER_PAGE  # the page before may end with starts inside
        found = self._starts.read(first, max(first, min(int(pages[1]) * STARTS_PER_PAGE, len(self._starts))))
        inside = np.searchsorted(found, (begin, end))
        return found[inside[0] : inside[1]]


def documents_file(file: FileT) -> FileT:
    """The file of the positions at which documents start in a token file: a .npy of int64, ascending."""
    return file.with_suffix(".documents")


class Shard(TypedDict):
    """A token file and its .documents file: sizes in bytes and counts; hashes in hex."""

    file: str
    bytes: int
    tokens: int
    documents: int
    xxh3_128: str
    xxh3_128_of_documents: str
    pieces: int
    bad_rows: int


class ManifestTokenizer(TypedDict):
    description: str
    fingerprint: str
    vocab_size: int


class Manifest(TypedDict):
    """The schema of tokens.json. The totals are absent in that of an interrupted tokenization."""

    format: int
    dtype: str
    tokenizer: ManifestTokenizer
    settings: dict[str, Any]
    sources: list[dict[str, Any]]
    shards: list[Shard]
    tokens: NotRequired[int]
    documents: NotRequired[int]
    bad_rows: NotRequired[int]


def read_manifest(file: SourceFile) -> dict[str, Any] | None:
    """Read and validate a tokens.json, or the tokens.incomplete.json of an interrupted tokenization; None if absent.

    Raises UserError.
    """
    try:
        raw = file.read_all() if isinstance(file, StoredFile) else read_regular(file)
        found: dict[str, Any] = parse_json(raw)
        if found.get("format") == FORMAT_VERSION:
            parse_json(raw, Manifest)
            return found
    except FileNotFoundError:
        if file.is_symlink():
            raise UserError(f"{file} is a link to a file that does not exist: copy the file there") from None
        return None
    except JsonError as error:
        raise UserError(f"{file} {error}: write the files again") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}: fix this, or write the files again") from None
    raise UserError(
        f"{file} is not of format {FORMAT_VERSION}, the only one that this version of titanlite reads: write the files "
        "again with titanlite tokenize"
    )


def manifests_of(files: Sequence[SourceFile]) -> dict[SourceFile, dict[str, Any]]:
    """The manifests of the folders of these files, by folder. Raises UserError if one cannot be read."""
    found = {folder: read_manifest(folder / MANIFEST) for folder in dict.fromkeys(file.parent for file in files)}
    return {folder: manifest for folder, manifest in found.items() if manifest is not None}


def _check_manifests(source: Tokens, key: str, vocab_size: int) -> list[Problem]:
    """Problems of folders with a tokens.json: not finished, files that do not match it, a larger vocabulary.

    Folders without a tokens.json, written by another program, are not checked.
    """
    by_folder: dict[SourceFile, list[SourceFile]] = defaultdict(list)
    for file in source.files():
        by_folder[file.parent].append(file)
    complete = source.is_folder
    for folder, inside in by_folder.items():
        try:
            mismatch = next(_mismatches(folder, inside, complete=complete, vocab_size=vocab_size), None)
        except UserError as error:
            mismatch = f"a readable {MANIFEST}", str(error)
        if mismatch:
            return [Problem(f"{key}.path", source.config.path, *mismatch)]
    return []


def _mismatches(
    folder: SourceFile, files: Sequence[SourceFile], *, complete: bool, vocab_size: int
) -> Iterator[tuple[str, str]]:
    """Yield rule and remedy of each difference between `files` and the folder's tokens.json. Raises UserError.

    complete: whether `files` must include all shards.
    """
    manifest = read_manifest(folder / MANIFEST)
    if manifest is None:
        if (folder / UNFINISHED).exists():
            remedy = f"{folder / UNFINISHED} shows an interrupted run: run the same titanlite tokenize command again"
            yield "token files of a finished tokenization", remedy
        return
    rule = f"the files listed in {folder / MANIFEST}"
    shards = {shard["file"]: shard for shard in manifest["shards"]}
    tokens = sum(shard["tokens"] for shard in manifest["shards"])
    if len(shards) < len(manifest["shards"]) or manifest.get("tokens", tokens) != tokens:
        yield f"a consistent {MANIFEST}", f"{folder / MANIFEST} lists a file twice or a wrong sum: write it again"
    needed = manifest["tokenizer"]["vocab_size"]
    for file in files:
        if file.name not in shards:
            yield rule, f"{file} is not listed: move it to another folder"
            continue
        listed = {file: shards[file.name]["bytes"]}
        starts = documents_file(file)
        if starts.is_symlink() and not starts.exists():
            yield rule, f"{starts} is a link to a file that does not exist: copy the file there"
        if starts.exists():  # only data.document_mask needs it
            listed[starts] = HEADER_BYTES + np.dtype(np.int64).itemsize * shards[file.name]["documents"]
        for path, num_bytes in listed.items():
            if (size := size_of(path)) != num_bytes:
                yield rule, f"{path} has {size:,} bytes instead of {num_bytes:,}: copy or write it again"
        opened = open_tokens(file, "")
        listed_as = f"{shards[file.name]['tokens']:,} tokens of {manifest['dtype']}"
        if (found := f"{len(opened):,} tokens of {opened.dtype.name}") != listed_as:
            yield rule, f"{file} has {found} instead of {listed_as}: copy or write it again"
        if find_invalid(opened.read(0, min(CHECKED_TOKENS, len(opened))), needed) is not None:
            yield rule, f"{file} has tokens above vocab_size = {needed} of {MANIFEST}: copy or write it again"
    missing = sorted(shards.keys() - {file.name for file in files})
    if complete and missing:
        yield rule, f"{folder / missing[0]} is missing: copy it there, or write the files again"
    if needed > vocab_size:
        rule = f"token files of a tokenizer with at most model.vocab_size = {vocab_size} tokens"
        yield rule, f"{folder / MANIFEST} names {needed}: write vocab_size = {needed} in [model]"
