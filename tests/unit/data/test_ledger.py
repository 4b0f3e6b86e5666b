"""A run that is killed repeatedly, over mixtures, epochs and meshes, has the ledger of an uninterrupted run."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.ranks import RankRow, build, build_ranks
from titanlite.data import streams
from titanlite.data.config import DataConfig
from titanlite.data.ledger import Ledger, ledger_files, read_ledger
from titanlite.data.sources.config import SourceConfig
from titanlite.data.streams import Origin, SourceState
from titanlite.data.tokenizer import Tokenizer
from titanlite.metrics.jsonl import keep_rows
from titanlite.runtime.errors import UserError
from titanlite.tools import ledger

STREAMS, STEPS = 8, 40


def text_of(rng: random.Random) -> str:
    words = ["the", "model", "reads", "a", "few", "words", "of", "a", "text"]
    return " ".join(rng.choice(words) for _ in range(rng.choice([1, 5, 40])))


@pytest.fixture
def section(write_jsonl: Callable[..., Path], tmp_path: Path) -> DataConfig:
    """Four sources whose epochs end within 40 steps: one is finite, one a streamed dataset of three files."""
    rng = random.Random(1)
    paths = [write_jsonl([text_of(rng) for _ in range(count)], f"{count}.jsonl") for count in (3, 25, 12)]
    weights, epochs = (1.0, 4.0, 2.0), (-1, -1, 3)
    sources = tuple(
        SourceConfig(kind="jsonl", path=str(path), weight=weight, epochs=count)
        for path, weight, count in zip(paths, weights, epochs, strict=True)
    )
    streamed = tmp_path / "dataset" / "data"
    streamed.mkdir(parents=True)
    for n in range(3):
        rows = [json.dumps({"text": text_of(rng)}) + "\n" for _ in range(7 * n + 4)]
        (streamed / f"train-0000{n}-of-00003.jsonl").write_text("".join(rows))
    sources = (*sources, SourceConfig(kind="hf", path=str(streamed.parent), weight=3.0))
    return DataConfig(num_streams=STREAMS, max_piece_bytes=64, sources=sources)


class Run:
    """The loaders and ledgers of one start on `degree` data ranks."""

    def __init__(self, section: DataConfig, tokenizer: Tokenizer, folder: Path, degree: int, packing: str) -> None:
        config = DataConfig(**vars(section) | {"packing": packing})
        self.ranks = build_ranks(config, tokenizer, degree, seq_len=12)
        self.ledgers = [Ledger(folder, data_rank=rank, data_degree=degree) for rank in range(degree)]

    def step(self, number: int) -> list[RankRow]:
        rows = self.ranks.step()
        for loader, rank_ledger in zip(self.ranks.loaders, self.ledgers, strict=True):
            rank_ledger.write(number, loader.sequences, loader.origins)
        return rows

    def close(self) -> None:
        for part in (self.ranks, *self.ledgers):
            part.close()


@pytest.mark.usefixtures("cached_hub_files")
@pytest.mark.parametrize("packing", ["concatenate", "none", pytest.param("best_fit", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2, 3))])
def test_a_killed_run_has_the_ledger_of_an_uninterrupted_one(
    section: DataConfig, tokenizer: Tokenizer, tmp_path: Path, seed: int, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "WINDOW_SEQUENCES", 8)
    rng = random.Random(seed)
    (tmp_path / "reference").mkdir()
    (tmp_path / "killed").mkdir()
    reference = Run(section, tokenizer, tmp_path / "reference", 1, packing)
    expected = {number: reference.step(number) for number in range(1, STEPS + 1)}
    assert len({tuple(origin) for origin in reference.ranks.loaders[0].origins}) > 1
    assert reference.ranks.state()[:, :: len(SourceState._fields)].max(0).values.min() >= 1, (
        "not all sources have crossed epochs"
    )
    reference.close()

    saved, saved_at, done = None, 0, 0
    while done < STEPS:
        for file in ledger_files(tmp_path / "killed"):
            keep_rows(file, saved_at)
        run = Run(section, tokenizer, tmp_path / "killed", rng.choice([1, 2, 4]), packing)
        if saved is not None:
            run.ranks.load_state(saved)
        for done in range(saved_at + 1, min(STEPS, saved_at + rng.randrange(1, 12)) + 1):
            assert run.step(done) == expected[done]
            if rng.random() < 0.4 or done == STEPS:
                saved, saved_at = run.ranks.state(), done
        run.close()  # the steps since the last save are lost
    assert list(read_ledger(tmp_path / "killed")) == list(read_ledger(tmp_path / "reference"))
    assert [step for step, _ in read_ledger(tmp_path / "killed")] == list(range(1, STEPS + 1))


def test_origins_locate_the_tokens(write_jsonl: Callable[..., Path], tokenizer: Tokenizer) -> None:
    texts = [f"{n} reads a few words {n}" for n in range(9)]
    source = SourceConfig(kind="jsonl", path=str(write_jsonl(texts)), epochs=2)
    section = DataConfig(num_streams=2, max_piece_bytes=999, sources=(source,))
    loader = build(section, tokenizer, seq_len=7, global_batch_size=2, local_batch_size=2)
    seen = 0
    while not loader.ended[0]:
        (batch,) = loader.next_step()
        for origin, tokens in zip(loader.origins, batch.tokens.tolist(), strict=True):
            if origin == Origin(0, -1, -1, -1):
                continue
            piece = [*tokenizer.encode(texts[origin.piece]), tokenizer.eos_id][origin.offset :][:7]
            assert tokens[: len(piece)] == piece
            seen += 1
    loader.close()
    assert seen > 20


def write_ledger(folder: Path, *, ranks: int, steps: int) -> None:
    """One sequence per rank and step, all of piece 5, at the rank's offset."""
    for rank in range(ranks):
        one = Ledger(folder, data_rank=rank, data_degree=ranks)
        for step in range(1, steps + 1):
            one.write(step, [ranks * (step - 1) + rank], [Origin(0, 0, 5, rank)])
        one.close()


def test_the_ledger_is_printed(tmp_path: Path, capsys: Any) -> None:
    write_ledger(tmp_path, ranks=2, steps=2)
    ledger.main([str(tmp_path)])
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"step": 1, "sequences": [[0, 0, 0, 5, 0], [1, 0, 0, 5, 1]]},
        {"step": 2, "sequences": [[2, 0, 0, 5, 0], [3, 0, 0, 5, 1]]},
    ]
    with pytest.raises(UserError, match=r"/none does not exist: pass the dump folder of a run"):
        ledger.main([str(tmp_path / "none")])
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"/none has no ledger: train with --data\.ledger true"):
        ledger.main([str(tmp_path / "none")])


def test_a_truncated_last_line_is_skipped_and_a_damaged_line_is_named(tmp_path: Path) -> None:
    """A line is truncated by a crash, or read while the run is writing it."""
    write_ledger(tmp_path, ranks=1, steps=2)
    (file,) = ledger_files(tmp_path)
    content = file.read_text()
    file.write_text(content[:-9])
    assert list(read_ledger(tmp_path)) == [(1, [[0, 0, 0, 5, 0]])]
    file.write_text(content.replace('{"step":2', '{"step":'))
    with pytest.raises(UserError, match=r"0-of-1\S*: line 2 is not JSON: .*; restore the file, or remove this line$"):
        list(read_ledger(tmp_path))


def test_a_closed_pipe_causes_no_traceback(tmp_path: Path) -> None:
    write_ledger(tmp_path, ranks=1, steps=3000)
    command = [sys.executable, "-m", "titanlite", "ledger", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 1


@pytest.mark.timeout(30)
def test_a_pipe_in_place_of_a_ledger_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    os.mkfifo(tmp_path / "ledger" / "0-of-1.jsonl")
    with pytest.raises(UserError, match=r"0-of-1.jsonl cannot be read: not a regular file but a pipe"):
        list(read_ledger(tmp_path))
