"""Requests, keys and bytes of heartbeats, of the explanation of a hang and of the end of a run grow as the ranks do."""

from benchmarks.growth.heartbeats import PER_NODE, of_heartbeats

SIZES = (128, 256, 512)


def test_no_part_grows_faster_than_the_number_of_ranks() -> None:
    found = {(each.part, each.name, each.ranks): each.value for size in SIZES for each in of_heartbeats(size)}
    assert {part for part, _, _ in found} == {"heartbeats", "explanation", "end"}
    for (part, name, size), value in found.items():
        if (part, name, 2 * size) in found:
            assert 0 < found[part, name, 2 * size] <= 2.05 * value, (part, name, size)


def test_a_heartbeat_is_two_requests_per_node() -> None:
    """And one request per 256 nodes and view."""
    found = {(each.part, each.name): each.value for each in of_heartbeats(256)}
    nodes = 256 // PER_NODE
    assert found["heartbeats", "requests"] <= 2 * nodes + 10
    assert found["heartbeats", "bytes"] <= 4_000 * nodes
