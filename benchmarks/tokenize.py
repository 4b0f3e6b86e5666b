"""Tokenization: `titanlite tokenize` against a bare `encode_batch`, and against datatrove on the same file.

The corpus is that of `python -m benchmarks data`, in one file of JSON lines. Each case is a program with one thread per
process, which runs on a sixteenth of the corpus and on all of it; rates are those of the difference, without the start
of the program. A round has each case once; every second round runs in reverse order. "core / encode_batch": tokens per
second of CPU time, relative to `encode_batch` in the same round. "1 worker": tokens per second relative to one worker.
Hours for 10 T tokens: by calculation, on 1,000 cores at the rate per core.
"""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from benchmarks.data import VOCAB_SIZE, Rates, documents
from benchmarks.measuring import Row, ratios, report
from titanlite.data.bpe import EOS, train_bpe
from titanlite.runtime.json_files import read_json

BARE = """
import json, sys, tokenizers
encode = tokenizers.Tokenizer.from_file("tokenizer/tokenizer.json").encode_batch
with open("corpus.jsonl") as lines:
    texts = [json.loads(line)["text"] for line in lines]
for begin in range(0, len(texts), 256):
    [encoding.ids for encoding in encode(texts[begin : begin + 256], add_special_tokens=False)]
"""
DATATROVE = f"""
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
steps = [
    JsonlReader(".", glob_pattern="corpus.jsonl"),
    DocumentTokenizer("datatrove", "tokenizer/tokenizer.json", eos_token="{EOS}", shuffle_documents=False),
]
LocalPipelineExecutor(steps, tasks=1, logging_dir="logs", skip_completed=False).run()
"""
CONFIG = '[tokenizer]\npath = "tokenizer"\n[[data.sources]]\nkind = "jsonl"\npath = "corpus.jsonl"\n'
RAY = "ray, 2 tasks"
"""Its processes are not children of the program, so that their CPU time is not known."""
PART_BYTES, SMALLER = 2**22, 16
CORES, TOKENS = 1_000, 10**13


class Program(NamedTuple):
    """The tokens of a corpus, and the seconds and CPU seconds of a program on it."""

    tokens: int
    elapsed: float
    worked: float


def run(command: Sequence[str], folder: Path) -> Program:
    """Run a program on the corpus of a folder."""
    tokens = read_json(folder / "first" / "tokens.json")["tokens"]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    elapsed, after = perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Program(tokens, elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def rates_of(command: Sequence[str], folders: Sequence[Path]) -> Rates:
    """The rates between a small and a large corpus, which are those without the start of the program."""
    small, large = (run(command, folder) for folder in folders)
    tokens = large.tokens - small.tokens
    return Rates(tokens / (large.elapsed - small.elapsed), tokens / (large.worked - small.worked))


def tokenize(out: str, *options: str) -> list[str]:
    command = [sys.executable, "-m", "titanlite", "tokenize", "my.toml", "--out", out]
    return [*command, "--part-bytes", str(PART_BYTES), *options]


def write_corpora(folder: Path, num_bytes: int) -> list[Path]:
    """A small and a large corpus, with their tokenizer, configuration and first tokenization."""
    texts = list(documents(num_bytes))
    folders = [folder / "small", folder / "large"]
    for each, part in zip(folders, (texts[: len(texts) // SMALLER], texts), strict=True):
        (each / "tokenizer").mkdir(parents=True)
        train_bpe(iter(texts[:2000]), VOCAB_SIZE, each / "tokenizer")
        (each / "corpus.jsonl").write_text("".join(dumps({"text": text}) + "\n" for text in part))
        (each / "my.toml").write_text(CONFIG)
        subprocess.run(tokenize("first"), cwd=each, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folders


def per_core(rates: Sequence[Rates], bare: Sequence[float]) -> Row:
    """The columns by CPU time. bare: rates per core of encode_batch."""
    found = [rate.per_core for rate in rates]
    hours = [TOKENS / (rate * CORES) / 3600 for rate in found]
    return {"core / encode_batch": ratios(found, bare), "hours for 10 T tokens": hours}


def main(rounds: int = 3, mebibytes: int = 64, datatrove: str = "", json: Path | None = None) -> None:
    """mebibytes: of the corpus. datatrove: the interpreter of an environment that has it. json: folder of
    tokenize.json."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    rates: dict[str, list[Rates]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TITANLITE_CACHE"] = str(Path(folder, "cache"))
        folders = write_corpora(Path(folder), mebibytes * 2**20)
        for round_ in range(rounds):
            cases = {"encode_batch": [sys.executable, "-c", BARE]}
            if datatrove:
                cases["datatrove"] = [datatrove, "-c", DATATROVE]
            cases |= {f"{n} workers": tokenize(f"local-{n}-{round_}", "--workers", str(n)) for n in (1, 2)}
            if find_spec("ray") is not None:
                cases[RAY] = tokenize(f"ray-{round_}", "--workers", "2", "--engine", "ray")
            for name in cases if round_ % 2 == 0 else reversed(cases):
                rates.setdefault(name, []).append(rates_of(cases[name], folders))
    bare = [rate.per_core for rate in rates["encode_batch"]]
    one = [rate.per_second for rate in rates["1 workers"]]
    rows: list[Row] = [
        {
            "case": name,
            "M tokens/s": [rate.per_second / 1e6 for rate in found],
            "1 worker": ratios([rate.per_second for rate in found], one),
            **({} if name == RAY else per_core(found, bare)),
        }
        for name, found in rates.items()
    ]
    report("tokenize", {"Rate of the tokenization": rows}, json)
