"""Which rank prints: exactly one of all that fail, whatever else another program has written into the store."""

import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.unit.ranks.test_foreign_values import FOREIGN
from titanlite.ranks.election import (
    FIRST_FAILURE,
    LOWEST_SEQUENCE,
    PRINTED,
    first_failure,
    note_printed,
    note_sequence,
    register,
    take_over,
)
from titanlite.runtime.waiting import parse_value


def of_each_rank(ranks: int, function: Callable[[int], bool]) -> list[int]:
    """The ranks for which the function, called at the same time for all of them, is true."""
    found: list[int] = []
    begun = threading.Barrier(ranks)

    def call(rank: int) -> None:
        begun.wait()
        if function(rank):
            found.append(rank)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_the_first_rank_that_registers_prints() -> None:
    store = dist.HashStore()
    assert first_failure(store) == ""
    assert [register(store, rank) for rank in ("2", "0", "2")] == [True, False, True]
    assert first_failure(store) == "2"
    note_printed(store)
    assert first_failure(store) == PRINTED
    assert not register(store, "2")


@pytest.mark.parametrize("store", [dist.HashStore() for _ in range(20)], ids=range(20))
def test_of_ranks_that_fail_at_once_one_prints(store: dist.Store) -> None:
    (first,) = of_each_rank(16, lambda rank: register(store, str(rank)))
    assert first_failure(store) == str(first)
    # It is killed before it has printed: each of the others would take its place.
    (second,) = of_each_rank(16, lambda rank: rank != first and take_over(store, str(first), str(rank)))
    assert first_failure(store) == str(second) != str(first)


def test_a_rank_that_has_printed_is_not_replaced() -> None:
    store = dist.HashStore()
    assert register(store, "1")
    note_printed(store)
    assert not take_over(store, "1", "0")


def test_of_data_errors_the_lowest_sequence_prints() -> None:
    store = dist.HashStore()
    sequences = [9, 4, 30, 12, 7, 4, 100, 5]
    of_each_rank(len(sequences), lambda rank: note_sequence(store, sequences[rank]) is not None)
    assert store.get(LOWEST_SEQUENCE) == b"4"
    prints = of_each_rank(len(sequences), lambda rank: register(store, str(rank), sequences[rank]))
    assert len(prints) == 1
    assert sequences[prints[0]] == 4


@pytest.mark.parametrize("value", FOREIGN)
def test_one_rank_still_prints(value: bytes) -> None:
    store = dist.HashStore()
    if parse_value(value, int) is None and value != PRINTED.encode():
        store.set(FIRST_FAILURE, value)
    assert register(store, "0")
    store.set(LOWEST_SEQUENCE, value)
    if parse_value(value, int) is None:
        note_sequence(store, 5)
        assert register(store, "0", 5)
