"""What saves, resumes and retention cost does not grow faster than the number of ranks, or of checkpoints."""

import math
from unittest.mock import patch

import pytest

from benchmarks.growth import saves

TENSORS = [(f"model/layers.{n}.w{i}", (512, 16)) for n in range(30) for i in range(3)] + [("model/norm", (24,))]


def counts(number: int) -> dict[tuple[str, str], float]:
    return {(part, name): value for part, _, name, value in saves.grid(TENSORS, number) if name != "CPU s"}


def test_messages_and_metadata_grow_with_ranks_and_not_with_tensors_times_ranks() -> None:
    few, many = counts(32), counts(128)
    assert many["first save", "items"] == 4 * few["first save", "items"]
    assert many["first save: plan", "bytes"] <= 4 * few["first save: plan", "bytes"] * 1.05
    assert many["later saves", "bytes"] <= 4 * few["later saves", "bytes"] * 1.05
    assert many["later saves", "items"] == 0
    metadata = {number: found["first save: metadata", "bytes"] for number, found in ((32, few), (128, many))}
    assert metadata[128] <= 4 * metadata[32] * 1.05
    assert metadata[128] < 10 * many["first save", "items"], "DCP's metadata have 191 bytes per item"


def test_a_resumed_rank_reads_the_blocks_that_it_needs() -> None:
    few, many = (counts(number)["resume of a rank of 7", "items"] for number in (32, 128))
    assert many <= len(TENSORS) * (128 / 7 + 2)
    assert many <= 4 * few * 1.05


def test_no_pairs_of_shards_are_compared() -> None:
    """One product of sizes for each shard and each tensor."""
    calls, product = [], math.prod

    def noted(sizes: tuple[int, ...]) -> int:
        calls.append(sizes)
        return product(sizes)

    wide = [(f"model/w{n}", (64, 512)) for n in range(4)]  # torch compares all pairs of these, cut along the first
    found = {}
    with (
        patch("titanlite.checkpoint.planning.math.prod", noted),
        patch("torch.distributed.checkpoint.default_planner._check_box_overlap", side_effect=AssertionError),
    ):
        for number in (8, 32):
            calls.clear()
            list(saves.listed(wide, number))
            found[number] = len(calls)
    assert found == {8: len(wide) * 9, 32: len(wide) * 33}


def test_requests_of_retention_do_not_grow_with_kept_checkpoints() -> None:
    (few,), (many,) = saves.retention(4), saves.retention(16)
    assert few.value == many.value <= 16


def test_the_rows_of_a_model() -> None:
    found = [*saves.rows("llama3", "debug", [4, 8])]
    assert {count.name for count in found} == {"items", "bytes", "CPU s", "requests"}
    assert all(count.value >= 0 for count in found)
    assert [count.value for count in found if count.part == "first save"] == pytest.approx(
        [4 * len(saves.tensors_of("llama3", "debug")), 8 * len(saves.tensors_of("llama3", "debug"))]
    )
