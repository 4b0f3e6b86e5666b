"""How far the plan's formulas for memory are off: every allocation of a real forward pass and of a real step."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.distributed.gradients import build_on_mesh
from tests.distributed.reference import small_config
from titanlite.config.schema import JobConfig
from titanlite.data.loader import Batch
from titanlite.parallel.tensor import parallel_loss
from titanlite.plan.estimate import RankPlan, estimate
from titanlite.runtime.launch import run_ranks

import torch  # isort: skip

SHAPE = ["model.dim=128", "model.n_layers=4", "model.n_heads=4", "model.ffn_dim=384", "model.vocab_size=512"]
SHAPE += ["model.max_seq_len=256", "training.seq_len=256", "optimizer.name=AdamW", "training.local_batch_size=2"]
RECOMPUTE = {
    "none": [],
    "full": ["activation_checkpoint.mode=full"],
    "selective, op": ["activation_checkpoint.mode=selective"],
    "selective, layer": ["activation_checkpoint.mode=selective", "activation_checkpoint.selective_policy=layer"],
}
LAYOUTS = {
    "1 process": (1, []),
    "tp 2": (2, ["parallelism.tp=2"]),
    "tp 2, whole logits": (2, ["parallelism.tp=2", "parallelism.loss_parallel=false"]),
}
STEP_LAYOUTS = {
    **LAYOUTS,
    "dp_shard 2": (2, ["parallelism.dp_shard=2"]),
    "dp_shard 2, last": (2, ["parallelism.dp_shard=2", "parallelism.gradient_sync=last"]),
    "dp_replicate 2": (2, ["parallelism.dp_replicate=2", "parallelism.dp_shard=1"]),
    "pp 2, 1F1B": (2, ["parallelism.pp=2"]),
    "pp 2, GPipe": (2, ["parallelism.pp=2", "parallelism.pp_schedule=GPipe"]),
    "pp 2, Interleaved1F1B": (2, ["parallelism.pp=2", "parallelism.pp_schedule=Interleaved1F1B"]),
    "pp 2, ZBVZeroBubble": (2, ["parallelism.pp=2", "parallelism.pp_schedule=ZBVZeroBubble"]),
    "pp 2 x dp_shard 2, 1F1B": (4, ["parallelism.pp=2"]),
}


def allocated(function: Callable[[], Any]) -> tuple[Any, int, int]:
    """(what it returns, bytes that it has left allocated, most bytes at any time), of all CPU tensors of the process."""
    gc.collect()  # what is freed inside should have been allocated inside
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
        gc.collect()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return result, now, most


def configuration(world_size: int, settings: list[str], microbatches: int) -> tuple[JobConfig, list[Batch]]:
    """The configuration and this rank's batches of a step."""
    config = small_config(world_size, *SHAPE, "training.global_batch_size=16", *settings)
    axes = config.parallelism
    rows = 2 * microbatches
    degree = world_size // (axes.pp * axes.tp)
    config = small_config(world_size, *SHAPE, f"training.global_batch_size={rows * degree}", *settings)
    tokens = torch.randint(512, (rows, 257), generator=torch.Generator().manual_seed(0))
    batches = 1 if axes.pp > 1 else microbatches
    whole = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return config, [Batch(*parts) for parts in zip(*(part.chunk(batches) for part in whole), strict=True)]


def kept_after_forward(all_settings: list[list[str]]) -> list[tuple[int, int]]:
    """(measured, planned) bytes between forward and backward of one microbatch, parameters' copies left out."""
    found = []
    for settings in all_settings:
        config, batches = configuration(dist.get_world_size(), settings, 1)
        trainer, _ = build_on_mesh(config)
        trainer.train_step(batches)
        trainer.optimizer.zero_grad()
        valid = torch.tensor(batches[0].labels.numel())
        with parallel_loss(shard_logits=trainer.shard_logits):
            _, kept, _ = allocated(
                lambda: trainer.loss(trainer.model_parts[0](batches[0].tokens), batches[0].labels, valid)
            )
        found.append((kept, 0))
    return found


def peak_of_a_step(all_settings: list[list[str]], microbatches: int) -> list[int]:
    """Most bytes that a step has allocated at once beside parameters and optimizer state, which were there before."""
    found = []
    for settings in all_settings:
        config, batches = configuration(dist.get_world_size(), settings, microbatches)
        trainer, _ = build_on_mesh(config)
        trainer.train_step(batches)
        trainer.optimizer.zero_grad()
        _, _, most = allocated(lambda: trainer.train_step(batches))
        found.append(most)
    return found


def planned(world_size: int, settings: list[str], microbatches: int) -> list[RankPlan]:
    config, _ = configuration(world_size, settings, microbatches)
    return list(estimate(config, world_size, device_type="cpu").ranks)
