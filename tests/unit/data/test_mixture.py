from itertools import groupby

import pytest

from titanlite.data.order import Mixture

RECORDED = [0, 1, 0, 2, 0, 0, 1, 0, 2, 0, 0, 1]


def test_choices_never_change() -> None:
    """If this fails, resumed runs change their data: STREAM_VERSION must change, too."""
    mixture = Mixture([5, 3, 1], seed=7)
    assert [mixture.source(stream, count) for stream in range(3) for count in range(4)] == RECORDED


@pytest.mark.parametrize("weights", [[1, 1], [0.9, 0.1], [5, 3, 1, 0.5], [1e-3, 1], [0.2] * 5])
@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_actual_shares_follow_the_weights_from_the_start(weights: list[float], seed: int) -> None:
    """Along each stream and over the rows of the steps. Random draws would deviate by 27 of 3000."""
    mixture = Mixture(weights, seed=seed)
    along = [[mixture.source(stream, count) for count in range(3000)] for stream in (0, 1, 17)]
    steps = [mixture.source(stream, count) for count in range(50) for stream in range(64)]
    for choices, bound in (*[(one, 4) for one in along], (steps, 16)):
        counts = [0] * len(weights)
        for n, source in enumerate(choices, start=1):
            counts[source] += 1
            assert all(abs(count - n * share) < bound for count, share in zip(counts, mixture.shares, strict=True)), (
                n,
                counts,
            )


def test_even_weights_alternate() -> None:
    mixture = Mixture([1, 1], seed=3)
    runs = [len(list(run)) for _, run in groupby(mixture.source(0, count) for count in range(500))]
    assert max(runs) <= 3


def test_shares_do_not_depend_on_the_scale_of_the_weights() -> None:
    one, other = Mixture([1, 3], seed=0), Mixture([0.25, 0.75], seed=0)
    assert one.shares == other.shares == (0.25, 0.75)
    assert all(one.source(0, n) == other.source(0, n) for n in range(1000))


def test_a_single_source_is_always_chosen() -> None:
    assert {Mixture([0.3], seed=1).source(stream, n) for stream in range(8) for n in range(50)} == {0}
