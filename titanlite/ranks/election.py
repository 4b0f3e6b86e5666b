"""Which rank prints the message of a failed job: the first one that registers; of data errors, the lowest sequence.

All functions raise RuntimeError if the store is lost. Values that another program has written count as absent.
"""

from typing import Protocol

from titanlite.runtime.waiting import parse_value

FIRST_FAILURE = "titanlite/first_failure"
"""Key in the store: the rank that prints its error, and afterwards PRINTED."""
PRINTED = "printed"
MOST_BYTES = 16
"""Of a value of FIRST_FAILURE."""
LOWEST_SEQUENCE = "titanlite/lowest_sequence"
"""Key in the store: the lowest sequence with unusable data."""


class Store(Protocol):
    """What an election needs of torch's Store."""

    def check(self, arg0: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str, /) -> bytes: ...


def register(store: Store, rank: str, sequence: int | None = None) -> bool:
    """Register a rank as the one that prints, unless another one is; whether it prints. sequence: of a data error."""
    lowest = None if sequence is None else parse_value(store.get(LOWEST_SEQUENCE), int)
    if sequence is not None and lowest is not None and lowest < sequence:
        return False
    first = store.compare_set(FIRST_FAILURE, "", rank)
    if parse_value(first, _parse_failure) is None:
        first = store.compare_set(FIRST_FAILURE, first, rank)  # type: ignore[arg-type]
    return first == rank.encode()


def first_failure(store: Store) -> str:
    """The rank that prints, or PRINTED; "" if no rank has failed."""
    value = store.get(FIRST_FAILURE) if store.check([FIRST_FAILURE]) else b""
    return parse_value(value, _parse_failure) or ""


def take_over(store: Store, first: str, rank: str) -> bool:
    """Register `rank` in place of the rank `first`, which has ended before it has printed; whether `rank` prints."""
    return store.compare_set(FIRST_FAILURE, first, rank) == rank.encode()


def note_printed(store: Store) -> None:
    """Tell the other ranks that the message is printed."""
    store.set(FIRST_FAILURE, PRINTED)


def note_sequence(store: Store, sequence: int) -> None:
    """Register the sequence of a data error: of all registered ranks, the one with the lowest sequence prints."""
    number = str(sequence)
    lowest = store.compare_set(LOWEST_SEQUENCE, "", number)
    # repeat: another rank may have replaced it meanwhile
    while (other := parse_value(lowest, int)) is None or other > sequence:
        lowest = store.compare_set(LOWEST_SEQUENCE, lowest, number)  # type: ignore[arg-type]


def _parse_failure(value: bytes) -> str:
    """A rank, or PRINTED."""
    if len(value) > MOST_BYTES:
        raise ValueError("no rank")
    return PRINTED if value == PRINTED.encode() else str(int(value))
