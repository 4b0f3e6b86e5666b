"""Bad rows and a 10 MB line, in every text format: the message, and the same step on every mesh."""

import gzip
import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data.ranks import RankRow, Ranks, build_ranks
from titanlite.data.config import DataConfig
from titanlite.data.sources.config import SourceConfig
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import DataError

STREAMS, SEQ_LEN, MAX_PIECE_BYTES = 4, 8, 200
GOOD = [json.dumps({"text": f"the model reads row {n}"}).encode() for n in range(12)]
CSV_ROWS = [b'"the model,\nreads"', *(b"the model reads row %d" % n for n in range(1, 6))]
NULL = pa.table({"text": pa.array(["good", None, "good"], pa.string())})
LINE = b'{"text": "half a line of gzip'


@dataclass(frozen=True)
class Case:
    """kind: of the source and its files. data: content of file b; files a and c are valid. faults: (line, reason)."""

    kind: str
    fault: str
    data: bytes | pa.Table
    faults: tuple[tuple[int, str], ...]
    streaming: bool = True

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.streaming else ' as Arrow'}: {self.fault}"


def lines(*rows: bytes) -> bytes:
    return b"".join(row + b"\n" for row in rows)


def zstd(data: bytes) -> bytes:
    """A zstd frame."""
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as packed:
        packed.write(data)
    return out.getvalue().to_pybytes()


def cases() -> Iterator[Case]:
    """A fault of each reader, and of each way that its files are opened. test_readers.py has all faults of a reader."""
    yield Case("text", "non-UTF-8", lines(b"good", b"caf\xe9", b"good"), ((2, "invalid UTF-8 at byte 3"),))
    nul = "a NUL character at byte 2"
    yield Case("text", "NUL", lines(b"good", b"ca\0fe", b"good"), ((2, nul),))
    yield Case("hf jsonl", "NUL", lines(GOOD[0], b'{"text": "ca\\u0000fe"}'), ((2, nul),))
    yield Case("csv", "NUL", lines(b"text", CSV_ROWS[0], b"ca\0fe"), ((2, nul),))
    yield Case("parquet", "NUL", pa.table({"text": ["row", "ca\0fe"]}), ((2, nul),))
    broken = lines(*GOOD[:3], b'{"text": "open', *GOOD[3:6])
    for kind in ("jsonl", "jsonl.gz", "jsonl.zst", "hf jsonl", "hf jsonl.gz", "hf jsonl.zst"):
        yield Case(kind, "corrupt line", broken, ((4, "invalid JSON at character 9: Unterminated string"),))
    for kind in ("jsonl", "hf jsonl", "parquet", "hf parquet"):
        yield Case(kind, "empty file", b"", ((1, "the file is empty"),))
    for source in ("", "hf "):
        cut_off = gzip.compress(lines(*GOOD[:5]) + LINE)[:-8]
        yield Case(f"{source}jsonl.gz", "truncated", cut_off, ((6, "the gzip data ends early after line 5"),))
        cut_off = zstd(lines(*GOOD[:5]) + LINE)[:-8]
        yield Case(f"{source}jsonl.zst", "truncated", cut_off, ((1, "the zstd data ends early after line 0"),))
        numbers = "field 'text' is not text but int64"
        yield Case(f"{source}parquet", "numbers", pa.table({"text": [1, 2]}), ((1, numbers), (2, numbers)))
    bad = "the row that ends at line 6 has 2 values, but the header has 1"
    yield Case("csv", "corrupt line", lines(b"text", *CSV_ROWS[:3], b"two,values", *CSV_ROWS[3:6]), ((4, bad),))
    yield Case("arrow", "null", NULL, ((2, "field 'text' is not text but null"),))
    for kind, streaming in (("parquet", True), ("hf parquet", True), ("hf parquet", False)):
        yield Case(kind, "null", NULL, ((2, "field 'text' is null"),), streaming)


pytestmark = pytest.mark.usefixtures("hugging_face_home", "cached_hub_files")


def write(file: Path, data: bytes | pa.Table) -> None:
    if isinstance(data, pa.Table) and file.suffix == ".arrow":
        with pa.ipc.new_stream(str(file), data.schema) as out:
            out.write_table(data)
    elif isinstance(data, pa.Table):
        pq.write_table(data, file)
    elif file.suffix == ".gz" and data[:2] != b"\x1f\x8b":
        file.write_bytes(gzip.compress(data))
    elif file.suffix == ".zst" and data[:4] != b"\x28\xb5\x2f\xfd":
        file.write_bytes(zstd(data))
    else:
        file.write_bytes(data)


def source_of(case: Case, folder: Path) -> SourceConfig:
    """Write the three files of the case and return their source."""
    folder.mkdir()
    suffix = {"text": "txt"}.get(case.kind, case.kind.removeprefix("hf "))
    rows: bytes | pa.Table = lines(*GOOD[:6])
    if suffix in ("parquet", "arrow"):
        rows = pa.table({"text": [f"row {n}" for n in range(6)]})
    elif suffix == "csv":
        rows = lines(b"text", *CSV_ROWS)
    for name, data in (("a", rows), ("b", case.data), ("c", rows)):
        write(folder / f"train-{name}.{suffix}", data)
    kind = "hf" if case.kind.startswith("hf") else case.kind.partition(".")[0]
    document = "line" if kind == "text" else ""
    return SourceConfig(kind, path=str(folder), document=document, epochs=2, streaming=case.streaming)  # type: ignore[arg-type]


def ranks_of(source: SourceConfig, tokenizer: Tokenizer, degree: int, skip: bool, **changes: int) -> Ranks:
    settings = {"max_piece_bytes": MAX_PIECE_BYTES, **changes}
    section = DataConfig(num_streams=STREAMS, on_bad_row="skip" if skip else "error", sources=(source,), **settings)
    return build_ranks(section, tokenizer, degree, seq_len=SEQ_LEN, global_batch_size=STREAMS)


def step(run: Ranks) -> tuple[list[RankRow], int]:
    """The rows of the next step, and the bad rows so far."""
    return run.step(), run.bad_rows


def until_error(run: Ranks) -> tuple[int, str]:
    """The step and the message of the first DataError."""
    for number in range(1000):
        try:
            run.step()
        except DataError as error:
            run.close()
            return number, str(error)
    pytest.fail("there was no error")


QUICK = (
    *("text: non-UTF-8", "jsonl: corrupt line", "hf jsonl: corrupt line", "csv: corrupt line", "arrow: null"),
    *("parquet: null", "hf parquet as Arrow: null", "jsonl.gz: truncated", "hf jsonl.zst: truncated"),
)
"""One fault of each reader, and both ways of damaged compressed data."""
PARAMETERS = [
    pytest.param(case, marks=() if str(case) in QUICK else pytest.mark.slow, id=str(case)) for case in cases()
]


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_bad_row_is_found_at_the_same_step_on_every_mesh(case: Case, tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = source_of(case, tmp_path / "corpus")
    failures = [until_error(ranks_of(source, tokenizer, degree, skip=False)) for degree in (1, 2, 4)]
    assert failures[0] == failures[1] == failures[2]
    message = failures[0][1]
    assert message.startswith("bad row: ")
    assert message.endswith('; fix or delete it, or skip bad rows: data.on_bad_row = "skip"')
    if case.streaming:
        where = [f"train-b.{case.kind.split()[-1].replace('text', 'txt')}, ", f" {case.faults[0][0]}: "]
        assert all(part in message for part in where)
    assert any(reason in message for _, reason in case.faults)

    steps, runs = [], [ranks_of(source, tokenizer, degree, skip=True) for degree in (1, 2, 4)]
    states = []
    while not runs[0].ended:
        states.append(runs[0].state())
        steps.append(step(runs[0]))
        assert steps[-1] == step(runs[1]) == step(runs[2])
    assert steps[-1][1] == len(case.faults)  # counted once over two epochs
    resumed = ranks_of(source, tokenizer, 2, skip=True)
    for begin in (failures[0][0], failures[0][0] + 1, len(steps) - 1):
        resumed.load_state(states[begin])
        assert [step(resumed) for _ in steps[begin:]] == steps[begin:]
    for run in (*runs, resumed):
        run.close()

    number, message = until_error(ranks_of(source, tokenizer, 2, skip=True, max_bad_rows=0))
    assert number == failures[0][0]
    assert message.startswith("more than data.max_bad_rows = 0 bad rows; the last one: ")


LONG_BYTES = 10 * 2**20


@pytest.mark.parametrize(
    "kind",
    [
        *("text", "jsonl"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("parquet", "jsonl.gz", "hf jsonl", "hf parquet")),
    ],
)
def test_a_line_of_10_mb_is_trained_on_in_pieces(kind: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    end = " " if kind == "text" else "\n"
    text = "".join(f"{n} the model reads a few words and learns{end}" for n in range(LONG_BYTES // 45))
    line = text.encode() if kind == "text" else json.dumps({"text": text}).encode()
    source = source_of(
        Case(kind, "", pa.table({"text": [text]}) if "parquet" in kind else line, ()), tmp_path / "corpus"
    )
    run = ranks_of(source, tokenizer, 1, skip=False, max_piece_bytes=1024)
    tracemalloc.start()
    rows = [tuple(tokens) for _ in range(80) for _, _, tokens, _ in run.step()]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    run.close()
    assert len(set(rows)) > 50  # at least one stream reads only this line
    # The line, its text, the text in UTF-8, its pieces; and the line again in other streams, which read past it.
    assert peak_bytes < 8 * LONG_BYTES
