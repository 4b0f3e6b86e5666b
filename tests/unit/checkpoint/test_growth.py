"""What saves, resumes and retention cost does not grow faster than the number of ranks, or of checkpoints."""

import math
from unittest.mock import patch

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
    (few,), (many,) = saves.of_retention(4), saves.of_retention(16)
    assert few.value == many.value <= 16


def test_tensors_of_a_model_with_its_optimizer() -> None:
    tensors = dict(saves.tensors_of("llama3", "debug"))
    shape = tensors["model/layers.0.attention.wq.weight"]
    assert tensors["optimizer/layers.0.attention.wq.weight/exp_avg"] == shape
    assert len(tensors) == 3 * len([name for name in tensors if name.startswith("model/")])
