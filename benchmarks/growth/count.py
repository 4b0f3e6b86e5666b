"""A counted cost."""

from typing import NamedTuple


class Count(NamedTuple):
    """A cost of a part with this many ranks. name: "items", "requests", "bytes" or "CPU s"."""

    part: str
    ranks: int
    name: str
    value: float
