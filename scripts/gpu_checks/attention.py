"""Check 9: attention in all forms against float64, on fused kernels that are compiled once, and in all models."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from gpu_checks.kernels import Kernel, compare
from gpu_checks.rows import Emit, Found, WrongError, run_case
from gpu_checks.workload import Setup, fused_kernel
from titanlite.models import attention
from titanlite.models.attention import attend, attention_mask, document_arguments, pin_kernels
from titanlite.models.registry import FAMILIES, SHIPPED
from titanlite.parallel.mesh import part_of_rows
from titanlite.runtime.torch_internals import compiled_graphs, reset_compiler, strict_compiler

CHECK = "9 attention"
SHARES = 3
"""Processes among which the cases are dealt: compiling takes most of their time."""
WINDOW = 128
STARTS = (0, 130, 131, 256)
"""First positions of the documents of a row, on both sides of the edge of a block of 128."""
IN_FLOAT32 = ("documents", "sinks, window, documents", "capped")
"""Also compared in float32, in which no model is trained as a rule."""


@dataclass(frozen=True)
class Form:
    """A form of attention. own_queries: those of a rank of context parallelism. latent: keys of 3/2 the width of the
    values, one for each head of queries."""

    window: int = 0
    cap: float = 0.0
    has_sinks: bool = False
    documents: bool = False
    own_queries: bool = False
    latent: bool = False

    @property
    def graphs(self) -> int:
        """Graphs that are compiled for it on a GPU: of the mask's blocks, and of FlexAttention."""
        return 2 if self.window or self.cap or self.has_sinks or self.documents else 0


def forms() -> dict[str, Form]:
    """The most usual ones first."""
    found = {"documents": Form(documents=True), "causal": Form()}
    found["documents, 192 and 128 wide"] = Form(documents=True, latent=True)
    for documents in (True, False):
        suffix = ", documents" * documents
        found |= {
            f"window{suffix}": Form(window=WINDOW, documents=documents),
            f"sinks, window{suffix}": Form(window=WINDOW, has_sinks=True, documents=documents),
            f"capped{suffix}": Form(cap=2.0, documents=documents),
            f"sinks{suffix}": Form(has_sinks=True, documents=documents),
            f"capped, window{suffix}": Form(window=WINDOW, cap=2.0, documents=documents),
        }
    return found | {"documents, own queries": Form(documents=True, own_queries=True)}


def cases() -> list[tuple[str, Form, torch.dtype]]:
    of_bfloat16 = [(name, form, torch.bfloat16) for name, form in forms().items()]
    return [*of_bfloat16, *((name, forms()[name], torch.float32) for name in IN_FLOAT32)]


def check(emit: Emit, setup: Setup, share: int) -> None:
    """The cases of a share, from 1. The first one also has the kernels of all models."""
    pin_kernels(setup.device)
    for name, form, dtype in cases()[share - 1 :: SHARES]:
        case = partial(exact_and_fused, setup, form, dtype)
        emit(run_case(CHECK, f"{name}, {str(dtype).removeprefix('torch.')}", case))
    for deterministic in (False, True) if share == 1 else ():
        for family in SHIPPED:
            name = f"kernel of {family.name}{', deterministic' * deterministic}"
            emit(run_case(CHECK, name, partial(kernels_of, setup, family.name, deterministic)))


def exact_and_fused(setup: Setup, form: Form, dtype: torch.dtype) -> Found:
    """Compare with float64; the kernel is compiled once, whatever the documents, and keeps no matrix of scores."""
    reset_compiler()
    attention._kept_causal_blocks.cache_clear()  # of another form with the same window
    made = kernel(setup, form)
    if setup.device_type == "cpu":
        return compare(made, dtype, setup.device)
    before = compiled_graphs()[0]
    with strict_compiler():
        found = compare(made, dtype, setup.device)
        graphs = compiled_graphs()[0] - before
        again = prepared(kernel(setup, form, shift=1), dtype, setup.device)
        peak = peak_bytes(again)
        require_once(graphs, compiled_graphs()[0] - before - graphs, form.graphs)
        require_fused(peak, scores_bytes(made))
        text = f"{found.text}; {graphs} graphs, {peak / 2**20:.0f} MiB"
        if not form.graphs:
            text += f", {fused_kernel(again)}"
    return Found(text, {**found.values, "graphs": graphs, "MiB": peak / 2**20})


def require_once(graphs: int, later: int, expected: int) -> None:
    if graphs != expected or later:
        raise WrongError(f"{graphs} graphs, not {expected}, and {later} more for other documents")


def require_fused(peak: int, scores: int) -> None:
    if peak >= scores:
        raise WrongError(f"not fused: {peak / 2**20:.0f} MiB, and all scores take {scores / 2**20:.0f}")


def scores_bytes(made: Kernel) -> int:
    """Of the scores of all heads, in float32."""
    (rows, heads, queries, _), (_, _, keys, _) = made.shapes[:2]
    return 4 * rows * heads * queries * keys


def prepared(made: Kernel, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Forward and backward of random inputs."""
    inputs = [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in made.shapes]

    def run() -> None:
        out = made.run(*inputs)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return run


def peak_bytes(function: Callable[[], object]) -> int:
    """Memory that a call needs beyond what is allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kernel(setup: Setup, form: Form, *, shift: int = 0) -> Kernel:
    """shift: of the documents' first positions, except for that of a row."""
    seq_len, width = (300, 16) if setup.tiny else (2048, 128)  # the scores take more than all tensors together
    device, wide = setup.device, width * 3 // 2 if form.latent else width
    ids = document_ids(seq_len, shift)
    own = part_of_rows(torch.arange(seq_len).unsqueeze(0), 0, 2, "gather").squeeze(0) if form.own_queries else None

    def attended(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        mask = None
        if form.documents:
            queries = None if own is None else own.to(device)
            mask = attention_mask(ids.to(device), q.dtype, wide, queries, form.window)
        return attend(q, k, v, mask, form.window, sinks, form.cap)

    seen = visible(ids if form.documents else torch.zeros_like(ids), form.window)
    expected = partial(plain, seen if own is None else seen[:, own], cap=form.cap)
    n_queries, n_keys = seq_len if own is None else len(own), 4 if form.latent else 2
    shapes: tuple[tuple[int, ...], ...] = ((2, 4, n_queries, wide), (2, n_keys, seq_len, wide))
    shapes = (*shapes, (2, n_keys, seq_len, width), *(((4,),) if form.has_sinks else ()))
    return Kernel(attended, expected, shapes, 8 if form.window or form.cap or form.has_sinks else 4)


def document_ids(seq_len: int, shift: int) -> Tensor:
    positions = torch.ones(2, seq_len, dtype=torch.int64)
    positions[0, [0, *(start + shift for start in STARTS[1:])]] = positions[1, 0] = 0
    return document_arguments(positions)["document_ids"]


def visible(ids: Tensor, window: int) -> Tensor:
    """Which keys each query sees: bool (batch, queries, keys)."""
    seq_len = ids.shape[1]
    seen = torch.ones(seq_len, seq_len, dtype=torch.bool).tril() & (ids.unsqueeze(2) == ids.unsqueeze(1))
    return seen.triu(1 - window) if window else seen


def plain(
    seen: Tensor, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None, *, cap: float
) -> Tensor:
    """Attention by its formulas."""
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(groups, 1) for tensor in (keys, values))
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
    scores = (cap * (scores / cap).tanh() if cap else scores).masked_fill(~seen.unsqueeze(1), -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ values
    sink = sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1] @ values


Shape = tuple[int, int, int, int, int, float, bool]
"""Heads of queries and of keys, width of keys and of values, window, cap, sinks."""


def shapes_of(family: str) -> list[Shape]:
    """Those of all published models of a family, except for its debug size."""
    found: dict[Shape, None] = {}
    for name, config in FAMILIES[family].flavors.items():
        for window in sorted(set(getattr(config, "windows", (0,)))) if name != "debug" else ():
            heads = (config.n_heads, config.n_kv_heads, config.head_dim, config.value_dim)
            found[(*heads, window, config.score_cap, family == "gpt_oss")] = None
    return list(found)


def kernels_of(setup: Setup, family: str, deterministic: bool) -> Found:
    """The kernels that the attention of these models takes, forward and backward, in bfloat16 without documents."""
    texts: dict[str, None] = {}
    with deterministic_algorithms(deterministic), without_compilation() as blocks:
        for shape in shapes_of(family):
            blocks[:] = ["capped"] if shape[5] and setup.device_type == "cpu" else []  # an operation of titanlite
            try:
                found = fused_kernel(partial(attend_at, setup, shape), also=blocks)
            except WrongError as error:
                heads, kv_heads, width, value_width, window, cap, sinks = shape
                raise WrongError(
                    f"{heads} and {kv_heads} heads, {width} and {value_width} wide, window {window}, cap {cap:g}"
                    f"{', sinks' * sinks}: {error}"
                ) from None
            texts[found] = None
    return Found(", ".join(texts))


def attend_at(setup: Setup, shape: Shape) -> None:
    heads, kv_heads, width, value_width, window, cap, has_sinks = shape
    seq_len = 64 if setup.tiny else 1024
    window = min(window, seq_len // 2)
    sizes = ((heads, width), (kv_heads, width), (kv_heads, value_width))
    inputs = [
        torch.randn(1, number, seq_len, wide, device=setup.device, dtype=torch.bfloat16, requires_grad=True)
        for number, wide in sizes
    ]
    sinks = torch.zeros(heads, device=setup.device, dtype=torch.bfloat16) if has_sinks else None
    queries, keys, values = inputs
    out = attend(queries, keys, values, None, window, sinks, cap)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


@contextmanager
def without_compilation() -> Iterator[list[str]]:
    """Inside, FlexAttention is not compiled but noted: the other cases run it."""
    noted: list[str] = []

    def in_blocks(queries: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
        noted.append("FlexAttention")
        return sum(x.sum() for x in (queries, keys, values)).expand(*queries.shape[:-1], values.shape[-1])  # type: ignore[union-attr]

    stubs: dict[str, Any] = {"causal_blocks": lambda *_: object.__new__(BlockMask), "_attend_in_blocks": in_blocks}
    with mock.patch.multiple(attention, **stubs):
        yield noted


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
