"""Sequences of conversations: packed without cutting them, the same on every mesh and after any resume."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.seeds import seeds
from tests.unit.data.conversations import write_conversations
from tests.unit.data.fake_corpus import PAD, FakeCorpus, SizedStream, empty_row, make_stream, piece_at
from tests.unit.data.ranks import build, build_ranks
from titanlite.batch import IGNORE_INDEX
from titanlite.data.config import DataConfig
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.pieces import AT_BEGIN, TokenPiece
from titanlite.data.streams import SourceState
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import UserError

SECOND = {"stream": 1, "num_streams": 2}
"""Stream 1 of 2: its first conversation is not the first of the source."""


class FakeConversations(FakeCorpus):
    """Each conversation begins with up to 5 tokens that are not trained on, maybe all of it."""

    def fetch(self, pieces: Sequence[int]) -> list[TokenPiece | Exception]:
        found = super().fetch(pieces)
        return [
            TokenPiece(piece.tokens, AT_BEGIN, np.arange(len(piece.tokens)) >= 1 + number % 5)
            if isinstance(piece, TokenPiece)
            else piece
            for piece, number in zip(found, pieces, strict=True)
        ]


def take(stream: SizedStream, sequences: int) -> list[tuple[list[int], list[int], list[int]]]:
    rows = []
    for _ in range(sequences):
        row = empty_row(stream.seq_len, positions=True)
        stream.next_sequence(row)
        assert row.positions is not None
        rows.append((row.tokens.tolist(), row.labels.tolist(), row.positions.tolist()))
    return rows


def expected(
    corpus: FakeConversations, *, epochs: int, seq_len: int, packing: str, too_long: str
) -> tuple[list[tuple[list[int], list[int], list[int]]], int]:
    """All rows of the stream, conversation by conversation, and the number of those that were too long."""
    rows, count = list[list[tuple[list[int], list[bool]]]](), 0
    for number in range(1, epochs * corpus.count, 2):
        (piece,) = corpus.fetch([piece_at(corpus, number)])
        if not isinstance(piece, TokenPiece):
            continue
        assert piece.trained is not None
        tokens, trained = piece.tokens.tolist(), piece.trained.tolist()
        is_longer = len(tokens) > seq_len + 1
        count += is_longer and number < corpus.count
        tokens, trained = tokens[: seq_len + 1], trained[: seq_len + 1]
        if not any(trained[1:]) or (is_longer and too_long == "skip"):
            continue
        if packing == "none" or not rows or sum(len(ids) for ids, _ in rows[-1]) + len(tokens) > seq_len + 1:
            rows.append([])
        rows[-1].append((tokens, trained))
    return [padded(row, seq_len) for row in rows], count


def padded(row: list[tuple[list[int], list[bool]]], seq_len: int) -> tuple[list[int], list[int], list[int]]:
    inputs, labels, positions = list[int](), list[int](), list[int]()
    for tokens, trained in row:
        inputs += tokens
        labels += [
            token if is_target else IGNORE_INDEX for token, is_target in zip(tokens[1:], trained[1:], strict=True)
        ]
        labels.append(IGNORE_INDEX)
        positions += range(len(tokens))
    rest = max(0, seq_len - len(inputs))
    positions += range(len(row[-1][0]), seq_len)  # the padding continues the positions of the last conversation
    return ([*inputs, *[PAD] * rest][:seq_len], [*labels, *[IGNORE_INDEX] * rest][:seq_len], positions[:seq_len])


@seeds(12, 400)
def test_a_row_holds_uncut_conversations_and_resume_is_exact(seeds: range) -> None:
    for rng in map(random.Random, seeds):
        lengths = [rng.choice([None, 0, 1, 2, *range(1, 30)]) for _ in range(rng.randrange(4, 50))]
        corpus, epochs = FakeConversations([*lengths, 6, 6, 6, 6]), rng.randrange(1, 4)
        packing, too_long = rng.choice(["concatenate", "none"]), rng.choice(["truncate", "skip"])
        facts = {"epochs": epochs, "seq_len": rng.randrange(5, 20), "packing": packing, "too_long": too_long}
        rows, count = expected(corpus, **facts)
        stream, states, found = make_stream(corpus, **facts, **SECOND), [], []
        for _ in rows:
            states.append(stream.state())
            found += take(stream, 1)
        assert found == rows
        take(stream, 1)  # masked: bad rows may follow the last conversation
        end = stream.state()
        assert stream.ended
        assert end.too_long == count
        begin = rng.randrange(len(rows))
        restored = make_stream(corpus, **facts, **SECOND)
        restored.load_state(SourceState(*states[begin]))
        assert take(restored, len(rows) - begin) == rows[begin:]
        take(restored, 1)
        assert restored.state() == end


def test_a_source_without_a_target_raises_instead_of_looking_forever() -> None:
    corpus = FakeConversations([1, 2, 1, 1])  # the second token of the second one is not trained on
    stream = make_stream(corpus, epochs=-1, seq_len=8, too_long="truncate", **SECOND)
    with pytest.raises(UserError, match=r"fake: 1,000 consecutive conversations have no token to train on \(0 bad"):
        take(stream, 1)


def test_conversations_that_are_all_too_long_ask_for_longer_sequences() -> None:
    stream = make_stream(FakeConversations([30] * 8), epochs=-1, seq_len=8, too_long="skip", **SECOND)
    with pytest.raises(
        UserError, match=r"4 conversations had more than .* tokens\); increase training\.seq_len, or look"
    ):
        take(stream, 1)


@pytest.fixture
def section(tmp_path: Path) -> DataConfig:
    """Conversations of 1 to 60 words, and text."""
    write_conversations(tmp_path / "chat.jsonl", [1, 60, 2, 7, 1, 30, 3] * 5)
    (tmp_path / "text.txt").write_text("the model reads a few words\n" * 40)
    sources = (
        SourceConfig("chat", str(tmp_path / "chat.jsonl"), weight=2.0),
        SourceConfig("text", str(tmp_path / "text.txt"), document="line", weight=1.0),
    )
    return DataConfig(num_streams=8, max_piece_bytes=1000, num_workers=0, sources=sources)


def test_a_mixture_is_the_same_on_every_mesh_and_resumes_on_another(
    section: DataConfig, chat_tokenizer: Tokenizer
) -> None:
    one = build_ranks(section, chat_tokenizer, 1, seq_len=64)
    expected = [one.step() for _ in range(12)]
    end = one.state()
    too_long = [sum(loader.too_long[n] for loader in one.loaders) for n in range(2)]
    assert too_long[0] > 0
    assert too_long[1] == 0
    one.close()
    first, second = (build_ranks(section, chat_tokenizer, degree, seq_len=64) for degree in (4, 2))
    assert [first.step() for _ in range(5)] == expected[:5]
    second.load_state(first.state())
    assert [second.step() for _ in range(7)] == expected[5:]
    assert torch.equal(second.state(), end)
    assert [sum(loader.too_long[n] for loader in second.loaders) for n in range(2)] == too_long
    for ranks in (first, second):
        ranks.close()


def test_targets_are_the_answers(section: DataConfig, chat_tokenizer: Tokenizer) -> None:
    """Each label is the next token of the same conversation; the labels read as the answers. Text has all labels."""
    loader = build(section, chat_tokenizer, seq_len=300)
    answers, positions, text = "", 0, 0
    for _ in range(4):
        for batch in loader.next_step():
            assert batch.positions is not None
            assert batch.lengths is not None
            for row, source in enumerate(batch.sources.tolist()):
                valid = batch.labels[row] != IGNORE_INDEX
                positions += int(batch.lengths[row])
                if source == 1:
                    text += int(valid.sum())
                    continue
                inside = valid[:-1]
                assert torch.equal(batch.labels[row][:-1][inside], batch.tokens[row][1:][inside])
                assert not valid[:-1][batch.positions[row][1:] == 0].any()
                answers += chat_tokenizer.decode(batch.labels[row][valid].tolist())
    assert text > 500
    assert positions > text
    assert set(answers.split()) == {"word", "."}
    loader.close()
