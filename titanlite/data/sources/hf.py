"""Datasets of the Hugging Face hub, and folders in its layout: streamed, or converted to Arrow files first."""

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from titanlite.data.sources.base import (
    MAX_BLOCK_BYTES,
    MAX_BLOCK_ROWS,
    READERS,
    ReadUnit,
    Row,
    Share,
    Source,
    StreamedSource,
    TextSource,
    cached_json,
)
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.hub_files import (
    DATASET_RULE,
    HubFiles,
    check_hub,
    check_hub_name,
    hub_files,
    hub_folder,
    load_builder,
    open_file,
    require_plain_members,
    source_split,
)
from titanlite.data.sources.jsonl import damage_after, json_row, numbered_lines, open_lines
from titanlite.data.sources.limits import UNPACKING_ERRORS, ExpansionError, is_damage
from titanlite.data.sources.parquet import TOO_LONG, damage, open_parquet, read_batches, row_counts, text_of
from titanlite.data.sources.pieces import BAD_FILE, BadRowError, Piece, no_lines
from titanlite.data.sources.stored import SourceFile
from titanlite.runtime.errors import Problem, UserError
from titanlite.runtime.retry import reason, retrying

ROW_GROUPS_VERSION = 1


class HubDataset(Source):
    """A document is one row of a text column."""

    kind = "hf"
    keys = ("field", "split", "subset", "revision", "streaming")
    has_revision = True
    blocks: ClassVar[list[int] | None] = None
    """Limits of a block, if the dataset is streamed."""

    def __init__(self, config: SourceConfig) -> None:
        super().__init__(config)
        self.field = config.field or "text"

    @cached_property
    def found(self) -> HubFiles:
        """The files of the configured split. Raises ConfigError."""
        return hub_files(self.config)

    def _find_files(self) -> list[Path]:
        """Local files; [] for a name on the hub."""
        return [] if self.found.commit else [Path(file) for file in self.found.files]

    def check_keys(self, key: str) -> list[Problem]:
        path, remedy = self.config.path, "write the name or the folder of the dataset"
        return [] if path else [Problem(f"{key}.path", path, f"{DATASET_RULE}; required for kind = 'hf'", remedy)]

    def check_files(self, key: str) -> list[Problem]:
        return check_hub_name(self.config, key)

    def check_content(self, key: str, *, vocab_size: int, needs_documents: bool) -> list[Problem]:  # noqa: ARG002
        return check_hub(self.config, key)

    def pinned_revision(self, key: str) -> str:
        if hub_folder(self.config) is not None:
            return ""
        commit = hub_files(self.config, key).commit
        hub_files(replace(self.config, revision=commit), key)  # checks the field
        return commit

    def settings(self) -> dict[str, Any]:
        return {
            "subset": self.config.subset or "default",
            "split": source_split(self.config),
            "field": self.field,
            "blocks": self.blocks,
        }

    def facts(self, *, document_mask: bool) -> dict[str, Any]:
        """The commit of a dataset on the hub, or the files of a local folder."""
        if self.found.commit:
            return self._settings_facts() | {"commit": self.found.commit, "files": len(self.found.files)}
        return super().facts(document_mask=document_mask)

    def _current_facts(self) -> list[Any]:
        """URLs with the commit for a dataset on the hub."""
        return list(self.found.files) if self.found.commit else super()._current_facts()


class StreamedDataset(HubDataset, StreamedSource):
    """Reads the original files, JSON lines and Parquet, sequentially."""

    blocks: ClassVar = [MAX_BLOCK_ROWS, MAX_BLOCK_BYTES]

    @property
    def origin(self) -> str:
        return f" at commit {self.found.commit}" if self.found.commit else ""

    def data_files(self) -> Sequence[str]:
        return self.found.files

    def row_groups(self) -> list[ReadUnit]:
        """The row groups of all files as units, from the cache if possible. Raises UserError."""
        files = self.found.files

        def read_sizes() -> list[list[int]]:
            with ThreadPoolExecutor(READERS) as pool:
                return list(pool.map(_row_group_sizes, files))

        facts = [ROW_GROUPS_VERSION, self.content_facts]
        sizes = cached_json("row_groups", facts, f"the row groups of {self.name}", read_sizes)
        return [unit for file, of_file in zip(files, sizes, strict=True) for unit in _units_of(file, of_file)]

    def rows(self, unit: ReadUnit, first: int, share: Share) -> Iterator[Row]:
        rows = _parquet_rows if unit.row_name == "row" else _json_rows
        found = rows(unit, self.field, first, share)
        return (row for row in found if row.number >= first and share.has(row.number))


class ConvertedDataset(HubDataset, TextSource):
    """Converts the dataset to Arrow files first.

    A piece is a row (offset: record batch, size: row within the batch) and a part of its text (begin, length).
    """

    row_name = "row"

    def __init__(self, config: SourceConfig) -> None:
        super().__init__(config)
        self._columns: dict[SourceFile, Any] = {}

    def indexed_files(self, into: Path) -> list[Path]:
        """Download the dataset and write the split as Arrow files into `into`. Raises UserError."""
        builder = load_builder(self.config)
        split = source_split(self.config)
        folder = into / "arrow"
        try:
            require_plain_members(builder)
            builder.download_and_prepare(str(folder), file_format="arrow")
        except UserError:
            raise
        except Exception as error:  # the library raises many types and wraps the cause
            fault = reason(error.__cause__ or error)
            remedy = "set streaming = true to read it row by row, with data.on_bad_row for bad rows"
            if "zstd not supported" in fault:  # titanlite streams zstd without this package
                remedy = 'install the package zstandard, or read local files with kind = "jsonl"'
            raise UserError(f"{self.name} cannot be converted to Arrow files: {fault}; {remedy}") from error
        _require_text(self.name, self.field, builder.info.features)
        # The split is in the name of the file, between dataset name and shard number.
        prefix = f"{builder.dataset_name}-"
        files = sorted(file for file in folder.glob("*.arrow") if file.stem.removeprefix(prefix).split("-")[0] == split)
        moved = [file.rename(into / file.name) for file in files]
        shutil.rmtree(folder)
        return moved

    def scan(self, path: SourceFile, file: int, max_piece_bytes: int) -> Iterator[Piece]:
        import pyarrow.compute

        row = 0
        for batch, texts in enumerate(self._column(path).chunks):
            sizes = pyarrow.compute.binary_length(texts).fill_null(0).to_numpy(zero_copy_only=False)
            for place, size in enumerate(sizes.tolist()):
                row += 1
                uncut = Piece(file, row, batch, place, 0, size)
                if size <= max_piece_bytes:
                    yield uncut
                else:
                    yield from uncut.parts(texts[place].as_buffer().to_pybytes(), max_piece_bytes)
        if not row:
            yield Piece(file, 1, 0, 0, flags=BAD_FILE)

    def read(self, path: SourceFile, piece: Piece) -> str:
        if piece.flags & BAD_FILE:
            raise BadRowError("the file has no rows")
        return text_of(piece, self._column(path).chunk(piece.offset)[piece.size], self.field)

    def _column(self, path: SourceFile) -> Any:
        """The text column, memory-mapped."""
        import pyarrow

        if path not in self._columns:
            opened = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
            self._columns[path] = opened.read_all().column(self.field)
        return self._columns[path]


def _require_text(name: str, field: str, features: Any) -> None:
    """Raise UserError unless `datasets` reads the field as text."""
    if field not in features:
        present = ", ".join(map(repr, list(features)[:8]))
        raise UserError(f"{name}: field {field!r} is missing; the data has {present}: write one of them as field")
    if getattr(features[field], "dtype", "") not in ("string", "large_string"):
        raise UserError(f"{name}: field {field!r} is not text in all rows: `datasets` reads it as {features[field]}")


def _row_group_sizes(file: str) -> list[int]:
    """Number of rows of each row group; [] for other files than Parquet, and for corrupted files."""

    def read() -> list[int]:
        with open_file(file) as opened:
            return row_counts(open_parquet(opened), opened.seek(0, 2))

    try:
        return retrying(file, read) if ReadUnit(file).row_name == "row" else []
    except BadRowError:  # rows() reports the error
        return []


def _units_of(file: str, sizes: list[int]) -> Iterator[ReadUnit]:
    """The nonempty row groups of a file; the file itself if it has none, or if `sizes` is empty."""
    first = 1
    for group, size in enumerate(sizes):
        if size:
            yield ReadUnit(file, group, first)
        first += size
    if first == 1:
        yield ReadUnit(file)


def _json_rows(unit: ReadUnit, field: str, first: int, share: Share) -> Iterator[Row]:
    number, blank = 0, True
    with open_file(unit.file) as opened, open_lines(opened, unit.file) as lines:
        try:
            for number, line in numbered_lines(lines):
                if isinstance(line, bytes) and line.isspace():
                    continue
                blank = False
                if number >= first and share.has(number):
                    yield Row(number, json_row(line.rstrip(b"\r\n"), field) if isinstance(line, bytes) else line)
        except UNPACKING_ERRORS as error:
            if not is_damage(error):
                raise
            yield Row(number + 1, BadRowError(damage_after(number, error, unit.file)))
            return
    if blank:
        yield Row(1, no_lines(number))


def _parquet_rows(unit: ReadUnit, field: str, first: int, share: Share) -> Iterator[Row]:
    with open_file(unit.file) as opened:
        try:
            file = open_parquet(opened)
            sizes = dict(enumerate(row_counts(file, opened.seek(0, 2))))
        except BadRowError as bad:
            yield Row(1, bad)
            return
        if unit.group >= 0:
            sizes = {unit.group: sizes[unit.group]}
        number = unit.first_row
        for group, size in sizes.items():
            if number + size > first:
                batches = read_batches(opened, file, group, field)
                yield from _group_rows(batches, group, range(number, number + size), field, first, share)
            number += size
        if not sum(sizes.values()):
            yield Row(1, BadRowError("the file has no rows"))


def _group_rows(
    batches: Iterator[Any], group: int, numbers: range, field: str, first: int, share: Share
) -> Iterator[Row]:
    """Yield the rows of one row group, decoded in batches. After a read error, all remaining rows are bad rows."""
    import pyarrow

    done = 0
    try:
        for batch in batches:
            in_batch = numbers[done : done + len(batch)]
            selected = [number for number in in_batch if number >= first and share.has(number)]
            texts = batch.take([number - in_batch.start for number in selected]).to_pylist()
            for number, text in zip(selected, texts, strict=True):
                yield Row(number, BadRowError(f"field {field!r} is null") if text is None else text)
            done += len(batch)
        return
    except ExpansionError:
        bad = BadRowError(f"row group {group} is not read further: {TOO_LONG}")
    except (pyarrow.ArrowException, OSError, BadRowError) as error:
        bad = damage(error, f"row group {group} cannot be read")
    yield from (Row(number, bad) for number in numbers[done:])
