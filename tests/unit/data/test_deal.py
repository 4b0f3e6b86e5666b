import pytest

from titanlite.data.deal import most_sequences, streams_of


@pytest.mark.parametrize("num_streams", [8, 12, 13])
@pytest.mark.parametrize("global_batch_size", [4, 8, 16, 18, 25])
def test_the_most_sequences_of_a_rank_in_any_step(global_batch_size: int, num_streams: int) -> None:
    for degree in range(1, num_streams + 1):
        owner = {stream: rank for rank in range(degree) for stream in streams_of(rank, num_streams, degree)}
        assert sorted(owner) == list(range(num_streams))
        counts = []
        for step in range(num_streams):  # after so many steps, the streams begin again
            owners = [owner[n % num_streams] for n in range(step * global_batch_size, (step + 1) * global_batch_size)]
            counts += [owners.count(rank) for rank in range(degree)]
        assert most_sequences(global_batch_size, num_streams, degree) == max(counts)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_sequences_stay_together(degree: int) -> None:
    """With R = 3, sequences 3 n to 3 n + 2 are on one rank, in every step; no rank has more than most_sequences."""
    owner = {stream: rank for rank in range(degree) for stream in streams_of(rank, 12, degree, 3)}
    assert sorted(owner) == list(range(12))
    for step in range(4):
        owners = [owner[n % 12] for n in range(step * 15, (step + 1) * 15)]
        assert all(len({*owners[begin : begin + 3]}) == 1 for begin in range(0, 15, 3))
        assert max(owners.count(rank) for rank in range(degree)) <= most_sequences(15, 12, degree, 3)


def test_more_ranks_than_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="8 streams cannot be dealt to 9 data ranks"):
        most_sequences(16, 8, 9)
