"""The kernels behind `attend` agree, and each mask is built only once.

GPUs use FlexAttention. Its arithmetic, forward and backward, is checked here on a CPU, where torch runs it as plain
operations if no fused kernel is requested; tests/gpu checks the kernel itself.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, _sdpa_kernel, sdpa_kernel
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from titanlite.models import attention, capped_attention, llama3
from titanlite.models.attention import (
    additive_mask,
    attend,
    attention_mask,
    attention_weights,
    band_mask,
    block_mask,
    document_arguments,
    mask_form,
    may_see,
)
from titanlite.models.llama3 import LLAMA3, Llama3Config
from titanlite.parallel.compile import CompileConfig, apply_compile
from titanlite.parallel.recompute import ActivationCheckpointConfig, _recomputed, apply_recompute
from titanlite.runtime.torch_internals import compiler_settings, set_compiler

pytestmark = [  # warnings of torch's compiler
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

SEQ_LEN = 150  # more than one block of 128
STARTS = ([], [1], [40, 41, 149], [127, 128])
OTHER_STARTS = (([3], [], [128], [1, 2]), ([5], [149], [], [3]))
HEADS = ((4, 2, 8), (3, 1, 24))
"""Query heads, key/value heads, width of each head."""


def ids_of(*rows: list[int], seq_len: int = SEQ_LEN) -> Tensor:
    """document_ids of rows, from the positions at which documents start; every row also starts one at 0."""
    positions = torch.ones(len(rows), seq_len, dtype=torch.int64)
    for row, starts in enumerate(rows):
        positions[row, [0, *starts]] = 0
    return document_arguments(positions)["document_ids"]


def projections(heads: tuple[int, int, int], rows: int, dtype: torch.dtype, *, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    n_heads, n_kv_heads, head_dim = heads
    shapes = [(rows, n, SEQ_LEN, head_dim) for n in (n_heads, n_kv_heads, n_kv_heads)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [tensor.requires_grad_(grad) for tensor in drawn]


def visible_blocks(document_ids: Tensor) -> Tensor:
    """(rows, blocks, blocks): 1 for a block of 128 x 128 scores that has a visible score, else 0."""
    seen = may_see(document_ids)[:, 0].float()
    return functional.max_pool2d(seen, 128, ceil_mode=True).to(torch.int32)


def by_definition(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    document_ids: Tensor,
    window: int = 0,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[3])
    scores = cap * torch.tanh(scores / cap) if cap else scores
    places = torch.arange(SEQ_LEN)
    distance = places[:, None] - places
    seen = (document_ids[:, :, None] == document_ids[:, None]) & (distance >= 0) & (distance < (window or SEQ_LEN))
    weights = torch.where(seen[:, None], scores.exp(), 0.0)
    further = 0.0 if sinks is None else sinks.exp().view(-1, 1, 1)
    return weights / (weights.sum(-1, keepdim=True) + further) @ values


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run FlexAttention as plain operations, including backward, which torch rejects on CPUs (no fused kernel)."""
    torch._dynamo.reset()
    once: dict[Callable[..., Any], Callable[..., Any]] = {
        function: torch.compile(function, backend="aot_eager", dynamic=False)
        for function in (attention.create_block_mask, attention.flex_attention)
    }
    monkeypatch.setattr(attention, "compiled", lambda function, **_: once[function])
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    yield
    torch._dynamo.reset()


def relative(value: Tensor, expected: Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


MASKS: dict[str, Callable[[Tensor, torch.dtype, Tensor | None, int], Any]] = {
    "additive": additive_mask,
    "blocks": lambda document_ids, _dtype, queries, window: block_mask(document_ids, queries, window),
    "bands": lambda document_ids, dtype, _queries, window: band_mask(document_ids, dtype, window),
    "none": lambda *_: None,
}

SOME = torch.cat((torch.arange(3, 10), torch.arange(120, 150)))
"""Positions of some queries, as one rank of context parallelism has them."""


@pytest.mark.usefixtures("composed")
@pytest.mark.parametrize(
    ("heads", "form", "queries", "window"),
    [
        (HEADS[0], "additive", None, 0),
        (HEADS[1], "additive", None, 0),
        (HEADS[1], "additive", SOME, 0),
        pytest.param(HEADS[0], "blocks", None, 0, marks=pytest.mark.soak),
        pytest.param(HEADS[1], "blocks", None, 0, marks=pytest.mark.soak),
        pytest.param(HEADS[1], "blocks", SOME, 0, marks=pytest.mark.soak),
        (HEADS[1], "additive", SOME, 9),
        pytest.param(HEADS[1], "blocks", SOME, 9, marks=pytest.mark.slow),
        *((HEADS[0], form, None, window) for form in ("bands", "none") for window in (9, SEQ_LEN - 1)),
        *(
            pytest.param(HEADS[0], form, None, window, marks=pytest.mark.slow)
            for form in ("bands", "none")
            for window in (2, 50, 75)
        ),
        *((HEADS[0], "none", None, window) for window in (SEQ_LEN, SEQ_LEN + 1)),
    ],
)
def test_every_mask_form_matches_the_definition(
    heads: tuple[int, int, int], form: str, queries: Tensor | None, window: int
) -> None:
    """Forward and backward, plain, with sinks, and with a cap; other documents cause no recompilation."""
    for number, starts in enumerate((STARTS, *OTHER_STARTS)):
        document_ids = ids_of(*(([],) * len(starts) if form == "none" else starts))
        drawn = torch.linspace(-2.0, 2.0, heads[0], dtype=torch.float64, requires_grad=True)
        for sinks, cap in ((None, 0.0), (drawn, 0.0), (None, 1.5)):
            inputs = projections(heads, len(STARTS), torch.float64, grad=True)
            expected = by_definition(*inputs, document_ids, window, sinks, cap)
            some = inputs[0]
            if queries is not None:
                expected, some = expected[:, :, queries], inputs[0][:, :, queries]
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                mask = MASKS[form](document_ids, torch.float64, queries, window)
                out = attend(some, *inputs[1:], mask, window, sinks, cap)
            assert relative(out, expected) < 1e-14
            weights, values = (
                attention_weights(some, inputs[1], mask, window, sinks, cap),
                inputs[2].repeat_interleave(heads[0] // heads[1], 1),
            )
            assert relative(weights @ values, expected) < 1e-14
            upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            inputs += [] if sinks is None else [sinks]
            for found, wanted in zip(
                torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
            ):
                assert relative(found, wanted) < 1e-13
            if isinstance(mask, BlockMask) and queries is None and not window:
                assert torch.equal(mask.to_dense()[:, 0], visible_blocks(document_ids)), (
                    "blocks without visible scores must be left out"
                )


@pytest.mark.usefixtures("composed")
@pytest.mark.parametrize(
    ("form", "queries", "window", "at_once"),
    [
        *(
            (*case, at_once)
            for case in (
                *(("additive", None, 0), ("additive", SOME, 0), ("additive", None, 9), ("bands", None, 9)),
                *(("none", None, 0), ("none", None, 9)),
            )
            for at_once in (True, False)
        ),
        pytest.param("blocks", None, 9, False, marks=pytest.mark.slow),
        pytest.param("blocks", None, 9, True, marks=pytest.mark.soak),
        *(pytest.param("blocks", SOME, 9, at_once, marks=pytest.mark.soak) for at_once in (True, False)),
    ],
)
def test_largest_scores_are_those_of_the_full_matrix(
    form: str, queries: Tensor | None, window: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block of queries, and in several. Also compiled with a mask for GPUs."""
    # 2^13 scores are 3 queries. To compile so many blocks takes seconds: 23 queries have largest scores at their ends
    block_scores = 23 * 2400 if form == "blocks" else 2**13
    monkeypatch.setattr(capped_attention, "BLOCK_SCORES", 2**24 if at_once else block_scores)
    document_ids = ids_of([], []) if form == "none" else ids_of(*STARTS)
    of_queries, keys, values = projections(HEADS[0], len(document_ids), torch.float64)
    of_queries = of_queries if queries is None else of_queries[:, :, queries]
    mask = MASKS[form](document_ids, torch.float64, queries, window)
    products = of_queries @ keys.repeat_interleave(2, 1).mT / math.sqrt(HEADS[0][2])
    expected = products.masked_fill(~may_see(document_ids, queries, window), -torch.inf).amax((0, 2, 3))
    expected[0] = 1e3  # noted before
    compiles = form == "blocks" and queries is None
    attending = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiles else attend
    largest = torch.tensor([1e3, *[-torch.inf] * 3], dtype=torch.float64)
    attending(of_queries, keys, values, mask, window, largest=largest)
    torch.testing.assert_close(largest, expected, rtol=1e-13, atol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("composed")
@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.soak), 9])
def test_sinks_on_a_gpu(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one document have blocks, whose kernel returns the logsumexp; generation computes all weights."""
    monkeypatch.setattr(attention, "mask_form", lambda *_: "blocks")
    inputs = projections(HEADS[0], 2, torch.float64)
    sinks = torch.linspace(-2.0, 2.0, HEADS[0][0], dtype=torch.float64)
    expected = by_definition(*inputs, ids_of([], []), window, sinks)
    assert relative(attend(*inputs, None, window, sinks), expected) < 1e-14
    monkeypatch.setattr(attention, "attend_in_bands", None)  # windows have blocks, too
    assert relative(attend(*inputs, None, window), by_definition(*inputs, ids_of([], []), window)) < 1e-14
    last = attention_weights(inputs[0][:, :, -1:], inputs[1], None, window, sinks) @ inputs[2].repeat_interleave(2, 1)
    assert relative(last, expected[:, :, -1:]) < 1e-14


@pytest.mark.slow
@pytest.mark.usefixtures("composed")
def test_capped_scores_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where FlexAttention gets a mask of its own; and of the last queries, as in a cache."""
    inputs = projections(HEADS[0], 2, torch.float64)
    expected = by_definition(*inputs, ids_of([], []), 9, cap=1.5)
    last = attention.capped_attention(inputs[0][:, :, -70:], *inputs[1:], None, 9, 1.5)[0]
    assert relative(last, expected[:, :, -70:]) < 1e-14
    monkeypatch.setattr(attention, "mask_form", lambda *_: "blocks")
    for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        assert relative(function(*inputs, None, 9, cap=1.5), expected) < 1e-14
    of_layers = [attention.causal_blocks(SEQ_LEN, 9, inputs[0].device) for _ in range(2)]
    assert of_layers[0] is of_layers[1]


@pytest.mark.soak  # compiles for half a minute
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_the_fused_kernel_on_a_cpu() -> None:
    """Forward only: torch has no fused backward on CPUs."""
    torch._dynamo.reset()
    document_ids = ids_of(*STARTS)
    inputs = projections((4, 2, 16), len(STARTS), torch.float32)
    out = attend(*inputs, block_mask(document_ids))
    expected = attend(*inputs, additive_mask(document_ids, torch.float32))
    assert relative(out, expected) < 1e-6


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "form"),
    [
        ("cpu", torch.float32, 128, "scores"),
        ("cuda", torch.float32, 128, "blocks"),
        ("cuda", torch.bfloat16, 16, "blocks"),
        ("cuda", torch.bfloat16, 8, "scores"),
        ("cuda", torch.float64, 128, "scores"),
    ],
)
def test_choice_of_the_mask_form(
    device: str, dtype: torch.dtype, head_dim: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mask_form(device, dtype, head_dim) == form
    monkeypatch.setattr(attention, "block_mask", lambda *_: "blocks")
    monkeypatch.setattr(attention, "additive_mask", lambda *_: "scores")
    with FakeTensorMode():
        document_ids = torch.zeros(2, 8, dtype=torch.int64, device=device)
        assert attention_mask(document_ids, dtype, head_dim) == form


@pytest.mark.parametrize(
    ("capability", "cudnn_version", "deprioritized", "first"),
    [
        (9, 91900, "0", SDPBackend.CUDNN_ATTENTION),
        (10, 91501, "0", SDPBackend.CUDNN_ATTENTION),
        (9, 91500, "0", SDPBackend.FLASH_ATTENTION),
        (8, 91900, "0", SDPBackend.FLASH_ATTENTION),
        (12, 91900, "0", SDPBackend.FLASH_ATTENTION),
        (9, 91900, "1", SDPBackend.FLASH_ATTENTION),
    ],
)
def test_order_of_kernels_on_a_gpu(
    capability: int, cudnn_version: int, deprioritized: str, first: SDPBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is set for the process: other threads, such as that of the backward pass, take it, too."""
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", deprioritized)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (capability, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn_version)
    before = _cur_sdpa_kernel_backends(with_priority=True)
    found: list[SDPBackend] = []
    try:
        attention.pin_kernels(torch.device("cuda", 0))
        thread = threading.Thread(target=lambda: found.extend(_cur_sdpa_kernel_backends(with_priority=True)))
        thread.start()
        thread.join()
    finally:
        _sdpa_kernel(before, set_priority=True)
    rest = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    assert found == list(dict.fromkeys([first, *rest]))


def test_cudnn_is_never_first_on_gpus_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their compute capability is 9, and cudnn.version() that of MIOpen."""
    orders: list[Any] = []
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 4))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 3_005_000)
    monkeypatch.setattr(attention, "set_attention_kernels", orders.append)
    attention.pin_kernels(torch.device("cuda", 0))
    assert orders == [attention.kernel_order(9, 0)]
    assert SDPBackend.CUDNN_ATTENTION not in orders[0]


def test_name_of_the_chosen_kernel() -> None:
    cpu = torch.device("cpu")
    assert attention.chosen_kernel(cpu, torch.float32, 4, 2, 16) == "flash"
    with sdpa_kernel(SDPBackend.MATH):
        assert attention.chosen_kernel(cpu, torch.float32, 4, 2, 16) == "math"


def test_arguments_of_a_forward_pass() -> None:
    assert document_arguments(None) == {}
    assert attention_mask(None, torch.float32, 64) is None
    positions = torch.tensor([[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    arguments = document_arguments(positions)
    assert arguments["positions"] is positions
    assert arguments["document_ids"].tolist() == [[1, 1, 2, 3, 3, 3], [1] * 6]
    assert arguments["document_ids"].dtype == torch.int64


def test_a_function_is_compiled_for_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls the function itself beyond its limit, of 8 by default."""
    traced, settings = list[int](), compiler_settings()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        traced.append(len(inputs[0]))
        return graph.forward

    monkeypatch.setattr(attention, "_compiled", partial(torch.compile, dynamic=False, backend=backend))
    try:
        function = attention.compiled(lambda x: x + 1)
        for length in range(3, 23):
            function(torch.zeros(length))
    finally:
        set_compiler(**settings)
    assert traced == [*range(3, 23)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("window", [0, 8])
def test_compiled_attention_of_as_many_rows_as_positions(window: int) -> None:
    """The second shape makes the graph symbolic, in which equal sizes share a symbol."""
    torch._dynamo.reset()
    attending = torch.compile(partial(attend, mask=None, window=window), backend="eager", fullgraph=True)
    for rows, seq_len in ((1, 64), (2, 32), (16, 16)):
        queries, keys = torch.ones(rows, 4, seq_len, 8), torch.ones(rows, 2, seq_len, 8)
        assert torch.equal(attending(queries, keys, keys), attend(queries, keys, keys, None, window))


@pytest.mark.slow
def test_a_compiled_block_traces_flex_attention_without_warnings() -> None:
    """As on a GPU, where each compiled block gets a BlockMask. Warnings are errors here."""
    torch._dynamo.reset()
    document_ids = ids_of([40], [127])
    mask = attention.create_block_mask(
        lambda row, _head, query, key: (query >= key) & (document_ids[row, query] == document_ids[row, key]),
        *(2, None, SEQ_LEN, SEQ_LEN),
        device="cpu",
    )
    inputs = projections(HEADS[0], 2, torch.float32)
    found = torch.compile(attend, backend="eager", fullgraph=True)(*inputs, mask)
    assert relative(found, attend(*inputs, additive_mask(document_ids, torch.float32))) < 1e-6


CONFIG = Llama3Config(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=50, max_seq_len=SEQ_LEN)


def small_model() -> llama3.Llama3:
    torch.manual_seed(0)
    model = llama3.Llama3(CONFIG).to(torch.float64)
    model.init_buffers(torch.device("cpu"))
    return model


def test_one_mask_for_all_blocks() -> None:
    """Built once in a forward pass, and saved once for the backward pass."""
    model, document_ids = small_model(), ids_of([40], [7])
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    tokens = torch.zeros(2, SEQ_LEN, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(tokens, document_ids=document_ids)
    score_masks = [tensor for tensor in saved if tensor.shape[-2:] == (SEQ_LEN, SEQ_LEN)]
    assert len(score_masks) == CONFIG.n_layers
    assert len({tensor.data_ptr() for tensor in score_masks}) == 1


def gradients(model: llama3.Llama3, document_ids: Tensor) -> dict[str, Tensor]:
    tokens = torch.arange(SEQ_LEN).remainder(CONFIG.vocab_size).expand(len(document_ids), -1)
    model.zero_grad()
    model(tokens, document_ids=document_ids).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one with every forward computation of FlexAttention's plain operations."""
    module = sys.modules["torch._higher_order_ops.flex_attention"]
    times: list[int] = []
    compute = module.math_attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        times.append(1)
        return compute(*args, **kwargs)

    monkeypatch.setattr(module, "math_attention", counted)
    return times


POLICIES = [
    pytest.param(ActivationCheckpointConfig(), 1, id="none", marks=pytest.mark.soak),
    pytest.param(ActivationCheckpointConfig("full"), 2, id="full", marks=pytest.mark.soak),
    pytest.param(ActivationCheckpointConfig("selective", "op"), 1, id="op"),
]
"""The policy, and how often each block computes its attention."""


@pytest.mark.slow
@pytest.mark.usefixtures("composed")
@pytest.mark.parametrize("compile_blocks", [pytest.param(False, marks=pytest.mark.soak), True])
@pytest.mark.parametrize(("policy", "per_block"), POLICIES)
def test_block_masks_in_recomputed_and_compiled_blocks(
    policy: ActivationCheckpointConfig,
    per_block: int,
    compile_blocks: bool,
    computed: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: each transformer block gets a BlockMask, and other documents cause no recompilation."""
    document_ids = ids_of([40, 41], [127])
    expected = gradients(small_model(), document_ids)
    monkeypatch.setattr(attention, "additive_mask", lambda document_ids, *_: block_mask(document_ids))
    model, units = small_model(), LLAMA3.structure(CONFIG)
    compilation = CompileConfig(enable=compile_blocks, backend="aot_eager")
    by_op = policy.mode == "selective"
    steps = [partial(apply_compile, section=compilation), partial(apply_recompute, section=policy)]
    for apply in reversed(steps) if by_op else steps:
        apply(model, units)
    seen: list[Any] = []
    model.layers["1"].register_forward_pre_hook(lambda _module, args: seen.append(args[2]))
    gradients(model, ids_of([5], [2, 3]))
    computed.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = gradients(model, document_ids)
    assert len(computed) == per_block * CONFIG.n_layers
    assert isinstance(seen[-1], BlockMask)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert relative(gradient, expected[name]) < 1e-12, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("mode", "per_layer"), [("selective", 1), ("full", 2)])
def test_eager_blocks_recompute_no_compiled_attention_by_op(
    mode: Literal["full", "selective"], per_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where blocks that are not compiled call a compiled FlexAttention, which has no gradient on CPUs."""
    lengths = list[int]()

    # operations, so that the compiler has nothing to generate
    @torch.library.custom_op("titanlite_tests::product", mutates_args=())
    def product(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        lengths.append(queries.shape[2])
        return queries * keys * values

    @torch.library.custom_op("titanlite_tests::product_backward", mutates_args=())
    def backward(gradient: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return gradient * keys * values, gradient * queries * values, gradient * queries * keys

    product.register_fake(lambda queries, *_: torch.empty_like(queries))
    backward.register_fake(lambda gradient, *_: (*(torch.empty_like(gradient) for _ in range(3)),))
    product.register_autograd(
        lambda ctx, gradient: backward(gradient, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),  # noqa: ARG005
    )

    def in_place_of_flex(queries: Tensor, keys: Tensor, values: Tensor, **_options: Any) -> Tensor:
        result: Tensor = product(queries, keys, values)
        return result

    torch._dynamo.reset()
    monkeypatch.setattr(attention, "flex_attention", in_place_of_flex)
    layer = _recomputed(attend, ActivationCheckpointConfig(mode=mode))
    inputs = {length: [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)] for length in (16, 32)}
    masks = {length: flex.create_block_mask(_is_earlier, None, None, length, length, device="cpu") for length in inputs}
    expected = [torch.autograd.grad(in_place_of_flex(*x).sum(), x) for x in inputs.values()]
    for _ in range(2):  # in the first round, functions are compiled
        lengths.clear()
        results = [layer(*inputs[length], masks[length]) for length in inputs]
        with torch.no_grad():
            layer(*inputs[32], masks[32])
        found = [torch.autograd.grad(out.sum(), x) for out, x in zip(results, inputs.values(), strict=True)]
        assert lengths == [16, 32, 32, 16, 32][: 3 + 2 * (per_layer - 1)]
        for gradients_, of_plain in zip(found, expected, strict=True):
            assert all(map(torch.allclose, gradients_, of_plain))
    torch._dynamo.reset()


def _is_earlier(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
