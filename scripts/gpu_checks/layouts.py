"""Check 6: two ranks against float64, and one rank of eight with simulated communication."""

import hashlib
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_checks.processes import Call, Outcome, Send, run_calls
from gpu_checks.rows import Emit, Found, SkippedError, WrongError, require_errors, run_case
from gpu_checks.workload import (
    BOUNDS,
    Operations,
    Setup,
    configure,
    difference,
    dtypes,
    fill_,
    on_this_device,
    random_batch,
    reference,
    small_model,
    split,
    step_errors,
)
from titanlite.assembly.job import job_of
from titanlite.assembly.model import build_model, build_trainer
from titanlite.batch import Batch
from titanlite.config.schema import JobConfig
from titanlite.models.attention import pin_kernels
from titanlite.models.family import resolve_model
from titanlite.parallel.mesh import Mesh
from titanlite.planning.estimate import estimate
from titanlite.ranks.distributed import World
from titanlite.ranks.network import init_process_group
from titanlite.runtime.determinism import apply_determinism
from titanlite.runtime.memory import GIB
from titanlite.runtime.torch_internals import clear_sharding_cache
from titanlite.tools.parity.measure import full_tensor, named_parameters
from titanlite.trainer import Trainer

CHECK = "6 layouts"
ROWS = 8
LIMIT_S = 120.0
LAYOUTS = {
    "dp_shard 2": ["parallelism.dp_shard=2"],
    "dp_replicate 2": ["parallelism.dp_replicate=2", "parallelism.dp_shard=1"],
    "tp 2": ["parallelism.tp=2", "parallelism.dp_shard=1"],
    "pp 2": ["parallelism.pp=2", "parallelism.dp_shard=1", "training.local_batch_size=8"],
    "cp 2": ["parallelism.cp=2", "parallelism.dp_shard=1"],
    "ep 2": [
        *("model.family=qwen3_moe", "model.n_experts=8", "model.n_active_experts=2", "model.head_dim=16"),
        *("parallelism.ep=2", "parallelism.dp_shard=2"),
    ],
    "cp 2, gather": ["parallelism.cp=2", "parallelism.context_parallel=gather", "parallelism.dp_shard=1"],
}
UNIT = ("training.bit_equal=true", "training.local_batch_size=1", "parallelism.pp_microbatch_size=1")
BITS = {name: [*LAYOUTS[name], *UNIT] for name in ("dp_shard 2", "dp_replicate 2", "pp 2")}
"""Layouts whose weights are those of one process, bit for bit."""
SIMULATED = 8
"""Ranks of the simulated world."""
PLAN_ERRORS = (-0.03, 0.15)
"""Bounds of the relative error of the planned memory of a rank: what is planned to fit must fit. The plan is for blocks
that run operation by operation; compiled ones keep less."""
BITS_SEQ_LEN = 4096
"""Tokens of a row, so that a kernel adds up many blocks of keys, in an order that it might not fix."""


def check(emit: Emit, setup: Setup) -> None:
    """All layouts of two ranks: with NCCL on two GPUs, with gloo on a CPU."""
    for name, settings in LAYOUTS.items():
        emit(run_case(CHECK, name, partial(compare, setup, settings)))
    alone = run_ranks(setup, rank_bits, [*UNIT], ranks=1)
    for name, settings in BITS.items():
        emit(run_case(CHECK, f"bits of {name}", partial(same_bits, setup, settings, alone)))


def run_ranks(setup: Setup, function: Callable[..., None], *args: Any, ranks: int = 2) -> list[Outcome]:
    """Call function(send, setup, world, store, *args) on the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        worlds = [World(rank, rank, ranks, setup.device_type) for rank in range(ranks)]
        return run_calls([Call(function, (setup, world, store, *args)) for world in worlds], setup.device_type, LIMIT_S)


def first_failure(outcomes: list[Outcome]) -> str | None:
    """The last line of the failure of a rank; one that is more than a consequence if possible."""
    lines = [outcome.failure.strip().splitlines()[-1] for outcome in outcomes if outcome.failure is not None]
    return min(lines, key=lambda line: "did not end" in line or "ended with code" in line) if lines else None


def connect(world: World, store: str, config: JobConfig) -> Mesh:
    """Join the process group of the ranks, as in training."""
    apply_determinism(config.debug)
    pin_kernels(world.device)
    init_process_group(world, dist.FileStore(store, world.size), config.comm)
    mesh = Mesh(config.parallelism, world)
    mesh.connect(config.comm)
    return mesh


def compare(setup: Setup, settings: list[str]) -> Found:
    """Loss and gradients of a step in float64 on two ranks, against one process."""
    outcomes = require_sent(run_ranks(setup, rank_step, settings))
    errors: dict[str, float] = {}
    names: set[str] = set()
    for outcome in outcomes:
        ((rank_errors, rank_names),) = outcome.sent
        errors |= {name: max(error, errors.get(name, 0.0)) for name, error in rank_errors.items()}
        names |= set(rank_names)
    config = layout_config(setup, settings)
    missing = reference(config, layout_batch(config)).gradients.keys() - names
    if missing:
        raise WrongError(f"no rank has a gradient of {min(missing)}")
    return require_errors(errors, dict.fromkeys(errors, BOUNDS["float64"]))


def require_sent(outcomes: list[Outcome]) -> list[Outcome]:
    """The outcomes. Raises WrongError if a rank has failed."""
    if (failure := first_failure(outcomes)) is not None:
        raise WrongError(failure)
    return outcomes


def same_bits(setup: Setup, settings: list[str], alone: list[Outcome]) -> Found:
    """The weights after three steps on two ranks, against those of one process. alone: its outcome."""
    (expected,) = require_sent(alone)[0].sent
    outcomes = require_sent(run_ranks(setup, rank_bits, settings))
    found = {name: bits for outcome in outcomes for part in outcome.sent for name, bits in part.items()}
    if different := [name for name in expected if found.get(name) != expected[name]]:
        raise WrongError(f"{len(different)} of {len(expected)} weights differ, such as {different[0]}")
    return Found(f"{len(expected)} weights are equal to the last bit after 3 steps")


def rank_bits(send: Send, setup: Setup, world: World, store: str, settings: list[str]) -> None:
    """Three steps in bfloat16; sends the digests of this rank's weights."""
    own = [*dtypes("bfloat16"), "training.mixed_precision_reduce=float64", *settings]
    own += [] if setup.tiny else [f"training.seq_len={BITS_SEQ_LEN}"]
    config = layout_config(setup, own, world.size)
    mesh = connect(world, store, config)
    job = job_of(config, world.size)
    trainer = build_trainer(job, build_model(config, mesh, world.device), mesh, world.device)
    for step in range(3):
        batch = split(random_batch(config, ROWS, seed=step), job.step.batches, mesh.data_rank, mesh.data_degree)
        trainer.train_step(on_this_device(trainer, batch))
    whole = {name: full_tensor(parameter.detach()).cpu() for name, parameter in named_parameters(trainer)}
    send({name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in whole.items()})
    dist.barrier()
    dist.destroy_process_group()


def layout_config(setup: Setup, settings: list[str], ranks: int = 2) -> JobConfig:
    sizes = [*small_model(setup, "llama3"), "training.local_batch_size=2", f"training.global_batch_size={ROWS}"]
    return configure(setup, *sizes, *dtypes("float64"), "training.max_norm=0.0", *settings, world_size=ranks)


def layout_batch(config: JobConfig) -> Batch:
    """The global batch. With cp, its rows have documents."""
    return random_batch(config, ROWS, documents=(5, 11) if config.parallelism.cp > 1 else ())


def rank_step(send: Send, setup: Setup, world: World, store: str, settings: list[str]) -> None:
    """A step on this rank; sends its errors and the names of its parameters."""
    config = layout_config(setup, settings)
    mesh = connect(world, store, config)
    job = job_of(config, mesh.world.size)
    trainer = build_trainer(job, build_model(config, mesh, world.device), mesh, world.device)
    batch = layout_batch(config)
    own = on_this_device(trainer, split(batch, job.step.batches, mesh.data_rank, mesh.data_degree))
    stats = trainer.train_step(own)
    loss = stats.mean_loss.clone()
    dist.all_reduce(loss)
    expected = reference(config, batch)
    errors = step_errors(trainer, loss, expected)
    norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in expected.gradients.values()]))
    errors["gradient norm"] = difference(stats.grad_norm, norm)
    send((errors, [name for name, _ in named_parameters(trainer)]))
    dist.barrier()
    dist.destroy_process_group()


def check_simulated(emit: Emit, setup: Setup) -> None:
    """Rank 0 of eight, whose collectives return at once and move no data."""
    emit(run_case(CHECK, f"products of rank 0 of {SIMULATED}", partial(simulated_products, setup)))
    emit(run_case(CHECK, f"8B, rank 0 of {SIMULATED}", partial(simulated_8b, setup)))


def simulated_trainer(setup: Setup, config: JobConfig) -> Trainer:
    """The trainer of rank 0, in a new simulated process group."""
    pin_kernels(setup.device)
    clear_sharding_cache()  # which refers to meshes of an earlier group
    dist.init_process_group("fake", rank=0, world_size=SIMULATED)
    mesh = Mesh(config.parallelism, World(0, 0, SIMULATED, setup.device_type))
    mesh.connect(None)
    model = build_model(config, mesh, setup.device, draws_weights=False)
    trainer = build_trainer(job_of(config, mesh.world.size), model, mesh, setup.device)
    fill_(trainer)
    return trainer


PRODUCTS = ("aten.mm", "aten.addmm", "aten.addmm_", "aten.bmm")
"""Matrix products. Attention is another operation."""


def simulated_products(setup: Setup) -> Found:
    """FLOPs of the products of a sharded step, against the formula by which MFU and the structure count."""
    sizes = [*small_model(setup, "llama3"), "training.local_batch_size=1", f"training.global_batch_size={SIMULATED}"]
    config = configure(setup, *sizes, *dtypes("bfloat16"), "parallelism.dp_shard=-1", world_size=SIMULATED)
    family, hyper_parameters = resolve_model(config.model)
    trainer = simulated_trainer(setup, config)
    try:
        batches = on_this_device(trainer, [random_batch(config, 1)])
        with Operations() as operations:
            trainer.train_step(batches)
    finally:
        dist.destroy_process_group()
    factors = [shapes[-2:] for name, shapes in operations.found if name.rpartition(".")[0] in PRODUCTS]
    flops = sum(2 * left.numel() * right[-1] for left, right in factors)
    # The formula is linear in the sequence length; without it, no attention is left.
    expected = config.training.seq_len * family.flops_per_token(hyper_parameters, 0)
    if flops != expected:
        raise WrongError(f"{flops:,} FLOPs, not {expected:,}")
    return Found(f"{expected:,} FLOPs, as by the formula of MFU")


def require_planned(measured: int, planned: int) -> str:
    """Compare the peak memory with that of the plan, in bytes; returns both as text. Raises WrongError."""
    error = planned / measured - 1
    least, most = PLAN_ERRORS
    text = f"{measured / GIB:.2f} GiB at the peak, planned {planned / GIB:.2f}"
    text += f" ({error:+.1%}; bounds {least:+.0%} and {most:+.0%})"
    if not least <= error <= most:
        raise WrongError(text)
    return text


def simulated_8b(setup: Setup) -> Found:
    """Memory of rank 0 of the shipped 8B configuration against the structure, and its step without communication."""
    if setup.device_type == "cpu" or setup.tiny:
        raise SkippedError("needs CUDA and the full size")
    settings = ["job.config_file=llama3_8b", "training.local_batch_size=1", f"training.global_batch_size={SIMULATED}"]
    config = configure(setup, *settings, "parallelism.dp_shard=-1", "checkpoint.enable=false", world_size=SIMULATED)
    planned = estimate(config, SIMULATED, device_type="cuda").largest.memory.total
    trainer = simulated_trainer(setup, config)
    try:
        batches = on_this_device(trainer, [random_batch(config, 1)])
        for _ in range(2):
            trainer.train_step(batches)
        setup.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(3):
            trainer.train_step(batches)
        setup.synchronize()
        seconds = (time.perf_counter() - start) / 3
    finally:
        dist.destroy_process_group()
    measured = torch.cuda.max_memory_allocated()
    values = {"GiB": measured / GIB, "planned GiB": planned / GIB, "step s": seconds}
    text = require_planned(measured, planned)
    rate = config.training.seq_len / seconds
    return Found(f"{text}; {rate:,.0f} tokens/s without communication, on meaningless numbers", values)
