"""Deterministic algorithms, as on a GPU, where torch refuses some operations."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.generation.generate import Sampling, choose
from titanlite.models import delta_rule
from titanlite.runtime import determinism
from titanlite.runtime.determinism import DebugConfig, apply_determinism, cumulative_sum


class CumulativeSums(TorchDispatchMode):
    """Counts torch's cumulative sums of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        del types
        if func.overloadpacket is torch.ops.aten.cumsum:
            self.found += args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def test_a_cumulative_sum_as_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    short, long = torch.randn(3, 64, dtype=torch.float64), torch.randn(2, 1000, dtype=torch.float64)
    monkeypatch.setattr(determinism, "_is_refused", lambda _: True)
    torch.testing.assert_close(cumulative_sum(short), short.cumsum(-1), rtol=0, atol=1e-14)
    assert torch.equal(cumulative_sum(long), long.cumsum(-1))


def test_nothing_that_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gated delta rule, forward and backward, and sampling."""
    monkeypatch.setattr(determinism, "_is_refused", lambda _: True)
    queries, keys = (torch.ones(2, 128, 2, 8) for _ in range(2))
    values, decays = torch.ones(2, 128, 4, 8), torch.zeros(2, 128, 4)
    with CumulativeSums() as sums:
        chunks = delta_rule._chunks(queries, keys, values, decays, decays + 0.5, None, slice(0, 128))
        state = torch.zeros(8, 8, 8)
        delta_rule._backward_of_segment(chunks, state, values, state)
    assert sums.found == 0
    monkeypatch.setattr(determinism, "MOST_PRODUCT", 1000)
    with CumulativeSums() as sums:
        choose(torch.ones(2, 1000), Sampling(temperature=0.8, top_p=0.9), 0)
    assert sums.found == 0


def test_uninitialized_memory_is_not_filled() -> None:
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    deterministic, cudnn = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    try:
        apply_determinism(DebugConfig(deterministic=True))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        cudnn.benchmark, cudnn.deterministic = before
