"""Best-fit packing: the sequences of a brute-force reference, each token once per epoch, the same after any resume."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.data import documents_in
from tests.seeds import seeds
from tests.unit.data.fake_corpus import FakeCorpus, SizedStream, empty_row, make_stream, piece_at
from tests.unit.data.ranks import build
from tests.unit.data.test_chat_streams import FakeConversations
from tests.unit.data.test_streams import OneDocument
from titanlite.batch import IGNORE_INDEX, rows_and_tokens
from titanlite.data import packing, streams
from titanlite.data.config import DataConfig
from titanlite.data.order import IndexedPieces, Permutation
from titanlite.data.packing import Packing, Span, best_fit, num_sequences, packed_lengths
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.pieces import TokenPiece
from titanlite.data.streams import BadRowPolicy, SourceState
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import UserError
from titanlite.tools.inspect import packing_shares

Rows = list[tuple[list[int], list[int], list[int]]]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of three sequences: an epoch has several, and they begin and end anywhere in it."""
    for module in (packing, streams):
        monkeypatch.setattr(module, "WINDOW_SEQUENCES", 3)


def by_brute_force(lengths: Sequence[int], seq_len: int) -> list[list[Span]]:
    """Try all sequences for each part."""
    parts: list[Span] = []
    for piece, length in enumerate(lengths):
        begin = 0
        while length - begin > 1:
            parts.append(Span(piece, begin, min(seq_len + 1, length - begin)))
            begin += seq_len
    packed: list[list[Span]] = []
    for size in range(seq_len + 1, 1, -1):
        for part in parts:
            if part.length != size:
                continue
            rooms = [seq_len + 1 - sum(other.length for other in sequence) for sequence in packed]
            fitting = [room for room in rooms if room >= size]
            if fitting:
                packed[rooms.index(min(fitting))].append(part)
            else:
                packed.append([part])
    packed.sort(key=lambda sequence: parts.index(sequence[0]))
    return [sorted(sequence, key=parts.index) for sequence in packed]


@seeds(60, 2000)
def test_parts_are_packed_as_by_brute_force(seeds: range) -> None:
    """Of this size, one in ten differs from the first sequence that has enough room."""
    for rng in map(random.Random, seeds):
        seq_len, longest = rng.randrange(1, 60), rng.choice([3, 10, 50])
        lengths = [rng.randrange(longest) for _ in range(rng.randrange(60))]
        assert best_fit(lengths, seq_len) == by_brute_force(lengths, seq_len)


@pytest.mark.slow
def test_many_pieces_are_packed_in_no_time_and_fill_the_sequences() -> None:
    """A search among all sequences would take minutes."""
    rng = random.Random(0)
    lengths = [int(2 ** rng.uniform(3, 13)) for _ in range(40_000)]
    packed = best_fit(lengths, 2048)
    assert len(packed) < 1.002 * sum(lengths) / 2048


def take(stream: SizedStream) -> Rows:
    """The sequences up to the end of a finite source."""
    rows = []
    while not stream.ended:
        row = empty_row(stream.seq_len, positions=True)
        stream.next_sequence(row)
        assert row.positions is not None
        assert (row.labels[int(row.length[0]) :] == IGNORE_INDEX).all(), "padding has no target"
        rows.append((row.tokens.tolist(), row.labels.tolist(), row.positions.tolist()))
    return rows


@seeds(12, 300)
def test_each_token_is_read_once_per_epoch_and_only_long_documents_are_cut(seeds: range) -> None:
    for rng in map(random.Random, seeds):
        lengths = [rng.choice([None, rng.randrange(9), rng.randrange(40)]) for _ in range(rng.randrange(1, 60))]
        corpus, seq_len, epochs, num_streams = FakeCorpus(lengths), rng.randrange(1, 16), rng.randrange(1, 4), 3
        inputs, targets, cut = Counter[int](), Counter[int](), Counter[int]()
        for stream in range(num_streams):
            facts = {"stream": stream, "num_streams": num_streams, "seq_len": seq_len, "epochs": epochs}
            for tokens, labels, positions in take(make_stream(corpus, **facts, packing="best_fit")):
                length = next((n for n in range(seq_len) if tokens[n] == 0), seq_len)
                inputs.update(tokens[:length])
                targets.update(label for label in labels if label != IGNORE_INDEX)
                cut.update(token for token, place in zip(tokens[:length], positions, strict=False) if place == 0)
                for token, label in zip(tokens, labels, strict=True):
                    assert label in (IGNORE_INDEX, token + 1), "the tokens of the corpus are numbered"
        for ids in filter(None, corpus.tokens):
            counts = [cut[token] for token in ids]
            if len(ids) == 1:
                assert not inputs[ids[0]], "a single token has no target"
                continue
            assert [targets[token] for token in ids] == [0, *[epochs] * (len(ids) - 1)]
            assert [inputs[token] for token in ids[:-1]] == [epochs] * (len(ids) - 1)
            assert inputs[ids[-1]] <= epochs
            expected = [epochs if n % seq_len == 0 and n < len(ids) - 1 else 0 for n in range(len(ids))]
            assert counts == expected, "parts begin at multiples of the length of a sequence"


@pytest.mark.slow
@seeds(6, 100)
@pytest.mark.parametrize("too_long", [None, "truncate", "skip"])
def test_resume_at_any_sequence_of_a_window_is_exact(seeds: range, too_long: str | None) -> None:
    """With bad rows and conversations that are too long, which are counted once."""
    windows = 0
    for rng in map(random.Random, seeds):
        lengths = [rng.choice([None, rng.randrange(40)]) for _ in range(rng.randrange(4, 60))]
        corpus = (FakeCorpus if too_long is None else FakeConversations)([*lengths, 7, 7, 7, 7])
        facts = {"stream": 1, "num_streams": 2, "seq_len": rng.randrange(5, 16), "epochs": rng.randrange(1, 3)}
        facts |= {"packing": "best_fit", "too_long": too_long}
        stream, states, rows = make_stream(corpus, **facts), [], []
        while not stream.ended:
            states.append(stream.state())
            row = empty_row(stream.seq_len)
            origin = stream.next_sequence(row)
            rows.append((origin, row.tokens.tolist(), row.labels.tolist()))
        end = stream.state()
        pieces = [piece_at(corpus, position) for position in range(1, corpus.count, 2)]
        assert end.bad_rows == sum(corpus.tokens[piece] is None for piece in pieces)
        longer = sum(len(corpus.tokens[piece] or []) > stream.seq_len + 1 for piece in pieces)
        assert end.too_long == (longer if too_long else 0)
        windows += len({state[:2] for state in states})
        for n, state in enumerate(states):
            restored = make_stream(corpus, **facts)
            restored.load_state(SourceState(*state))
            for expected in rows[n:]:
                row = empty_row(stream.seq_len)
                origin = restored.next_sequence(row)
                assert (origin, row.tokens.tolist(), row.labels.tolist()) == expected
            assert restored.state() == end
    assert windows > len(seeds)


@seeds(6, 100)
def test_conversations_are_packed_and_not_cut(seeds: range) -> None:
    for rng in map(random.Random, seeds):
        corpus, seq_len = FakeConversations([rng.randrange(30) for _ in range(40)]), rng.randrange(5, 16)
        stream = make_stream(
            corpus, stream=0, num_streams=1, seq_len=seq_len, epochs=1, packing="best_fit", too_long="truncate"
        )
        rows, targets = take(stream), Counter[int]()
        for _, labels, _ in rows:
            targets.update(label for label in labels if label != IGNORE_INDEX)
        expected = Counter[int]()
        for piece in corpus.fetch(range(corpus.count)):
            assert isinstance(piece, TokenPiece)
            assert piece.trained is not None
            kept = slice(1, seq_len + 1)
            expected.update(piece.tokens[kept][piece.trained[kept]].tolist())
        assert targets == expected


def test_the_rest_of_a_piece_does_not_continue_the_piece_before() -> None:
    """Of one document in two pieces: a sequence has the first one, and the last two tokens of the second one."""
    pieces = IndexedPieces(OneDocument([3, 6]), Permutation(2, ()), 0, num_streams=1, name="one", epochs=1)
    stream = SizedStream(pieces, packing="best_fit", policy=BadRowPolicy(False, 0))
    stream.seq_len = 4
    assert take(stream)[0] == ([1, 2, 3, 8], [2, 3, IGNORE_INDEX, 9], [0, 1, 2, 0])


def test_states_of_other_data_are_refused() -> None:
    stream = make_stream(FakeCorpus([4] * 6), stream=0, num_streams=1, seq_len=8, epochs=-1, packing="best_fit")
    stream.load_state(SourceState(0, 2, 9, 9, 0, 0))
    with pytest.raises(UserError, match=r"sequence 9 of a packing window of 3 sequences; use the data and the tok"):
        stream.next_sequence(empty_row(8))


def test_windows_of_many_short_pieces_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_WINDOW_PIECES", 4)
    corpus = FakeCorpus([2] * 20)
    stream = make_stream(corpus, stream=0, num_streams=1, seq_len=99, epochs=1, packing="best_fit")
    assert len(take(stream)) == 5


def test_the_first_window_differs_by_stream() -> None:
    """Otherwise all streams would tokenize a window at the same step."""
    sizes = []
    for part in (0.3, 1.0):
        corpus = FakeCorpus([9] * 50)
        stream = make_stream(corpus, stream=0, num_streams=1, seq_len=8, epochs=1, packing="best_fit")
        stream._first_window = part
        states = [stream.state() for _ in range(9) if stream.next_sequence(empty_row(8))]
        sizes.append([state.offset for state in states])
    assert sizes == [[0, 1, 2, 0, 1, 2, 0, 1, 2], [1, 2, 0, 1, 2, 0, 1, 2, 0]]


def test_the_sequences_of_an_epoch_are_estimated() -> None:
    lengths = [6, 5, 3, 4, 20]
    assert packed_lengths(lengths, 8, "best_fit", cuts=True) == [9, 9, 9, 9, 4]  # 6 + 3, 5 + 4, of 20: 9, 9, 4
    assert num_sequences(lengths, 8, "best_fit", cuts=True) == 5
    assert packed_lengths([5, 4, 4, 5, 0], 8, "best_fit", cuts=False) == [9, 9]
    assert num_sequences([4], 8, "best_fit", cuts=True) == 1 / 2  # two of a window fit
    assert num_sequences([], 8, "best_fit", cuts=True) == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", get_args(Packing))
def test_shares_and_estimates_are_those_of_the_loader(
    method: Packing, write_jsonl: Callable[..., Path], tokenizer_folder: Path
) -> None:
    rng, seq_len = random.Random(0), 50
    texts = ["a" * rng.randrange(1, 120) for _ in range(60)]
    source = SourceConfig(kind="jsonl", path=str(write_jsonl([*texts])), epochs=1)
    marks = {"num_streams": 1, "max_piece_bytes": 999, "shuffle": False, "add_bos": True, "document_mask": True}
    tokenizer = Tokenizer(tokenizer_folder / "tokenizer.json", bos="<|endoftext|>")
    loader = build(
        DataConfig(packing=method, sources=(source,), **marks), tokenizer, seq_len=seq_len, global_batch_size=1
    )
    batches = []
    while not loader.ended[0]:
        batches += loader.next_step()
    loader.close()
    lengths = [[len(tokenizer.encode(text)) + 2] for text in texts]
    padding, cut = packing_shares(lengths, seq_len, method, cuts=True)
    found = [documents_in(batch, tokenizer.eos_id) for batch in batches]
    assert sum(documents for documents, _ in found) == len(texts)
    assert cut == sum(cut for _, cut in found) / len(texts)
    assert padding == pytest.approx(1 - rows_and_tokens(batches)[1] / (len(batches) * seq_len), rel=1e-12)
    (size,) = loader._preparation.epoch_sizes()
    assert size is not None
    assert size.sequences == pytest.approx(len(batches), abs=1)
