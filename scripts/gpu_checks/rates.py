"""Check 12: rates of parts of a step and of a save: beside work of the GPU, and for the choices that titanlite made."""

import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from gpu_checks.device import occupied
from gpu_checks.profiling import recorded, rows
from gpu_checks.rows import Emit, Found, SkippedError, Value, WrongError, require_errors, run_case
from gpu_checks.steps import RECOMPUTE
from gpu_checks.workload import (
    Operations,
    Setup,
    build,
    configure,
    difference,
    dtypes,
    on_this_device,
    one_rank,
    random_batch,
    small_model,
)
from titanlite.checkpoint.storage import save_tensors
from titanlite.models.experts import Experts, grouped_feed_forward
from titanlite.models.head import LossComputation, OutputLayer
from titanlite.runtime.memory import GIB

CHECK = "12 rates"
SAVED_BYTES = GIB
TENSORS = 64
MOST_SLOWER = 1.5
"""Time of a save beside a busy GPU, relative to that beside an idle one: it takes the host's memory, not the GPU."""
CHUNKS = (2092, 2048)
"""Tokens of a chunk of the loss: what fits into its memory, and a multiple of 128 below."""
MOST_OFF = 1.05
"""Time of the loss with automatic chunks, relative to that with the best of CHUNKS."""
GROUPED = "aten._grouped_mm.default"
PRODUCTS = 9
"""Grouped products of a layer: 3 forward, and 2 backward for each."""


def check(emit: Emit, setup: Setup) -> None:
    emit(run_case(CHECK, "a save beside a busy GPU", partial(save_beside, setup)))
    with one_rank(setup):
        emit(run_case(CHECK, "products of experts", partial(expert_products, setup)))
        emit(run_case(CHECK, "a layer of 30B-A3B", partial(expert_layer, setup, emit)))
    emit(run_case(CHECK, "chunks of the loss", partial(chunks, setup)))
    emit(run_case(CHECK, "gradient of the output layer", partial(output_gradient, setup)))


class Busy(Protocol):
    """Keeps the device busy for so many seconds; returns a function that says whether it still is."""

    def __call__(self, seconds: float) -> Callable[[], bool]: ...


def busy_stream(seconds: float) -> Callable[[], bool]:
    """The default stream."""
    occupied(seconds)
    event = torch.cuda.Event()
    event.record()
    return lambda: not event.query()


def save_beside(setup: Setup) -> Found:
    """Save tensors of the host in a thread, as an asynchronous checkpoint does."""
    if setup.device_type == "cpu":
        raise SkippedError("needs CUDA")
    memory = Path("/dev/shm")
    in_memory = memory.is_dir() and shutil.disk_usage(memory).free > 2 * SAVED_BYTES
    with tempfile.TemporaryDirectory(dir=memory if in_memory else setup.folder) as folder:
        size = SAVED_BYTES // (8 if setup.tiny else 1)
        tensors = {f"w{index}": torch.ones(size // TENSORS // 4) for index in range(TENSORS)}

        def save(name: str) -> None:
            place = Path(folder, name)
            place.mkdir()
            save_tensors(place, tensors, tensors, None)
            shutil.rmtree(place)

        return judge_save(save, busy_stream, size)


def judge_save(save: Callable[[str], None], busy: Busy, size: int) -> Found:
    """Compare the time of a save beside a busy device with that beside an idle one."""
    save("first")  # allocates, and imports
    idle_s = timed(partial(save, "idle"))
    still_busy = busy(3 * idle_s + 2)
    failures: list[BaseException] = []

    def in_thread() -> None:
        try:
            save("busy")
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=in_thread)
    begin = time.perf_counter()
    thread.start()
    thread.join()
    busy_s, was_busy = time.perf_counter() - begin, still_busy()
    if failures:
        raise failures[0]
    text = f"{size / GIB:.2f} GiB in {busy_s:.2f} s, beside an idle GPU in {idle_s:.2f} s"
    if not was_busy or busy_s > MOST_SLOWER * idle_s + 0.1:
        raise WrongError(f"{text} (bound {MOST_SLOWER:g} times): the save waited for the GPU")
    return Found(text, {"busy s": busy_s, "idle s": idle_s, "bytes/s": size / busy_s})


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def layer_settings(setup: Setup) -> list[str]:
    model = small_model(setup, "qwen3_moe")
    if not setup.tiny:
        model = ["model.family=qwen3_moe", "model.flavor=30B-A3B", "training.seq_len=8192"]
    return [
        *model,
        "model.n_layers=1",
        "training.local_batch_size=1",
        "training.global_batch_size=1",
        *dtypes("bfloat16"),
    ]


def expert_products(setup: Setup) -> Found:
    """With recomputation by op, a step computes each grouped product once."""
    config = configure(setup, *layer_settings(setup), *RECOMPUTE["by op"])
    trainer = build(setup, config, draws_weights=False)
    if setup.device_type == "cpu":  # which computes them expert by expert
        for experts in (module for part in trainer.model_parts for module in part.modules()):
            if isinstance(experts, Experts):
                experts.feed_forward = grouped_feed_forward
    batches = on_this_device(trainer, [random_batch(config, 1)])
    trainer.train_step(batches)
    with Operations() as operations:
        trainer.train_step(batches)
    count = Counter(name for name, _ in operations.found)[GROUPED]
    if count != PRODUCTS:
        raise WrongError(f"{count} grouped products, not {PRODUCTS}")
    return Found(f"{count}, none of them again in backward", {"products": count})


def expert_layer(setup: Setup, emit: Emit) -> Found:
    """Time of a step, and its kernels with most time."""
    config = configure(setup, *layer_settings(setup))
    trainer = build(setup, config, draws_weights=False)
    batches = on_this_device(trainer, [random_batch(config, 1)])
    seconds = setup.seconds(lambda: trainer.train_step(batches))
    for row in rows(CHECK, recorded(setup, lambda: trainer.train_step(batches)), "a layer of 30B-A3B, "):
        emit(row)
    return Found(f"{1000 * seconds:.1f} ms per step with embedding and loss", {"s": seconds}, measured=True)


def loss_and_gradients(setup: Setup, chunk: int | str) -> Callable[[], None]:
    """That of the output layer of an 8B."""
    tokens, dim, vocab = (64, 64, 131) if setup.tiny else (8192, 4096, 128_256)
    with setup.device:
        layer = OutputLayer(dim, vocab).to(torch.bfloat16)
        x = torch.randn(1, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(vocab, (1, tokens))
    layer.computation = LossComputation(chunk_tokens=chunk)  # type: ignore[arg-type]
    count = torch.tensor([tokens], device=setup.device)
    return lambda: layer(x, labels, count).sum().backward()


def chunks(setup: Setup) -> Found:
    """Time of the loss and its gradients by the size of a chunk."""
    found: dict[str, float] = {}
    for chunk in ("auto", *CHUNKS):
        found[str(chunk)] = 1000 * setup.seconds(loss_and_gradients(setup, chunk))
    return judge_chunks(found, is_bound=not setup.tiny)


def judge_chunks(found: dict[str, float], *, is_bound: bool) -> Found:
    best = min(found, key=lambda name: found[name])
    text = ", ".join(f"{name} {ms:.2f} ms" for name, ms in found.items())
    if is_bound and found["auto"] > MOST_OFF * found[best]:
        raise WrongError(f"{text}: chunks of {best} tokens are faster than automatic ones (bound {MOST_OFF:g} times)")
    return Found(text, {f"{name} ms": ms for name, ms in found.items()}, measured=not is_bound)


def output_gradient(setup: Setup) -> Found:
    """The gradient of the output layer: as titanlite adds it up, and by torch's product with a sum in float32."""
    tokens, dim, vocab = (64, 64, 131) if setup.tiny else (2048, 4096, 128_256)
    with setup.device:
        scores = torch.randn(tokens, vocab).to(torch.bfloat16)
        x = torch.randn(tokens, dim).to(torch.bfloat16)
        total = torch.zeros(vocab, dim)
    exact = scores[:, :64].double().T @ x.double()

    def by_parts() -> None:
        for part, of_ids in zip(total.split(4096), scores.split(4096, 1), strict=True):
            part += of_ids.T @ x

    def at_once() -> Tensor:
        return torch.addmm(total, scores.T, x, out_dtype=torch.float32)

    by_parts()
    errors = {"by parts": difference(total[:64], exact)}
    values: dict[str, Value] = {"by parts ms": 1000 * setup.seconds(by_parts)}
    total.zero_()
    with suppress(TypeError, RuntimeError):  # this torch, or a CPU, has no such product
        errors["at once"] = difference(at_once()[:64], exact)
        values["at once ms"] = 1000 * setup.seconds(at_once)
    require_errors(errors, dict.fromkeys(errors, torch.finfo(torch.bfloat16).eps))
    text = ", ".join(f"{name} {value:.2f}" for name, value in values.items() if isinstance(value, float))
    return Found(f"{text}; off by at most {max(errors.values()):.1e}", values)
