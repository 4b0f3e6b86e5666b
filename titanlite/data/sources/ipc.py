"""Arrow IPC streams and files whose content is not trusted.

pyarrow reads what the metadata say: it allocates stated sizes, and follows offsets into other memory. So the sizes are
compared with the file before pyarrow reads a message, and the offsets of the text before it is used.
"""

import io
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

from titanlite.data.sources.limits import MAX_LOADED_BYTES, require_ratio
from titanlite.data.sources.seekable import SeekableReader

_FILE_MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
"""Before the length of a message, except in streams of Arrow before 0.15."""
_V4 = 3
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
"""Numbers of a version, and of types of headers."""
_VERSION, _HEADER_TYPE, _HEADER, _BODY_BYTES, _CUSTOM_METADATA = range(5)
_DICTIONARY_DATA = 1
_BUFFERS, _COMPRESSION = 2, 3
_FOOTER_DICTIONARIES, _FOOTER_BATCHES = 2, 3
"""Numbers of the fields of Message, DictionaryBatch, RecordBatch and Footer."""
_BLOCK_BYTES, _BUFFER_BYTES = 24, 16
"""Sizes of the structs Block (offset, bytes of the metadata, bytes of the body) and Buffer (offset, length)."""

SLICE_ROWS = 1024
"""Rows whose indices are Python objects at the same time."""


class IpcReader:
    """The batches of an open IPC stream or file. Raises ValueError, and OSError without an errno, for damaged data."""

    def __init__(self, opened: IO[bytes]) -> None:
        import pyarrow

        clamped = _Clamped(opened)
        with _damage_is_value_error():
            if clamped.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
                _check_file(clamped)
                clamped.seek(0)
                reader = pyarrow.ipc.open_file(clamped)
                self._batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                clamped.seek(0)
                reader = pyarrow.ipc.open_stream(_CheckedStream(clamped))
                self._batches = iter(reader)
            self.schema = reader.schema

    def columns(self, field: str) -> Iterator[Any]:
        """The column of each batch, as text_column returns it."""
        with _damage_is_value_error():
            for batch in self._batches:
                yield text_column(batch.column(field))


def text_column(column: Any) -> Any:
    """A text column, which may be dictionary-encoded, with values of binary data and valid offsets. Raises ValueError.

    Invalid UTF-8 is no fault here: it is one of a row.
    """
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column.indices.validate(full=True)
        return pyarrow.DictionaryArray.from_arrays(column.indices, text_column(column.dictionary))
    kinds = {"string": pyarrow.binary(), "large_string": pyarrow.large_binary(), "string_view": pyarrow.binary_view()}
    values = column.view(kinds[str(column.type)])
    values.validate(full=True)
    return values


def texts(column: Any) -> Iterator[Any]:
    """The text of each row of a column of text_column, as a buffer of bytes; None: null. Expands no dictionary."""
    import pyarrow

    if not pyarrow.types.is_dictionary(column.type):
        yield from (row.as_buffer() for row in column)
        return
    values = column.dictionary
    for begin in range(0, len(column), SLICE_ROWS):
        for index in column.indices.slice(begin, SLICE_ROWS).to_pylist():
            yield None if index is None else values[index].as_buffer()


@contextmanager
def _damage_is_value_error() -> Iterator[None]:
    """Raise pyarrow's other errors of damaged data as ValueErrors; those of the system are unchanged."""
    import pyarrow

    try:
        yield
    except pyarrow.ArrowException as error:
        if isinstance(error, ValueError | OSError | MemoryError):
            raise
        raise ValueError(str(error)) from None


class _Clamped(SeekableReader):
    """An open file that allocates no more bytes than it has, however many are requested."""

    def __init__(self, opened: IO[bytes]) -> None:
        super().__init__(opened.seek(0, io.SEEK_END))
        self._opened = opened

    def read(self, size: int = -1, /) -> bytes:
        begin = self._opened.seek(min(max(0, self.position), self.size))  # the system refuses some other places
        left = self.size - begin
        data = self._opened.read(left if size < 0 else min(size, left))
        self.position = begin + len(data)
        return data

    def number(self, begin: int, at: int) -> int:
        """The signed number in 8 bytes at a byte after `begin`. Raises ValueError."""
        self.seek(begin + at)
        return _number(self.read(8), "q", 0)


class _CheckedStream(io.RawIOBase):
    """The bytes of an IPC stream, of which each message is checked before its first byte can be read."""

    def __init__(self, opened: _Clamped) -> None:
        self._opened = opened
        self._parts: list[bytes] = []

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes, fewer only at the end of the stream; no copy of a part that has this size."""
        found: list[bytes] = []
        while size and (part := self._parts.pop(0) if self._parts else self._next()):
            if 0 <= size < len(part):
                self._parts.insert(0, part[size:])
                part = part[:size]
            found.append(part)
            size -= len(part) if size > 0 else 0
        return found[0] if len(found) == 1 else b"".join(found)

    def _next(self) -> bytes:
        """The bytes before the next message; its metadata and its body become the following parts. b"": the end."""
        prefix = self._opened.read(4)
        if prefix == _CONTINUATION:
            prefix += self._opened.read(4)
        metadata = self._opened.read(int.from_bytes(prefix[-4:], "little")) if prefix[-4:] != _CONTINUATION else b""
        if metadata:
            message = _Table.root(metadata)
            body = self._opened.read(message.integer(_BODY_BYTES, "q"))
            _check_message(message, len(body), partial(_number, body, "q"))
            self._parts = [part for part in (metadata, body) if part]
        return prefix


def _check_file(opened: _Clamped) -> None:
    """Check the messages of an IPC file, whose places are in its footer. Raises ValueError."""
    end = opened.size - len(_FILE_MAGIC) - 4
    opened.seek(end)
    length = int.from_bytes(opened.read(4), "little")
    opened.seek(end - length)
    footer = _Table.root(opened.read(length))
    for field in (_FOOTER_DICTIONARIES, _FOOTER_BATCHES):
        for place in footer.structs(field, _BLOCK_BYTES):
            offset, length, body = struct.unpack("<qi4xq", place)
            opened.seek(offset)
            metadata = opened.read(max(0, length))
            message = _Table.root(metadata[8 if metadata.startswith(_CONTINUATION) else 4 :])
            _check_message(message, min(opened.size, body), partial(opened.number, offset + length))


def _check_message(message: "_Table", body_bytes: int, stated_at: Callable[[int], int]) -> None:
    """Raise ValueError if the stated size of the unpacked buffers of a batch is too large for those of its body.

    stated_at: the number at a byte of the body.
    """
    kind, batch = message.integer(_HEADER_TYPE, "B"), message.table(_HEADER)
    if kind == _DICTIONARY_BATCH and batch is not None:
        batch = batch.table(_DICTIONARY_DATA)
    if kind not in (_DICTIONARY_BATCH, _RECORD_BATCH) or batch is None:
        return
    was_experimental = message.integer(_VERSION, "h") == _V4 and message.has(_CUSTOM_METADATA)
    if batch.has(_COMPRESSION) or was_experimental:  # in Arrow 0.17, custom metadata name the compression
        buffers = (struct.unpack("<qq", buffer) for buffer in batch.structs(_BUFFERS, _BUFFER_BYTES))
        stated = sum(max(stated_at(offset), length - 8) for offset, length in buffers if length >= 8)
        require_ratio(stated, body_bytes, MAX_LOADED_BYTES, "a batch")


class _Table:
    """A table of a FlatBuffer: its fields by their numbers. Raises ValueError if one is outside of `data`."""

    def __init__(self, data: bytes, begin: int) -> None:
        self._data, self._begin = data, begin

    @classmethod
    def root(cls, data: bytes) -> "_Table":
        return cls(data, _number(data, "I", 0))

    def _place(self, field: int) -> int:
        """The place of a field; 0: absent."""
        fields = self._begin - _number(self._data, "i", self._begin)
        entry = 4 + 2 * field
        offset = _number(self._data, "H", fields + entry) if entry < _number(self._data, "H", fields) else 0
        return self._begin + offset if offset else 0

    def has(self, field: int) -> bool:
        return self._place(field) > 0

    def integer(self, field: int, kind: str) -> int:
        """kind: of the module struct."""
        place = self._place(field)
        return _number(self._data, kind, place) if place else 0

    def table(self, field: int) -> "_Table | None":
        place = self._place(field)
        return _Table(self._data, place + _number(self._data, "I", place)) if place else None

    def structs(self, field: int, size: int) -> Iterator[bytes]:
        """The structs of `size` bytes in a vector."""
        place = self._place(field)
        begin = place + _number(self._data, "I", place) if place else 0
        end = begin + 4 + size * _number(self._data, "I", begin) if place else 0
        if end > len(self._data):
            raise ValueError("a vector ends after the metadata")
        return (self._data[at : at + size] for at in range(begin + 4, end, size))


def _number(data: bytes, kind: str, at: int) -> int:
    """The little-endian number at a byte. kind: of the module struct. Raises ValueError."""
    if not 0 <= at <= len(data) - struct.calcsize(kind):
        raise ValueError("the metadata are cut off")
    found: int = struct.unpack_from(f"<{kind}", data, at)[0]
    return found
