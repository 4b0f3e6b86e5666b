import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.data.fake_corpus import FakeCorpus, expected_sequences, order_of
from tests.unit.data.ranks import Ranks, build
from titanlite.batch import IGNORE_INDEX, Batch, rows_and_tokens
from titanlite.data import preparation, segments
from titanlite.data.check import check_data
from titanlite.data.config import DataConfig
from titanlite.data.loader import Loader
from titanlite.data.order import IndexedPieces
from titanlite.data.preparation import Assignment, SourceOrder
from titanlite.data.sources.config import SourceConfig
from titanlite.data.steps import BatchStage
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import UserError

STREAMS, SEQ_LEN = 8, 6
WORDS = ["the", "model", "reads", "a", "few", "words"]


@pytest.fixture
def corpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCorpus:
    rng = random.Random(0)
    lengths = [rng.choice([None, 0, 1, rng.randrange(20), rng.randrange(60)]) for _ in range(150)]
    is_dealt = getattr(request, "param", "shuffled") == "dealt"
    made = FakeCorpus(
        [*lengths[: 40 if is_dealt else None], *[3] * STREAMS]
    )  # those that are dealt are read repeatedly
    made.is_dealt = is_dealt
    monkeypatch.setattr(segments, "MIN_BLOCKS", 10)
    monkeypatch.setattr(segments, "MIN_STREAM_BLOCKS", 2)  # blocks of 3 windows, of 48
    monkeypatch.setattr(segments, "OPEN_BLOCKS", 0)
    return made


@pytest.fixture
def make(corpus: FakeCorpus, monkeypatch: pytest.MonkeyPatch) -> Any:
    """make(rank, degree, ...): a loader that is closed after the test."""
    made: list[Loader] = []

    def one(rank: int = 0, degree: int = 1, **changes: Any) -> Loader:
        facts = {
            "global_batch_size": 8,
            "local_batch_size": 2,
            "epochs": -1,
            "skip": True,
            "later": (),
            "weights": (-1.0,),
        } | changes
        section = DataConfig(
            num_streams=STREAMS,
            on_bad_row="skip" if facts["skip"] else "error",
            max_bad_rows=10**6,
            sources=tuple(SourceConfig(epochs=facts["epochs"], weight=each) for each in facts["weights"]),
        )
        order = {"num_streams": STREAMS, "name": "fake", "epochs": facts["epochs"]}
        pieces = partial(IndexedPieces, corpus, order_of(corpus, STREAMS), **order)
        monkeypatch.setattr(preparation, "open_order", lambda *_: SourceOrder(1, "a fake corpus", pieces, str))
        first = BatchStage(1, facts["global_batch_size"], SEQ_LEN, facts["local_batch_size"])
        assignment = Assignment(section, None, 10**6, (first, *facts["later"]))
        made.append(Loader(assignment, None, data_rank=rank, data_degree=degree))
        return made[-1]

    yield one
    for loader in made:
        loader.close()


def steps_of(loaders: list[Loader], count: int) -> list[list[tuple[list[int], list[int], int]]]:
    """The (tokens, labels, sequence) rows of each global step, in the run's order."""
    steps = [Ranks(loaders).step() for _ in range(count)]
    return [[(tokens, labels, number) for number, _, tokens, labels in rows] for rows in steps]


@pytest.mark.parametrize("global_batch_size", [8, 16, 4])
@pytest.mark.parametrize("epochs", [-1, 2])
def test_sequence_n_is_the_next_of_stream_n_mod_s(
    make: Any, corpus: FakeCorpus, global_batch_size: int, epochs: int
) -> None:
    steps = steps_of([make(global_batch_size=global_batch_size, epochs=epochs)], 160 // global_batch_size)
    facts = {
        "num_streams": STREAMS,
        "seq_len": SEQ_LEN,
        "epochs": epochs if epochs > 0 else 1000,
        "sequences": 160 // STREAMS,
    }
    streams = [expected_sequences(corpus, stream=s, **facts) for s in range(STREAMS)]
    assert [row for step in steps for row in step] == [(*streams[n % STREAMS][n // STREAMS], n) for n in range(160)]


def both_orders(first: int, *others: int) -> list[Any]:
    """Cases of pieces that are shuffled and, of the first one, of windows that are dealt. The others are slow."""
    slow = [pytest.param("shuffled", other, marks=pytest.mark.slow) for other in others]
    return [("shuffled", first), ("dealt", first), *slow]


@pytest.mark.parametrize(("corpus", "global_batch_size"), both_orders(16, 32), indirect=["corpus"])
def test_steps_are_the_same_on_every_mesh(make: Any, global_batch_size: int) -> None:
    reference = make(local_batch_size=1, global_batch_size=global_batch_size)
    expected = steps_of([reference], 12)
    for degree, local_batch_size in product([1, 2, 4], [1, 2, 4]):
        facts = {"local_batch_size": local_batch_size, "global_batch_size": global_batch_size}
        loaders = [make(rank, degree, **facts) for rank in range(degree)]
        assert steps_of(loaders, 12) == expected, (degree, local_batch_size)
        assert sum(loader.bad_rows for loader in loaders) == reference.bad_rows > 0
        assert torch.equal(Ranks(loaders).state(), reference.state())


@pytest.mark.parametrize(("corpus", "global_batch_size"), both_orders(4, 12, 16), indirect=["corpus"])
def test_a_degree_need_not_divide_the_streams(make: Any, global_batch_size: int) -> None:
    facts = {"local_batch_size": 2, "global_batch_size": global_batch_size}
    reference = make(**facts)
    expected = steps_of([reference], 12)
    state = None
    for degree in (3, 5, 7, 8):
        loaders = [make(rank, degree, **facts) for rank in range(degree)]
        assert steps_of(loaders, 12) == expected, degree
        assert torch.equal(Ranks(loaders).state(), reference.state())
        rows = [[len(batch.tokens) for batch in loader.next_step()] for loader in loaders]
        assert all(of_rank == rows[0] for of_rank in rows)
        if state is not None:  # 3 -> 5 -> 7 -> 8 ranks, at a step that they do not divide
            for loader in loaders:
                loader.load_state(state)
            assert steps_of(loaders, 7) == expected[5:]
        for loader in loaders:
            loader.restart()
        assert steps_of(loaders, 5) == expected[:5]
        state = Ranks(loaders).state()


def test_filler_rows_repeat_sequences_and_hold_no_token(make: Any) -> None:
    (batch,) = make(2, 3, local_batch_size=3).next_step()  # streams 2 and 5
    assert batch.sequences.tolist() == [2, 5, -1]
    assert torch.equal(batch.tokens[2], batch.tokens[0])
    assert batch.sources.tolist() == [0, 0, 0]
    assert (batch.labels[2] == IGNORE_INDEX).all()
    assert (batch.labels[:2] != IGNORE_INDEX).any()
    assert batch.lengths.tolist()[:2] != [0, 0]
    assert batch.lengths[2] == 0
    (empty,) = make(5, 8, global_batch_size=4, local_batch_size=1).next_step()  # no sequence in this step
    assert empty.sequences.tolist() == [-1]
    assert empty.tokens.tolist() == [list(range(SEQ_LEN))]
    assert (empty.labels == IGNORE_INDEX).all()
    assert rows_and_tokens([empty]) == (0, 0)


@pytest.mark.parametrize(("corpus", "epochs"), both_orders(1, -1), indirect=["corpus"])
def test_resume_on_another_mesh_is_exact(make: Any, epochs: int) -> None:
    reference = steps_of([make(epochs=epochs)], 20)
    for (before, after), stop in product([(1, 1), (1, 4), (4, 1), (2, 4), (4, 2)], [0, 1, 2, 5, 11]):
        first = [make(rank, before, epochs=epochs) for rank in range(before)]
        assert steps_of(first, stop) == reference[:stop]
        time.sleep(0.01)  # let the threads prefetch
        second = [make(rank, after, local_batch_size=1, epochs=epochs) for rank in range(after)]
        for loader in second:
            loader.load_state(Ranks(first).state())
        assert torch.equal(Ranks(second).state(), Ranks(first).state())
        assert steps_of(second, 20 - stop) == reference[stop:], (before, after, stop)
        for loader in (*first, *second):
            loader.close()


LATER = (BatchStage(4, 20, 3, 2), BatchStage(6, 5, 13, 3), BatchStage(9, 12, 6, 2))


def test_stages_change_the_steps_and_keep_the_positions_of_the_streams(make: Any) -> None:
    """On all meshes, after resumes before, at and after the first step of a stage. Each token is a target once, as in a
    run of one stage."""
    reference, plain = steps_of([make(later=LATER)], 12), steps_of([make()], 40)
    assert [(len(step), len(step[0][0])) for step in reference] == [(8, 6)] * 3 + [(20, 3)] * 2 + [(5, 13)] * 3 + [
        (12, 6)
    ] * 4
    assert [number for step in reference for *_, number in step] == list(range(24 + 40 + 15 + 48))
    for stream in range(STREAMS):
        targets, expected = (
            [label for step in steps for _, labels, number in step if number % STREAMS == stream for label in labels]
            for steps in (reference, plain)
        )
        assert targets == expected[: len(targets)]
    for (before, after), stop in product([(1, 3), (3, 4), (4, 5), (8, 1)], [2, 3, 4, 5, 8, 10]):
        first = [make(rank, before, later=LATER) for rank in range(before)]
        assert steps_of(first, stop) == reference[:stop], before
        second = [make(rank, after, later=LATER) for rank in range(after)]
        for loader in second:
            loader.load_state(Ranks(first).state(), stop)
        assert steps_of(second, 12 - stop) == reference[stop:], (before, after, stop)
        for loader in (*first, *second):
            loader.close()


def test_stages_change_the_mixture(make: Any) -> None:
    later = (BatchStage(3, 40, SEQ_LEN, 2, (0.0, 1.0, 0.0)), BatchStage(5, 400, SEQ_LEN, 2, (1.0, 0.0, 3.0)))
    (loader,) = loaders = [make(later=later, weights=(1.0, 0.0, 0.0))]
    for sources in ({0: 8}, {0: 8}, {1: 40}, {1: 40}, {0: 100, 2: 300}):
        steps_of(loaders, 1)
        found = Counter(origin.source for origin in loader.origins)
        assert found.keys() == sources.keys()
        assert all(abs(found[source] - count) <= 3 for source, count in sources.items()), found
    state = loader.state()
    resumed = make(later=later, weights=(1.0, 0.0, 0.0))
    resumed.load_state(state, 5)
    assert steps_of([resumed], 1) == steps_of(loaders, 1)


def test_a_batch_size_that_changes_on_resume_loses_no_sequence(make: Any) -> None:
    """7 ranks have 8 streams: 2 sequences from an odd one on may both be of rank 0, but not those from an even one."""
    before = make(global_batch_size=7)
    steps_of([before], 1)
    after = [make(rank, 7, global_batch_size=2, local_batch_size=1) for rank in range(7)]
    for loader in after:
        loader.load_state(before.state())
    assert [number for step in steps_of(after, 4) for *_, number in step] == list(range(7, 15))


def test_the_batch_size_may_change_on_resume(make: Any) -> None:
    before, after, reference = make(), make(global_batch_size=4), make(global_batch_size=4)
    steps_of([before], 3)
    after.load_state(before.state())
    assert steps_of([after], 4) == steps_of([reference], 10)[6:]


def test_mismatched_states_are_refused(make: Any) -> None:
    loader = make(0, 2)
    state = torch.zeros(STREAMS, 6, dtype=torch.int64)
    with pytest.raises(UserError, match=r"num_streams = 8 and 1 data.sources need \(8, 6\)"):
        loader.load_state(state[:4])
    with pytest.raises(UserError, match="int64"):
        loader.load_state(state.int())
    state[0, 3] = 2
    with pytest.raises(UserError, match=r"2 sequences\) is not the state after a step"):
        loader.load_state(state)


def test_a_finite_run_ends_on_all_ranks_and_counts_each_target_once(make: Any, corpus: FakeCorpus) -> None:
    loaders = [make(rank, 2, epochs=1) for rank in range(2)]
    labels: list[int] = []
    while not all(loader.ended[0] for loader in loaders):
        labels += [label for row in steps_of(loaders, 1)[0] for label in row[1] if label != IGNORE_INDEX]
    assert len(labels) == len(set(labels)) == sum(len(ids or []) for ids in corpus.tokens) - STREAMS
    assert all(label == IGNORE_INDEX for row in steps_of(loaders, 1)[0] for label in row[1])


class CountingCorpus(FakeCorpus):
    """Records which threads fetch, and can block them."""

    def __init__(self) -> None:
        super().__init__([SEQ_LEN + 1] * 400)
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def fetch(self, pieces: Any) -> Any:
        self.gate.wait(5)
        self.threads.add(threading.current_thread().name)
        return super().fetch(pieces)


def test_a_thread_prepares_at_most_two_steps_ahead_and_waiting_is_measured(make: Any, corpus: FakeCorpus) -> None:
    counting = CountingCorpus()
    corpus.__dict__, corpus.__class__ = counting.__dict__, CountingCorpus  # type: ignore[assignment]
    counting.gate.clear()
    threading.Timer(0.2, counting.gate.set).start()
    loader = make()
    loader.next_step()
    assert 0.1 < loader.wait_s < 3
    prepared = 0
    while prepared != (prepared := len(counting.fetched)) or prepared < 3 * STREAMS:
        time.sleep(0.05)
    assert loader._preparation.next_sequence == 3 * 8
    assert counting.threads == {"titanlite-data"}
    assert loader.state()[:, 3].tolist() == [1] * STREAMS


def write_words(write_jsonl: Callable[..., Path], rows: int) -> SourceConfig:
    texts = [" ".join(WORDS[n % 6 :] + WORDS[: n % 6]) + f" {n}" for n in range(rows)]
    return SourceConfig(kind="jsonl", path=str(write_jsonl(texts)))


def test_documents_end_with_eos_and_labels_cross_it(write_jsonl: Callable[..., Path], tokenizer: Tokenizer) -> None:
    """The pieces of a long document have no separators between them."""
    line, words = "the model reads\n", [" ".join(WORDS[n:]) for n in range(6)]
    source = SourceConfig(kind="jsonl", path=str(write_jsonl([line * 20, *words])), epochs=1)
    section = DataConfig(num_streams=1, max_piece_bytes=3 * len(line), shuffle=False, sources=(source,))
    loader = build(section, tokenizer, global_batch_size=1, local_batch_size=1)
    rows: list[Batch] = []
    while not loader.ended[0]:
        rows += loader.next_step()
    loader.close()
    expected = [*tokenizer.encode(line * 3) * 6, *tokenizer.encode(line * 2), tokenizer.eos_id]
    for text in words:
        expected += [*tokenizer.encode(text), tokenizer.eos_id]
    tokens, labels = (torch.cat([row[n][0] for row in rows]).tolist() for n in range(2))
    assert tokens[: len(expected) - 1] == expected[:-1]
    assert [label for label in labels if label != IGNORE_INDEX] == expected[1:]


def test_fewer_pieces_than_streams_are_shared_over_the_epochs(
    write_jsonl: Callable[..., Path], tokenizer: Tokenizer
) -> None:
    """Stream s starts at piece s of the concatenated epochs, so that every stream has tokens."""
    source = write_words(write_jsonl, 3)
    section = DataConfig(num_streams=8, max_piece_bytes=1000, shuffle=False, sources=(source,))
    loader = build(section, tokenizer, global_batch_size=8, local_batch_size=8)
    (batch,) = loader.next_step()
    assert [origin[1:] for origin in loader.origins] == [(n // 3, n % 3, 0) for n in range(8)]
    assert torch.equal(batch.tokens[0, :4], batch.tokens[6, :4])
    loader.close()


def test_a_corpus_of_only_bad_files_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for n in range(4):
        (tmp_path / f"{n}.txt").touch()
    section = DataConfig(num_streams=4, max_piece_bytes=99, sources=(SourceConfig(kind="text", path=str(tmp_path)),))
    with pytest.raises(UserError, match=r"no data to train on: .*0.txt, line 1: the file is empty: add data"):
        build(section, tokenizer)
    (tmp_path / "9.txt").write_bytes(b"\xff\xff")
    for on_bad_row, message in (("error", "0.txt, line 1: the file is empty"), ("skip", "have no token")):
        loader = build(replace(section, on_bad_row=on_bad_row, shuffle=False), tokenizer)
        with pytest.raises(UserError, match=message):
            loader.next_step()
        loader.close()


def problem_keys(section: DataConfig, **facts: int) -> list[str]:
    known = {"global_batch_size": 8, "data_degree": 2, "vocab_size": 300}
    return [problem.key for problem in check_data(section, **known | facts)]


@pytest.mark.usefixtures("stdlib")
def test_check_data(write_jsonl: Callable[..., Path]) -> None:
    good = DataConfig()
    assert problem_keys(good) == []
    assert problem_keys(replace(good, num_streams=4)) == []
    assert problem_keys(replace(good, num_streams=3), data_degree=0) == []
    missing = SourceConfig(kind="text", path="nowhere")
    assert problem_keys(replace(good, sources=(SourceConfig(), missing))) == ["data.sources.1.path"]
    tokens = SourceConfig(kind="tokens", path=str(write_jsonl(["1"], "tokens.bin")), dtype="uint16")
    assert problem_keys(replace(good, sources=(SourceConfig(), tokens)), vocab_size=0) == ["data.sources.0.weight"]
