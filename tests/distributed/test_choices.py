"""Settings that must not change numbers: reshard policy, tied weights, seed."""

import pytest

from tests.distributed.gradients import build_on_mesh, step_errors
from tests.distributed.reference import global_batch, rank_batches, small_config
from tests.distributed.test_step import OperationCount
from tests.pool import run_ranks

RESHARDS = ("default", "always", "never")


def worst_errors(layouts: list[tuple[int, int]]) -> dict[str, float]:
    """Relative errors of a step; infinite if initial weights differ."""
    errors = {}
    for replicate, shard in layouts:
        for reshard, tied in (*((policy, "true") for policy in RESHARDS), ("default", "false")):
            settings = [
                f"parallelism.dp_replicate={replicate}",
                f"parallelism.dp_shard={shard}",
                f"parallelism.fsdp_reshard_after_forward={reshard}",
                f"model.tie_embeddings={tied}",
                "debug.seed=11",
                f"training.local_batch_size={8 // (replicate * shard)}",
            ]
            found = step_errors(settings, "silent_ranks", 2)
            case = f"replicate {replicate} x shard {shard}, reshard {reshard}, tied {tied}"
            errors[case] = found.worst if found.same_initial_weights else float("inf")
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [[(1, 2), (2, 1)], pytest.param([(2, 2)], marks=pytest.mark.soak)])
def test_reshard_policies_and_tied_weights_keep_gradients_correct(layouts: list[tuple[int, int]]) -> None:
    for errors in run_ranks(worst_errors, layouts[0][0] * layouts[0][1], layouts):
        assert len(errors) == 4 * len(layouts)
        assert {case: error for case, error in errors.items() if error > 1e-12} == {}


def gathers_of_a_step(tied: str) -> dict[str, int]:
    """All-gathers of FSDP units in a step of one microbatch, by reshard policy."""
    found = {}
    for reshard in RESHARDS:
        settings = [f"parallelism.fsdp_reshard_after_forward={reshard}", f"model.tie_embeddings={tied}"]
        trainer, mesh = build_on_mesh(small_config(2, *settings, "training.local_batch_size=8"))
        batches = rank_batches(global_batch("uneven"), mesh.data_rank, 2, 1)
        trainer.train_step(batches)
        with OperationCount() as count:
            trainer.train_step(batches)
        found[reshard] = count.collectives["allgather_base"]
    return found


def gathers() -> dict[str, dict[str, int]]:
    return {"separate": gathers_of_a_step("false"), "tied": gathers_of_a_step("true")}


@pytest.mark.slow
def test_units_are_gathered_according_to_the_reshard_policy() -> None:
    """Forward gathers each unit, backward each resharded unit. Units: embedding, two blocks, head (tied: no head)."""
    assert (
        run_ranks(gathers, 2)
        == [
            {
                "separate": {"default": 4 + 3, "always": 4 + 4, "never": 4},
                "tied": {"default": 3 + 2, "always": 3 + 3, "never": 3},
            }
        ]
        * 2
    )
