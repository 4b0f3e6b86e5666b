"""Check 4: a step never waits for the device, and is compiled once."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from gpu_checks.rows import Emit, Found, SkippedError, WrongError, run_case
from gpu_checks.steps import RECOMPUTE, ROWS, document_lengths, settings
from gpu_checks.workload import (
    Operations,
    Setup,
    build,
    compiled,
    configure,
    on_this_device,
    one_rank,
    random_batch,
    split,
)
from titanlite.batch import Batch
from titanlite.runtime.torch_internals import compiled_graphs, reset_compiler, strict_compiler
from titanlite.trainer import Trainer

CHECK = "4 waits and graphs"
MOST_GRAPHS = 5
"""All blocks share one; two for the loss, whose last chunk of tokens may be shorter; one for the mask of documents on a
GPU; one to spare. A graph per layer or per microbatch would exceed it, or be compiled in later steps."""


def check(emit: Emit, setup: Setup) -> None:
    modes: dict[str, tuple[list[str], bool]] = {
        "eager": ([], False),
        "eager, documents": ([], True),
        "recompute by op": (RECOMPUTE["by op"], False),
        "compiled": (compiled(setup), False),
        "compiled, documents": (compiled(setup), True),
        "compiled, recompute by op, documents": ([*compiled(setup), *RECOMPUTE["by op"]], True),
    }
    with one_rank(setup):
        for name, (extra, documents) in modes.items():
            find: Callable[..., Found]
            if setup.tiny and "compiled" in name and not name.endswith("by op, documents"):
                continue  # compiling takes most of the time
            for what, find in ("no wait for the device", no_wait), ("graphs", graphs), ("host reads", no_host_read):
                is_compiled = "compiled" in name
                if (find is graphs) == is_compiled or find is no_wait:
                    emit(run_case(CHECK, f"{what}, {name}", partial(find, setup, extra, documents)))


def prepared(
    setup: Setup, extra: Sequence[str], documents: bool, family: str = "llama3"
) -> tuple[Trainer, Callable[[int], list[Batch]]]:
    """A trainer after two steps, and a function that returns the batches of a step on the device."""
    reset_compiler()
    config = configure(setup, *settings(setup, family, "bfloat16"), *extra)
    trainer = build(setup, config)

    def batches(step: int) -> list[Batch]:
        lengths = document_lengths(setup)[step % 3 :] if documents else ()
        return on_this_device(trainer, split(random_batch(config, ROWS, seed=step, documents=lengths), 2))

    for step in range(2):
        trainer.train_step(batches(step))
    setup.synchronize()
    return trainer, batches


def no_wait(setup: Setup, extra: Sequence[str], documents: bool) -> Found:
    """CUDA's own debug mode raises on every call that waits for the device."""
    if setup.device_type == "cpu":
        raise SkippedError("needs CUDA")
    trainer, batches = prepared(setup, extra, documents)
    with waits_are_errors():
        for step in range(2, 5):
            trainer.train_step(batches(step))
    setup.synchronize()
    return Found("3 steps, also their copies to the device")


@contextmanager
def waits_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


HOST_READS = (
    *("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.masked_select.default"),
    "aten.equal.default",
)
"""Operations that read a number of a tensor on the host, or whose output size depends on one."""


def no_host_read(setup: Setup, extra: Sequence[str], documents: bool) -> Found:
    """The same by the operations of an eager step, on any device."""
    trainer, batches = prepared(setup, extra, documents)
    own = batches(2)
    with Operations() as operations:
        trainer.train_step(own)
    return require_no_reads(operations)


def require_no_reads(operations: Operations) -> Found:
    if reads := Counter(name for name, _ in operations.found if name in HOST_READS):
        raise WrongError(f"the host read numbers in a step: {dict(reads)}")
    return Found("none in a step")


def graphs(setup: Setup, extra: Sequence[str], documents: bool) -> Found:
    """Number of compiled graphs; later steps with other rows and documents compile nothing."""
    reset_compiler()
    before = compiled_graphs()
    trainer, batches = prepared(setup, extra, documents)
    first = compiled_graphs()
    with strict_compiler(recompiles=False):
        for step in range(2, 5):
            trainer.train_step(batches(step))
    setup.synchronize()
    count, breaks, later = first[0] - before[0], first[1] - before[1], compiled_graphs()[0] - first[0]
    if not 1 <= count <= MOST_GRAPHS or breaks or later:
        raise WrongError(f"{count} graphs (bound {MOST_GRAPHS}), {breaks} graph breaks, {later} more in later steps")
    return Found(f"{count}, no graph break, none compiled in later steps", {"graphs": count})
