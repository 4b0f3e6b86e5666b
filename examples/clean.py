"""Filter and deduplicate JSON lines with datatrove, as a corpus for `titanlite tokenize`.

    python examples/clean.py RAW OUT [TASKS]

RAW: a folder of .jsonl files with a field "text". OUT/clean has the documents that remain, and OUT/logs the number of
those that each step removed. The rules are examples: datatrove has those of FineWeb, C4 and Gopher. With
SlurmPipelineExecutor or RayPipelineExecutor in place of LocalPipelineExecutor, the same steps run on a cluster. A step
that has finished is not run again.
"""

import sys
from typing import Any

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.word_tokenizers import WordTokenizer

MINHASH = MinhashConfig(5, num_buckets=14, hashes_per_bucket=8, hash_config=HashConfig(hash_fc="sha1"))
"""Finds most pairs of documents that share 3 of 4 sequences of five words."""


class Words(WordTokenizer):
    """Words between white space, for languages that have it. datatrove's tokenizers need other packages."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        return text.splitlines()

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [(0, len(text))]


def is_good(document: Document) -> bool:
    """Whether a document has at least 20 words, of which at most half are the same one."""
    words = document.text.lower().split()
    return len(words) >= 20 and max(map(words.count, set(words))) <= len(words) / 2


def clean(raw: str, out: str, tasks: int) -> None:
    lines = JsonlReader(f"{out}/filtered")
    signatures = MinhashDedupSignature(f"{out}/signatures", MINHASH, language=Words())
    steps: dict[str, tuple[int, list[Any]]] = {
        "filter": (tasks, [JsonlReader(raw), LambdaFilter(is_good), JsonlWriter(f"{out}/filtered")]),
        "signatures": (tasks, [lines, signatures]),
        "buckets": (MINHASH.num_buckets, [MinhashDedupBuckets(f"{out}/signatures", f"{out}/buckets", config=MINHASH)]),
        "clusters": (1, [MinhashDedupCluster(f"{out}/buckets", f"{out}/removed", config=MINHASH)]),
        "remove": (tasks, [lines, MinhashDedupFilter(f"{out}/removed"), JsonlWriter(f"{out}/clean")]),
    }
    for name, (number, step) in steps.items():
        LocalPipelineExecutor(step, tasks=number, workers=min(tasks, number), logging_dir=f"{out}/logs/{name}").run()


if __name__ == "__main__":
    raw, out, *tasks = sys.argv[1:]
    clean(raw, out, int(tasks[0]) if tasks else 1)
