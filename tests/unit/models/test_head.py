"""The output layer's loss in chunks equals that of all logits: cross-entropy and a registered loss, in both forms."""

import re
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import titanlite
from tests.configuration import EACH_SCHEDULE
from tests.custom_loss import LOSS, WITH_Z, plain_objective
from tests.distributed.test_plan_memory import memory_events
from tests.plain_loss import cross_entropy_by_row
from titanlite.batch import IGNORE_INDEX
from titanlite.models.head import CHUNK_BYTES, CHUNK_TOKENS, PART_IDS, LossComputation, OutputLayer, tokens_per_chunk
from titanlite.models.losses import CROSS_ENTROPY, Loss

ROWS, SEQ_LEN, DIM, VOCAB_SIZE = 3, 37, 24, 101
FORMS = pytest.mark.parametrize("recomputes", [False, True], ids=["at once", "recomputed"])
EVERY_LOSS = pytest.mark.parametrize("loss", [CROSS_ENTROPY, LOSS, WITH_Z], ids=["cross-entropy", "registered", "term"])


def layer(
    dtype: torch.dtype = torch.float64,
    chunk: int = 16,
    *,
    recomputes: bool = False,
    loss: Loss = CROSS_ENTROPY,
    soft_cap: float = 0.0,
) -> OutputLayer:
    head = OutputLayer(DIM, VOCAB_SIZE).to(dtype)
    head.soft_cap = soft_cap
    head.computation = LossComputation(loss, chunk, recomputes)
    if loss.terms:
        head.start_step(loss.counts(inputs()[1]))
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCAB_SIZE, DIM, generator=torch.Generator().manual_seed(0)))
    return head


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, labels and num_valid. The first row has no valid label, and a chunk of the second has none."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, SEQ_LEN, DIM, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB_SIZE, (ROWS, SEQ_LEN), generator=generator)
    labels[0] = labels[1, 10:30] = labels[2, ::3] = IGNORE_INDEX
    return x, labels, (labels >= 0).sum().expand(ROWS)


def plain_shares(head: OutputLayer, x: Tensor, labels: Tensor, num_valid: Tensor) -> Tensor:
    return cross_entropy_by_row(nn.functional.linear(x, head.weight), labels) / num_valid


def plain_of(head: OutputLayer, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Objective, mean loss and terms from all logits."""
    logits = nn.functional.linear(x, head.weight).flatten(0, 1)
    logits = head.soft_cap * torch.tanh(logits / head.soft_cap) if head.soft_cap else logits
    return plain_objective(logits, labels.flatten(), head.computation.loss)


def assert_terms(head: OutputLayer, terms: list[Tensor]) -> None:
    found = [] if head.term_sums is None else head.term_sums.sum(0).tolist()
    assert found == pytest.approx([term.item() for term in terms], rel=1e-13, abs=0)


@FORMS
@EVERY_LOSS
@pytest.mark.parametrize(("chunk", "soft_cap"), [(1, 0.0), (7, 2.5), (16, 0.0), (1000, 2.5)])
def test_shares_terms_and_gradients_equal_those_of_all_logits(
    loss: Loss, chunk: int, soft_cap: float, recomputes: bool
) -> None:
    head = layer(chunk=chunk, recomputes=recomputes, loss=loss, soft_cap=soft_cap)
    x, labels, num_valid = inputs()
    found, (objective, mean, terms) = head(x, labels, num_valid), plain_of(head, x, labels)
    torch.testing.assert_close(found.sum(), mean, rtol=1e-14, atol=0)
    assert found[0] == 0.0
    if loss is CROSS_ENTROPY and not soft_cap:
        torch.testing.assert_close(found, plain_shares(head, x, labels, num_valid), rtol=1e-14, atol=0)
    assert_terms(head, terms)
    gradients = torch.autograd.grad(2 * found.sum(), (x, head.weight))
    for gradient, right in zip(gradients, torch.autograd.grad(2 * objective, (x, head.weight)), strict=True):
        assert (gradient - right).norm() <= 1e-14 * right.norm()
    assert not gradients[0][labels < 0].any()
    assert_terms(head, terms)


@FORMS
@EVERY_LOSS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_as_close_to_float64_as_all_logits_are(
    loss: Loss, dtype: torch.dtype, recomputes: bool
) -> None:
    head, (x, labels, num_valid) = layer(dtype, recomputes=recomputes, loss=loss), inputs(dtype)
    exact_head, exact_x = layer(loss=loss), x.detach().double().requires_grad_()
    exact_head.weight.data = head.weight.detach().double()

    def results(objective: Tensor, mean: Tensor, *leaves: Tensor) -> list[Tensor]:
        return [mean, *torch.autograd.grad(objective, leaves)]

    right = results(*plain_of(exact_head, exact_x, labels)[:2], exact_x, exact_head.weight)
    wide = nn.functional.linear(x, head.weight).float().flatten(0, 1)
    plain = results(*plain_objective(wide, labels.flatten(), loss)[:2], x, head.weight)
    shares = head(x, labels, num_valid)
    assert shares.dtype == torch.float32
    found = results(shares.sum(), shares.sum(), x, head.weight)
    for one, other, true in zip(found, plain, right, strict=True):
        error, bound = (((each - true).norm() / true.norm()).item() for each in (one, other))
        assert error <= 1.5 * bound + 1e-7


@FORMS
@EVERY_LOSS
def test_no_valid_label_gives_zero_with_a_graph(loss: Loss, recomputes: bool) -> None:
    head, (x, labels, _) = layer(recomputes=recomputes, loss=loss), inputs()
    labels = torch.full_like(labels, IGNORE_INDEX)
    if loss.terms:
        head.start_step(loss.counts(labels))
    shares = head(x, labels, torch.zeros(ROWS, dtype=torch.int64))
    zeros = [shares, *torch.autograd.grad(shares.sum(), (x, head.weight))]
    assert not any(tensor.any() for tensor in zeros)
    assert_terms(head, [torch.zeros(())] * len(loss.terms))


def test_shares_with_different_gradients_are_no_silent_error() -> None:
    """The gradients computed in the forward pass are summed over the rows already."""
    head, (x, labels, num_valid) = layer(), inputs()
    (head(x, labels, num_valid) * torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64)).sum().backward()
    assert x.grad is not None
    assert x.grad.isnan().all()


class CountedProducts(TorchDispatchMode):
    """Counts matrix products by the shape of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm_.default):
            self.shapes[tuple(found.shape)] += 1
        return found


@pytest.mark.parametrize(("recomputes", "forward", "backward"), [(False, 3, 0), (True, 1, 3)])
def test_number_of_products(recomputes: bool, forward: int, backward: int) -> None:
    head, (x, labels, num_valid) = layer(chunk=ROWS * SEQ_LEN, recomputes=recomputes), inputs()
    with CountedProducts() as in_forward:
        shares = head(x, labels, num_valid)
    with CountedProducts() as in_backward:
        shares.sum().backward()
    assert (in_forward.shapes.total(), in_backward.shapes.total()) == (forward, backward)
    with CountedProducts() as without_gradients, torch.no_grad():
        head(x, labels, num_valid)
    assert without_gradients.shapes.total() == 1


@FORMS
@pytest.mark.parametrize("frozen", [0, 1], ids=["input", "weight"])
def test_frozen_inputs_and_weights(frozen: int, recomputes: bool) -> None:
    """Their gradients are neither computed nor kept; nor is the other one after backward."""
    head, (x, labels, num_valid) = layer(chunk=ROWS * SEQ_LEN, recomputes=recomputes), inputs()
    leaves = [x, head.weight]
    right = torch.autograd.grad(plain_of(head, x, labels)[0], leaves[1 - frozen])[0]
    leaves[frozen].requires_grad_(False)
    with CountedProducts() as products:
        shares = head(x, labels, num_valid)
        shares.sum().backward()
    assert products.shapes.total() == 2 + recomputes
    found = leaves[1 - frozen].grad
    assert found is not None
    assert leaves[frozen].grad is None
    assert (found - right).norm() <= 1e-14 * right.norm()
    if not recomputes:
        rows = shares.grad_fn.next_functions[0][0].next_functions[0][0]  # sum, view, the loss
        assert rows.gradients == [None, None]


@EACH_SCHEDULE
@EVERY_LOSS
@FORMS
def test_a_split_backward_pass_computes_each_gradient_once(loss: Loss, recomputes: bool) -> None:
    head, (x, labels, num_valid) = layer(chunk=ROWS * SEQ_LEN, recomputes=recomputes, loss=loss), inputs()
    body = nn.Linear(DIM, DIM, bias=False).double()
    objective, _, terms = plain_of(head, body(x), labels)
    right = torch.autograd.grad(objective, (x, body.weight, head.weight))
    parameters = [*body.parameters(), *head.parameters()]
    loss = head(body(x), labels, num_valid).sum()
    logits, of_input, weight_grad = (ROWS * SEQ_LEN, VOCAB_SIZE), (ROWS * SEQ_LEN, DIM), (VOCAB_SIZE, DIM)
    with CountedProducts() as first:
        (x_grad, *_), groups = stage_backward_input([loss], None, [x], iter(parameters))
    assert first.shapes == ({logits: 1, of_input: 2} if recomputes else {of_input: 1}), "of head and body"
    assert head.weight.grad is None
    with CountedProducts() as second:
        stage_backward_weight(iter(parameters), groups)
    assert second.shapes == ({logits: 1, weight_grad: 1} if recomputes else {}) | {(DIM, DIM): 1}
    for found, expected in zip((x_grad, body.weight.grad, head.weight.grad), right, strict=True):
        assert found is not None
        assert (found - expected).norm() <= 1e-14 * expected.norm()
    assert_terms(head, terms)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("token_bytes", [4 * 2048, 4 * 32_000, 4 * 128_256, 2**40])
def test_automatic_chunks_stay_below_the_limit(token_bytes: int, device: str) -> None:
    for tokens in (1, 4096, 8192, 10_000):
        chunk = tokens_per_chunk("auto", token_bytes, device, tokens)
        assert chunk == 1 or chunk * token_bytes <= CHUNK_BYTES[device]
        assert chunk <= CHUNK_TOKENS[device]
        assert tokens_per_chunk(5, token_bytes, device, tokens) == 5


def test_automatic_chunks_on_gpus_are_aligned_and_about_equal() -> None:
    """Of rows of 8,192 tokens: of 128,256 ids, at most 2,092 tokens fit into a chunk."""
    found = {
        ids: tokens_per_chunk("auto", 4 * ids, "cuda", 8192) for ids in (32_000, 128_256, 151_936, 256_000, 262_144)
    }
    assert found == {32_000: 4096, 128_256: 2048, 151_936: 1664, 256_000: 1024, 262_144: 1024}
    assert tokens_per_chunk("auto", 4 * 32_000, "cuda", 5000) == 2560  # not 4,096 and 904
    assert tokens_per_chunk("auto", 4 * 32_000, "cuda", 100) == 128
    assert tokens_per_chunk("auto", 2**24, "cuda", 8192) == 64  # fewer than 128 fit


@FORMS
def test_peak_memory_in_bfloat16(recomputes: bool) -> None:
    """Beside the sum of the weight's gradients in float32: a chunk and the gradients of PART_IDS ids; at the end, the
    gradient in bfloat16."""
    ids, dim, chunk = 8 * PART_IDS, 64, 16
    head = OutputLayer(dim, ids).to(torch.bfloat16)
    head.computation = LossComputation(chunk_tokens=chunk, recomputes=recomputes)
    x = torch.randn(1, 4 * chunk, dim).to(torch.bfloat16).requires_grad_()
    labels = torch.arange(4 * chunk).unsqueeze(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        head(x, labels, torch.tensor([4 * chunk])).sum().backward()
    peak = max(accumulate(size for _, size in memory_events(profiler)))
    during = chunk * ids * (4 + 2 * 2) + PART_IDS * dim * (4 + 2)
    assert peak <= 1.15 * (ids * dim * 4 + max(during, ids * dim * 2))


@FORMS
def test_largest_tensor_does_not_grow_with_the_tokens(recomputes: bool) -> None:
    head, (x, labels, num_valid) = layer(recomputes=recomputes), inputs()
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            largest = max(largest, *(each.numel() for each in [found] if isinstance(each, Tensor)), 0)
            return found

    with Largest():
        head(x, labels, num_valid).sum().backward()
    assert largest == max(16 * VOCAB_SIZE, VOCAB_SIZE * DIM, ROWS * SEQ_LEN * DIM)


def test_ignore_index_is_defined_once() -> None:
    definition = re.compile(r"^\s*IGNORE_INDEX\b.*=|[^\w.]-100\b", re.MULTILINE)
    sources = Path(titanlite.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if definition.search(path.read_text(encoding="utf-8"))] == ["batch.py"]
