"""Shuffled windows of a token file: read by position, as titanlite does, against a mapping.

The file has random uint16 ids. A round draws windows without replacement, reads them with both methods, the first one
alternating, and computes the largest id of each window, as the loader does. "disk" removes the file from the page cache
before each method; "cache" reads it completely before the first round. The rates are thousands of windows per second
("disk") or per second of CPU time ("cache").
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import numpy.typing as npt

from benchmarks.measuring import Row, ratios, report
from titanlite.data.sources.arrays import ArrayFile

SEED = 0
SEQ_LENS = (2048, 8192)
WINDOWS = {"cache": 8192, "disk": 1024}
"""Windows per round."""
CLOCKS = {"cache": process_time, "disk": perf_counter}

Window = Callable[[int, int], npt.NDArray[np.integer]]


def mapped(file: Path) -> Window:
    ids = np.asarray(np.load(file, mmap_mode="r"))  # slicing a memmap is slow
    return lambda begin, end: ids[begin:end]


def by_position(file: Path) -> Window:
    return ArrayFile(file).read


def drop_from_cache(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def rate(window: Window, begins: list[int], seq_len: int, clock: Callable[[], float]) -> float:
    """Thousands of windows per second of the clock."""
    start = clock()
    for begin in begins:
        window(begin, begin + seq_len + 1).max()
    return len(begins) / (clock() - start) / 1e3


def main(rounds: int = 5, mebibytes: int = 512, json: Path | None = None) -> None:
    """mebibytes: size of the file. json: folder of token_files.json."""
    rows: list[Row] = []
    generator = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tokens.npy")
        count = mebibytes * 2**19
        np.save(file, generator.integers(2**15, size=count, dtype=np.uint16))
        for place, windows in WINDOWS.items():
            for seq_len in SEQ_LENS:
                file.read_bytes()
                rates: dict[Callable[[Path], Window], list[float]] = {mapped: [], by_position: []}
                for round_ in range(rounds):
                    order = generator.permutation((count - 1) // seq_len)[:windows]
                    begins = (order * seq_len).tolist()
                    for method in rates if round_ % 2 == 0 else reversed(rates):
                        if place == "disk":
                            drop_from_cache(file)
                        rates[method].append(rate(method(file), begins, seq_len, CLOCKS[place]))
                row: Row = {
                    "file": place,
                    "window": seq_len,
                    "mapping": rates[mapped],
                    "by position": rates[by_position],
                }
                rows.append({**row, "by position / mapping": ratios(rates[by_position], rates[mapped])})
    report("token_files", {"Windows read (thousands/s)": rows}, json)
