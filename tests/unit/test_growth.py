"""Costs that grow with the ranks of a job grow no faster than they do: counts of the simulators, at small sizes."""

from collections.abc import Callable, Iterable

import pytest

from benchmarks.growth import agreements, data, files, history, plans, weights
from benchmarks.growth.count import Count
from benchmarks.scale import by_name, law, row_of
from titanlite.data import order, segments
from titanlite.data.sources import stored

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


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the order of 8 windows of 512 bytes, or of 4 KiB of a file."""
    monkeypatch.setattr(segments, "BLOCK_TOKENS", 2**11)
    monkeypatch.setattr(segments, "FETCHED_TOKENS", 2**8)
    monkeypatch.setattr(segments, "MIN_BLOCKS", 32)
    monkeypatch.setattr(stored, "HEAD_BYTES", 2**12)
    monkeypatch.setattr(stored, "BLOCK_BYTES", 2**12)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("nodes", [1, 3, 8])
def test_nodes_fetch_shuffled_token_files_once(nodes: int) -> None:
    """But for the blocks at the ends of the segments of streams; version 3 fetches them on each node."""
    corpus = {"seq_len": 256, "num_streams": 8, "files": 3, "file_tokens": 80_001}
    found = data.fetched(nodes, 4, **corpus)
    assert 0.95 < found.bytes / found.corpus < 1.15
    assert found.requests * 2**11 < 1.2 * found.bytes  # one of two is for a block, the other confirms it
    if nodes > 1:
        before = data.fetched(nodes, 3, **corpus)
        assert before.bytes / before.corpus > 0.7 * nodes


def test_the_orders_of_many_sources_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams in 32 blocks: 16 MB in 64 bits, 4 MB in 16 bits. Less than 4 MB are those of one sort."""
    monkeypatch.setattr(order, "TABLE_BYTES", 2**20)
    most = data.order_bytes(2, count=2**21, num_streams=16, own_streams=16, places=2)
    assert 2**20 < most < 4.5e6


def test_experts_draw_at_most_twice_what_they_own() -> None:
    """Of the rank that draws most. With ep, a rank owns less than a block."""
    for ranks in (256, 512, 4096):
        alone, drawn = (count.value for count in weights.of_experts(ranks))
        assert drawn < 2, ranks
        assert alone > 30 or ranks == 256


def test_a_resume_and_a_report_parse_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.runtime.row_files.INDEXED_BYTES", 2**14)
    monkeypatch.setattr("titanlite.metrics.jsonl.MOST_PARSED_BYTES", 2**19)
    for part in (history.of_history, history.of_ledger):
        parsed = {count.part: count.value for count in part(400) if count.name == "rows parsed"}
        assert parsed.pop("report, metrics.jsonl", 0) < 80
        assert max(parsed.values()) < 40


def test_one_rank_of_a_node_opens_token_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others open them when they read them: a window's tokens and documents, with their headers."""
    monkeypatch.setattr("titanlite.data.sources.tokens.TABLE_FILES", 10)
    monkeypatch.setattr("titanlite.data.sources.token_table.KEPT_FILES", 1)
    for size in (20, 40):
        found = {count.part: count.value for count in files.of_start(size) if count.name == "opens"}
        first, other, steps = found.values()
        assert size < first <= 2 * size + 2
        assert other == 0
        assert 2 * files.STEPS <= steps <= 4 * (files.STEPS + 4)


def test_the_law_of_a_cost() -> None:
    counts = [Count("a", ranks, "keys", 3.0 * ranks**2) for ranks in (2, 4, 8)]
    assert law(counts) == pytest.approx(2)
    assert row_of(counts) == {"part": "a", "cost": "keys", "by ranks": "2: 12, 4: 48, 8: 192", "law": "2.00"}
