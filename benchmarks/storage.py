"""Object stores: checkpoints against plain s3fs, bytes that a resume on another mesh reads, tokens against local files.

The server is moto on loopback, in a process of its own, unless --address names a bucket: all methods use the same one
in each round. The state is that of a model of 39 M parameters with AdamW, 470 MB in float32. Plain s3fs writes the
bytes of each rank, which lie in memory, as one object, and reads it; it hashes and verifies nothing. Each save has a
new name. The first round is discarded. Tokens are those of the loader on one process without workers, from 16 MiB of
documents: "empty cache" includes the download and the index of the files; otherwise an earlier pass has filled the
cache.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import torch
import torch.distributed as dist

from benchmarks.checkpoint import draft, state, storage_of
from benchmarks.data import VOCAB_SIZE, Measure, Rates, documents, pipeline, write_corpus
from benchmarks.measuring import Row, in_turns, ratios, report, threads_per_process
from tests.stores import Bucket, serving
from titanlite.checkpoint.saver import Saver
from titanlite.checkpoint.start import load
from titanlite.checkpoint.verification import Found, verify_checkpoint
from titanlite.data.bpe import train_bpe
from titanlite.data.tokenizer import Tokenizer
from titanlite.ranks.launch import run_ranks
from titanlite.storage.address import Address
from titanlite.storage.store import Store

BLOCKS = 2
RANKS = 2
MESHES = (1, 2, 4)
KINDS = ("jsonl", "parquet", "tokens")


def saver(folder: Address) -> Saver:
    return Saver(folder, dist.new_group(backend="gloo"), "disabled", torch.device("cpu"), list)


def measure(folder: Address, rounds: int, threads: int) -> tuple[int, dict[str, list[float]]]:
    """(bytes of the state, seconds of each round by method)."""
    import fsspec

    torch.set_num_threads(threads)
    logging.getLogger("titanlite").setLevel(logging.WARNING)
    tensors, own, plain = state(BLOCKS), saver(folder), fsspec.filesystem("s3", use_listings_cache=False)
    content = b"".join(storage_of(tensor).numpy().tobytes() for tensor in tensors.values())
    step = 0

    def write() -> None:
        plain.pipe_file(f"{folder.path}/plain/{step}-{dist.get_rank()}", content)

    def read() -> None:
        assert len(plain.cat_file(f"{folder.path}/plain/{step}-{dist.get_rank()}")) == len(content)

    def save() -> None:
        own.save(draft(step), tensors)

    def load_() -> None:
        found = verify_checkpoint(folder / f"step-{step}", own._group, lambda _: True)
        assert isinstance(found, Found), found
        load(found.path, tensors, own._group)

    seconds: dict[str, list[float]] = {}
    for round_ in range(rounds + 1):
        step = round_ + 1
        sides: dict[str, Callable[[], None]] = {"s3fs, write": write, "save": save}
        found = in_turns(sides if round_ % 2 else dict(reversed(sides.items())), 1, 1, dist.barrier)
        sides = {"s3fs, read": read, "load": load_}
        found |= in_turns(sides if round_ % 2 else dict(reversed(sides.items())), 1, 1, dist.barrier)
        if round_ > 0:
            for name, ((elapsed, _),) in found.items():
                seconds.setdefault(name, []).append(elapsed)
        dist.barrier()
        if dist.get_rank() == 0 and round_ < rounds:  # the last one is loaded on other meshes
            store = Store(folder)
            store.delete(store.list())
    return len(content) * dist.get_world_size(), seconds


def bytes_read(folder: Address, step: int) -> tuple[int, int]:
    """(bytes of this rank's state, bytes that it reads to load it)."""
    read, of_range, of_object = 0, Store.read_range, Store.read

    def counted(function: Callable[..., bytes]) -> Callable[..., bytes]:
        def count(*arguments: Any) -> bytes:
            nonlocal read
            content = function(*arguments)
            read += len(content)
            return content

        return count

    logging.getLogger("titanlite").setLevel(logging.WARNING)
    tensors, group = state(BLOCKS), dist.new_group(backend="gloo")
    with patch.object(Store, "read_range", counted(of_range)), patch.object(Store, "read", counted(of_object)):
        found = verify_checkpoint(folder / f"step-{step}", group, lambda _: True)
        assert isinstance(found, Found), found
        load(found.path, tensors, group)
    return sum(storage_of(tensor).nbytes for tensor in tensors.values()), read


@contextmanager
def cache(folder: Path | str) -> Iterator[None]:
    with patch.dict(os.environ, {"TITANLITE_CACHE": str(folder)}):
        yield


def token_rates(folder: Address, rounds: int, seconds: float) -> list[Row]:
    """A row for each kind of source: tokens per second from a local folder and from the store."""
    with tempfile.TemporaryDirectory() as local, cache(Path(local, "cache")):
        texts = list(documents(16 * 2**20))
        train_bpe(iter(texts), VOCAB_SIZE, Path(local))
        tokenizer = Tokenizer(Path(local, "tokenizer.json"))
        sources = write_corpus(Path(local), texts)
        rows: list[Row] = []
        for kind in KINDS:
            for file in Path(local, kind).iterdir():
                with Store(folder).writer(f"{kind}/{file.name}") as upload:
                    upload.write(file.read_bytes())
            stored = replace(sources[kind], path=f"{folder}/{kind}")
            cases = {
                name: pipeline(source, tokenizer, 0) for name, source in (("local", sources[kind]), ("store", stored))
            }

            def in_empty_cache(seconds: float, measure: Measure = cases["store"]) -> Rates:
                with tempfile.TemporaryDirectory() as empty, cache(empty):
                    return measure(seconds)

            cases["empty cache"] = in_empty_cache
            rates: dict[str, list[float]] = {name: [] for name in cases}
            for round_ in range(rounds + 1):
                for name in cases if round_ % 2 else reversed(list(cases)):
                    rate = cases[name](seconds).per_second
                    if round_ > 0:
                        rates[name].append(rate)
            row: Row = {"source": kind, "M tokens/s, local": [rate / 1e6 for rate in rates["local"]]}
            row = {**row, "store / local": ratios(rates["store"], rates["local"])}
            rows.append({**row, "empty cache / local": ratios(rates["empty cache"], rates["local"])})
        return rows


def main(rounds: int = 5, seconds: float = 1.5, address: str = "", json: Path | None = None) -> None:
    """seconds: of each measurement of tokens. address: of an empty folder in a bucket, such as s3://bucket/benchmark;
    "": a server on this machine. json: folder of storage.json."""
    with ExitStack() as stack:
        if not address:
            bucket = Bucket(f"bucket-{uuid4().hex}", stack.enter_context(serving()))
            bucket.request("PUT")
            stack.enter_context(patch.dict(os.environ, bucket.environment))
            address = f"{bucket.address}/benchmark"
        folder = Address.parse(address)
        size, times = run_ranks(measure, RANKS, folder, rounds, threads_per_process(RANKS), timeout_s=3600)[0]
        rows: list[Row] = [
            {
                "method": name,
                "seconds": times[name],
                "MB/s": [size / 1e6 / value for value in times[name]],
                **({"speed / s3fs": ratios(times[other], times[name])} if other else {}),
            }
            for name, other in {
                "s3fs, write": "",
                "save": "s3fs, write",
                "s3fs, read": "",
                "load": "s3fs, read",
            }.items()
        ]
        meshes: list[Row] = []
        for ranks in MESHES:
            counts = run_ranks(bytes_read, ranks, folder, rounds + 1, timeout_s=3600)
            needed, read = (sum(column) for column in zip(*counts, strict=True))
            meshes.append(
                {"ranks": ranks, "MB needed": needed / 1e6, "MB read": read / 1e6, "read / needed": read / needed}
            )
        tokens = token_rates(folder / "data", rounds, seconds)
        Store(folder).delete(Store(folder).list())
    tables = {
        f"{RANKS} processes, {size / 1e6:,.0f} MB": rows,
        f"loading a checkpoint of {RANKS} processes": meshes,
        "tokens from a store": tokens,
    }
    report("storage", tables, json)
