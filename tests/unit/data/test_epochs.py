"""How often each source has been read, and the tokens of an epoch in the start log."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.unit.conftest import SENTENCE
from tests.unit.data.ranks import Ranks, build, build_ranks
from titanlite.data import corpus
from titanlite.data.config import DataConfig
from titanlite.data.sources.config import SourceConfig
from titanlite.data.tokenizer import Tokenizer

SEQ_LEN = 16
WINDOWS = 12


@pytest.fixture
def tokens(tmp_path: Path) -> SourceConfig:
    """A token file of 12 windows."""
    np.save(tmp_path / "tokens.npy", np.arange(WINDOWS * SEQ_LEN + 1, dtype=np.uint16))
    return SourceConfig("tokens", str(tmp_path / "tokens.npy"), name="tokens")


@pytest.fixture
def text(write_jsonl: Callable[..., Path]) -> SourceConfig:
    return SourceConfig("jsonl", str(write_jsonl([SENTENCE] * 40)), name="text")


def of_run(ranks: Ranks) -> list[float]:
    """The epochs of each source, over all data ranks."""
    return [sum(parts) for parts in zip(*(loader.epochs() for loader in ranks.loaders), strict=True)]


@pytest.mark.parametrize("degree", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_windows_are_counted_exactly_on_every_mesh(
    degree: int, num_workers: int, tokens: SourceConfig, tokenizer: Tokenizer
) -> None:
    section = DataConfig(num_streams=4, sources=(tokens,), num_workers=num_workers)
    ranks = build_ranks(section, tokenizer, degree, global_batch_size=4)
    assert of_run(ranks) == [0.0]
    for step in range(1, 8):
        ranks.step()
        assert of_run(ranks) == pytest.approx([4 * step / WINDOWS], rel=1e-15)
    state = ranks.state()
    ranks.close()
    resumed = build_ranks(section, tokenizer, 2, global_batch_size=4)
    resumed.load_state(state)
    assert of_run(resumed) == pytest.approx([7 * 4 / WINDOWS], rel=1e-15)
    resumed.close()


@pytest.mark.parametrize("num_streams", [1, 3, 8])
def test_a_finite_source_is_read_as_often_as_its_epochs(
    num_streams: int, text: SourceConfig, tokenizer: Tokenizer
) -> None:
    source = SourceConfig("jsonl", text.path, epochs=2)
    section = DataConfig(num_streams=num_streams, max_piece_bytes=64, sources=(source,))
    ranks = build_ranks(section, tokenizer, 1, global_batch_size=num_streams)
    earlier = 0.0
    while not ranks.ended:
        now = of_run(ranks)[0]
        assert earlier <= now < 2
        earlier = now
        ranks.step()
    assert of_run(ranks) == pytest.approx([2.0], rel=1e-15)
    ranks.close()


@pytest.mark.usefixtures("hugging_face_home", "cached_hub_files")
@pytest.mark.parametrize("num_streams", [1, 2, 3, 4])
def test_a_streamed_source_counts_files(
    num_streams: int, write_jsonl: Callable[..., Path], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Two files: of three or four streams, several read each file."""
    (tmp_path / "dataset").mkdir()
    for name in "ab":
        write_jsonl([SENTENCE] * 9, f"dataset/train-{name}.jsonl")
    source = SourceConfig("hf", str(tmp_path / "dataset"), epochs=2, name="rows")
    assert describe(tokenizer, source) == "rows: the number of tokens is unknown"
    section = DataConfig(num_streams=num_streams, max_piece_bytes=64, sources=(source,))
    ranks = build_ranks(section, tokenizer, 1, global_batch_size=num_streams)
    found = []
    while not ranks.ended:
        found += of_run(ranks)
        ranks.step()
    assert found == sorted(found)
    assert 0.0 < found[-1] < 2.0
    assert of_run(ranks) == pytest.approx([2.0], rel=1e-15)
    ranks.close()


def describe(tokenizer: Tokenizer, *sources: SourceConfig, steps: int = 6, **settings: str) -> str:
    loader = build(DataConfig(num_streams=8, max_piece_bytes=10**4, sources=sources, **settings), tokenizer)  # type: ignore[arg-type]
    description = loader.describe_epochs(steps)
    loader.close()
    return description


def test_the_start_log_has_the_tokens_of_an_epoch(
    text: SourceConfig, tokens: SourceConfig, tokenizer: Tokenizer
) -> None:
    """48 sequences in 6 steps of 8: of the text, 40 rows, each with its EOS token."""
    count = 40 * (len(tokenizer.encode_batch([SENTENCE])[0]) + 1)
    times = f"{48 * SEQ_LEN / count:.2f}"
    assert describe(tokenizer, text) == f"text: {count:,} tokens, read {times} times in 6 steps"
    assert describe(tokenizer, tokens) == "tokens: 193 tokens, read 4.00 times in 6 steps"
    alone = 40 * -(-(count // 40 - 1) // SEQ_LEN)
    assert describe(tokenizer, text, packing="none").endswith(f" read {48 / alone:.2f} times in 6 steps")
    weighted = [SourceConfig(one.kind, one.path, name=one.name, weight=w) for one, w in ((text, 1.0), (tokens, 3.0))]
    assert describe(tokenizer, *weighted, steps=1000) == (
        f"text: {count:,} tokens, read {2000 * SEQ_LEN / count:.2f} times in 1,000 steps; "
        "tokens: 193 tokens, read 500.00 times in 1,000 steps"
    )


def test_large_texts_are_estimated(
    write_jsonl: Callable[..., Path], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_jsonl([SENTENCE] * 3 + [b"bad"] + [SENTENCE] * 1000)
    monkeypatch.setattr(corpus, "SAMPLED_BYTES", 1000)
    found = describe(tokenizer, SourceConfig("jsonl", str(file), name="text"))
    count = 1003 * (len(tokenizer.encode_batch([SENTENCE])[0]) + 1)
    assert found.startswith(f"text: about {round(count, 3 - len(str(count))):,} tokens, read ")
