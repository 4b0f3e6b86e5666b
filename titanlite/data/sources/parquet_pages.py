"""The pages of a Parquet column: how long their content is, from their headers, before pyarrow makes room for it."""

from collections.abc import Iterator

from titanlite.data.sources.limits import MAX_LOADED_BYTES, require_ratio
from titanlite.data.sources.pieces import BadRowError

MAX_BATCH_ROWS = 1024
MAX_BATCH_BYTES = 2**26
"""Limits for the rows that pyarrow decodes at once, and for their text if values repeat."""

MAX_PADDING = 100
"""Bytes that old writers add to a column."""

_I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(5, 13)
_TRUE, _FALSE, _BYTE, _I16 = range(1, 5)
"""Types of Thrift's compact protocol, in which the headers are."""

_DICTIONARY = 2
"""The kind of a page of values that the following pages refer to."""

_PREFIXES = 7
"""DELTA_BYTE_ARRAY, the encoding in which a value can repeat the one before it."""

Fields = dict[int, "int | Fields"]
"""The 32-bit integers and structs of a Thrift struct, by number of their field."""


def batch_rows(column: bytes) -> int:
    """Rows of a column of a row group to decode at once, so that their text has at most about MAX_BATCH_BYTES.

    Raises ExpansionError if its pages are too long for its data, and BadRowError if their headers are damaged.
    """
    longest, total = 1, 0
    for header in _headers(column):
        size = _integer(header, 2)
        total += size
        require_ratio(total, len(column), MAX_LOADED_BYTES, "a column")
        encodings = (_integer(header.get(5), 2), _integer(header.get(8), 4))  # of the two kinds of pages of values
        if _integer(header, 1) == _DICTIONARY or _PREFIXES in encodings:
            longest = max(longest, size)
    return max(1, min(MAX_BATCH_ROWS, MAX_BATCH_BYTES // longest))


def _headers(column: bytes) -> Iterator[Fields]:
    """The headers of the pages of a column. Raises BadRowError."""
    at = 0
    while at < len(column):
        reader = _Compact(column, at)
        try:
            header = reader.struct()
        except (IndexError, RecursionError):
            if len(column) - at <= MAX_PADDING:
                return
            raise BadRowError("the header of a page is damaged") from None
        if min(_integer(header, 2), _integer(header, 3)) < 0:
            raise BadRowError("a page has a negative size")
        yield header
        at = reader.at + _integer(header, 3)


def _integer(fields: "int | Fields | None", number: int) -> int:
    """An integer in a struct; 0 if it is not there."""
    value = fields.get(number, 0) if isinstance(fields, dict) else 0
    return value if isinstance(value, int) else 0


class _Compact:
    """Reads Thrift's compact protocol from `data`, from byte `at` on, as pyarrow does: numbers that are too large lose
    their upper bits, and a field of another type than expected is skipped. Raises IndexError for damaged data."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def struct(self) -> Fields:
        found: Fields = {}
        field = 0
        while head := self._byte():
            field = _wrapped(field + (head >> 4) if head >> 4 else self._signed(), 16)
            value = self._value(head & 15)
            if value is not None:
                found[field] = value
        return found

    def _value(self, kind: int) -> "int | Fields | None":
        """Read a value; return it if it is a 32-bit integer or a struct."""
        if kind == _STRUCT:
            return self.struct()
        if kind == _I32:
            return _wrapped(self._signed(), 32)
        if kind in (_I16, _I64):
            self._signed()
        elif kind in (_BYTE, _DOUBLE, _BINARY):
            self._skip(self._unsigned() if kind == _BINARY else 1 if kind == _BYTE else 8)
        elif kind in (_LIST, _SET):
            head = self._byte()
            self._items([head & 15], head >> 4 if head >> 4 < 15 else self._unsigned())
        elif kind == _MAP:
            if size := self._unsigned():
                kinds = self._byte()
                self._items([kinds >> 4, kinds & 15], size)
        elif kind not in (_TRUE, _FALSE):
            raise IndexError(f"no type {kind}")
        return None

    def _items(self, kinds: list[int], size: int) -> None:
        for _ in range(size):
            for kind in kinds:
                if kind in (_TRUE, _FALSE):
                    self._skip(1)
                else:
                    self._value(kind)

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self.at:
            raise IndexError("a value ends after the data")
        self.at += size

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _unsigned(self) -> int:
        found = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return found
        raise IndexError("an integer has more than ten bytes")

    def _signed(self) -> int:
        number = self._unsigned()
        return number >> 1 ^ -(number & 1)


def _wrapped(number: int, bits: int) -> int:
    """The signed integer of the lowest `bits` of a number."""
    half = 1 << bits - 1
    return (number + half) % (2 * half) - half
