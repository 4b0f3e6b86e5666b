"""Random numbers that depend only on seed, step, sequence, site and element, and have good statistics."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from titanlite.models.randomness import DRAW_VERSION, dropout, row_keys, seed_microbatch, uniform

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15
FNV_OFFSET = 0xCBF29CE484222325


def mixed(word: int) -> int:
    """The output function of SplitMix64, in Python integers."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WORD
    return word ^ word >> 31


def unmixed(word: int) -> int:
    """The inverse of `mixed`."""
    word = (word ^ word >> 31 ^ word >> 62) * pow(0x94D049BB133111EB, -1, WORD) % WORD
    word = (word ^ word >> 27 ^ word >> 54) * pow(0xBF58476D1CE4E5B9, -1, WORD) % WORD
    return word ^ word >> 30 ^ word >> 60


def expected(seed: int, step: int, sequence: int, site: str, element: int) -> float:
    key = 0
    for number in (seed, step, sequence):
        key = mixed((key + (number + 1) * GOLDEN) % WORD)
    name = FNV_OFFSET
    for byte in site.encode():
        name = (name ^ byte) * 0x100000001B3 % WORD
    row = mixed((key + name) % WORD)
    return (mixed((row + mixed((element + 1) * GOLDEN % WORD)) % WORD) >> 40) / 2**24


@pytest.mark.parametrize(("seed", "step"), [(0, 1), (2**63 - 1, 10**9), (7, 0)])
@pytest.mark.parametrize("site", ["layers.0.dropout", "a", ""])
def test_numbers_match_the_formula(seed: int, step: int, site: str) -> None:
    sequences = [0, 5, 2**40]
    numbers = uniform(row_keys(seed, step, torch.tensor(sequences)), site, 3, 5)
    assert numbers.dtype == torch.float32
    precise = uniform(row_keys(seed, step, torch.tensor(sequences)), site, 3, 5, dtype=torch.float64)
    assert precise.dtype == torch.float64
    assert torch.equal(precise, numbers.double())
    wanted = [[expected(seed, step, sequence, site, element) for element in range(15)] for sequence in sequences]
    assert numbers.view(3, 15).tolist() == wanted


def test_known_values_of_this_version() -> None:
    """These change only together with DRAW_VERSION: otherwise a run with dropout would not resume exactly."""
    assert DRAW_VERSION == 1
    numbers = uniform(row_keys(1, 2, torch.tensor([3, 4])), "layers.0.dropout", 2)
    assert (numbers * 2**24).to(torch.int64).tolist() == [[9931375, 7873719], [8530700, 10363082]]


def test_numbers_do_not_depend_on_batch_or_shape() -> None:
    keys = row_keys(1, 2, torch.arange(6))
    full = uniform(keys, "site", 4, 3)
    assert torch.equal(torch.cat([uniform(part, "site", 4, 3) for part in keys.split([1, 3, 2])]), full)
    assert torch.equal(uniform(keys.flip(0), "site", 12).flip(0).view(6, 4, 3), full)
    assert torch.equal(uniform(keys, "site", 2, 3), full[:, :2])
    assert uniform(keys, "site").shape == (6,)


def test_torch_generators_are_not_used() -> None:
    before = torch.get_rng_state()
    first = uniform(row_keys(1, 2, torch.arange(6)), "site", 100)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert torch.equal(uniform(row_keys(1, 2, torch.arange(6)), "site", 100), first)


def of_seeds(n: int) -> Tensor:
    return uniform(torch.cat([row_keys(seed, 1, torch.zeros(1, dtype=torch.int64)) for seed in range(n)]), "a", n)


def of_steps(n: int) -> Tensor:
    return uniform(torch.cat([row_keys(0, step, torch.zeros(1, dtype=torch.int64)) for step in range(n)]), "a", n)


def of_sequences(n: int) -> Tensor:
    return uniform(row_keys(0, 1, torch.arange(n)), "a", n)


def of_sites(n: int) -> Tensor:
    return torch.cat([uniform(row_keys(0, 1, torch.zeros(1, dtype=torch.int64)), f"layers.{k}", n) for k in range(n)])


@pytest.mark.parametrize("numbers_of", [of_seeds, of_steps, of_sequences, of_sites])
def test_neighbors_are_independent(numbers_of: Callable[[int], Tensor]) -> None:
    """512 x 512 numbers: uniform in 16 classes and uncorrelated along and across, within 5 standard deviations."""
    numbers = numbers_of(512).to(torch.float64)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    count = numbers.numel()
    classes = torch.histc(numbers, 16, 0, 1)
    chi_square = ((classes - count / 16).square() / (count / 16)).sum()
    assert abs(chi_square - 15) < 5 * 30**0.5
    centered = (numbers - 0.5) * 12**0.5
    for shift in ((0, 1), (1, 0), (1, 1), (0, 64), (64, 0)):
        correlation = (centered * centered.roll(shift, (0, 1))).mean()
        assert abs(correlation) < 5 / count**0.5, shift


def test_rows_are_not_shifted_copies() -> None:
    """In plain SplitMix64 every key is a position in the same sequence, so that a row could be another one, shifted."""
    starts = [12345, 12345 + GOLDEN]
    keys = [(unmixed(start) - FNV_OFFSET) % WORD for start in starts]
    first, second = uniform(torch.tensor([key - WORD * (key >= 2**63) for key in keys]), "", 1000)
    assert not torch.equal(first[1:], second[:-1])
    assert not torch.equal(second[1:], first[:-1])


def test_dropout_keeps_the_mean_and_its_gradient() -> None:
    keys = row_keys(0, 1, torch.arange(8))
    x = torch.ones(8, 50, 40, dtype=torch.float64, requires_grad=True)
    out = dropout(x, 0.25, keys, "site")
    assert out.dtype == torch.float64
    assert set(out.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs(out.mean().item() - 1) < 5 * (0.25 / 0.75 / x.numel()) ** 0.5
    out.sum().backward()
    assert torch.equal(x.grad, out)
    assert torch.equal(dropout(x, 0.0, keys, "site"), x)
    assert dropout(x.to(torch.bfloat16), 0.25, keys, "site").dtype == torch.bfloat16


@pytest.mark.slow
def test_compiled_dropout_is_the_same() -> None:
    def draw(x: Tensor, keys: Tensor) -> Tensor:
        return dropout(x, 0.3, keys, "layers.3.dropout")

    compiled = torch.compile(draw, backend="aot_eager", fullgraph=True)
    x, keys = torch.randn(4, 5, 6), row_keys(1, 2, torch.arange(4))
    assert torch.equal(compiled(x, keys), draw(x, keys))


def drawn(*facts: int) -> list[float]:
    """Draws of torch's generator, seeded for a microbatch."""
    seed_microbatch(*facts, torch.device("cpu"))
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
