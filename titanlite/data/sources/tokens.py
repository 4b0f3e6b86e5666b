"""Token files: flat arrays of token ids. A piece is a window of seq_len + 1 tokens, which is one sequence.

A folder written by `titanlite tokenize` also has a manifest, tokens.json, beside each shard a file of the positions at
which documents start, and a copy of the tokenizer. titanlite.data.sources.formats describes files of other programs.
"""

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, NotRequired

import numpy as np
from typing_extensions import TypedDict

from titanlite.data.sources.base import Source, current_facts
from titanlite.data.sources.formats import (
    DOCUMENTS,
    RAW,
    Head,
    Seen,
    documents_file,
    open_starts,
    open_tokens,
    read_head,
    read_start,
)
from titanlite.data.sources.pieces import EMPTY, EpochSize, TokenPiece
from titanlite.data.sources.raw_tokens import content_fault, find_invalid, raw_fault
from titanlite.data.sources.stored import SourceFile, StoredFile, facts_of, for_each, size_of
from titanlite.data.sources.token_look import Ids, look_at, looked_at
from titanlite.data.sources.token_table import (
    TABLE_FILES,
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


class _Opened(NamedTuple):
    """sources: by path and dtype, those that were opened first. digests: whether the check of a file reads its digest,
    too."""

    sources: dict[tuple[str, str], "Tokens"]
    digests: bool


_OPENED: list[_Opened] = []


@contextmanager
def opened_once(*, digests: bool = False) -> Iterator[None]:
    """Inside, token files of a path are listed and looked at once: the checks of a configuration, and the look after
    them, open a source several times. digests: whether this look needs them."""
    _OPENED.append(_OPENED[-1] if _OPENED else _Opened({}, digests))
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
        return TokenTable(build_table(self._with_heads(), self.config.dtype, facts, manifests, what, check))

    def _with_heads(self) -> Iterator[tuple[Seen, Head]]:
        for seen in self._seen:
            yield seen, seen.head or read_start(seen.file, seen.format, self.config.dtype)[0]

    @cached_property
    def _first(self) -> "Tokens":
        """The one of this path that was opened first inside opened_once(): what it has found is not looked for again.
        Else this one."""
        return _OPENED[-1].sources.setdefault((self.config.path, self.config.dtype), self) if _OPENED else self

    @cached_property
    def _seen(self) -> Sequence[Seen]:
        """A look at each file, when first used: that of check_content(), or one without ids."""
        if self._first is not self:
            return self._first._seen
        files, dtype = self.files(), self.config.dtype
        return looked_at(files, lambda number: look_at(files[number], dtype)[0])

    @cached_property
    def content_facts(self) -> list[Any]:
        if self._first is not self:
            return self._first.content_facts
        return [*(seen.facts for seen in self._seen), *(seen.of_documents for seen in self._seen if seen.of_documents)]

    @cached_property
    def starts_folder(self) -> Path:
        """The folder of the starts of documents of the files of the table. Raises UserError."""
        if self._look and self._look.starts:
            return Path(self._look.starts)
        assert self.table is not None, "few files have none"
        return build_starts(self.table, self._seen, f"the starts of documents of {self.name}")

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

    def _list_entries(self) -> list[tuple[str, bool]]:
        return super()._list_entries() if self._first is self else self._first.entries

    def folders(self) -> Sequence[SourceFile]:
        """The folders of the files."""
        if self._look and self.table:
            return self.table.folders
        return _folders_of(self.files())

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
        problem = self._check_starts(key, vocab_size, needs_documents=needs_documents) if vocab_size > 0 else []
        if (problems := self._check_keys(key, vocab_size)) or vocab_size <= 0:
            return problems
        return _check_manifests(self, key, vocab_size, self._seen) or problem

    def _check_starts(self, key: str, vocab_size: int, *, needs_documents: bool) -> list[Problem]:
        """Look at the files for all that use them: problems of the first file that has any. Reads no ids of the files
        after it."""
        files, found, first = self.files(), dict[int, list[Problem]](), len(self.files())
        digests = bool(_OPENED) and _OPENED[-1].digests

        def look(number: int) -> Seen:
            nonlocal first
            is_read = number < first
            seen, ids = look_at(
                files[number], self.config.dtype, reads_ids=is_read, digests=digests, of_documents=needs_documents
            )
            if is_read and (problems := self._check_start(key, seen, ids, vocab_size, needs_documents=needs_documents)):
                found[number], first = problems, min(first, number)
            return seen

        self._first._seen = looked_at(files, look)
        vars(self._first).pop("content_facts", None)
        return found[min(found)] if found else []

    def _check_start(self, key: str, seen: Seen, ids: Ids, vocab_size: int, *, needs_documents: bool) -> list[Problem]:
        """Problems of a file, of which the first ids were read."""
        file = seen.file
        if seen.head is None:
            remedy = "" if seen.format.is_described else "; write token files with titanlite tokenize"
            return [Problem(f"{key}.path", self.config.path, "readable token files", f"{seen.fault}{remedy}")]
        if seen.format is RAW and (fault := raw_fault(file, ids, vocab_size)):
            return [Problem(f"{key}.dtype", self.config.dtype, "the type of the ids in each file", fault)]
        if not seen.head.fits(vocab_size):
            position = find_invalid(ids, vocab_size)
            assert position is not None
            rule = f"token ids from 0 to {vocab_size - 1} (model.vocab_size = {vocab_size})"
            found = f"{file} has {ids[position]} at position {position}"
            remedy = f"{found}: use the tokenizer and vocab_size of the model, and the dtype of the file"
            return [Problem(f"{key}.path", self.config.path, rule, remedy)]
        if needs_documents and self.config.eos == -1 and seen.documents is None:
            rule = f"needs the starts of documents; {key}: no file beside {file} has them"
            remedy = (
                f"write {key}.eos, the id that separates documents in these files, or use files written by "
                "titanlite tokenize, or the text instead of token files, or write data.document_mask = false, so "
                "that all tokens of a sequence see each other"
            )
            return [Problem("data.document_mask", True, rule, remedy)]
        return []

    def _check_keys(self, key: str, vocab_size: int) -> list[Problem]:
        rules, dtype, eos = Rules(key, self.config), self.config.dtype, self.config.eos
        raw = next((seen.file for seen in self._seen if seen.format is RAW), None)
        if not dtype and raw and (fault := content_fault(raw, read_head(raw))):
            return [Problem(f"{key}.path", self.config.path, "token files", fault)]
        remedy = 'write "uint16" or "uint32", the type of its ids, or write token files with titanlite tokenize'
        rules.require("dtype", dtype or not raw, f"required: {raw} does not contain its type", remedy)
        has_type = (
            f"files that do not contain their type, as those of {self._seen[0].format.name} do" if self._seen else ""
        )
        rules.needs("dtype", raw or not dtype, has_type)
        rules.needs("eos", eos == -1 or not self._all_have_documents, "files that do not record where documents start")
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
        return self._all_have_documents

    @property
    def _all_have_documents(self) -> bool:
        return all(seen.documents is not None for seen in self._seen)

    def documents_files(self) -> list[SourceFile]:
        """The files that record where the documents of the token files start."""
        return [seen.documents for seen in self._seen if seen.documents is not None]

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

    def _digests(self, files: Sequence[SourceFile]) -> list[str]:
        """Those of the look, if it has read them."""
        known = {seen.facts[0]: seen.digest for seen in self._seen}
        known |= {seen.of_documents[0]: seen.digest_of_documents for seen in self._seen if seen.of_documents}
        found = [digest.hex() for file in files if (digest := known.get(str(file))) is not None]
        return found if len(found) == len(files) else super()._digests(files)

    def _types(self) -> list[str]:
        """The types of files whose type is in another file, or in a header that others than numpy write."""
        if self.table is not None:
            return self.table.described_types()
        return sorted({open_tokens(seen.file, "").dtype.name for seen in self._seen if seen.format.is_described})


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
    found = {folder: read_manifest(folder / MANIFEST) for folder in _folders_of(files)}
    return {folder: manifest for folder, manifest in found.items() if manifest is not None}


def _folders_of(files: Iterable[SourceFile]) -> list[SourceFile]:
    """The folders of files, in their order."""
    firsts = dict[str, SourceFile]()
    for file in files:
        firsts.setdefault(os.path.dirname(str(file)), file)  # the parent of each file would take longer
    return [file.parent for file in firsts.values()]


def _check_manifests(source: Tokens, key: str, vocab_size: int, looks: Sequence[Seen]) -> list[Problem]:
    """Problems of folders with a tokens.json: not finished, files that do not match it, a larger vocabulary.

    Folders without a tokens.json, written by another program, are not checked.
    """
    by_folder: dict[str, list[Seen]] = defaultdict(list)
    for seen in looks:
        by_folder[os.path.dirname(str(seen.file))].append(seen)
    complete = source.is_folder
    for inside in by_folder.values():
        try:
            found = _mismatches(inside[0].file.parent, inside, complete=complete, vocab_size=vocab_size)
            mismatch = next(found, None)
        except UserError as error:
            mismatch = f"a readable {MANIFEST}", str(error)
        if mismatch:
            return [Problem(f"{key}.path", source.config.path, *mismatch)]
    return []


def _mismatches(
    folder: SourceFile, looks: Sequence[Seen], *, complete: bool, vocab_size: int
) -> Iterator[tuple[str, str]]:
    """Yield rule and remedy of each difference between files and the folder's tokens.json. Raises UserError.

    looks: at the files. complete: whether these must include all shards.
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
    for seen in looks:
        file = seen.file
        if file.name not in shards:
            yield rule, f"{file} is not listed: move it to another folder"
            continue
        shard = shards[file.name]
        sizes: list[tuple[SourceFile, int, int]] = [(file, seen.facts[1], shard["bytes"])]
        needed_starts = HEADER_BYTES + np.dtype(np.int64).itemsize * shard["documents"]
        if seen.documents and seen.of_documents and str(seen.documents).endswith(DOCUMENTS):
            sizes.append((seen.documents, seen.of_documents[1], needed_starts))
        else:
            starts = documents_file(file)
            if starts.is_symlink() and not starts.exists():
                yield rule, f"{starts} is a link to a file that does not exist: copy the file there"
            if starts.exists():  # only data.document_mask needs it
                sizes.append((starts, size_of(starts), needed_starts))
        for path, size, num_bytes in sizes:
            if size != num_bytes:
                yield rule, f"{path} has {size:,} bytes instead of {num_bytes:,}: copy or write it again"
        head = seen.head or read_start(file, seen.format, "")[0]
        listed_as = f"{shard['tokens']:,} tokens of {manifest['dtype']}"
        if (found := f"{head.tokens:,} tokens of {np.dtype(head.dtype).name}") != listed_as:
            yield rule, f"{file} has {found} instead of {listed_as}: copy or write it again"
        if not head.fits(needed):
            yield rule, f"{file} has tokens above vocab_size = {needed} of {MANIFEST}: copy or write it again"
    missing = sorted(shards.keys() - {seen.file.name for seen in looks})
    if complete and missing:
        yield rule, f"{folder / missing[0]} is missing: copy it there, or write the files again"
    if needed > vocab_size:
        rule = f"token files of a tokenizer with at most model.vocab_size = {vocab_size} tokens"
        yield rule, f"{folder / MANIFEST} names {needed}: write vocab_size = {needed} in [model]"
