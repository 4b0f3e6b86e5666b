"""Costs that grow with the ranks of a job grow no faster than they do: counts of the simulators, at small sizes."""

from collections.abc import Callable, Iterable

import pytest

from benchmarks.growth import agreements, plans
from benchmarks.growth.count import Count
from benchmarks.scale import by_name, law, row_of

SIZES = (16, 64)
SLACK = {"a name of the attempt": 1.5, "facts that differ on all nodes": 1.5}
"""Limits of the law: how often rank 0 polls depends on the machine, and more ranks differ in more groups."""


@pytest.mark.slow
@pytest.mark.parametrize("part", [agreements.of_start, agreements.of_groups], ids=["start", "groups"])
def test_the_store_has_linear_work(part: Callable[[int], Iterable[Count]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.ranks.network.JOIN_POLL_S", 0.3)  # few polls also on a busy machine
    counts = [count for size in SIZES for count in part(size)]
    for of_cost in map(list, by_name(counts)):
        assert [count.ranks for count in of_cost] == [*SIZES]
        assert law(of_cost) < SLACK.get(of_cost[0].part, 1.1), row_of(of_cost)


@pytest.mark.slow
def test_the_facts_of_some_nodes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most MAX_GROUPS of them, and by rank 0 only."""
    monkeypatch.setattr(agreements, "LOCAL", 1)
    part = "facts that differ on all nodes", "requests"
    counts = [count for size in (16, 64) for count in agreements.of_start(size)]
    of_cost = [count for count in counts if (count.part, count.name) == part]
    assert law(of_cost) < 1.1, row_of(of_cost)


def test_plans_and_shards() -> None:
    found = {count.part: count.value for count in plans.of_shards(4096)}
    assert found["shards of a parameter"] == 2


def test_the_law_of_a_cost() -> None:
    counts = [Count("a", ranks, "keys", 3.0 * ranks**2) for ranks in (2, 4, 8)]
    assert law(counts) == pytest.approx(2)
    assert row_of(counts) == {"part": "a", "cost": "keys", "by ranks": "2: 12, 4: 48, 8: 192", "law": "2.00"}
