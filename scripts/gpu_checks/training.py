"""Check 10: steps of all options never wait for the device; wrapped ranks; saved copies; deterministic kernels."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu_checks.attention import deterministic_algorithms
from gpu_checks.device import occupied
from gpu_checks.layouts import SIMULATED, simulated_trainer
from gpu_checks.rows import Emit, Found, WrongError, run_case
from gpu_checks.steps import ROWS, compare, repeats, settings
from gpu_checks.syncs import prepared, require_no_reads, waits_are_errors
from gpu_checks.workload import (
    Operations,
    Setup,
    build,
    compiled,
    configure,
    dtypes,
    on_this_device,
    one_rank,
    random_batch,
    small_model,
    split,
    take_step,
)
from titanlite.batch import Batch
from titanlite.checkpoint.manifest import Branch, Manifest
from titanlite.checkpoint.saver import Saver
from titanlite.checkpoint.state import HostCopy
from titanlite.config.schema import JobConfig
from titanlite.faults.skipped import SkippedSteps
from titanlite.generation.generate import Sampling, choose
from titanlite.metrics.meter import Meter, Work
from titanlite.parallel.data import wrapped_modules
from titanlite.runtime.determinism import DebugConfig, apply_determinism
from titanlite.runtime.torch_internals import local_part
from titanlite.tools.parity.measure import named_parameters
from titanlite.trainer import Trainer

CHECK = "10 training"
WITHOUT_WAITS = {
    "qwen3_moe": ("qwen3_moe", ()),
    "qwen3_next": ("qwen3_next", ()),
    "Muon": ("llama3", ("optimizer.name=Muon",)),
    "Lion": ("llama3", ("optimizer.name=Lion",)),
    "bfloat16 moments": ("llama3", ("optimizer.state_dtype=bfloat16",)),
    "average, spikes, z-loss": (
        "llama3",
        ("optimizer.ema_decay=0.99", "faults.spike_factor=4", "faults.on_spike=skip", "loss.z_loss=0.0001"),
    ),
    "two sources": ("llama3", ("data.sources.1.kind=tokens", "data.sources.1.path=other.npy")),
}
"""Name -> family, and settings."""
BIT_EQUAL = (
    *dtypes("bfloat16"),
    *("training.mixed_precision_reduce=float64", "training.bit_equal=true", "training.local_batch_size=1"),
)
SEQ_LEN = 4096
"""With bit_equal: a kernel adds up many blocks of keys, in an order that it might not fix."""
DELAY_S = 0.3
"""Time for which a copy to the host is held back."""


def check(emit: Emit, setup: Setup) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it once
    with one_rank(setup):
        for name, (family, extra) in WITHOUT_WAITS.items():
            emit(run_case(CHECK, f"no wait: {name}", partial(no_wait, setup, family, extra)))
        emit(run_case(CHECK, "one wrapped rank", partial(wrapped_rank, setup)))
    emit(run_case(CHECK, f"no wait: rank 0 of {SIMULATED}, sharded", partial(no_wait_sharded, setup)))
    apply_determinism(DebugConfig(deterministic=True))  # as bit_equal does on GPUs
    with one_rank(setup):
        emit(run_case(CHECK, "copies of a save", partial(copies, setup)))
        for mode in ("eager",) if setup.tiny else ("eager", "compiled"):
            emit(run_case(CHECK, f"bit_equal twice, {mode}", partial(bits_twice, setup, mode == "compiled")))
        step = partial(compare, setup, "qwen3_next", "float64", True)
        emit(run_case(CHECK, "a deterministic step, qwen3_next", step))
        emit(run_case(CHECK, "deterministic samples", partial(samples, setup)))


def no_wait(setup: Setup, family: str, extra: Sequence[str]) -> Found:
    """Steps with what follows each of them in training: the meter, the record of skipped steps, a save in a thread."""
    config = configure(setup, *settings(setup, family, "bfloat16"), *extra)
    trainer, batches = prepared(setup, extra, False, family)
    with ExitStack() as stack:
        after_step = followed(setup, config, trainer, stack)
        after_step(2, trainer.train_step(batches(2)))
        setup.synchronize()
        return watched(setup, lambda step: after_step(step, trainer.train_step(batches(step))))


def watched(setup: Setup, take: Callable[[int], object]) -> Found:
    """Two steps, in which CUDA's own debug mode raises on a wait; on a CPU, no operation may read a number."""
    if setup.device_type == "cuda":
        with waits_are_errors():
            for step in (3, 4):
                take(step)
        setup.synchronize()
        return Found("2 steps")
    with Operations() as operations:
        take(3)
    return require_no_reads(operations)


def followed(setup: Setup, config: JobConfig, trainer: Trainer, stack: ExitStack) -> Callable[[int, Any], None]:
    """A function of a step and its StepStats."""
    group, device = dist.new_group(backend="gloo"), trainer.device
    names = [f"source {number}" for number in range(len(config.data.sources))]
    work = Work(1, 1.0)
    of_meter: Any = {"work": lambda _: work, "peak_flops": None, "sources": names, "terms": config.terms}
    meter = Meter(trainer.data_group, device, **of_meter, watched=trainer.watched)
    loader: Any = SimpleNamespace(first_sequence=0, sequences=range(ROWS), origin_values=None)
    recorder: Any = None
    skipped = SkippedSteps(config.faults, trainer.model_parts, [0], loader, group, recorder, counts_loss=True)
    mode = "async_with_pinned_mem" if setup.device_type == "cuda" else "async"
    folder = Path(tempfile.mkdtemp(dir=setup.folder))
    saver = Saver(folder, group, mode, device, list)  # type: ignore[arg-type]
    trainer.before_update = saver.hold_copies
    tensors = saved(trainer)
    stack.callback(require_saved, saver)

    def after_step(step: int, stats: Any) -> None:
        skipped.note(step, stats)
        meter.update(step, stats, lr=0.0, data_wait_s=0.0, bad_rows=0)
        saver.begin(Manifest(step, "full", (Branch("a", 0),), {}, {}, {}, {}, "", {}), tensors)

    return after_step


def require_saved(saver: Saver) -> None:
    if (failure := saver.take_failure()) is not None:
        raise WrongError(failure)


def saved(trainer: Trainer) -> dict[str, Tensor]:
    """What a checkpoint has of a trainer."""
    largest = {} if trainer.exact is None else trainer.exact.largest
    named: dict[str, Mapping[str, Tensor]] = {
        "model": dict(named_parameters(trainer)),
        "optimizer": dict(trainer.optimizer.named_state()),
        "exact": largest,
    }
    return {f"{kind}/{name}": tensor for kind, tensors in named.items() for name, tensor in tensors.items()}


def no_wait_sharded(setup: Setup) -> Found:
    """Rank 0 of a sharded model, whose collectives move no data."""
    sizes = [*small_model(setup, "llama3"), "training.local_batch_size=1", f"training.global_batch_size={SIMULATED}"]
    config = configure(setup, *sizes, *dtypes("bfloat16"), "parallelism.dp_shard=-1", world_size=SIMULATED)
    trainer = simulated_trainer(setup, config)
    try:
        require_wrapped(trainer)
        batches = on_this_device(trainer, [random_batch(config, 1)])
        for _ in range(2):
            trainer.train_step(batches)
        setup.synchronize()
        return watched(setup, lambda _: trainer.train_step(batches))
    finally:
        dist.destroy_process_group()


def require_wrapped(trainer: Trainer) -> None:
    if not any(True for part in trainer.model_parts for _ in wrapped_modules(part)):
        raise WrongError("the model is not wrapped: nothing is tested")


def wrapped_rank(setup: Setup) -> Found:
    """A rank that FSDP wraps, since its gradients are reduced in float64: its gradients, and no wait."""
    extra = ["training.mixed_precision_reduce=float64"]
    trainer, batches = prepared(setup, extra, False)
    require_wrapped(trainer)
    found = compare(setup, "llama3", "bfloat16", False, extra)
    watched(setup, lambda step: trainer.train_step(batches(step)))
    return Found(f"{found.text}; no wait", found.values)


def exact_trainer(setup: Setup, *extra: str) -> tuple[JobConfig, Trainer]:
    config = configure(setup, *settings(setup, "llama3", "bfloat16"), *BIT_EQUAL, *extra)
    return config, build(setup, config)


def copies(setup: Setup) -> Found:
    """What a save copies in the background is the state of its step, although the next step has begun."""
    config, trainer = exact_trainer(setup)
    batches: list[list[Batch]] = [split(random_batch(config, ROWS, seed=seed), ROWS) for seed in range(3)]
    host = HostCopy(pinned=setup.device_type == "cuda")
    trainer.before_update = host.hold
    for each in batches[:2]:
        take_step(trainer, each)
    local = {name: local_part(tensor) for name, tensor in saved(trainer).items()}
    host.begin(local)  # allocates
    host.wait()
    expected = {name: tensor.cpu().clone() for name, tensor in local.items()}
    stream = host._stream
    if stream is not None:
        with torch.cuda.stream(stream):
            occupied(DELAY_S)
    found = host.begin(local)
    take_step(trainer, batches[2])
    host.wait()
    setup.synchronize()
    if different := [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]:
        raise WrongError(f"{len(different)} of {len(expected)} copies have the next step, such as {different[0]}")
    changed = {
        name.partition("/")[0] for name, tensor in expected.items() if not torch.equal(tensor, local[name].cpu())
    }
    if len(changed) < 3:
        raise WrongError(f"the next step changed {', '.join(sorted(changed)) or 'nothing'}: the others are not tested")
    return Found(f"{len(expected)} copies, behind {DELAY_S:g} s of work, are those of their step")


def bits_twice(setup: Setup, is_compiled: bool) -> Found:
    """With bit_equal, which sets deterministic kernels on GPUs."""
    extra = [*settings(setup, "llama3", "bfloat16"), *BIT_EQUAL, *(compiled(setup) if is_compiled else ())]
    extra += [] if setup.tiny else [f"training.seq_len={SEQ_LEN}"]
    if setup.device_type == "cuda" and not configure(setup, *extra).debug.deterministic:
        raise WrongError("training.bit_equal does not set debug.deterministic")
    return repeats(setup, extra, False, ROWS)


def samples(setup: Setup) -> Found:
    """Tokens that are drawn with deterministic algorithms are those of the host without them."""
    generator = torch.Generator().manual_seed(0)
    for vocab_size in (200, 1000):  # sums by products, and on the host
        logits = 3 * torch.randn(64, vocab_size, generator=generator, dtype=torch.float64)
        for sampling, step in product((Sampling(temperature=0.8), Sampling(temperature=0.8, top_p=0.9)), range(4)):
            with deterministic_algorithms(False):
                expected = choose(logits, sampling, step)
            found = choose(logits.to(setup.device), sampling, step).cpu()
            if count := int((found != expected).sum()):
                raise WrongError(
                    f"{count} of {len(logits)} tokens differ from those of the host, top_p {sampling.top_p}"
                )
    return Found("tokens as on the host, at temperature 0.8, with and without top_p")
