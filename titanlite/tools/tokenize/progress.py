"""Progress of a tokenization, on stderr: parts done, tokens per second, time left."""

import sys
import time
from collections.abc import Iterable, Iterator

from titanlite.data.config import DataConfig
from titanlite.data.sources.tokens import Shard
from titanlite.runtime.progress import tqdm
from titanlite.runtime.text import counted, duration
from titanlite.tools.tokenize.manifest import check_bad_rows

INTERVAL_S = 10.0


def with_progress(entries: Iterable[Shard], section: DataConfig, *, done: int, total: int) -> Iterator[Shard]:
    """Yield the entries of parts and show the progress: a bar on a terminal, otherwise a line every INTERVAL_S.

    done: parts that were written before. Raises UserError if too many rows are bad in the parts of these entries.
    """
    start = shown = time.monotonic()
    tokens = bad_rows = 0
    is_terminal = sys.stderr.isatty()
    with tqdm(total=total, initial=done, unit=" parts", desc="tokenizing", disable=not is_terminal) as bar:
        for count, entry in enumerate(entries, start=1):
            yield entry
            bad_rows += entry["bad_rows"]
            check_bad_rows(section, bad_rows)
            tokens += entry["tokens"]
            now = time.monotonic()
            speed = f"{tokens / (now - start):,.0f} tokens/s"
            bar.set_postfix_str(speed, refresh=False)
            bar.update()
            if not is_terminal and now - shown >= INTERVAL_S:
                left = duration((total - done - count) * (now - start) / count)
                print(f"{done + count:,} of {counted(total, 'part')}, {speed}, {left} left", file=sys.stderr)
                shown = now
