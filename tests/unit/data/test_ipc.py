"""Arrow IPC of a stranger: pyarrow follows no offset outside of the data, and unpacks no small batch to a large one."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.data.test_tables import arrow, texts
from titanlite.data.sources import ipc, limits
from titanlite.data.sources.jsonl import is_damage
from titanlite.data.sources.pieces import BadRowError
from titanlite.data.sources.tables import CONVERSION_ERRORS

ROWS = ["one", "zwei\n€", None, "", "long " * 10]
WRITERS = [pa.ipc.new_stream, pa.ipc.new_file]


def written(column: pa.Array, new: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    batch = pa.record_batch({"text": column})
    with new(out, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as file:
        file.write_batch(batch)
        file.write_batch(batch)
    return out.getvalue()


def mutations(content: bytes) -> Iterator[bytes]:
    """Each number of 4 bytes in turn is large, negative, or beyond a buffer."""
    for place in range(0, len(content) - 3, 4):
        for value in (2**31 - 16, 2**32 - 2**20, 2**20):
            yield content[:place] + value.to_bytes(4, "little") + content[place + 4 :]


@pytest.mark.parametrize("new", WRITERS)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("text", marks=pytest.mark.slow),
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("large", "view", "dictionary", "lz4")),
    ],
)
def test_no_number_in_a_file_makes_the_reader_crash(kind: str, new: Any) -> None:
    types = {"large": pa.large_string(), "view": pa.string_view()}
    column = pa.array(ROWS, types.get(kind, pa.string()))
    if kind == "dictionary":
        column = column.dictionary_encode()
    content = written(column, new, compression="lz4" if kind == "lz4" else None)
    damaged = 0
    for changed in mutations(content):
        try:
            assert len(list(arrow().rows(io.BytesIO(changed), ""))) <= 4 * len(ROWS)
        except (BadRowError, *CONVERSION_ERRORS) as error:
            if not is_damage(error):
                raise
            damaged += 1
    assert damaged > len(content) // 32


def save(content: bytes, folder: Path) -> Path:
    path = folder / "rows.arrow"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("new", WRITERS)
@pytest.mark.parametrize("offset", [-(2**20), 2**30])
def test_offsets_outside_of_the_data_are_damage(offset: int, new: Any, tmp_path: Path) -> None:
    content = written(pa.array(["good", "more"]), new)
    ends = (4).to_bytes(4, "little") + (8).to_bytes(4, "little")
    assert content.count(ends) == 2
    begin = content.rindex(ends)
    changed = content[:begin] + offset.to_bytes(4, "little", signed=True) + content[begin + 4 :]
    *rows, last = texts(arrow(), save(changed, tmp_path))
    assert rows == ["good", "more"]
    assert last.startswith("BAD the file is damaged after row 2: ")


@pytest.mark.parametrize("new", WRITERS)
@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("in_dictionary", [False, True])
def test_a_small_batch_is_not_unpacked_to_a_large_one(
    in_dictionary: bool, compression: str, new: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "MAX_LOADED_BYTES", 2**20)
    monkeypatch.setattr(limits, "MAX_RATIO", 100)
    column = pa.array(["x" * 2**22])
    content = written(column.dictionary_encode() if in_dictionary else column, new, compression=compression)
    assert len(content) < 2**16
    before = pa.total_allocated_bytes()
    (row,) = texts(arrow(), save(content, tmp_path))
    assert row.startswith("BAD the file is not read: a batch of ")
    assert " bytes expands to more than 1," in row
    assert pa.total_allocated_bytes() - before < 2**20
    monkeypatch.setattr(ipc, "MAX_LOADED_BYTES", 2**23)
    assert [len(row) for row in texts(arrow(), save(content, tmp_path), 2**22)] == [2**22] * 2


@pytest.mark.parametrize("new", WRITERS)
def test_dictionaries_deltas_and_schemas_of_other_columns(new: Any, tmp_path: Path) -> None:
    words = [["one", "two"], ["one", "two", "three"]]
    batches = [
        pa.record_batch({"text": pa.DictionaryArray.from_arrays(pa.array([0, None, len(each) - 1]), each)})
        for each in words
    ]
    out = io.BytesIO()
    with new(out, batches[0].schema, options=pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)) as file:
        for batch in batches:
            file.write_batch(batch)
    null = "BAD field 'text' is not text but null"
    assert texts(arrow(), save(out.getvalue(), tmp_path)) == ["one", null, "two", "one", null, "three"]


def test_a_text_above_the_limit_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.data.sources.tables.MAX_ROW_BYTES", 100)
    content = written(pa.array(["good", "long" * 30]), pa.ipc.new_stream)
    bad = "BAD the line has 120 bytes, more than 100: divide its text"
    assert texts(arrow(), save(content, tmp_path)) == ["good", bad] * 2
