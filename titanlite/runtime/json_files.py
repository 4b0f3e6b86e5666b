"""A strict reader of files and JSON that others may have written or damaged: limits, a schema."""

import json
import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from titanlite.runtime.files import NotRegularError, open_regular

MAX_BYTES = 100_000_000
MAX_DEPTH = 64
BLOCK_BYTES = 2**16


class JsonError(ValueError):
    """Content that is not valid. The text follows the name of the file: "is not JSON: ..."."""


def read_regular(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises OSError, and JsonError for a device, a pipe or a longer file."""
    try:
        with open_regular(path) as file:
            content = bytearray()  # in blocks: read(max_bytes + 1) would allocate that much for the smallest file
            while len(content) <= max_bytes and (block := file.read(BLOCK_BYTES)):
                content += block
    except NotRegularError as error:
        raise JsonError(f"is {error}") from None
    if len(content) > max_bytes:
        raise JsonError(f"has more than {max_bytes:,} bytes")
    return bytes(content)


def read_json(path: Path, schema: Any = dict[str, Any]) -> Any:
    """Read and parse a file. schema: see parse_json. Raises OSError and JsonError."""
    return parse_json(read_regular(path), schema)


def parse_json(text: bytes, schema: Any = dict[str, Any]) -> Any:
    """Parse JSON in UTF-8. schema: the type of the object, such as a TypedDict or a dataclass. Ignores keys that it
    lacks.

    Raises JsonError, also for repeated names, numbers that are not finite, numbers of more than 4,300 digits, and more
    than MAX_DEPTH levels.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
    except JsonError:
        raise
    except (ValueError, RecursionError) as error:
        raise JsonError(f"is not JSON: {error}") from None
    check_depth(value)
    if not isinstance(value, dict):
        raise JsonError("is not a JSON object")
    return value if schema == dict[str, Any] else of_type(text, schema)


def of_type(text: bytes, schema: Any) -> Any:
    """Parse JSON that is known to be valid as a type. Raises JsonError."""
    try:
        return _adapter(schema).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise JsonError(f"is invalid: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise JsonError(f"has {name[:200]!r} {'twice' if count == 2 else f'{count:,} times'}")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonError(f"has the number {text}, which is not finite")
    return value


def check_depth(value: Any) -> None:
    """Raise JsonError if dicts and lists are nested more than MAX_DEPTH deep. Does not recurse."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [each for items in inner for each in items]
        if not level:
            return
    raise JsonError(f"has more than {MAX_DEPTH} levels")
