"""Settings that must not change numbers: reshard policy, tied weights, seed, clipping."""

import pytest
import torch.distributed as dist

from tests.distributed.gradients import build_on_mesh, difference, full_tensor, step_errors
from tests.distributed.reference import global_batch, rank_batches, reference_step, small_config
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


def weights_after_a_clipped_step(replicate: int) -> float:
    """Relative error of a parameter's change in one SGD step whose gradients are clipped."""
    size = dist.get_world_size()
    settings = ("training.max_norm=0.01", "optimizer.lr=0.5", "optimizer.weight_decay=0.0")
    config = small_config(size, f"parallelism.dp_replicate={replicate}", "training.local_batch_size=2", *settings)
    batch = global_batch("uneven")
    reference = reference_step(config, batch)
    assert reference.grad_norm > 0.1  # clipping is active
    trainer, mesh = build_on_mesh(config)
    trainer.train_step(rank_batches(batch, mesh.data_rank, mesh.data_degree, 8 // size))
    scale = 0.5 * 0.01 / (reference.grad_norm + 1e-6)
    return max(
        difference(full_tensor(parameter.detach()) - reference.weights[name], -scale * reference.gradients[name])
        for name, parameter in trainer.model_parts[0].named_parameters()
    )


def clipped_steps(replicas: list[int]) -> list[float]:
    return [weights_after_a_clipped_step(replicate) for replicate in replicas]


@pytest.mark.slow
def test_clipped_update_matches_one_process() -> None:
    for world_size, replicas in ((1, [1]), (2, [1, 2])):
        for errors in run_ranks(clipped_steps, world_size, replicas):
            assert max(errors) <= 1e-9
