"""A training step: against a bare PyTorch loop, against its own matrix products, and its time by cause.

Every case trains the quick start's model on random tokens, 2,048 per step. A round runs `--steps` steps of titanlite's
trainer, of the bare loop, and of the kernels alone, in an order that alternates. The bare loop is plain torch, FSDP2,
torch's FSDP-based replicate, or DDP; tp and pp have none. "Kernels" are the matrix products and the attention of rank
0's step, forward and backward, one by one on random tensors of their shapes: kernels / step is 1 if everything else
is free. The second table splits the time of one step of rank 0 under the profiler: the time of operations by cause;
communication, with the time between operations in which the thread does not run, since it waits for other ranks or, on
a busy machine, for a core; and the rest, in Python, autograd, views and the profiler. The third table shows how long
the trainer waits for text that is tokenized and packed while it trains.
"""

import gc
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring import (
    CPU,
    Layout,
    Row,
    build,
    case,
    configuration,
    in_turns,
    ratios,
    report,
    threads_per_process,
)
from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.config.schema import JobConfig
from titanlite.data.bpe import prepare_tokenizer
from titanlite.data.loader import build_loader
from titanlite.forward import on_device
from titanlite.metrics.meter import Meter, Work
from titanlite.models.attention import attention_dtype
from titanlite.models.family import resolve_model
from titanlite.models.init import init_parameters_
from titanlite.models.registry import structure_of
from titanlite.precision import DTYPES
from titanlite.profiling.breakdown import CAUSES, cause_of, host_events, time_by_cause
from titanlite.ranks.launch import run_ranks
from titanlite.runtime.process_state import PacedGarbageCollection
from titanlite.runtime.torch_internals import linear_of_onednn
from titanlite.trainer import Trainer

BARE: dict[Layout, tuple[str, ...]] = {
    "single": ("plain torch",),
    "dp_shard": ("FSDP2",),
    "dp_replicate": ("replicate", "DDP"),
    "tp": ("",),
    "pp": ("",),
}
"""The bare loops of a layout; "": none exists."""
NextStep = Callable[[], list[Batch]]
"""Returns the batches of the next step."""


def bare_model(config: JobConfig, wrap: str) -> nn.Module:
    family, hyper_parameters = resolve_model(config.model)
    model = family.build(hyper_parameters).to(DTYPES[config.training.dtype])
    model.init_buffers(CPU)
    init_parameters_(model, 0, structure_of(family, hyper_parameters, model).init)
    if wrap == "DDP":
        return DistributedDataParallel(model)
    if wrap != "plain torch":
        apply: Any = fully_shard if wrap == "FSDP2" else replicate
        keep = {"reshard_after_forward": False} if wrap == "FSDP2" else {}
        for part in (model.get_submodule("tok_embeddings"), *model.get_submodule("layers").children()):
            apply(part)
        apply([model.get_submodule("norm"), model.get_submodule("output")], **keep)
        apply(model)
    return model


def bare_loop(model: nn.Module, next_step: NextStep) -> Callable[[int], None]:
    """Steps of a minimal training loop: accumulate, clip, update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def synchronize(is_last: bool) -> None:
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = is_last
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
            model.set_is_last_backward(is_last)

    def run(steps: int) -> None:
        for _ in range(steps):
            batches = next_step()
            optimizer.zero_grad()
            for index, (tokens, labels, *_) in enumerate(batches):
                synchronize(index == len(batches) - 1)
                logits = model(tokens).flatten(0, 1).float()
                loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX)
                (loss / len(batches)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        loss.item()

    return run


def trainer_loop(trainer: Trainer, next_step: NextStep) -> Callable[[int], None]:
    """Steps of titanlite's Trainer, including the work of the surrounding loop."""
    assert dist.group.WORLD is not None
    meter = Meter(dist.group.WORLD, CPU, work=lambda _: Work(1, 0.0), peak_flops=None)
    meter.start()

    def run(steps: int) -> None:
        with PacedGarbageCollection() as garbage:
            for _ in range(steps):
                stats = trainer.train_step([on_device(batch, CPU) for batch in next_step()])
                meter.update(trainer.step, stats, lr=trainer.schedule(trainer.step), data_wait_s=0.0, bad_rows=0)
                garbage.after_step(trainer.step)
        meter.flush()

    return run


def profiled(step: Callable[[], object]) -> tuple[list[FunctionEvent], dict[str, float]]:
    """(operations of a step, its milliseconds and the share of each cause)"""
    os.environ["KINETO_LOG_LEVEL"] = "6"  # else it prints its start and its end
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        begin, worked = perf_counter(), thread_time()
        step()
        worked, elapsed = thread_time() - worked, perf_counter() - begin
    events = host_events(profiler.events() or ())
    seconds = time_by_cause(events, elapsed, elapsed - worked)
    return events, {"profiled step (ms)": 1000 * elapsed} | {cause: value / elapsed for cause, value in seconds.items()}


def kernels(events: Sequence[FunctionEvent], dtype: torch.dtype) -> tuple[int, Callable[[int], None]]:
    """(FLOPs, function that runs a number of times) of the matrix products and the attention of these operations."""
    flops, calls = 0, list[Callable[[], object]]()
    for event in events:
        shapes: Any = [shape for shape in event.input_shapes if shape]
        if cause_of(event.name) == "matrix products":
            left, right = shapes[1:3] if "add" in event.name else shapes[:2]
            operands = [torch.randn(shape, dtype=dtype) for shape in (left, right)]
            by_onednn = event.name.startswith("mkldnn")
            out = {} if by_onednn else {"out": torch.matmul(*operands)}
            calls.append(partial(linear_of_onednn if by_onednn else torch.matmul, *operands, **out))
            flops += 2 * math.prod(left) * (right[0] if by_onednn else right[-1])
        elif cause_of(event.name) == "attention" and "backward" not in event.name:
            wide = attention_dtype("cpu", dtype)
            inputs = [torch.randn(shape, dtype=wide, requires_grad=True) for shape in shapes[:3]]
            calls.append(partial(attention, *inputs))
            flops += 12 * math.prod(shapes[0]) * shapes[1][2]  # counted as in flops_per_token

    def run(steps: int) -> None:
        for _ in range(steps):
            for call in calls:
                call()

    return flops, run


def attention(queries: Tensor, keys: Tensor, values: Tensor) -> None:
    """Forward and backward."""
    grouped = queries.shape[1] != keys.shape[1]
    out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
    torch.autograd.grad(out, (queries, keys, values), out.detach())


def compare(settings: Sequence[str], bare: str, rounds: int, steps: int, threads: int) -> dict[str, Any]:
    """Seconds per step of each side in each round, and the profile."""
    torch.set_num_threads(threads)
    config = configuration(settings, dist.get_world_size())
    trainer, batches = build(config)
    sides = {"trainer": trainer_loop(trainer, lambda: batches)}
    if bare:
        sides["bare"] = bare_loop(bare_model(config, bare), lambda: batches)
    for run in sides.values():
        run(2)
    events, profile_ = profiled(lambda: trainer.train_step(batches))
    flops, sides["kernels"] = kernels(events, DTYPES[config.training.mixed_precision_param])
    sides["kernels"](1)

    def freeze(_side: str) -> None:
        """The trainer freezes all objects once when a run starts: keep that out of the timed steps."""
        gc.collect()
        gc.freeze()

    calls = {side: partial(run, steps) for side, run in sides.items()}
    found = in_turns(calls, rounds, 1, dist.barrier, freeze)
    seconds = {side: [elapsed / steps for elapsed, _ in times] for side, times in found.items()}
    tokens = config.training.global_batch_size * config.training.seq_len
    return {"tokens": tokens, "kernel_flops": flops, "seconds": seconds, "profile": profile_}


def waiting(settings: Sequence[str], steps: int, threads: int) -> list[float]:
    """(seconds per step, seconds of them spent waiting) on the standard library's text."""
    torch.set_num_threads(threads)
    config = configuration(settings, 1)
    training, vocab_size = config.training, resolve_model(config.model)[1].vocab_size
    loader = build_loader(
        config.data,
        prepare_tokenizer(config.tokenizer, config.data.sources, vocab_size=vocab_size),
        seq_len=training.seq_len,
        vocab_size=vocab_size,
        global_batch_size=training.global_batch_size,
        local_batch_size=training.local_batch_size,
        data_rank=0,
        data_degree=1,
    )
    run = trainer_loop(build(config)[0], loader.next_step)
    run(2)
    before, start = loader.wait_s, perf_counter()
    run(steps)
    elapsed, waited = perf_counter() - start, loader.wait_s - before
    loader.close()
    return [elapsed / steps, waited / steps]


def main(
    layouts: tuple[Layout, ...] = get_args(Layout),
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16"),
    accumulation: tuple[int, ...] = (1, 4),
    rounds: int = 8,
    steps: int = 4,
    settings: tuple[str, ...] = (),
    json: Path | None = None,
) -> None:
    """settings: of the model, such as model.n_layers=2. json: folder of step.json."""
    rows: list[Row] = []
    profiles: list[Row] = []
    for layout, dtype, count in product(layouts, dtypes, accumulation):
        # Both sides reduce at the last microbatch only, so they communicate the same.
        sync = ("parallelism.gradient_sync=last",) if layout == "dp_shard" else ()
        ranks, keys = case(layout, count, (f"training.dtype={dtype}", *sync, *settings))
        labels = {"layout": layout, "dtype": dtype, "accumulation": str(count)}
        for bare in BARE[layout]:
            arguments = (keys, bare, rounds, steps, threads_per_process(ranks))
            found = run_ranks(compare, ranks, *arguments, timeout_s=3600)[0]
            seconds, tokens = found["seconds"], found["tokens"]
            trainer = seconds["trainer"]
            row = {**labels, "bare loop": bare, "trainer (tokens/s)": [tokens / value for value in trainer]}
            if bare:
                row["bare (tokens/s)"] = [tokens / value for value in seconds["bare"]]
                row["trainer / bare"] = ratios(seconds["bare"], trainer)
            row["kernels (GFLOP/s)"] = [found["kernel_flops"] / 1e9 / value for value in seconds["kernels"]]
            row["kernels / step"] = ratios(seconds["kernels"], trainer)
            rows.append(row)
        profiles.append({**labels, **found["profile"]})
    tables = {"Time of a step": rows, "Share of the time of a step of rank 0, by cause": profiles}
    if "single" in layouts:
        _, keys = case("single", 1, settings)
        step_s, wait_s = run_ranks(waiting, 1, keys, 4 * steps, threads_per_process(1), timeout_s=3600)[0]
        tables["Waiting for data"] = [{"layout": "single", "step (ms)": 1000 * step_s, "waiting": wait_s / step_s}]
    report("step", tables, json, {**dict.fromkeys(CAUSES, ".1%"), "waiting": ".2%"})
