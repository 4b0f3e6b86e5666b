"""The order of pieces and the choice of sources: recorded values, and their properties; deals and packing."""

from collections import Counter
from itertools import chain, groupby

import numpy as np
import pytest

from tests.unit.data.fake_corpus import FakeCorpus
from titanlite.data import order as order_module
from titanlite.data import segments
from titanlite.data.deal import most_sequences, streams_of
from titanlite.data.order import STREAM_VERSION, IndexedPieces, Mixture, Order, Permutation, mix, shuffled
from titanlite.data.packing import num_sequences, packed_lengths
from titanlite.data.segments import Segments, scattered
from titanlite.data.sources.pieces import AT_BEGIN, TokenPiece
from titanlite.data.streams import TooLong, fitted_length, piece_lengths

SHUFFLED = [5, 7, 8, 2, 9, 0, 3, 1, 6, 4]
SCATTERED = [2, 8, 7, 3, 9, 0, 5, 6, 4, 1]
SCATTERED_WIDELY = [554865107, 562370149, 9574481204]
DEALT = [40, 39, 20, 2, 23, 19, 18, 1, 22, 27, 0, 29, 21, 28]
CHOICES = [0, 1, 0, 2, 0, 0, 1, 0, 2, 0, 0, 1]
ORDER = [9, 7, 10, 5, 8, 6, 11, 13, 16, 12, 14, 15, 3, 2, 0, 4, 1]


def order(of: Order, epoch: int, num_streams: int = 1) -> list[int]:
    return [int(of.pieces(epoch, position, num_streams)[0]) for position in range(of.count)]


def test_mix_is_splitmix64() -> None:
    """The first outputs of the published generator for the seed 1234567."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    states = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * golden
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_the_order_never_changes() -> None:
    """If this fails, resumed runs change their data: STREAM_VERSION must change, too."""
    assert STREAM_VERSION == 4
    assert shuffled(10, 0).tolist() == SHUFFLED
    assert order(Permutation(17, (5, 0), block_pieces=6), 1) == ORDER


@pytest.mark.parametrize("count", [1, 7, 100, 53])
@pytest.mark.parametrize("block_pieces", [1, 8, 1000])
def test_each_epoch_has_every_piece_once(count: int, block_pieces: int) -> None:
    permutation = Permutation(count, (1,), block_pieces=block_pieces)
    for epoch in range(3):
        assert sorted(order(permutation, epoch)) == list(range(count))


def test_epochs_and_seeds_differ() -> None:
    one, other = (Permutation(200, (seed,), block_pieces=64) for seed in (0, 1))
    orders = [order(one, 0), order(one, 1), order(other, 0), order(other, 1)]
    assert len({tuple(o) for o in orders}) == 4
    assert orders[0] == order(one, 0)


def test_pieces_are_shuffled_within_contiguous_blocks() -> None:
    pieces = order(Permutation(1000, (0,), block_pieces=100), 0)
    blocks = [pieces[n : n + 100] for n in range(0, 1000, 100)]
    assert all(max(block) - min(block) == 99 for block in blocks)
    assert sorted(block[0] // 100 for block in blocks) == list(range(10))
    assert [block[0] // 100 for block in blocks] != list(range(10))
    assert len({tuple(piece % 100 for piece in block) for block in blocks}) == 10


def test_streams_in_other_blocks_do_not_sort_for_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for one block, four streams that are each in another block read in turns."""
    sorts, offsets = [], Permutation._offsets
    monkeypatch.setattr(Permutation, "_offsets", lambda *facts: sorts.append(facts[1:]) or offsets(*facts))
    monkeypatch.setattr(order_module, "TABLE_BYTES", 1)
    monkeypatch.setattr(order_module, "_tables", order_module._Tables())
    permutation = Permutation(4000, (0,), block_pieces=1000)
    streams = [
        IndexedPieces(FakeCorpus([1] * 4000), permutation, n, num_streams=4, name="", epochs=1) for n in range(4)
    ]
    places = [stream.first()._replace(position=1000 * n + n) for n, stream in enumerate(streams)]
    found = set()
    for _ in range(250):
        found |= {stream.number(place) for stream, place in zip(streams, places, strict=True)}
        places = [stream.after(place) for stream, place in zip(streams, places, strict=True)]
    assert len(found) == 1000
    assert len(sorts) == 4


def test_without_shuffle_the_order_is_that_of_the_source() -> None:
    assert order(Permutation(8, ()), 4) == list(range(8))


def segments_of(count: int, seeds: tuple[int, ...], num_streams: int, block: int, open_blocks: int = 2) -> Segments:
    """Blocks of this many windows, of which a stream mixes so many."""
    made = Segments(count, seeds, num_streams=num_streams, seq_len=segments.BLOCK_TOKENS)
    made.block, made.open_windows = block, block * open_blocks
    return made


def of_stream(of: Segments, epoch: int, stream: int, num_streams: int) -> list[int]:
    """The windows of a stream in an epoch, as it looks them up."""
    found = list[int]()
    position = (stream - epoch * of.count) % num_streams
    while position < of.count:
        run = of.pieces(epoch, position, num_streams).tolist()
        found += run
        position += num_streams * len(run)
    return found


def test_the_order_of_dealt_windows_never_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, resumed runs change their data: STREAM_VERSION must change, too."""
    assert of_stream(segments_of(41, (5, 0), 3, 3, 4), 1, 2, 3) == DEALT
    for count, num_streams, seq_len, expected in (
        (10**9, 1024, 8192, (160, 320)),
        (10**9, 8, 8192, (160, 5120)),
        (10**9, 1, 2**21, (1, 32)),
        (10**5, 64, 1024, (48, 1536)),
        (1000, 8, 1024, (1, 32)),
    ):
        made = Segments(count, (0, 0), num_streams=num_streams, seq_len=seq_len)
        assert (made.block, made.open_windows) == expected
    monkeypatch.setattr(segments, "SORTED", 0)
    assert scattered(np.arange(10), 10, 7, 8).tolist() == SCATTERED
    assert scattered(np.arange(3), 10**10, 7, 8).tolist() == SCATTERED_WIDELY


@pytest.mark.parametrize("count", [1, 2, 7, 157])
@pytest.mark.parametrize("num_streams", [1, 3, 8, 200])
def test_streams_share_each_epoch(count: int, num_streams: int) -> None:
    """Each window is in one stream once, and positions have the windows that runs of them have."""
    for block in {1, min(5, count), count}:
        of = segments_of(count, (1, 0), num_streams, block)
        for epoch in range(3):
            found = [of_stream(of, epoch, stream, num_streams) for stream in range(num_streams)]
            assert sorted(chain(*found)) == list(range(count))
            position = (epoch * 31) % count
            stream = (epoch * count + position) % num_streams
            assert of.pieces(epoch, position, num_streams)[0] == found[stream][position // num_streams]


def test_a_stream_needs_the_blocks_that_it_mixes() -> None:
    """A few at a time, in a random order; no block is in more than two streams."""
    of = segments_of(5 * 203 + 2, (1, 0), 4, 5, open_blocks=4)
    found = [of_stream(of, 1, stream, 4) for stream in range(4)]
    blocks = [[window // 5 for window in windows] for windows in found]
    owners = Counter(block for of_one in blocks for block in set(of_one))
    assert sum(owners.values()) <= len(owners) + 3
    for of_one in blocks:
        spans = [max(places) - min(places) for places in (np.flatnonzero(np.array(of_one) == b) for b in set(of_one))]
        assert max(spans) <= 2 * 30
        assert np.mean(np.diff(of_one) == 0) < 0.35
        assert abs(np.corrcoef(np.arange(len(of_one)), of_one)[0, 1]) < 0.3


def test_windows_are_mixed_better_than_before() -> None:
    """Neighbors of 100,000 windows of 8 streams are a third of all windows apart, as in a random order. They were half
    as far apart in version 3, which reads 65,536 windows before the others."""
    distances = []
    for of in (Permutation(100_000, (0, 0)), Segments(100_000, (0, 0), num_streams=8, seq_len=8192)):
        runs = [of.pieces(0, stream, 8) for stream in range(8)]
        distances.append(np.abs(np.diff(np.stack([run[:64] for run in runs], 1).ravel())).mean() / 100_000)
    assert distances[0] < 0.25
    assert distances[1] == pytest.approx(1 / 3, abs=0.03)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 17, 4097])
def test_a_large_permutation_is_one(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SORTED", 0)
    found = scattered(np.arange(count), count, 1, 2)
    assert sorted(found.tolist()) == list(range(count))
    if count > 1000:
        assert abs(np.corrcoef(np.arange(count), found)[0, 1]) < 0.05
        assert np.abs(np.diff(found)).mean() == pytest.approx(count / 3, rel=0.05)


@pytest.mark.slow
def test_first_positions_are_uniform() -> None:
    firsts = [order(Permutation(4, (seed,)), 0)[0] for seed in range(4000)]
    assert np.abs(np.bincount(firsts, minlength=4) - 1000).max() < 150


def test_choices_never_change() -> None:
    """If this fails, resumed runs change their data: STREAM_VERSION must change, too."""
    mixture = Mixture([5, 3, 1], seed=7)
    assert [mixture.source(stream, count) for stream in range(3) for count in range(4)] == CHOICES


@pytest.mark.parametrize("weights", [[0.3], [1, 1], [0.9, 0.1], [5, 3, 1, 0.5], [1e-3, 1], [0.2] * 5])
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


@pytest.mark.parametrize("num_streams", [8, 12, 13])
@pytest.mark.parametrize("global_batch_size", [4, 8, 16, 18, 25])
def test_the_most_sequences_of_a_rank_in_any_step(global_batch_size: int, num_streams: int) -> None:
    for degree in range(1, num_streams + 1):
        owner = {stream: rank for rank in range(degree) for stream in streams_of(rank, num_streams, degree)}
        assert sorted(owner) == list(range(num_streams))
        counts = []
        for begin in range(num_streams):  # after so many sequences, the streams begin again
            owners = [owner[n % num_streams] for n in range(begin, begin + global_batch_size)]
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


def piece(length: int, *trained: int) -> TokenPiece:
    """trained: places of the tokens that are trained on; none are given: all."""
    places = np.arange(length)
    return TokenPiece(places, AT_BEGIN, np.isin(places, trained) if trained else None)


@pytest.mark.parametrize(
    ("conversation", "truncated", "skipped"),
    [
        (piece(0), 0, 0),
        (piece(1), 0, 0),  # the first token is no target
        (piece(2), 2, 2),
        (piece(5, 0), 0, 0),
        (piece(5, 0, 1), 5, 5),
        (piece(8, 7), 8, 8),
        (piece(9, 8), 9, 9),
        (piece(10), 9, 0),
        (piece(10, 8), 9, 0),
        (piece(10, 9), 0, 0),  # the only target is cut
    ],
)
def test_a_conversation_has_a_target_in_a_sequence_of_9_tokens(
    conversation: TokenPiece, truncated: int, skipped: int
) -> None:
    ways: tuple[TooLong, TooLong] = ("truncate", "skip")
    assert [fitted_length(conversation, 8, way) for way in ways] == [truncated, skipped]


def test_conversations_fill_sequences_in_order() -> None:
    assert packed_lengths([3, 3, 0, 4, 9, 2], 8, "concatenate", cuts=False) == [6, 4, 9, 2]
    assert packed_lengths([3, 3, 0, 4, 9, 2], 8, "none", cuts=False) == [3, 3, 4, 9, 2]
    assert packed_lengths([5, 4, 9], 8, "concatenate", cuts=False) == [9, 9]
    assert num_sequences([0, 0], 8, "concatenate", cuts=False) == 0
    pieces = [piece(5), piece(12), piece(4)]
    assert piece_lengths(pieces, 8, "truncate") == [5, 9, 4]
    assert piece_lengths(pieces, 8, "skip") == [5, 0, 4]
    assert piece_lengths(pieces, 8, None) == [5, 12, 4]


def test_documents_fill_a_fraction_of_a_sequence_or_one_each() -> None:
    lengths = [0, 1, 9, 10]
    assert num_sequences(lengths, 8, "concatenate", cuts=True) == 20 / 8
    assert num_sequences(lengths, 8, "none", cuts=True) == 0 + 0 + 1 + 2
    assert num_sequences(lengths, 1, "none", cuts=True) == 0 + 0 + 8 + 9
