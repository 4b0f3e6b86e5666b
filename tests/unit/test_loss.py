"""The loss is a sum over valid labels, computed in at least float32."""

import re
from pathlib import Path

import pytest
import torch

import titanlite
from titanlite.batch import IGNORE_INDEX
from titanlite.loss import cross_entropy_by_row


def _logits(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def test_sums_over_valid_labels_only() -> None:
    logits = _logits(2, 3, 5)
    labels = torch.tensor([[1, IGNORE_INDEX, 4], [IGNORE_INDEX, 0, IGNORE_INDEX]])
    expected = torch.zeros((), dtype=torch.float64)
    for row, column in ((0, 0), (0, 2), (1, 1)):
        scores = logits[row, column]
        expected = expected + scores.exp().sum().log() - scores[labels[row, column]]
    torch.testing.assert_close(cross_entropy_by_row(logits, labels).sum(), expected, rtol=1e-14, atol=0)


def test_gradient_is_exact() -> None:
    logits = _logits(2, 3, 5)
    labels = torch.tensor([[1, IGNORE_INDEX, 4], [2, 0, IGNORE_INDEX]])
    assert torch.autograd.gradcheck(lambda scores: cross_entropy_by_row(scores, labels), (logits,))


def test_no_valid_label_gives_zero_with_a_graph() -> None:
    logits = _logits(2, 3, 5)
    loss = cross_entropy_by_row(logits, torch.full((2, 3), IGNORE_INDEX)).sum()
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_computed_in_at_least_float32(dtype: torch.dtype, expected: torch.dtype) -> None:
    logits = _logits(1, 64, 100, dtype=dtype)
    labels = torch.arange(64).unsqueeze(0)
    loss = cross_entropy_by_row(logits, labels).sum()
    assert loss.dtype == expected
    exact = cross_entropy_by_row(logits.detach().double(), labels).sum()
    assert abs(loss.item() - exact.item()) <= 8 * torch.finfo(expected).eps * exact.item()


def test_backward_saves_one_tensor_of_the_logits_size() -> None:
    logits = _logits(1, 2, 3, dtype=torch.bfloat16)
    saved: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        cross_entropy_by_row(logits, torch.zeros(1, 2, dtype=torch.int64))
    assert sum(tensor.numel() == logits.numel() for tensor in saved.values()) == 1


def test_ignore_index_is_defined_once() -> None:
    definition = re.compile(r"^\s*IGNORE_INDEX\b.*=|[^\w.]-100\b", re.MULTILINE)
    sources = Path(titanlite.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if definition.search(path.read_text(encoding="utf-8"))] == ["batch.py"]
