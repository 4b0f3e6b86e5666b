"""Seeding of torch's generators for a microbatch."""

import torch

from titanlite.runtime.determinism import seed_microbatch

CPU = torch.device("cpu")


def drawn(*facts: int) -> list[float]:
    seed_microbatch(*facts, CPU)
    return torch.rand(4).tolist()


def test_draws_depend_on_all_arguments_and_nothing_else() -> None:
    facts = [(0, 1, 2, 0), (1, 1, 2, 0), (0, 2, 2, 0), (0, 1, 3, 0), (0, 1, 2, 1), (2**63 - 1, 10**9, 2**40, 9)]
    first = [drawn(*arguments) for arguments in facts]
    assert len({tuple(numbers) for numbers in first}) == len(facts)
    assert [drawn(*arguments) for arguments in reversed(facts)] == first[::-1]


def test_arguments_are_not_concatenated() -> None:
    assert drawn(1, 11, 1, 1) != drawn(11, 1, 1, 1) != drawn(1, 1, 11, 1)


def test_cuda_is_not_initialized() -> None:
    before = torch.cuda.is_initialized()
    drawn(0, 1, 2, 0)
    assert torch.cuda.is_initialized() == before
