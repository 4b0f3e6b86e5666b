"""Each kind of source yields the same tokens as at commit 0aa755c, in the same order and from the same origins."""

import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from titanlite.data.config import DataConfig
from titanlite.data.loader import build_loader
from titanlite.data.sources.config import SourceConfig
from titanlite.data.tokenizer import Tokenizer

ROWS = [f"row {n}:\n" + f"word {n % 7} " * (n * 7 % 23) + "end" for n in range(120)]
STEPS, SEQ_LEN, ROWS_PER_STEP = 8, 32, 4
KINDS: dict[str, dict[str, Any]] = {
    "text": {"kind": "text", "document": "paragraph"},
    "jsonl": {"kind": "jsonl", "field": "body"},
    "jsonl.gz": {"kind": "jsonl", "field": "body"},
    "parquet": {"kind": "parquet"},
    "hf": {"kind": "hf"},
    "arrow": {"kind": "hf", "streaming": False},
    "tokens": {"kind": "tokens", "dtype": "uint16"},
    "tokens of version 3": {"kind": "tokens", "dtype": "uint16"},
}
RECORDED = {
    **dict.fromkeys(("text", "jsonl", "jsonl.gz", "parquet", "arrow"), "c65225460e87e860"),
    "hf": "0a78097b57feb915",
    "tokens": "55b44b9d701ad810",
    "tokens of version 3": "fa5c0149689e7e7a",
}
"""Digests by kind. Kinds that read the same rows as the same pieces have the same digest. That of tokens is of
data.stream_version 4."""


def write(kind: str, folder: Path, rows: Sequence[str], number: int) -> None:
    lines = "".join(json.dumps({"body": row}) + "\n" for row in rows).encode()
    if kind == "text":
        (folder / f"{number}.txt").write_text("\n\n".join(rows))
    elif kind == "jsonl":
        (folder / f"{number}.jsonl").write_bytes(lines)
    elif kind == "jsonl.gz":
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines))
    elif kind.startswith("tokens"):
        np.arange(number, 1500 + number, dtype="<u2").__mod__(250).astype("<u2").tofile(folder / f"{number}.bin")
    else:
        name = f"{number}.parquet" if kind == "parquet" else f"train-0000{number}-of-00003.parquet"
        pq.write_table(pa.table({"text": list(rows)}), folder / name, row_group_size=16)


def write_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer with one token per byte, and EOS; independent of the version of the library."""
    vocabulary = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary | {"EOS": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json", eos="EOS")


def digest(kind: str, folder: Path) -> str:
    """A digest of some steps: tokens, labels, positions, and the origin of each sequence."""
    (folder / "rows").mkdir()
    for number in range(3):
        write(kind, folder / "rows", ROWS[number * 40 : number * 40 + 40], number)
    source = SourceConfig(path=str(folder / "rows"), **KINDS[kind])
    settings = {"document_mask": source.kind != "tokens", "stream_version": 3 if kind.endswith("version 3") else -1}
    data = DataConfig(num_streams=4, seed=5, max_piece_bytes=64, sources=(source,), **settings)
    facts = {"seq_len": SEQ_LEN, "vocab_size": 300, "global_batch_size": ROWS_PER_STEP, "local_batch_size": 2}
    loader = build_loader(data, write_tokenizer(folder), **facts, data_rank=0, data_degree=1)
    found = hashlib.sha256()
    for _ in range(STEPS):
        for batch in loader.next_step():
            for tensor in (batch.tokens, batch.labels, batch.positions):
                found.update(b"" if tensor is None else tensor.numpy().tobytes())
        found.update(json.dumps(loader.origins).encode())
    loader.close()
    return found.hexdigest()[:16]


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_each_kind_never_changes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    assert digest(kind, tmp_path) == RECORDED[kind]
