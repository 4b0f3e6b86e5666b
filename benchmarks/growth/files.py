"""What a start costs per token file: on the first rank of a node, which looks at the files, and on the others; and per
document of text, whose index is built first."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.growth.count import Count
from titanlite.assembly.data_files import looks_of
from titanlite.assembly.facts import content_facts
from titanlite.config.schema import JobConfig
from titanlite.data.check import check_source
from titanlite.data.config import DataConfig
from titanlite.data.corpus import open_index
from titanlite.data.kinds import text_sources
from titanlite.data.loader import build_loader
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.token_table import use_looks
from titanlite.data.sources.tokens import opened_once

SEQ_LEN, VOCAB_SIZE, STEPS = 128, 1000, 4
TOKENS = 16 * SEQ_LEN + 1
DOCUMENT_BYTES, MAX_PIECE_BYTES = 1000, 2**15

_watched: list[str] = []
_opens: list[str] = []
_hooks: list[str] = []


def of_start(files: int) -> Iterator[Count]:
    """Files opened until the first step, with listings of their folder, and CPU time: `ranks` is the number of files.
    Each has documents."""
    with TemporaryDirectory() as folder, patch.dict(os.environ, TITANLITE_CACHE=f"{folder}/cache"):
        _write(Path(folder, "data"), files)
        section = DataConfig(
            num_streams=1, document_mask=True, sources=(SourceConfig("tokens", f"{folder}/data"),), shuffle=True
        )
        config = JobConfig(data=section)
        looks = list[Any]()

        def check() -> None:
            (source,) = section.sources
            assert not check_source(source, "data", section, vocab_size=VOCAB_SIZE, checks_files=True)

        def look() -> None:
            with opened_once(digests=True):
                check()
                looks.extend(looks_of(config))
            use_looks(looks)
            _facts_of_files(config)

        def follow() -> None:
            use_looks(looks)
            check()
            _facts_of_files(config)

        try:
            yield from _counts("a node's first rank", files, folder, look)
            yield from _counts("another rank of it", files, folder, follow)
            loader = _loader(config)
            yield from _counts(f"{STEPS} steps", files, folder, lambda: [loader.next_step() for _ in range(STEPS)])
            loader.close()
        finally:
            use_looks([])


def of_index(documents: int) -> Iterator[Count]:
    """CPU time and bytes of the index of JSON lines, by one process: `ranks` is the number of documents."""
    with TemporaryDirectory() as folder, patch.dict(os.environ, TITANLITE_CACHE=f"{folder}/cache"):
        with open(f"{folder}/data.jsonl", "w") as out:
            out.writelines(f'{{"text": "{n:0{DOCUMENT_BYTES}}"}}\n' for n in range(documents))
        (source,) = text_sources([SourceConfig("jsonl", f"{folder}/data.jsonl")])
        begin = time.process_time()
        index = open_index(source, MAX_PIECE_BYTES)
        yield Count("the index of text", documents, "CPU s", time.process_time() - begin)
        yield Count("the index of text", documents, "bytes", index.records.nbytes)


def _facts_of_files(config: JobConfig) -> None:
    """All that a start computes of them."""
    loader = _loader(config)
    content_facts(config, None, loader.sources, [], [])
    loader.close()


def _loader(config: JobConfig) -> Any:
    return build_loader(
        config.data,
        None,
        seq_len=SEQ_LEN,
        vocab_size=VOCAB_SIZE,
        global_batch_size=1,
        local_batch_size=1,
        data_rank=0,
        data_degree=1,
    )


def _write(folder: Path, files: int) -> None:
    folder.mkdir()
    for n in range(files):
        np.save(folder / f"{n:06}.npy", np.full(TOKENS, n % VOCAB_SIZE, np.uint16))
        with open(folder / f"{n:06}.documents", "wb") as out:
            np.save(out, np.arange(0, TOKENS, 100))


def _counts(part: str, files: int, folder: str, work: Callable[[], object]) -> Iterator[Count]:
    if not _hooks:
        sys.addaudithook(_note)  # cannot be removed
        _hooks.append("open")
    _watched.append(f"{folder}/data")
    _opens.clear()
    begin = time.process_time()
    work()
    yield Count(f"{part}: token files", files, "CPU s", time.process_time() - begin)
    yield Count(f"{part}: token files", files, "opens", len(_opens))
    _watched.clear()


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.scandir", "os.listdir") and _watched and str(arguments[0]).startswith(_watched[0]):
        _opens.append(event)
