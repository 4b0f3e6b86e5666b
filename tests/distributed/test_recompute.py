"""Activation checkpointing: matrix products recomputed in backward; dtypes of a running model."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.gradients import build_on_mesh, local_batches
from tests.distributed.layouts import BY_LAYER, BY_OP, FULL, Layout, depth, schedule
from tests.distributed.reference import global_batch
from tests.distributed.test_step import OperationCount
from tests.pool import run_ranks
from titanlite.trainer import Trainer

IN_A_BLOCK = 7  # wq, wk, wv, wo, w1, w2, w3
LAYERS = 3
PRODUCTS = LAYERS * IN_A_BLOCK + 1  # plus the logits


@contextmanager
def counted_products() -> Iterator[Counter[str]]:
    """Count matrix products in the CPU kernel, below dispatch modes (which may cache results) and compiled graphs."""
    count: Counter[str] = Counter()

    def product(left: Tensor, right: Tensor) -> Tensor:
        count["mm"] += 1
        return torch.bmm(left[None], right[None])[0]

    def product_into(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
        count["mm"] += 1
        torch.bmm(left[None], right[None], out=out[None])
        return out

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", product, "CPU")
    library.impl("mm.out", product_into, "CPU")
    yield count
    library._destroy()


def products_of_a_step(settings: list[str], tp: int) -> tuple[int, int]:
    """(matrix products in forward, in backward) of a step after compilation"""
    torch._dynamo.reset()
    layout = Layout((1, 1, 1, tp), (*depth(LAYERS), *settings))
    trainer, _ = build_on_mesh(layout.config())
    batch = global_batch("uneven")
    num_valid = torch.tensor(100)
    trainer.forward_backward(batch, num_valid)
    with counted_products() as count:
        loss = trainer.model_parts[0](batch.tokens, **trainer.forward_arguments(batch, num_valid)).sum()
        forward = count["mm"]
        loss.backward()
        return forward, count["mm"] - forward


RECOMPUTED = {"none": ([], 0), "full": (FULL, LAYERS), "op": (BY_OP, 0), "layer": (BY_LAYER, 2)}
"""Mode: (settings, number of recomputed blocks). The policy "layer" recomputes layers 0 and 2 of three."""


def all_products(backend: str, tp: int, modes: Sequence[str]) -> dict[str, tuple[int, int]]:
    compilation = [f"compile.enable={str(bool(backend)).lower()}", f"compile.backend={backend or 'eager'}"]
    return {name: products_of_a_step([*RECOMPUTED[name][0], *compilation], tp) for name in modes}


@pytest.mark.parametrize(
    ("backend", "tp", "modes"),
    [
        ("", 1, RECOMPUTED),
        pytest.param("", 2, RECOMPUTED, marks=pytest.mark.slow),
        pytest.param("aot_eager", 1, RECOMPUTED, marks=pytest.mark.soak),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (("aot_eager", 2, RECOMPUTED), ("inductor", 1, RECOMPUTED), ("inductor", 2, RECOMPUTED))
        ),
    ],
)
def test_only_missing_activations_are_recomputed(backend: str, tp: int, modes: Sequence[str]) -> None:
    """Without a compiler, early stop skips a block's last product: backward does not need its result."""
    for found in run_ranks(all_products, tp, backend, tp, list(modes)):
        for name in modes:
            forward, backward = found[name]
            assert forward == PRODUCTS + 1, name  # the head also multiplies for the gradient of its input
            per_block = IN_A_BLOCK if backend else IN_A_BLOCK - 1
            assert backward == 2 * (PRODUCTS - 1) + RECOMPUTED[name][1] * per_block, name


def forwards_of_blocks() -> dict[str, int]:
    """Forward passes of each block of this stage per microbatch of a step, by block index."""
    layout = Layout((2, 1, 1, 1), (*BY_LAYER, *depth(5), 'parallelism.pp_split=["layers.1"]', *schedule("GPipe")))
    trainer, _ = build_on_mesh(layout.config())
    count: Counter[str] = Counter()
    for name, module in trainer.model_parts[0].named_modules():
        if name.endswith(".attention_norm"):
            module.register_forward_hook(lambda *_, name=name: count.update([name.split(".")[1]]))
    trainer.train_step([global_batch("uneven")])
    return {name: number // 16 for name, number in count.items()}


@pytest.mark.slow
def test_recomputed_layers_are_chosen_by_their_index_in_the_model() -> None:
    assert run_ranks(forwards_of_blocks, 2) == [{"0": 2}, {"1": 1, "2": 2, "3": 1, "4": 2}]


def dtypes(axes: tuple[int, int, int, int]) -> list[str]:
    """Dtypes in a step with bfloat16 compute, float32 parameters and float32 reductions."""
    mixed = (
        "training.dtype=float32",
        "training.mixed_precision_param=bfloat16",
        "training.mixed_precision_reduce=float32",
    )
    layout = Layout(axes, mixed)
    trainer, mesh = build_on_mesh(layout.config())
    seen: set[str] = set()
    watch(trainer, seen)
    batches = local_batches(layout.config(), mesh, global_batch("uneven"))
    trainer.train_step(batches)  # a pipeline's first step also initializes
    with OperationCount() as count:
        trainer.train_step(batches)
    parameters = [parameter for part in trainer.model_parts for parameter in part.parameters()]
    seen |= {
        f"reduced over data {dtype}" for dtype in count.reduced_dtypes if dtype not in (torch.int64, torch.float64)
    }
    seen |= {f"parameter {parameter.dtype}" for parameter in parameters}
    seen |= {f"gradient {parameter.grad.dtype}" for parameter in parameters if parameter.grad is not None}
    return sorted(seen)


def watch(trainer: Trainer, seen: set[str]) -> None:
    def note(place: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda _module, _args, out: seen.add(f"{place} {out.dtype}"))

    for part in trainer.model_parts:
        for block in part.layers.values():
            note("in a block", block.attention.wq)
            note("in a block", block.feed_forward)
            note("between blocks", block)
        if part.output is None:
            note("between stages", part)
        if part.tok_embeddings is None:
            part.register_forward_pre_hook(lambda _module, args: seen.add(f"between stages {args[0].dtype}"))


def all_dtypes(meshes: list[tuple[int, int, int, int]]) -> list[list[str]]:
    return [dtypes(axes) for axes in meshes]


@pytest.mark.parametrize(
    "meshes",
    [
        [(1, 1, 1, 1)],
        pytest.param([(1, 1, 1, 2), (2, 1, 1, 1)], marks=pytest.mark.slow),
        *(pytest.param(meshes, marks=pytest.mark.soak) for meshes in ([(1, 2, 2, 1)], [(2, 1, 1, 2)])),
    ],
)
def test_mixed_precision_applies_in_every_layout(meshes: list[tuple[int, int, int, int]]) -> None:
    for ranks in run_ranks(all_dtypes, math.prod(meshes[0]), meshes):
        for axes, found in zip(meshes, ranks, strict=True):
            expected = {
                "in a block torch.bfloat16",
                "between blocks torch.bfloat16",
                "parameter torch.float32",
                "gradient torch.float32",
            }
            if axes[0] > 1:
                expected.add("between stages torch.bfloat16")
            reduced = {text for text in found if text.startswith("reduced")}
            assert set(found) - reduced == expected, axes
            assert reduced <= {"reduced over data torch.float32"}, axes
