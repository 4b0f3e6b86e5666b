"""Check 3: steps of one rank against float64, skipped steps, and repeated steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from gpu_checks.rows import Emit, Found, WrongError, require_errors, run_case
from gpu_checks.workload import (
    BOUNDS,
    EXPERTS,
    Setup,
    build,
    compiled,
    configure,
    dtypes,
    one_rank,
    random_batch,
    reference,
    small_model,
    split,
    step_errors,
    take_step,
)
from titanlite.batch import IGNORE_INDEX
from titanlite.runtime.determinism import DebugConfig, apply_determinism
from titanlite.runtime.torch_internals import reset_compiler
from titanlite.tools.parity.measure import full_tensor, named_parameters
from titanlite.trainer import Trainer

CHECK = "3 steps"
FAMILIES = ("llama3", "qwen3")
DENSE = ("gemma2", "gemma3", "mistral", "olmo2", "olmo3", "qwen2", "smollm3")
OTHERS = {**dict.fromkeys(DENSE, "bfloat16"), **dict.fromkeys(EXPERTS, "float64"), "qwen3_5": "float32"}
"""Families whose steps are compared in one dtype. In bfloat16, the gradient of qwen3_5's dt_bias is near the bound."""
ROWS = 4
RECOMPUTE = {"none": ["activation_checkpoint.mode=none"], "full": ["activation_checkpoint.mode=full"]}
RECOMPUTE["by op"] = ["activation_checkpoint.mode=selective", "activation_checkpoint.selective_policy=op"]
_OF_LLAMA3 = (
    ("bfloat16", "none", False),
    ("bfloat16", "by op", False),
    ("bfloat16", "full", False),
    ("bfloat16", "none", True),
    ("float32", "none", False),
    ("bfloat16", "by op", True),
)
COMPILED = {"llama3": _OF_LLAMA3, "qwen3": _OF_LLAMA3[-1:], "deepseek_v3": (("bfloat16", "none", True),)}
"""By family: dtype, recomputation and documents of the compiled steps; tiny: the last one. Compiling takes most of the
time."""
ALL_CHOSEN = {
    "deepseek_v3": [
        *(f"model.{key}=2" for key in ("n_experts", "n_active_experts")),
        *(f"model.{key}=1" for key in ("n_groups", "n_active_groups")),
    ]
}
"""Settings of the compiled steps of families with experts: in bfloat16, near ties would choose other ones."""


def document_lengths(setup: Setup) -> Sequence[int]:
    """Lengths of documents, of one token up to more than a block of 128."""
    return (5, 1, 7, 3, 16) if setup.tiny else (37, 1, 130, 61, 27)


def settings(setup: Setup, family: str, dtype: str) -> list[str]:
    sizes = [*small_model(setup, family), "training.local_batch_size=2"]
    return [*sizes, f"training.global_batch_size={ROWS}", "training.max_norm=1.0", *dtypes(dtype)]


def check_eager(emit: Emit, setup: Setup) -> None:
    """Both families, all dtypes, kinds of recomputation, with and without documents; skipped steps."""
    with one_rank(setup):
        for family, dtype, recompute, documents in product(FAMILIES, BOUNDS, RECOMPUTE, (False, True)):
            if setup.tiny and recompute != "none" and (family, dtype) != ("llama3", "bfloat16"):
                continue
            extra = RECOMPUTE[recompute]
            emit(
                run_case(
                    CHECK,
                    case_name(family, dtype, recompute, documents),
                    partial(compare, setup, family, dtype, documents, extra),
                )
            )
        for family, dtype in OTHERS.items():
            emit(run_case(CHECK, case_name(family, dtype, "none", True), partial(compare, setup, family, dtype, True)))
        for dtype in BOUNDS:
            name = f"{case_name('llama3', dtype, 'none', True)}, answers only"
            emit(run_case(CHECK, name, partial(compare, setup, "llama3", dtype, True, answers=True)))
        for dtype in BOUNDS:
            case = partial(skipped_step, setup, [*settings(setup, "llama3", dtype)])
            emit(run_case(CHECK, f"a step with an infinity, {dtype}", case))


def check_compiled(emit: Emit, setup: Setup, family: str) -> None:
    """Compiled steps of one family."""
    with one_rank(setup):
        for dtype, recompute, documents in COMPILED[family][-1:] if setup.tiny else COMPILED[family]:
            extra = [*RECOMPUTE[recompute], *compiled(setup), *ALL_CHOSEN.get(family, ())]
            name = f"{case_name(family, dtype, recompute, documents)}, compiled ({setup.backend})"
            emit(run_case(CHECK, name, partial(compare, setup, family, dtype, documents, extra)))
        if setup.tiny or family != "llama3":
            return  # the eager steps have one
        extra = [*settings(setup, family, "bfloat16"), *compiled(setup)]
        emit(run_case(CHECK, f"a step with an infinity, {family}, compiled", partial(skipped_step, setup, extra)))


def check_repeats(emit: Emit, setup: Setup) -> None:
    """Repeated steps with deterministic algorithms, which hold for the entire process."""
    apply_determinism(DebugConfig(deterministic=True))
    with one_rank(setup):
        pairs = (("eager", True), ("eager", False), ("compiled", True), ("compiled", False))
        for mode, documents in pairs[:1] if setup.tiny else pairs:
            extra = [*settings(setup, "llama3", "bfloat16"), *(compiled(setup) if mode == "compiled" else [])]
            name = f"repeated steps, {mode}{', documents' if documents else ''}"
            emit(run_case(CHECK, name, partial(repeats, setup, extra, documents)))


def case_name(family: str, dtype: str, recompute: str, documents: bool) -> str:
    again = "" if recompute == "none" else f", recompute {recompute}"
    return f"{family}, {dtype}{again}{', documents' if documents else ''}"


def compare(
    setup: Setup, family: str, dtype: str, documents: bool, extra: Sequence[str] = (), *, answers: bool = False
) -> Found:
    """Loss and gradients of a step of two microbatches against float64 on the host.

    answers: the documents are conversations, in which every second turn, of three tokens, has labels.
    """
    config = configure(setup, *settings(setup, family, dtype), *extra, "training.max_norm=0.0")
    if config.compile.enable:
        reset_compiler()  # the blocks of all models share one limit of recompilations
    batch = random_batch(config, ROWS, seed=int(answers), documents=document_lengths(setup) if documents else ())
    if answers:
        assert batch.positions is not None
        batch.labels[batch.positions % 6 < 3] = IGNORE_INDEX
    trainer = build(setup, config)
    stats = take_step(trainer, split(batch, 2))
    errors = step_errors(trainer, stats.mean_loss, reference(config, batch))
    return require_errors(errors, dict.fromkeys(errors, BOUNDS[dtype]))


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of the weights, and of moments and step counts."""
    tensors = dict(named_parameters(trainer)) | dict(trainer.optimizer.named_state())
    return {name: full_tensor(tensor.detach()).clone() for name, tensor in tensors.items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(before[name], after[name])]


def skipped_step(setup: Setup, all_settings: Sequence[str]) -> Found:
    """A step whose forward pass overflows changes no weight, no moment and no step count; the next one changes all."""
    reset_compiler()
    config = configure(setup, *all_settings)
    trainer = build(setup, config)
    batches = split(random_batch(config, ROWS), 2)
    first = take_step(trainer, batches)
    before = state(trainer)
    norm = trainer.model_parts[0].get_submodule("norm")
    with overflow(norm):
        overflowed = take_step(trainer, batches)
    after = state(trainer)
    if not bool(overflowed.skipped):
        raise WrongError("a step with an infinity was not skipped")
    if names := changed(before, after):
        raise WrongError(f"the skipped step changed {len(names)} tensors, such as {names[0]}")
    last = take_step(trainer, batches)
    if bool(first.skipped) or bool(last.skipped):
        raise WrongError("a step with finite numbers was skipped")
    still = before.keys() - changed(after, state(trainer))
    if still:
        raise WrongError(f"the step after it left {len(still)} tensors unchanged, such as {min(still)}")
    return Found(f"skipped; {len(before)} weights, moments and step counts bit-identical; the next step changes all")


@contextmanager
def overflow(module: nn.Module) -> Iterator[None]:
    """Inside, the output of the module is infinite."""
    handle = module.register_forward_hook(lambda _module, _inputs, output: output * torch.inf)
    try:
        yield
    finally:
        handle.remove()


def repeats(setup: Setup, all_settings: Sequence[str], documents: bool, microbatches: int = 2) -> Found:
    """Three steps twice from the same seed give the same bits, and other bits from another seed."""
    reset_compiler()
    found = []
    for seed in (0, 0, 1):
        config = configure(setup, *all_settings, f"debug.seed={seed}")
        trainer = build(setup, config)
        losses = []
        for step in range(3):
            batch = random_batch(config, ROWS, seed=step, documents=document_lengths(setup) if documents else ())
            losses.append(take_step(trainer, split(batch, microbatches)).mean_loss.item())
        found.append((losses, state(trainer)))
    (losses, tensors), (again, repeated), (_, other) = found
    if losses != again or changed(tensors, repeated):
        raise WrongError(f"losses {losses} and {again}; different tensors: {changed(tensors, repeated)[:3]}")
    if not changed(tensors, other):
        raise WrongError("another seed gives the same weights: nothing was compared")
    return Found(f"{len(tensors)} tensors bit-identical after 3 steps")
