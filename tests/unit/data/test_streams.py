import random
from collections.abc import Sequence

import pytest

from tests.seeds import seeds
from tests.unit.data.fake_corpus import (
    PAD,
    FakeCorpus,
    SizedStream,
    empty_row,
    expected_sequences,
    make_stream,
    piece_at,
)
from titanlite.batch import IGNORE_INDEX
from titanlite.data.order import IndexedPieces, Permutation
from titanlite.data.sources.pieces import TokenPiece
from titanlite.data.streams import BadRowPolicy, SourceState, SourceStream
from titanlite.runtime.errors import UserError


def random_corpus(rng: random.Random, *, bad: bool = False) -> FakeCorpus:
    longest = rng.choice([1, 4, 30])
    lengths: list[int | None] = [rng.choice([0, rng.randrange(longest + 1)]) for _ in range(rng.randrange(4, 40))]
    if bad:
        lengths = [None if rng.random() < 0.2 else length for length in lengths]
    return FakeCorpus([*lengths, 5, 5, 5, 5])


def take(stream: SizedStream, sequences: int) -> list[tuple[list[int], list[int]]]:
    taken = []
    for _ in range(sequences):
        row = empty_row(stream.seq_len)
        stream.next_sequence(row)
        targets = int((row.labels != IGNORE_INDEX).sum())
        assert row.length.tolist() == [min(targets + 1, stream.seq_len) if targets else 0]
        taken.append((row.tokens.tolist(), row.labels.tolist()))
    return taken


@seeds(10, 400)
def test_a_finite_stream_yields_its_tokens_in_a_row(seeds: range) -> None:
    for rng in map(random.Random, seeds):
        corpus, seq_len, epochs = random_corpus(rng, bad=True), rng.randrange(1, 9), rng.randrange(1, 4)
        for s in range(3):
            facts = {"stream": s, "num_streams": 3, "seq_len": seq_len, "epochs": epochs}
            stream = make_stream(corpus, **facts)
            assert take(stream, 200) == expected_sequences(corpus, **facts, sequences=200)
            assert stream.ended
            assert stream.state().sequences == 200


@seeds(5, 100)
def test_a_repeating_stream_begins_like_a_long_finite_one(seeds: range) -> None:
    for rng in map(random.Random, seeds):
        corpus = FakeCorpus([rng.randrange(5) for _ in range(20)] + [1, 1])
        facts = {"stream": 1, "num_streams": 2, "seq_len": 7}
        stream = make_stream(corpus, **facts, epochs=-1)
        assert take(stream, 60) == expected_sequences(corpus, **facts, epochs=1000, sequences=60)
        assert not stream.ended


@seeds(4, 100)
@pytest.mark.parametrize("epochs", [-1, 1, 2])
def test_resume_at_any_sequence_is_exact(seeds: range, epochs: int) -> None:
    for rng in map(random.Random, seeds):
        corpus = random_corpus(rng, bad=True)
        facts = {"stream": 0, "num_streams": 2, "seq_len": rng.randrange(1, 9), "epochs": epochs}
        expected, states = [], []
        stream = make_stream(corpus, **facts)
        for _ in range(40):
            states.append(stream.state())
            expected += take(stream, 1)
        end = stream.state()
        for n, state in enumerate(states):
            restored = make_stream(corpus, **facts)
            take(restored, rng.randrange(3))
            restored.load_state(SourceState(*state))
            assert take(restored, 40 - n) == expected[n:]
            assert restored.state() == end


def test_a_restored_stream_reads_only_its_current_piece() -> None:
    corpus = FakeCorpus([10] * 40)
    stream = make_stream(corpus, stream=0, num_streams=2, seq_len=8, epochs=-1)
    take(stream, 12)
    state = stream.state()
    corpus.fetched.clear()
    restored = make_stream(corpus, stream=0, num_streams=2, seq_len=8, epochs=-1)
    restored.load_state(state)
    take(restored, 1)
    assert len(corpus.fetched) <= 3


def test_a_finite_stream_ends_with_its_last_target() -> None:
    masked = ([0, 0], [IGNORE_INDEX, IGNORE_INDEX])
    for number, expected in ((0, [([1, 2], [2, 3]), ([3, 4], [4, 5]), masked]), (1, [masked])):  # of two streams
        stream = make_stream(FakeCorpus([5]), stream=number, num_streams=2, seq_len=2, epochs=1)
        for sequence in expected:
            assert stream.ended is (sequence == masked)
            assert take(stream, 1) == [sequence]


def test_bad_rows_are_counted_once_with_the_sequence_that_consumes_them() -> None:
    corpus = FakeCorpus([None, 4, None, None, 4, 4])
    stream = make_stream(corpus, stream=0, num_streams=1, seq_len=4, epochs=-1)
    order = [piece_at(corpus, position) for position in range(6)]
    lengths = [0 if corpus.tokens[piece] is None else 4 for piece in order]
    counts = []
    for n in range(1, 8):
        take(stream, 1)
        needed = next((p for p in range(6) if sum(lengths[: p + 1]) >= 4 * n + 1), 6)
        counts.append((stream.state().bad_rows, sum(length == 0 for length in lengths[:needed])))
    assert [count for count, _ in counts] == [expected for _, expected in counts]
    assert counts[-1][0] == 3


def test_only_one_rank_logs_a_bad_row(caplog: pytest.LogCaptureFixture) -> None:
    for logs in (True, False):
        caplog.clear()
        stream = make_stream(FakeCorpus([None, 9]), stream=0, num_streams=1, seq_len=4, epochs=1)
        stream._policy = BadRowPolicy(skip=True, limit=5, logs=logs)
        take(stream, 3)
        assert len(caplog.records) == logs
        assert stream.state().bad_rows == 1


def test_more_bad_rows_than_the_limit_raise() -> None:
    stream = make_stream(FakeCorpus([None] * 50 + [3]), stream=0, num_streams=1, seq_len=4, epochs=-1, limit=20)
    with pytest.raises(UserError, match=r"more than data.max_bad_rows = 20 bad rows; the last one: row"):
        take(stream, 1)


@pytest.mark.parametrize("length", [0, None])
def test_a_stream_without_any_token_is_an_error_not_an_endless_loop(length: int | None) -> None:
    stream = make_stream(FakeCorpus([length] * 6), stream=1, num_streams=2, seq_len=4, epochs=-1)
    with pytest.raises(UserError, match=r"1,000 consecutive documents .* have no token"):
        take(stream, 1)


def test_one_token_is_enough_to_repeat() -> None:
    stream = make_stream(FakeCorpus([1, 0]), stream=0, num_streams=1, seq_len=3, epochs=-1)
    assert take(stream, 2) == [([1, 1, 1], [1, 1, 1])] * 2


def test_states_of_other_data_are_refused() -> None:
    stream = make_stream(FakeCorpus([4] * 6), stream=0, num_streams=2, seq_len=4, epochs=-1)
    with pytest.raises(UserError, match="no piece at the saved state"):
        stream.load_state(SourceState(0, 6, 0, 0, 0, 0))
    stream.load_state(SourceState(0, 2, 4, 2, 0, 0))
    with pytest.raises(UserError, match="use the data and the tokenizer of the run that is resumed"):
        take(stream, 1)


@seeds(5, 100)
def test_without_packing_each_document_starts_a_sequence(seeds: range) -> None:
    for rng in map(random.Random, seeds):
        corpus, seq_len = random_corpus(rng, bad=True), rng.randrange(1, 9)
        stream = make_stream(corpus, stream=0, num_streams=1, seq_len=seq_len, epochs=2, packing="none")
        expected = []
        for epoch in range(2):
            for position in range(corpus.count):
                ids = corpus.tokens[piece_at(corpus, epoch * corpus.count + position)] or []
                for begin in range(0, len(ids) - 1, seq_len):
                    part = ids[begin : begin + seq_len + 1]
                    missing = seq_len + 1 - len(part)
                    tokens = [*part, *[PAD] * missing][:seq_len]
                    expected.append((tokens, [*part[1:], *[IGNORE_INDEX] * missing]))
        assert take(stream, len(expected)) == expected
        assert take(stream, 1) == [([0] * seq_len, [IGNORE_INDEX] * seq_len)]
        assert stream.ended


@seeds(5, 100)
def test_positions_restart_and_labels_stay_inside_documents(seeds: range) -> None:
    """Each token of the fake corpus is unique: it determines its document and its position there."""
    for rng in map(random.Random, seeds):
        corpus, seq_len = random_corpus(rng), rng.randrange(2, 12)
        place_of = {token: (n, place) for n, ids in enumerate(corpus.tokens) for place, token in enumerate(ids or [])}
        stream = make_stream(corpus, stream=0, num_streams=1, seq_len=seq_len, epochs=1)
        plain = make_stream(corpus, stream=0, num_streams=1, seq_len=seq_len, epochs=1)
        while not stream.ended:
            row, without = empty_row(seq_len, positions=True), empty_row(seq_len)
            assert stream.next_sequence(row) == plain.next_sequence(without)
            assert row.tokens.tolist() == without.tokens.tolist()
            assert row.positions is not None
            previous = (-1, -1)
            assert row.length.tolist() == without.length.tolist()
            values = zip(row.tokens.tolist(), row.labels.tolist(), row.positions.tolist(), strict=True)
            for n, (token, label, position) in enumerate(values):
                assert (token != 0) == (n < row.length[0])
                if token == 0:
                    assert label == IGNORE_INDEX
                    continue
                document, place = place_of[token]
                assert position == (0 if document != previous[0] else previous[1] + 1)
                previous = (document, position)
                following = int(without.labels[n])
                inside = following != IGNORE_INDEX and place_of[following] == (document, place + 1)
                assert label == (following if inside else IGNORE_INDEX)


class OneDocument(FakeCorpus):
    """A corpus whose pieces are the parts of one document."""

    def fetch(self, pieces: Sequence[int]) -> list[TokenPiece | Exception]:
        found = super().fetch(pieces)
        return [
            piece._replace(starts=piece.starts[:0]) if isinstance(piece, TokenPiece) and number else piece
            for number, piece in zip(pieces, found, strict=True)
        ]


@pytest.mark.parametrize(("num_streams", "positions"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 1, 2, 0, 1, 2])])
def test_consecutive_parts_of_a_document_are_one_document(num_streams: int, positions: list[int]) -> None:
    """Piece 1 continues the document of piece 0; piece 2 does not continue piece 0."""
    corpus = OneDocument([3, 3, 3, 3])
    permutation = Permutation(4, ())
    pieces = IndexedPieces(corpus, permutation, 0, num_streams=num_streams, name="one", epochs=1)
    stream = SourceStream(pieces, packing="concatenate", policy=BadRowPolicy(False, 0))
    row = empty_row(6, positions=True)
    stream.next_sequence(row)
    assert row.positions is not None
    assert row.positions.tolist() == positions
    assert (row.labels == IGNORE_INDEX).tolist() == [num_streams == 2 and n in (2, 5) for n in range(6)]
