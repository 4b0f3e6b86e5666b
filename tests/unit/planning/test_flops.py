"""The FLOPs of all ranks add up to those of the model."""

import pytest

from tests.distributed.reference import small_config
from titanlite.models.family import resolve_model
from titanlite.planning.estimate import estimate


@pytest.mark.parametrize("settings", [["model.tie_embeddings=true"], ["parallelism.pp=2", "parallelism.tp=2"]])
def test_ranks_add_up_to_the_model(settings: list[str]) -> None:
    config = small_config(4, *settings, "activation_checkpoint.mode=full")
    family, model = resolve_model(config.model)
    plan = estimate(config, 4, device_type="cpu")
    tokens = config.training.global_batch_size * config.training.seq_len
    copies = 4 // len(plan.ranks)
    assert copies * sum(rank.flops for rank in plan.ranks) == tokens * family.flops_per_token(model, 16)
    blocks = family.flops_per_token(model, 16) - 6 * model.vocab_size * model.dim
    logits = 6 * model.vocab_size * model.dim if config.parallelism.pp > 1 else 0
    assert copies * sum(rank.recomputed_flops for rank in plan.ranks) == tokens * (blocks + logits) // 3
