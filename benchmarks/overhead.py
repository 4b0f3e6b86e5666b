"""Benchmark of the trainer's overhead over a bare PyTorch loop: same model and batches, alternating in one run.

    python benchmarks/overhead.py [--processes 1] [--rounds 8] [--steps 4]

With one process the bare loop is plain torch; with two it is FSDP2 (compared with dp_shard = 2), and torch's FSDP-based
replicate and DDP (compared with dp_replicate = 2). A round consists of `--steps` optimizer steps of each side, in
alternating order. The table shows tokens/s (median over rounds) and the ratio trainer / bare per round. With one
process, a last line shows how long the trainer waits for real data, tokenized and packed while it trains.
"""

import gc
import statistics
from collections.abc import Callable, Sequence
from itertools import cycle
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from measuring import spread, threads_per_process
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from titanlite.assembly.model import build_model, build_trainer
from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.config.load import load_config
from titanlite.config.schema import JobConfig
from titanlite.data.bpe import prepare_tokenizer
from titanlite.data.loader import build_loader
from titanlite.forward import on_device
from titanlite.metrics.meter import Meter
from titanlite.models.init import init_parameters_
from titanlite.models.registry import resolve_model
from titanlite.parallel.mesh import Mesh
from titanlite.runtime.distributed import World
from titanlite.runtime.garbage import PacedGarbageCollection
from titanlite.runtime.launch import run_ranks

CPU = torch.device("cpu")


NextStep = Callable[[], list[Batch]]
"""Returns the batches of the next step."""


def configuration(layout: Sequence[str], accumulation: int) -> JobConfig:
    """The quick start's model, with 8 sequences of 256 tokens per step."""
    size = dist.get_world_size()
    keys = [
        "--model.vocab_size=4096",
        "--training.seq_len=256",
        "--training.global_batch_size=8",
        f"--training.local_batch_size={8 // (size * accumulation)}",
        *layout,
    ]
    return load_config(keys, world_size=size, device_type="cpu")


def bare_model(config: JobConfig) -> nn.Module:
    family, hyper_parameters = resolve_model(config.model)
    model = family.build(hyper_parameters)
    model.init_buffers(CPU)
    init_parameters_(model, 0, lambda name: family.init(hyper_parameters, name))
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
                logits = model(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
                (loss / len(batches)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        loss.item()

    return run


def trainer_loop(config: JobConfig, next_step: NextStep) -> Callable[[int], None]:
    """Steps of titanlite's Trainer, including the work of the surrounding loop."""
    mesh = Mesh(config.parallelism, World(dist.get_rank(), dist.get_rank(), dist.get_world_size(), "cpu"))
    mesh.connect(config.comm)
    trainer = build_trainer(config, build_model(config, mesh, CPU), mesh, CPU)
    assert dist.group.WORLD is not None
    meter = Meter(dist.group.WORLD, CPU, tokens_per_step=2048, flops_per_token=0.0, peak_flops=None)
    meter.start()

    def run(steps: int) -> None:
        with PacedGarbageCollection(freq=50) as garbage:
            for _ in range(steps):
                stats = trainer.train_step([on_device(batch, CPU) for batch in next_step()])
                meter.update(trainer.step, stats, lr=trainer.schedule(trainer.step), data_wait_s=0.0, bad_rows=0)
                garbage.after_step(trainer.step)
        meter.flush()

    return run


def compare(layout: Sequence[str], wrap: str, accumulation: int, rounds: int, steps: int, threads: int) -> list[float]:
    """Seconds of each round: trainer, bare, trainer, bare, ..."""
    torch.set_num_threads(threads)
    config = configuration(layout, accumulation)
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = config.training.local_batch_size
    batches = [
        [
            Batch(tokens, labels, torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
            for tokens, labels in torch.randint(4096, (accumulation, 2, rows, 256), generator=generator)
        ]
        for _ in range(4)
    ]
    model = bare_model(config)
    if wrap == "DDP":
        model = DistributedDataParallel(model)
    elif wrap in ("FSDP2", "replicate"):
        apply: Any = fully_shard if wrap == "FSDP2" else replicate
        keep = {"reshard_after_forward": False} if wrap == "FSDP2" else {}
        for part in (model.get_submodule("tok_embeddings"), *model.get_submodule("layers").children()):
            apply(part)
        apply([model.get_submodule("norm"), model.get_submodule("output")], **keep)
        apply(model)
    sides = [trainer_loop(config, cycle(batches).__next__), bare_loop(model, cycle(batches).__next__)]
    for warm_up in sides:
        warm_up(2)
    seconds = []
    for round_ in range(rounds):
        times = {}
        for side in (0, 1) if round_ % 2 == 0 else (1, 0):
            # The trainer freezes all objects once when a run starts: keep that out of the timed steps.
            gc.collect()
            gc.freeze()
            dist.barrier()
            start = perf_counter()
            sides[side](steps)
            dist.barrier()
            times[side] = perf_counter() - start
        seconds += [times[0], times[1]]
    return seconds


def waiting(steps: int, threads: int) -> list[float]:
    """(seconds per step, seconds of them spent waiting) on the standard library's text."""
    torch.set_num_threads(threads)
    config = configuration([], 1)
    tokenizer = prepare_tokenizer(config.tokenizer, config.data.sources, vocab_size=4096)
    loader = build_loader(
        config.data,
        tokenizer,
        seq_len=256,
        vocab_size=4096,
        global_batch_size=8,
        local_batch_size=8,
        data_rank=0,
        data_degree=1,
    )
    run = trainer_loop(config, loader.next_step)
    run(2)
    before, start = loader.wait_s, perf_counter()
    run(steps)
    elapsed, waited = perf_counter() - start, loader.wait_s - before
    loader.close()
    return [elapsed / steps, waited / steps]


def main(processes: Literal[1, 2] = 1, rounds: int = 8, steps: int = 4) -> None:
    threads = threads_per_process(processes)
    cases: list[tuple[str, str, list[str]]] = [("1 process", "plain torch", [])]
    if processes == 2:
        # Both sides reduce at the last microbatch only, so they communicate the same.
        cases = [
            ("dp_shard 2", "FSDP2", ["--parallelism.dp_shard=2", "--parallelism.gradient_sync=last"]),
            ("dp_replicate 2", "replicate", ["--parallelism.dp_replicate=2", "--parallelism.dp_shard=1"]),
            ("dp_replicate 2", "DDP", ["--parallelism.dp_replicate=2", "--parallelism.dp_shard=1"]),
        ]
    print(f"{'trainer':<16}{'bare loop':<14}{'accumulation':>13}{'ms/step':>9}{'tokens/s':>10}{'bare':>8}   ratio")
    for layout_name, bare_name, layout in cases:
        for accumulation in (1, 4):
            arguments = (layout, bare_name, accumulation, rounds, steps, threads)
            seconds = run_ranks(compare, processes, *arguments, timeout_s=3600)[0]
            trainer, bare = seconds[0::2], seconds[1::2]
            trainer_s, bare_s = statistics.median(trainer) / steps, statistics.median(bare) / steps
            ratios = spread([b / t for t, b in zip(trainer, bare, strict=True)], ".3f")
            print(
                f"{layout_name:<16}{bare_name:<14}{accumulation:>13}{1000 * trainer_s:>9.0f}"
                f"{2048 / trainer_s:>10.0f}{2048 / bare_s:>8.0f}   {ratios}"
            )
    if processes == 1:
        step_s, wait_s = run_ranks(waiting, 1, 4 * steps, threads, timeout_s=3600)[0]
        print(f"waiting for real data: {wait_s / step_s:.2%} of a step of {1000 * step_s:.0f} ms")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
