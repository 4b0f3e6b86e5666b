"""The data pipeline: its rate from each kind of source, against that of a bare tokenizer.

The corpus consists of seeded samples of the Python standard library's sources, written once per kind of source. The
loader is the trainer's; its batches are discarded. The baseline on the same text is `encode_batch` of the `tokenizers`
library; `encode_batch_fast`, which computes no offsets, is the method that titanlite calls. Every process uses one
thread. A round measures each case once; every second round runs in reverse order. "core / encode_batch": tokens per
second of CPU time, of this process and its workers together, relative to `encode_batch` in the same round.

Packing: an epoch of the JSON lines by each data.packing, from its start to its end, with num_workers = 0. The rate is
that of the tokens of documents. Documents that are cut are counted in the batches.
"""

import gzip
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import product
from json import dumps
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple, get_args

import numpy as np
import pyarrow
import pyarrow.parquet
import tokenizers

from benchmarks.measuring import Row, ratios, report
from titanlite.batch import IGNORE_INDEX, Batch, rows_and_tokens
from titanlite.data.bpe import train_bpe
from titanlite.data.config import DataConfig
from titanlite.data.loader import build_loader
from titanlite.data.packing import Packing
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.python_stdlib import PythonStdlib
from titanlite.data.tokenizer import Tokenizer

SEED = 0
SEQ_LEN = 2048
GLOBAL_BATCH_SIZE = 16
VOCAB_SIZE = 8192
SIZES: Any = {
    "seq_len": SEQ_LEN,
    "vocab_size": VOCAB_SIZE,
    "data_rank": 0,
    "data_degree": 1,
    "global_batch_size": GLOBAL_BATCH_SIZE,
    "local_batch_size": GLOBAL_BATCH_SIZE,
}
WORKERS = (0, 1, 2)
BARE = "encode_batch"
FILES = 8
"""Files per kind, except for text and tokens."""
WINDOWS = 2**14
"""Windows of the token file, 64 MiB, which is read repeatedly."""


class Rates(NamedTuple):
    """Tokens per second, and tokens per second of CPU time."""

    per_second: float
    per_core: float


Measure = Callable[[float], Rates]
"""Measures a case for about so many seconds."""


def documents(num_bytes: int) -> Iterator[str]:
    """Random excerpts of the standard library's sources, 256 bytes to 16 KiB, log-uniform."""
    generator = random.Random(SEED)
    texts = [file.read_text("utf-8") for file in PythonStdlib(SourceConfig()).split_files()]
    while num_bytes > 0:
        size = int(2 ** generator.uniform(8, 14))
        text = generator.choice(texts)
        begin = text.rfind("\n", 0, generator.randrange(len(text))) + 1
        document = text[begin : begin + size]
        num_bytes -= len(document)
        yield document


def write_corpus(folder: Path, texts: list[str]) -> dict[str, SourceConfig]:
    """The same documents as sources of each kind."""
    rows = [dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)]
    kinds = {"text": "text", "jsonl": "jsonl", "jsonl.gz": "jsonl", "parquet": "parquet", "tokens": "tokens"}
    for name in kinds:
        (folder / name).mkdir()
    for n, text in enumerate(texts):
        (folder / "text" / f"{n:06}.txt").write_text(text, "utf-8")
    for n in range(FILES):
        lines = "".join(rows[n::FILES]).encode()
        (folder / "jsonl" / f"{n}.jsonl").write_bytes(lines)
        (folder / "jsonl.gz" / f"{n}.jsonl.gz").write_bytes(gzip.compress(lines, 1))
        pyarrow.parquet.write_table(
            pyarrow.table({"text": texts[n::FILES]}), folder / "parquet" / f"{n}.parquet", row_group_size=500
        )
    ids = np.random.default_rng(SEED).integers(VOCAB_SIZE, size=WINDOWS * SEQ_LEN + 1, dtype=np.uint16)
    np.save(folder / "tokens" / "tokens.npy", ids)
    sources = {name: SourceConfig(kind=kind, path=str(folder / name)) for name, kind in kinds.items()}
    return sources | {"hf": SourceConfig(kind="hf", path=str(folder / "parquet"))}


def repeated(step: Callable[[], int], seconds: float) -> Rates:
    """The rates of step(), which returns its number of tokens, called for about `seconds` after one warm-up call."""
    step()
    tokens, start, worked = 0, perf_counter(), processor_seconds()
    while (elapsed := perf_counter() - start) < seconds:
        tokens += step()
    return Rates(tokens / elapsed, tokens / (processor_seconds() - worked))


def processor_seconds() -> float:
    """CPU time of this process and its children."""
    ticks = 0
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            fields = Path("/proc", child, "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # in user mode, in the kernel
    return process_time() + ticks / os.sysconf("SC_CLK_TCK")


def pipeline(source: SourceConfig, tokenizer: Tokenizer, num_workers: int) -> Measure:
    """Measure the loader of a single data rank (the full global batch). Each measurement starts at the first row."""
    section = DataConfig(
        num_streams=GLOBAL_BATCH_SIZE, max_piece_bytes=64 * SEQ_LEN, num_workers=num_workers, sources=(source,)
    )

    def measure(seconds: float) -> Rates:
        loader = build_loader(section, tokenizer, **SIZES)
        try:
            return repeated(lambda: sum(batch.tokens.numel() for batch in loader.next_step()), seconds)
        finally:
            loader.close()

    return measure


def packed_epoch(source: SourceConfig, tokenizer: Tokenizer, packing: Packing) -> tuple[float, float, float]:
    """(tokens per second of CPU time, share of padding, share of documents that are cut) of an epoch."""
    section = DataConfig(num_streams=GLOBAL_BATCH_SIZE, max_piece_bytes=64 * SEQ_LEN, num_workers=0)
    section = replace(section, add_bos=True, document_mask=True, packing=packing, sources=(replace(source, epochs=1),))
    batches, begin = list[Batch](), process_time()
    with closing(build_loader(section, tokenizer, **SIZES)) as loader:
        while not loader.ended[0]:
            batches += loader.next_step()
    worked, (rows, used) = process_time() - begin, rows_and_tokens(batches)  # without rows after the end of a stream
    documents, cut = np.sum([documents_in(batch, tokenizer.eos_id) for batch in batches], axis=0)
    return used / worked, 1 - used / (rows * SEQ_LEN), cut / documents


def documents_in(batch: Batch, mark: int | None) -> tuple[int, int]:
    """The documents that begin in a batch, and those of them that another sequence continues. Each begins and ends with
    the token `mark`."""
    documents, cut = 0, 0
    assert batch.positions is not None
    assert batch.lengths is not None
    for row, length in enumerate(batch.lengths.tolist()):
        tokens, labels = batch.tokens[row].tolist(), batch.labels[row].tolist()
        starts = np.flatnonzero(batch.positions[row, :length].numpy() == 0).tolist()
        for start, end in zip(starts, [*starts, length][1:], strict=True):
            part = tokens[start:end] + [label for label in labels[end - 1 : end] if label != IGNORE_INDEX]
            if part[0] == mark and len(part) > 1:  # otherwise the last token of a document
                documents, cut = documents + 1, cut + (part[-1] != mark)
    return documents, cut


def bare_encoder(file: Path, method: str, texts: list[str]) -> Measure:
    """Measure a method of the library on batches of 16 documents, with the ids as Python lists."""
    encode = getattr(tokenizers.Tokenizer.from_file(str(file)), method)

    def measure(seconds: float) -> Rates:
        begins = iter(range(0, 10**9, 16))

        def step() -> int:
            begin = next(begins) % len(texts)
            ids = [encoding.ids for encoding in encode(texts[begin : begin + 16], add_special_tokens=False)]
            return sum(map(len, ids))

        return repeated(step, seconds)

    return measure


def build_cases(folder: Path, num_bytes: int) -> tuple[dict[str, Measure], SourceConfig]:
    """The cases, and the source of the JSON lines."""
    texts = list(documents(num_bytes))
    train_bpe(iter(texts), VOCAB_SIZE, folder)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer(file)
    cases = {method: bare_encoder(file, method, texts) for method in (BARE, "encode_batch_fast")}
    sources = write_corpus(folder, texts)
    for (kind, source), workers in product(sources.items(), WORKERS):
        cases[f"{kind}, {workers} workers"] = pipeline(source, tokenizer, workers)
    return cases, sources["jsonl"]


def main(rounds: int = 5, seconds: float = 1.5, mebibytes: int = 16, json: Path | None = None) -> None:
    """seconds: of each measurement. mebibytes: of the corpus. json: folder of data.json."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TITANLITE_CACHE"] = str(Path(folder, "cache"))
        cases, source = build_cases(Path(folder), mebibytes * 2**20)
        rates: dict[str, list[Rates]] = {name: [] for name in cases}
        for measure in cases.values():
            measure(0.1)  # builds the indexes and fills the page cache
        for round_ in range(rounds):
            for name in cases if round_ % 2 == 0 else reversed(cases):
                rates[name].append(cases[name](seconds))
        marked = Tokenizer(Path(folder, "tokenizer.json"), bos="<|endoftext|>")
        epochs = {packing: [packed_epoch(source, marked, packing)] for packing in get_args(Packing)}
        for round_ in range(1, rounds):
            for packing in epochs if round_ % 2 == 0 else reversed(epochs):
                epochs[packing].append(packed_epoch(source, marked, packing))
    packings: list[Row] = [
        {
            "data.packing": packing,
            "padding": f"{found[0][1]:.2%}",
            "documents cut": f"{found[0][2]:.2%}",
            "M tokens/s and core": [rate / 1e6 for rate, *_ in found],
        }
        for packing, found in epochs.items()
    ]
    per_core = {name: [rate.per_core for rate in found] for name, found in rates.items()}
    rows: list[Row] = [
        {
            "case": name,
            "M tokens/s": [rate.per_second / 1e6 for rate in found],
            **({} if name.startswith("tokens") else {"core / encode_batch": ratios(per_core[name], per_core[BARE])}),
        }
        for name, found in rates.items()
    ]
    report("data", {"Rate of the loader": rows, "Packing": packings}, json)
