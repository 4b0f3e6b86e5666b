"""The digest of tensors does not depend on how they are sharded, and changes with any bit."""

import pytest
import torch
from torch import Tensor

from titanlite.parallel.digest import combine, sum_of_bits


def whole(tensor: Tensor) -> int:
    return int(sum_of_bits(tensor, tensor.shape, (0,) * tensor.dim()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (6, 5), (4, 6, 5)])
def test_parts_add_up(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for dim, size in enumerate(shape):
        begins = (0, 1, size - 2)  # uneven parts
        total = torch.zeros((), dtype=torch.int64)
        for begin, end in zip(begins, (*begins[1:], size), strict=True):
            offset = tuple(begin if each == dim else 0 for each in range(len(shape)))
            total += sum_of_bits(tensor.narrow(dim, begin, end - begin), shape, offset)
        assert int(total) == whole(tensor)
    assert int(sum_of_bits(tensor[:0], shape, (0,) * len(shape))) == 0


def test_any_bit_and_any_place_counts() -> None:
    tensor = torch.randn(9, 11, generator=torch.Generator().manual_seed(0))
    found = {whole(tensor)}
    for element in range(tensor.numel()):
        for bit in range(32):
            changed = tensor.clone()
            changed.view(torch.int32).view(-1)[element] ^= 1 << bit if bit < 31 else -(2**31)
            found.add(whole(changed))
    assert len(found) == 1 + tensor.numel() * 32
    assert whole(tensor.flip(0)) not in found
    assert whole(tensor.flip(1)) not in found
    swapped = tensor.clone()
    swapped[[0, 1]] = tensor[[1, 0]]
    assert whole(swapped) != whole(tensor)
    assert whole(torch.tensor([0.0])) != whole(torch.tensor([-0.0]))


def test_names_count() -> None:
    assert combine(["a", "b"], [1, 2]) == combine(["b", "a"], [2, 1])
    assert combine(["a", "b"], [1, 2]) != combine(["a", "b"], [2, 1])
    assert combine(["a"], [-1]) == combine(["a"], [2**64 - 1])
    assert len(combine([], [])) == 16
