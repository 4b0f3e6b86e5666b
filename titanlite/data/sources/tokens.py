"""Token files: flat arrays of token ids. A piece is a window of seq_len + 1 tokens, which is one sequence.

A folder written by `titanlite tokenize` also has a manifest, tokens.json, beside each shard a file of the positions at
which documents start, and a copy of the tokenizer. titanlite.data.sources.formats describes files of other programs.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from typing_extensions import TypedDict

from titanlite.data.sources.base import Source, current_facts
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.formats import (
    RAW,
    Format,
    Head,
    documents_file,
    format_of,
    open_starts,
    open_tokens,
    read_head,
    read_start,
)
from titanlite.data.sources.pieces import EMPTY, EpochSize, TokenPiece
from titanlite.data.sources.raw_tokens import content_fault, find_invalid, raw_fault
from titanlite.data.sources.stored import SourceFile, StoredFile, facts_of, for_each, size_of
from titanlite.data.sources.token_table import (
    TABLE_FILES,
    FoundFile,
    Look,
    TableFiles,
    TokenFiles,
    TokenTable,
    build_starts,
    build_table,
    hashes_of,
    look_of,
)
from titanlite.runtime.cache import has_hash
from titanlite.runtime.errors import Problem, Rules, UserError
from titanlite.runtime.json_files import JsonError, parse_json, read_regular

FORMAT_VERSION = 1
MANIFEST = "tokens.json"
UNFINISHED = "tokens.incomplete.json"
HEADER_BYTES = 128

_OPENED: list[dict[str, "Tokens"]] = []


@contextmanager
def opened_once() -> Iterator[None]:
    """Inside, token files of a path are listed, and their first bytes read, once: the checks of a configuration, and
    the look after them, open a source several times."""
    _OPENED.append(_OPENED[-1] if _OPENED else {})
    try:
        yield
    finally:
        _OPENED.pop()


class Tokens(Source):
    """Files of token ids, in the formats of titanlite.data.sources.formats."""

    kind = "tokens"
    holds = "tokens"
    keys = ("dtype", "eos")
    suffixes = (".npy", ".bin", ".ds")
    reads_stores = True

    def __init__(self, config: SourceConfig) -> None:
        super().__init__(config)
        self.heads: dict[str, Mapping[SourceFile, Head]] = {}
        """What check_content() has found of the files, by their dtype."""

    def settings(self) -> dict[str, Any]:
        return {"dtype": self.config.dtype}

    @cached_property
    def _look(self) -> Look | None:
        """Of another process of this node, which has checked the files; see use_looks."""
        return look_of(self.config.path, self.config.dtype)

    @cached_property
    def table(self) -> TokenTable | None:
        """The table of the files; None of stored files, and of few. Raises UserError."""
        if self._look:
            return TokenTable(Path(self._look.table))
        files = [file for file in self._files if isinstance(file, Path)]
        if self.is_stored or len(files) <= TABLE_FILES:
            return None
        manifests = manifests_of(files)
        facts = [self.content_facts, facts_of([folder / MANIFEST for folder in manifests])]
        what, check = f"the table of the files of {self.name}", partial(self._require_unchanged, self.content_facts)
        heads, dtype = self._first.heads.get(self.config.dtype, {}), self.config.dtype
        of_files = (
            FoundFile(file, of_file, beside is not None, heads.get(file) or read_start(file, of_file, dtype)[0])
            for file, of_file, beside in zip(files, self.formats, self.documents, strict=True)
        )
        return TokenTable(build_table(of_files, dtype, facts, manifests, what, check))

    @cached_property
    def _first(self) -> "Tokens":
        """The one of this path that was opened first inside opened_once(): what it has found is not looked for again.
        Else this one."""
        return _OPENED[-1].setdefault(self.config.path, self) if _OPENED else self

    @cached_property
    def _facts_and_formats(self) -> tuple[list[Any], Sequence[Format]]:
        """Of the token files, when first used. A file whose format changes has other facts, which are taken before."""
        if self._first is not self:
            return self._first._facts_and_formats
        return current_facts(self.files()), for_each(self.files(), format_of)

    @property
    def formats(self) -> Sequence[Format]:
        """The formats of the files, when first used."""
        return self._facts_and_formats[1]

    @cached_property
    def content_facts(self) -> list[Any]:
        if self._first is not self:
            return self._first.content_facts
        return [*self._facts_and_formats[0], *current_facts(self.documents_files())]

    @cached_property
    def documents(self) -> Sequence[SourceFile | None]:
        """The file that records where the documents of each file start, when first used; None without one."""
        if self._first is not self:
            return self._first.documents
        formats = dict(zip(self.files(), self.formats, strict=True))
        return for_each(self.files(), lambda file: formats[file].documents(file))

    @cached_property
    def starts_folder(self) -> Path:
        """The folder of the starts of documents of the files of the table. Raises UserError."""
        if self._look and self._look.starts:
            return Path(self._look.starts)
        assert self.table is not None, "few files have none"
        return build_starts(self.table, f"the starts of documents of {self.name}")

    def look(self, *, document_mask: bool) -> Look | None:
        """For other processes of this node; None if they look themselves. document_mask: as for facts()."""
        if self.table is None:
            return None
        starts = str(self.starts_folder) if document_mask else ""
        facts = self._facts_of_files(document_mask=document_mask)
        return Look(self.config.path, self.config.dtype, str(self.table.folder), starts, self.content_hash, facts)

    def opened(self, *, documents: bool) -> TokenFiles:
        """The files, to be read. documents: whether to read the starts of documents, too. Raises UserError."""
        config = self.config
        if self.table is not None:
            return TableFiles(self.table, config.eos, self.starts_folder if documents else None)
        files = self.files()
        tokens = for_each(files, lambda file: open_tokens(file, config.dtype))
        by_file = dict(zip(files, tokens, strict=True)) if documents else {}
        starts = for_each([*by_file], lambda file: open_starts(file, by_file[file], config.eos))
        return TokenFiles(files, tokens, starts, hashes_of(self.manifests()))

    def files(self) -> Sequence[SourceFile]:
        return self.table.paths if self._look and self.table else super().files()

    def _find_files(self) -> Sequence[SourceFile]:
        return super()._find_files() if self._first is self else self._first.files()

    def folders(self) -> Sequence[SourceFile]:
        """The folders of the files."""
        if self._look and self.table:
            return self.table.folders
        return [*dict.fromkeys(file.parent for file in self.files())]

    def manifests(self) -> Mapping[Any, dict[str, Any]]:
        """The manifests of these folders that have one; without shards and sources if another process has looked.
        Raises UserError."""
        return self.table.manifests if self._look and self.table else manifests_of(self.files())

    @property
    def content_hash(self) -> str:
        return self._look.key if self._look else super().content_hash

    def check_files(self, key: str) -> list[Problem]:
        if self._look:
            return []
        if problems := super().check_files(key):
            return problems
        other = [file for file in self.files() if file.suffix.lower() not in self.suffixes]
        remedy = f"write {', '.join(map(str, other[:1]))} with titanlite tokenize"
        return [Problem(f"{key}.path", self.config.path, f"{self._suffixes()} files", remedy)] if other else []

    def check_content(self, key: str, *, vocab_size: int, needs_documents: bool) -> list[Problem]:
        """Problems of the files' content, from the start of each file and the tokens.json beside it."""
        if self._look:
            return []
        files, formats = self.files(), self.formats
        if (problems := self._check_keys(key, formats, vocab_size)) or vocab_size <= 0:
            return problems
        heads, problem = dict[SourceFile, Head](), list[Problem]()
        for file, found_format, beside in zip(files, formats, self.documents, strict=True):
            is_known = not needs_documents or self.config.eos != -1 or beside is not None
            problem = self._check_file(key, file, found_format, vocab_size, heads) or problem
            if not problem and not is_known:
                rule = f"needs the starts of documents; {key}: no file beside {file} has them"
                remedy = (
                    f"write {key}.eos, the id that separates documents in these files, or use files written by "
                    "titanlite tokenize, or the text instead of token files, or write data.document_mask = false, so "
                    "that all tokens of a sequence see each other"
                )
                problem = [Problem("data.document_mask", True, rule, remedy)]
            if problem:
                break
        self._first.heads[self.config.dtype] = heads
        return _check_manifests(self, key, vocab_size, heads) or problem

    def _check_file(
        self, key: str, file: SourceFile, of_file: Format, vocab_size: int, heads: dict[SourceFile, Head]
    ) -> list[Problem]:
        """Problems of the start of a file, which is added to `heads`."""
        try:
            heads[file], tokens = read_start(file, of_file, self.config.dtype)
        except UserError as error:
            remedy = "" if of_file.is_described else "; write token files with titanlite tokenize"
            return [Problem(f"{key}.path", self.config.path, "readable token files", f"{error}{remedy}")]
        if of_file is RAW and (fault := raw_fault(file, tokens, vocab_size)):
            return [Problem(f"{key}.dtype", self.config.dtype, "the type of the ids in each file", fault)]
        if heads[file].fits(vocab_size):
            return []
        position = find_invalid(tokens, vocab_size)
        assert position is not None
        rule = f"token ids from 0 to {vocab_size - 1} (model.vocab_size = {vocab_size})"
        found = f"{file} has {tokens[position]} at position {position}"
        remedy = f"{found}: use the tokenizer and vocab_size of the model, and the dtype of the file"
        return [Problem(f"{key}.path", self.config.path, rule, remedy)]

    def _check_keys(self, key: str, formats: Sequence[Format], vocab_size: int) -> list[Problem]:
        rules, dtype, eos = Rules(key, self.config), self.config.dtype, self.config.eos
        raw = next((file for file, each in zip(self.files(), formats, strict=True) if each is RAW), None)
        if not dtype and raw and (fault := content_fault(raw, read_head(raw))):
            return [Problem(f"{key}.path", self.config.path, "token files", fault)]
        remedy = 'write "uint16" or "uint32", the type of its ids, or write token files with titanlite tokenize'
        rules.require("dtype", dtype or not raw, f"required: {raw} does not contain its type", remedy)
        has_type = f"files that do not contain their type, as those of {formats[0].name} do" if formats else ""
        rules.needs("dtype", raw or not dtype, has_type)
        rules.needs("eos", eos == -1 or None in self.documents, "files that do not record where documents start")
        rule, remedy = f"less than model.vocab_size = {vocab_size}", "write the id that separates documents"
        rules.require("eos", vocab_size <= 0 or eos < vocab_size, rule, remedy)
        return rules.problems

    @property
    def has_documents(self) -> bool:
        """Whether it is known where documents start."""
        if self.config.eos != -1:
            return True
        if self._look and self.table:
            return self.table.all_have_documents
        return len(self.documents_files()) == len(self.files())

    def documents_files(self) -> list[SourceFile]:
        """The files that record where the documents of the token files start."""
        return [file for file in self.documents if file is not None]

    def _current_facts(self) -> list[Any]:
        return current_facts([*self.files(), *self.documents_files()])

    def facts(self, *, document_mask: bool) -> dict[str, Any]:
        facts = self._look.facts if self._look else self._facts_of_files(document_mask=document_mask)
        eos = {"eos": self.config.eos} if document_mask and self.config.eos != -1 else {}
        return self._settings_facts() | facts | eos

    def _facts_of_files(self, *, document_mask: bool) -> dict[str, Any]:
        files = self.files()
        made_by = sorted({manifest["tokenizer"]["fingerprint"] for manifest in self.manifests().values()})
        facts = {"tokenizer": ", ".join(made_by)} if made_by else {}
        if types := self._types():
            facts["types"] = ", ".join(types)
        if document_mask:
            facts["documents"] = self._content_digest(self.documents_files())
        return facts | self._file_facts(files)

    def _types(self) -> list[str]:
        """The types of files whose type is in another file, or in a header that others than numpy write."""
        if self.table is not None:
            return self.table.described_types()
        described = [file for file, each in zip(self.files(), self.formats, strict=True) if each.is_described]
        return sorted({open_tokens(file, "").dtype.name for file in described})


class WindowCorpus:
    """Corpus of windows. Window n of a file is its tokens [n * seq_len, n * seq_len + seq_len + 1).

    Windows do not cross files. The tokens after a file's last full window form another, shorter window if the number of
    epochs is finite; otherwise they are not used, and the description shows their number. documents: whether to include
    the starts of documents.

    block: windows that a store is asked for at once, from window n * block to the next such one or to the end of the
    file; 0: blocks of the file.
    """

    windows = True
    block = 0

    def __init__(self, source: Tokens, seq_len: int, vocab_size: int, *, documents: bool) -> None:
        keep_tail = source.config.epochs != -1
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._opened, self._is_stored = source.opened(documents=documents), source.is_stored
        self._verified: set[int] = set()
        self._read: set[int] = set()
        counts = self._opened.counts
        targets = np.maximum(0, counts - 1)
        windows = -(-targets // seq_len) if keep_tail else targets // seq_len
        self._ends: list[int] = np.cumsum(windows).tolist()
        self.count = int(windows.sum())
        self.size = int(counts.sum())
        unused = 0 if keep_tail else int((targets % seq_len).sum())
        self.description = (
            f"{source.name}: {len(counts):,} files, {self.size:,} tokens, {self.count:,} windows of "
            f"{seq_len} tokens"
            + (f" ({unused:,} tokens at the ends of files fill no window and are not used)" if unused else "")
        )

    def epoch_size(self) -> EpochSize:
        return EpochSize(self.size, self.count, is_exact=True)

    def ahead(self, pieces: Iterator[int], num_tokens: int) -> list[int]:  # noqa: ARG002
        return [next(pieces)]

    def prepare(self, pieces: Sequence[int]) -> None:
        for piece in pieces:
            number, _ = self._place(piece)
            if extent := self._extent(number, piece):
                self._opened.tokens(number).prepare(extent)

    def fetch(self, pieces: Sequence[int]) -> list[TokenPiece | Exception]:
        return [self._window(piece) for piece in pieces]

    def check_unchanged(self) -> None:
        """Raise UserError if a file that was read since the last call has changed since it was opened."""
        for number in self._read:
            self._opened.check_unchanged(number)
        self._read.clear()

    def _verify(self, number: int) -> None:
        """Raise UserError if a file does not have the hashes of its tokens.json. Not of stored files, which would be
        fetched entirely."""
        path, hashes = self._opened.paths[number], self._opened.hashes(number)
        if hashes is None or not isinstance(path, Path):
            return
        expected = {path: hashes[0]} | ({documents_file(path): hashes[1]} if self._opened.reads_starts else {})
        for file, digest in expected.items():
            try:
                is_same = has_hash(file, digest)
            except OSError as error:
                raise UserError(f"{file} can no longer be read: {error.strerror}") from None
            if not is_same:
                raise UserError(f"{file} has changed since it was written, by {MANIFEST}: copy or write it again")

    def locate(self, piece: int) -> str:
        number, begin = self._place(piece)
        return f"{self._opened.paths[number]}, token {begin}"

    def _place(self, piece: int) -> tuple[int, int]:
        """(number of the file, index of the window's first token in it)."""
        number = bisect_right(self._ends, piece)
        first = self._ends[number - 1] if number else 0
        return number, (piece - first) * self._seq_len

    def _extent(self, number: int, piece: int) -> tuple[int, int] | None:
        """The tokens of the block of a window of a stored file, and the one before them, which separated documents need
        (titanlite.data.sources.formats.SeparatedStarts)."""
        if not self.block or not self._is_stored:
            return None
        first, end = self._ends[number - 1] if number else 0, self._ends[number]
        begin = piece - piece % self.block
        windows = max(begin, first) - first, min(begin + self.block, end) - first
        return max(0, windows[0] * self._seq_len - 1), min(
            windows[1] * self._seq_len + 1, int(self._opened.counts[number])
        )

    def _window(self, piece: int) -> TokenPiece | Exception:
        number, begin = self._place(piece)
        try:
            if number not in self._verified:
                self._verify(number)
                self._verified.add(number)
            self._read.add(number)
            tokens, starts = self._opened.tokens(number), self._opened.starts(number)
            end, extent = min(begin + self._seq_len + 1, len(tokens)), self._extent(number, piece)
            window = tokens.read(begin, end, extent)
            own_starts = EMPTY if starts is None else starts.between(begin, end, extent) - begin
        except UserError as error:
            return error
        if window.max() >= self._vocab_size or (window.dtype.kind == "i" and window.min() < 0):
            wrong = find_invalid(window, self._vocab_size)
            assert wrong is not None
            return UserError(
                f"{self._opened.paths[number]}: token {window[wrong]} at position {begin + wrong} is not in the "
                f"model's vocabulary of {self._vocab_size}; use the tokenizer and model.vocab_size of this file"
            )
        return TokenPiece(window, own_starts)


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


def _check_manifests(source: Tokens, key: str, vocab_size: int, heads: Mapping[SourceFile, Head]) -> list[Problem]:
    """Problems of folders with a tokens.json: not finished, files that do not match it, a larger vocabulary.

    Folders without a tokens.json, written by another program, are not checked.
    """
    by_folder: dict[SourceFile, list[SourceFile]] = defaultdict(list)
    for file in source.files():
        by_folder[file.parent].append(file)
    complete = source.is_folder
    for folder, inside in by_folder.items():
        try:
            found = _mismatches(folder, inside, heads, complete=complete, vocab_size=vocab_size)
            mismatch = next(found, None)
        except UserError as error:
            mismatch = f"a readable {MANIFEST}", str(error)
        if mismatch:
            return [Problem(f"{key}.path", source.config.path, *mismatch)]
    return []


def _mismatches(
    folder: SourceFile,
    files: Sequence[SourceFile],
    heads: Mapping[SourceFile, Head],
    *,
    complete: bool,
    vocab_size: int,
) -> Iterator[tuple[str, str]]:
    """Yield rule and remedy of each difference between `files` and the folder's tokens.json. Raises UserError.

    heads: of the files that were read. complete: whether `files` must include all shards.
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
        head = heads.get(file) or read_start(file, format_of(file), "")[0]
        listed_as = f"{shards[file.name]['tokens']:,} tokens of {manifest['dtype']}"
        if (found := f"{head.tokens:,} tokens of {np.dtype(head.dtype).name}") != listed_as:
            yield rule, f"{file} has {found} instead of {listed_as}: copy or write it again"
        if not head.fits(needed):
            yield rule, f"{file} has tokens above vocab_size = {needed} of {MANIFEST}: copy or write it again"
    missing = sorted(shards.keys() - {file.name for file in files})
    if complete and missing:
        yield rule, f"{folder / missing[0]} is missing: copy it there, or write the files again"
    if needed > vocab_size:
        rule = f"token files of a tokenizer with at most model.vocab_size = {vocab_size} tokens"
        yield rule, f"{folder / MANIFEST} names {needed}: write vocab_size = {needed} in [model]"
