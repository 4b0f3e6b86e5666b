"""Parts of a sequence, gathered and scattered."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from titanlite.parallel import tensor


@pytest.mark.parametrize("rows", [1, 2])
def test_the_parts_of_a_sequence_are_in_order(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is copied if there is one row, whose parts lie side by side."""
    whole = torch.arange(rows * 12 * 2.0).view(rows, 12, 2)
    parts = torch.cat(whole.chunk(3, dim=1))  # as all_gather returns them, and as reduce_scatter takes them
    group: Any = SimpleNamespace(size=lambda: 3)
    scattered = list[Tensor]()
    monkeypatch.setattr(tensor, "all_gather", lambda *_: parts)
    monkeypatch.setattr(tensor, "reduce_scatter", lambda x, _: scattered.append(x))
    gathered = tensor._gather_sequence(whole[:, :4], group)
    tensor._scatter_sequence(whole, group)
    assert torch.equal(gathered, whole)
    assert torch.equal(scattered[0], parts)
    assert (gathered.data_ptr() == parts.data_ptr()) is (rows == 1)
    assert (scattered[0].data_ptr() == whole.data_ptr()) is (rows == 1)
