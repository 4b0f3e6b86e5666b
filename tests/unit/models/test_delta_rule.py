"""Gated linear attention: the rule in chunks against the recurrence, position by position, in float64."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.models import delta_rule
from titanlite.models.delta_rule import gated_delta_rule
from titanlite.models.linear_attention import convolve, document_starts

BOUND = 1e-12
CHUNK, SEGMENT = 16, 2


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several segments in short rows."""
    monkeypatch.setattr(delta_rule, "CHUNK", CHUNK)
    monkeypatch.setattr(delta_rule, "SEGMENT", SEGMENT)


def inputs(seq_len: int, key_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seq_len)
    shapes = [(2, seq_len, key_heads, 6), (2, seq_len, key_heads, 6), (2, seq_len, 4, 5), *[(2, seq_len, 4)] * 2]
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    found[3:] = -2 * found[3].sigmoid(), found[4].sigmoid()
    return [x.requires_grad_() for x in found]


def starts_of(seq_len: int, kind: str) -> Tensor | None:
    """Documents of all lengths, of one position too, and none at the beginning of the second row."""
    if kind == "one document":
        return None
    if kind == "chunks":
        return (torch.arange(seq_len) % CHUNK == 0).expand(2, -1)
    return torch.rand(2, seq_len, generator=torch.Generator().manual_seed(1)) < 0.12


def recurrence(
    queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, betas: Tensor, starts: Tensor | None
) -> Tensor:
    heads = values.shape[2] // queries.shape[2]
    queries, keys = ((x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()) for x in (queries, keys))
    queries, keys = (x.repeat_interleave(heads, 2) for x in (queries * queries.shape[-1] ** -0.5, keys))
    state, found = values.new_zeros(2, 4, 6, 5), []
    for position in range(values.shape[1]):
        if starts is not None:
            state = state * ~starts[:, position].view(2, 1, 1, 1)
        state = state * decays[:, position].exp().view(2, 4, 1, 1)
        key = keys[:, position].unsqueeze(-1)
        missing = (values[:, position] - (state * key).sum(-2)) * betas[:, position].unsqueeze(-1)
        state = state + key * missing.unsqueeze(-2)
        found.append((state * queries[:, position].unsqueeze(-1)).sum(-2))
    return torch.stack(found, 1)


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def errors(seq_len: int, kind: str, key_heads: int = 2) -> list[float]:
    """Of the results and of all gradients."""
    given, starts = inputs(seq_len, key_heads), starts_of(seq_len, kind)
    weights = torch.randn(2, seq_len, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, expected = (
        (out, *torch.autograd.grad((out * weights).sum(), given))
        for out in (gated_delta_rule(*given, starts)[0], recurrence(*given, starts))
    )
    return [error(one, other) for one, other in zip(found, expected, strict=True)]


@pytest.mark.parametrize("kind", ["one document", "many documents", "chunks"])
@pytest.mark.parametrize(
    "seq_len", [75, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, CHUNK, CHUNK * SEGMENT, 101))]
)
def test_chunks_equal_the_recurrence(seq_len: int, kind: str) -> None:
    for key_heads in (2, 4):
        assert max(errors(seq_len, kind, key_heads)) < BOUND


def test_gradients_of_fast_decays_in_float32() -> None:
    """Their small gradients are not differences of large numbers."""
    given = [x.detach() for x in inputs(75)]
    given[3] = given[3] * 40
    found = []
    for dtype in (torch.float32, torch.float64):
        own = [x.to(torch.float32).to(dtype).requires_grad_() for x in given]
        (gradient,) = torch.autograd.grad(gated_delta_rule(*own)[0].square().sum(), own[3])
        found.append(gradient.double())
    assert error(*found) < 1e-4


def test_rows_continue_from_a_state() -> None:
    given, starts = [x.detach() for x in inputs(75)], starts_of(75, "many documents")
    assert starts is not None
    expected, last = gated_delta_rule(*given, starts)
    found, state = [], None
    for part in (slice(0, 20), slice(20, 21), slice(21, 75)):
        out, state = gated_delta_rule(*(x[:, part] for x in given), starts[:, part], state)
        found.append(out)
    assert state is not None
    assert error(torch.cat(found, 1), expected) < BOUND
    assert error(state, last) < BOUND


def test_saved_memory_grows_linearly() -> None:
    sizes = []
    for seq_len in (320, 640, 960):
        saved: list[int] = []

        def note(x: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            gated_delta_rule(*inputs(seq_len))
        sizes.append(sum(saved))
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.found[func.name()] += 1
        return func(*args, **(kwargs or {}))


def test_operations_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a GPU launches one after the other. A baddbmm that is not in place is two: it copies first."""
    monkeypatch.setattr(delta_rule, "SEGMENT", 8)
    counts = []
    for chunks in (3, 5):
        with torch.no_grad():
            x = inputs(chunks * CHUNK)
            out, states = gated_delta_rule(*x)[0], torch.zeros(2, 8, 6, 5, dtype=torch.float64)
            with Operations() as forward:
                delta_rule._gated_delta_rule._init_fn(*x, None, None)  # type: ignore[attr-defined]
            with Operations() as backward:
                delta_rule._backward._init_fn(out, *x, None, states)  # type: ignore[attr-defined]
        counts.append((forward.found, backward.found))
    views = ("aten::select.int", "aten::transpose.int")
    forward_, backward_ = (
        {name: number // 2 for name, number in (more - less).items() if name not in views}
        for less, more in zip(*counts, strict=True)
    )
    assert forward_ == {"aten::baddbmm_": 2, "aten::mul.out": 1}
    assert backward_ == {"aten::baddbmm_": 4, "aten::mul.out": 1, "aten::mul.Tensor": 1, "aten::add_.Tensor": 1}


def test_the_operations_have_the_shapes_of_fake_tensors() -> None:
    """As torch's compiler needs them."""
    for dtype in (torch.float32, torch.bfloat16):
        *heads, decays, betas = (x.detach() for x in inputs(75))
        given = [*(x.to(dtype) for x in heads), decays.float(), betas.float(), starts_of(75, "many documents"), None]
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.titanlite.gated_delta_rule, given, test_utils=tests)
        out, states = torch.ops.titanlite.gated_delta_rule(*given)
        torch.library.opcheck(
            torch.ops.titanlite.gated_delta_rule_backward, (out, *given[:-1], states), test_utils=tests
        )


@pytest.mark.parametrize("seq_len", [1, 2, 40])
def test_the_convolution_of_documents_is_that_of_each_alone(seq_len: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, seq_len, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    taps = torch.randn(6, 1, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    lengths = [1, 9, 2, 28] if seq_len == 40 else [seq_len]
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    found = convolve(x, taps, document_starts(ids))
    parts = [
        functional.silu(functional.conv1d(functional.pad(part.flatten(2).mT, (3, 0)), taps, groups=6)).mT
        for part in x.split(lengths, 1)
    ]
    expected = torch.cat(parts, 1).view_as(x)
    weights = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    for left, right in zip(
        (found, *torch.autograd.grad((found * weights).sum(), (x, taps))),
        (expected, *torch.autograd.grad((expected * weights).sum(), (x, taps))),
        strict=True,
    ):
        assert error(left, right) < BOUND


def not_passed_on(chunks: delta_rule._Chunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return chunks.solved_values, state.new_zeros(len(chunks.values), *state.shape), torch.zeros_like(state)


def without_documents(*arguments: Any) -> delta_rule._Chunks:
    *inputs, _starts, part = arguments
    return _chunks(*inputs, None, part)


def leaks_between_segments(*arguments: Any) -> delta_rule._Chunks:
    """A document that starts with a segment begins with the state before it."""
    *inputs, starts, part = arguments
    kept = starts.clone()
    kept[:, part.start] = False
    return _chunks(*inputs, kept, part)


_chunks = delta_rule._chunks


@pytest.mark.parametrize(
    ("name", "planted", "kind"),
    [
        ("_scan", not_passed_on, "one document"),
        ("_chunks", without_documents, "many documents"),
        ("_chunks", leaks_between_segments, "chunks"),
    ],
)
def test_a_mistake_is_detected(name: str, planted: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, name, planted)
    assert min(errors(101, kind)[:2]) > 1e-3
