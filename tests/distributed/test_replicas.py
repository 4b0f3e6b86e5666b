"""Comparison of replicas: every flipped bit is found, with tensor and ranks; equal replicas are never reported."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.gradients import build_on_mesh, local_batches
from tests.distributed.layouts import TIED
from tests.distributed.reference import global_batch, small_config
from tests.pool import run_ranks
from titanlite.faults.replicas import Replicas, ReplicasError, digest
from titanlite.runtime.torch_internals import local_part

Flip = tuple[str, tuple[int, ...]]
"""A tensor, and the ranks that flip the last bit of its last element."""

CASES: dict[str, list[tuple[Flip, str]]] = {
    "dp_replicate=2": [
        (("layers.0.attention.wq.weight", (1,)), "layers.0.attention.wq.weight: rank 1 differs from rank 0"),
        (("norm.weight/exp_avg_sq", (0,)), "norm.weight/exp_avg_sq: rank 1 differs from rank 0"),
        (("norm.weight/ema", (1,)), "norm.weight/ema: rank 1 differs from rank 0"),
        (("layers.0.attention.wq.weight", (0, 1)), ""),
    ],
    "dp_replicate=2 tp=2": [
        (("layers.0.attention.wq.weight", (3,)), "layers.0.attention.wq.weight: rank 3 differs from rank 1"),
        (("layers.0.attention_norm.weight", (2,)), "layers.0.attention_norm.weight: rank 2 differs from rank 0"),
        (("layers.0.attention_norm.weight", (1, 3)), "layers.0.attention_norm.weight: rank 1 differs from rank 0"),
        (("tok_embeddings.weight/exp_avg", (0,)), "tok_embeddings.weight/exp_avg: rank 2 differs from rank 0"),
        (("norm.weight/step", (1,)), "norm.weight/step: rank 1 differs from rank 0"),
        (("layers.0.attention.wq.weight", (1, 3)), ""),  # both replicas of the shard
        (("layers.1.ffn_norm.weight", (0, 1, 2, 3)), ""),
    ],
    "dp_replicate=2 cp=2": [  # parameters are sharded over the ranks of cp
        (("norm.weight", (3,)), "norm.weight: rank 3 differs from rank 1"),
        (("tok_embeddings.weight/exp_avg", (0,)), "tok_embeddings.weight/exp_avg: rank 2 differs from rank 0"),
        (("layers.0.attention.wq.weight", (1, 3)), ""),  # both replicas of the shard
    ],
    "pp=2 tp=2": [  # with tied embeddings, of which the first and the last stage have copies
        (("tok_embeddings.weight", (3,)), "tok_embeddings.weight: rank 3 differs from rank 1"),
        (("tok_embeddings.weight/exp_avg", (0,)), "tok_embeddings.weight/exp_avg: rank 2 differs from rank 0"),
        (("tok_embeddings.weight/ema", (2,)), "tok_embeddings.weight/ema: rank 2 differs from rank 0"),
        (("tok_embeddings.weight", (0, 2)), ""),
    ],
    "dp_shard=2 tp=2": [
        (("norm.weight", (3,)), "norm.weight: rank 3 differs from rank 2"),
        (("output.weight", (3,)), ""),  # no rank has the same shard
    ],
    "dp_replicate=4": [(("norm.weight/exp_avg_sq", (2,)), "norm.weight/exp_avg_sq: rank 2 differs from ranks 0, 1, 3")],
}


def found_on_layout(layout: str) -> list[str]:
    """The first differences that are reported, by case; "" if none are."""
    settings = ("optimizer.name=AdamW", "optimizer.ema_decay=0.9", "training.dtype=float32", *_keys(layout))
    settings += (*TIED, "parallelism.pp_microbatch_size=4") if "pp" in layout else ()
    settings += ("training.local_batch_size=4",)
    config = small_config(dist.get_world_size(), *settings)
    trainer, mesh = build_on_mesh(config)
    replicas = Replicas(trainer.model_parts, trainer.optimizer, mesh, every=1, average=trainer.average)
    for step in range(2):
        trainer.train_step(local_batches(config, mesh, global_batch("uneven", step)))
        replicas.after_step(step + 1, last=False)
    tensors: dict[str, Tensor] = {name: p for part in trainer.model_parts for name, p in part.named_parameters()}
    tensors |= dict(trainer.optimizer.named_state())
    tensors |= {f"{name}/ema": tensor for name, tensor in trainer.average.tensors.items()}
    found = []
    rare = Replicas(trainer.model_parts, trainer.optimizer, mesh, every=100, average=trainer.average)
    for number, ((name, ranks), _) in enumerate(CASES[layout]):
        if dist.get_rank() in ranks:
            flip_last_bit(local_part(tensors[name]))
        found.append("")
        try:
            rare.after_step(10 + number, last=True)
        except ReplicasError as error:
            found[-1] = str(error).splitlines()[1].strip()
        if dist.get_rank() in ranks:
            flip_last_bit(local_part(tensors[name]))
    replicas.compare(100)
    return found


def compared_on_shards() -> list[tuple[str, int]]:
    """Tensors of the weights and of the optimizer that are digested, with their elements."""
    config = small_config(2, "optimizer.name=AdamW", "training.local_batch_size=8", "parallelism.dp_shard=2")
    trainer, mesh = build_on_mesh(config)
    trainer.optimizer.init_state()
    tensors = dict(trainer.optimizer.named_state())
    tensors |= {name: p for part in trainer.model_parts for name, p in part.named_parameters()}
    names = {local_part(tensor).data_ptr(): name for name, tensor in tensors.items()}
    digested = list[tuple[str, int]]()

    def noted(local: Tensor, device: torch.device) -> Tensor:
        digested.append((names[local.data_ptr()], local.numel()))
        return digest(local, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titanlite.faults.replicas.digest", noted)
        Replicas(trainer.model_parts, trainer.optimizer, mesh, every=1).compare(1)
    return digested


@pytest.mark.slow
def test_shards_are_not_digested() -> None:
    for digested in run_ranks(compared_on_shards, 2):
        assert {(name.rpartition("/")[2], size) for name, size in digested} == {("step", 1)}


def _keys(layout: str) -> list[str]:
    return [f"parallelism.{setting}" for setting in layout.split()]


def flip_last_bit(local: Tensor) -> None:
    local.reshape(-1)[-1:].view(torch.int32).bitwise_xor_(1)


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        pytest.param(2, ["dp_replicate=2"], marks=pytest.mark.slow),
        pytest.param(4, ["dp_replicate=2 tp=2", "pp=2 tp=2"], marks=pytest.mark.slow),
        pytest.param(4, ["dp_replicate=2 cp=2", "dp_shard=2 tp=2", "dp_replicate=4"], marks=pytest.mark.soak),
    ],
)
def test_a_flipped_bit_is_found_on_all_ranks(ranks: int, layouts: list[str]) -> None:
    for layout in layouts:
        expected = [text for _, text in CASES[layout]]
        assert run_ranks(found_on_layout, ranks, layout) == [expected] * ranks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_digest_changes_with_every_bit(dtype: torch.dtype, on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not on_cpu:  # the sum of bits, which accelerators compute
        monkeypatch.setattr("titanlite.faults.replicas.has_fast_hash", lambda _: False)
    cpu = torch.device("cpu")
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    before = digest(tensor, cpu)
    assert digest(tensor.clone(), cpu) == before
    assert digest(tensor.t().contiguous().t(), cpu) == before, "the layout in memory does not count"
    data = tensor.view(torch.uint8)
    for byte in (0, 7, data.numel() - 1):
        for bit in range(8):
            data.view(-1)[byte] ^= 1 << bit if bit < 7 else 128
            assert digest(tensor, cpu) != before, (byte, bit)
            data.view(-1)[byte] ^= 1 << bit if bit < 7 else 128
    assert digest(tensor, cpu) == before
    assert abs(int(before)) < 2**62
